"""Options of the vLLM proposer, given as "draftree" in `--additional-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Self, cast

from draftree.drafters._fused import Fused
from draftree.drafters.base import Drafter, Method, TrainableMethod
from draftree.drafters.retrieval.datastore import Stored
from draftree.errors import UnknownName, UserError, shown
from draftree.policies.base import Policy
from draftree.policies.yield_ import Yield
from draftree.registry import build
from draftree.target.target import Needs, Target
from draftree.utils.validated_dataclass import Part

KEY = "draftree"
"""The entry of vLLM's additional config."""


@dataclass(frozen=True)
class ProposerOptions(Part):
    """The options of the proposer.

    Attributes:
        drafter: a spec of drafters that read text alone: suffix, pld, rest, aded, or several with
            `+` between them.
        policy: a spec of the policy that chooses the lengths. `yield` grows chains here.
        report: a file for figures, written as JSON about once a second while requests run.
        any_version: whether versions of vLLM are accepted with which this was not tested.
    """

    drafter: str = "suffix"
    policy: str = "yield"
    report: str | None = None
    any_version: bool = False

    @classmethod
    def of(cls, additional: Any) -> Self:
        """Return the options in vLLM's additional config.

        Raises:
            UserError: there is no such option, or its value is not allowed.
        """
        given = (additional or {}).get(KEY, {}) if isinstance(additional, Mapping | None) else {}
        if not isinstance(given, Mapping):
            raise UserError(
                f"'{KEY}' of the additional config is {shown(given)}, allowed is an object of options"
            )
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownName("option of the proposer", str(name), known)
        return cls(**given)


def open_drafter(spec: str, vocab: int, tokenizer: Any, name: str) -> Drafter[Any]:
    """Open a drafter that reads text alone.

    Args:
        spec: of the drafter.
        vocab: the number of token ids that the target has.
        tokenizer: returns the target's tokenizer; it is called for a datastore alone.
        name: of the target, for messages.

    Raises:
        UserError: there is no such drafter, or it needs the target's hidden states or a network of
            its own.
    """
    method: Method = build("drafter", spec)
    parts = method.parts if isinstance(method, Fused) else (method,)
    told = "allowed are those that read text alone: suffix, pld, rest, aded, or several of them with '+'"
    if any(isinstance(part, TrainableMethod) for part in parts):
        raise UserError(
            f"drafter {shown(spec)} needs the target's hidden states, which vLLM does not show: {told}"
        )
    stored = any(isinstance(part, Stored) and part.datastore for part in parts)
    stand_in = SimpleNamespace(
        decoder=SimpleNamespace(vocab=vocab), tokenizer=tokenizer() if stored else None, name=name
    )
    try:
        drafter = method.open(cast(Target, stand_in))
    except AttributeError as error:  # it looked for a network that only a loaded target has
        raise UserError(f"drafter {shown(spec)} cannot draft inside vLLM: {told}") from error
    if not drafter.searches or drafter.needs != Needs() or drafter.sends_probes:
        raise UserError(f"drafter {shown(spec)} cannot draft inside vLLM: {told}")
    return drafter


def open_policy(spec: str, longest: int) -> Policy:
    """Open a policy; `yield` grows chains of up to `longest` tokens instead of trees.

    Raises:
        UserError: there is no such policy.
    """
    policy: Policy = build("policy", spec)
    if isinstance(policy, Yield):
        return replace(
            policy, width=1, depth=longest if policy.depth == Yield.depth else policy.depth
        )
    return policy
