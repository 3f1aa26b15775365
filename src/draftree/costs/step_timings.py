"""The timings of one decoding step, from which costs are learnt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftStep:
    """The timing of one draft step.

    Attributes:
        tokens: number of tokens of all sequences that the drafter was fed.
        seconds: duration of the step.
    """

    tokens: int
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """The timings of one step of the decoding loop.

    Attributes:
        context: number of tokens in the KV cache of the longest sequence.
        sequences: number of sequences in the step.
        tokens: number of tokens of all sequences that the target was fed.
        target: seconds of the target's pass and of the acceptance.
        drafts: the draft steps, in order.
        finds: number of retrievals without a forward pass.
        find: seconds of all retrievals.
        commit: seconds of the drafter's commit.
        seconds: seconds of the whole step.
        gained: number of new tokens.
        prompt_read: whether the first draft step also read a prompt; its seconds are then not used.
        recorded: whether the step recorded passes, which is done only once; none of its seconds are
            then used.
        beside: number of prompt tokens that the target's pass also read; `target` then includes
            their time.
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

    @property
    def overhead(self) -> float:
        """Return the seconds beside passes, searches and the commit; 0 if they are not known."""
        drafts = sum(draft.seconds for draft in self.drafts)
        return max(self.seconds - self.target - drafts - self.find - self.commit, 0.0)
