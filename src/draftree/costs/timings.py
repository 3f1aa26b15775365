"""The timings of one decoding step, from which costs are learnt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftStep:
    """The timing of one draft step.

    Attributes:
        tokens: that the drafter was fed, of all sequences.
        seconds: it took.
    """

    tokens: int
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """The timings of one step of the loop.

    Attributes:
        context: tokens in the KV cache of the longest sequence.
        sequences: number of sequences in the step.
        tokens: number of tokens that the target was fed, of all sequences.
        target: seconds of the target's pass and of the acceptance.
        drafts: the draft steps, in order.
        finds: number of retrievals without a pass.
        find: seconds of all retrievals.
        commit: seconds of the drafter's commit.
        seconds: of the whole step.
        gained: number of new tokens.
        prompt_read: whether the first draft step also read a prompt, so that its seconds are not
            used.
        recorded: whether passes were recorded in it, which is done once, so that no seconds are
            used.
        beside: prompt tokens that the target's pass also read, so that its seconds are not those of
            the nodes alone.
    """

    context: int
    sequences: int
    tokens: int
    target: float
    drafts: tuple[DraftStep, ...] = ()
    finds: int = 0
    find: float = 0.0
    commit: float = 0.0
    seconds: float = 0.0
    gained: int = 1
    prompt_read: bool = False
    recorded: bool = False
    beside: int = 0
