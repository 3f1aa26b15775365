"""A request for one text, and the event that reports its new tokens after a step.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor
from typing_extensions import override

from draftree.errors import UserError, format_value
from draftree.metrics import Step
from draftree.sampling.distributions import Distributions
from draftree.sampling.draft_sampling import top_k
from draftree.sampling.params import GREEDY, Sampling
from draftree.target.target import Target
from draftree.tree import Ints, Tree
from draftree.utils.token_ids import row_of_ids
from draftree.utils.validated_dataclass import Knobs, Rule, is_list_of, knob, optional

Origin = Literal["prefill", "drafted", "forced", "bonus"]
"""The origin of a token.

`prefill` and `bonus` tokens are chosen by the target, `drafted` tokens are accepted drafts, and a
`forced` token is the only one that was allowed.
"""
Ending = Literal["length", "eos", "stop", "context"]
"""The reason why a text ended.

It is the limit of new tokens, an EOS token, a stopping criterion, or the end of the target's
context.
"""
Criterion = Callable[[Tensor, Any], Any]
"""A function of ids [1, n] and scores that returns whether a text ends after these ids.

It returns a bool or a tensor [1]. The StoppingCriteria of transformers are such functions.
"""
CALLABLES: Rule = "a tuple of what can be called", lambda v: is_list_of(v, callable)


@dataclass(frozen=True)
class Request(Knobs):
    """One text to continue, with all settings of its generation.

    Attributes:
        prompt: token ids as a list, an array or a tensor; at least one, and at most as many as the
            target's context.
        max_new_tokens: largest number of tokens to generate, at least 1.
        eos: token ids that end the text; the ending token is part of the output.
        number: distinguishes requests with the same seed. Seed and number together determine the
            noise, so that equal numbers give equal draws.
        sampling: the sampling settings; greedy by default.
        processors: logits processors of this request, applied before those of `sampling`, also in
            greedy decoding.
        guides: the members of `processors` that are also applied to draft logits, so that no
            forbidden token is drafted. They must be functions of the text alone. The output does
            not depend on them.
        stateless: further processors that are functions of the text alone. All other processors may
            have a state, and acceptors that evaluate several nodes in advance refuse them.
        forced: returns the only token that may follow a text, or None if several may. That token is
            drafted without calling the drafter.
        criteria: stopping criteria, called after every token; the text ends after the first token
            for which one returns true.
        before: padding ids that are put before the prompt in the ids passed to processors and
            criteria, as transformers does.
        logprobs: number of most likely tokens whose log-probabilities are returned in addition to
            that of each generated token; None for no log-probabilities.
        keep_scores: whether the raw and the processed logits [V] are stored for each token.

    Raises:
        UserError: a value is not allowed.
    """

    prompt: Sequence[int]
    max_new_tokens: int = knob(128, least=1)
    eos: frozenset[int] = frozenset()
    number: int = knob(0, least=0, most=2**63 - 1)
    processors: tuple[LogitsProcessor, ...] = knob((), rule=CALLABLES)
    guides: tuple[LogitsProcessor, ...] = knob((), rule=CALLABLES)
    stateless: tuple[LogitsProcessor, ...] = knob((), rule=CALLABLES)
    forced: Callable[[Sequence[int]], int | None] | None = knob(
        None, rule=("none, or what can be called", optional(callable))
    )
    criteria: tuple[Criterion, ...] = knob((), rule=CALLABLES)
    before: Sequence[int] = ()
    logprobs: int | None = knob(None, least=0)
    keep_scores: bool = False
    sampling: Sampling = knob(
        GREEDY, rule=("a Sampling", lambda value: isinstance(value, Sampling))
    )

    @override
    def __post_init__(self) -> None:
        for name, kind in (("prompt", tuple), ("before", tuple), ("eos", frozenset)):
            value = getattr(self, name)
            if (
                ids := row_of_ids([*value] if name == "eos" and isinstance(value, Set) else value)
            ) is None:
                raise UserError(
                    f"{name} is {format_value(value)}, allowed are token ids in one row"
                )
            object.__setattr__(self, name, kind(ids))
        super().__post_init__()


def all_greedy(requests: Sequence[Request]) -> bool:
    """Return whether all requests choose their tokens greedily."""
    return all(request.sampling.greedy for request in requests)


def override_sampling(requests: Sequence[Request], sampling: Sampling | None) -> list[Request]:
    """Return the requests, with their sampling settings replaced if `sampling` is given.

    Raises:
        UserError: `sampling` is not a `Sampling`.
    """
    return (
        [*requests]
        if sampling is None
        else [replace(request, sampling=sampling) for request in requests]
    )


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, and the log-probabilities of the most likely tokens.

    They are computed from the target's raw logits, before any processor.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scores:
    """The logits [V] by which a token was chosen, before and after the request's processors.

    A processor may write into its input. As in transformers, the raw logits include such changes.
    """

    raw: Tensor
    processed: Tensor


@dataclass(frozen=True)
class Emitted:
    """The new tokens of one sequence.

    Attributes:
        row: the slot of the sequence.
        tokens: the token ids, without those after the end of the text.
        origins: the origin of each token.
        tree: the verified draft trees of all sequences.
        path: the accepted nodes of this sequence in `tree`.
        logprobs: one for each token, if the request wants them.
        scores: one for each token, if the request keeps them.
        ending: the reason why the text ends with these tokens; None if it continues.
    """

    row: int
    tokens: list[int]
    origins: list[Origin]
    tree: Tree
    path: Ints
    logprobs: list[Logprob] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def step(self) -> Step | None:
        """Return the figures of this sequence's verification; None for the prefill."""
        if self.origins[-1] == "prefill":
            return None
        mine = self.tree.of_row(self.row)
        return Step(len(self.path), len(mine) - 1, int(self.tree.depth[mine].max()))


def check_requests(requests: Sequence[Request], target: Target) -> None:
    """Raise a `UserError` if one of the requests cannot be served."""
    context, vocab = target.decoder.context, target.decoder.vocab
    if not is_list_of(requests, lambda r: isinstance(r, Request)):
        raise UserError(
            f"the requests are {format_value(requests)}, allowed is a list of Request; texts are for `complete`"
        )
    if not requests:
        raise UserError("no prompt was given, at least one is needed")
    for request in requests:
        n = len(request.prompt)
        if n == 0:
            raise UserError("the prompt is empty: it has 0 tokens, at least 1 is needed")
        if n > context:
            raise UserError(
                f"the prompt has {n} tokens, allowed are at most the target's context of {context}"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise UserError(
                f"the prompt has token id {max(request.prompt, key=abs)}, allowed are 0 … {vocab - 1}"
            )


def logprobs(p: Distributions, kept: Ints, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return a list with one `Logprob` for each new token.

    Each also contains the most likely tokens in the same place, with their log-probabilities.

    Args:
        p: the target's distributions after the nodes.
        kept: the node after which each token follows.
        tokens: the new tokens.
        top: the number of most likely tokens.
    """
    found = []
    for node, token in zip(kept.tolist(), tokens, strict=False):
        log_p = torch.log_softmax(p.raw(node).cpu().double(), dim=-1)
        best = (
            ()
            if not top
            else tuple(
                zip(*(x[0].tolist() for x in top_k(log_p[None], min(top, len(log_p)))), strict=True)
            )
        )
        found.append(Logprob(token, float(log_p[token]), best))
    return found
