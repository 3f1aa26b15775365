"""Options of the vLLM proposer, given as "draftree" in `--additional-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

from draftree.drafters._fused import Fused
from draftree.drafters.base import Drafter, Method, TrainableMethod
from draftree.drafters.rest import REST, load_corpus
from draftree.drafters.retrieval.chain_drafting import IndexedCorpus
from draftree.drafters.retrieval.datastore_drafter import DatastoreMethod, read_note
from draftree.errors import UnknownName, UserError, format_value
from draftree.policies.base import Policy
from draftree.policies.yield_ import Yield
from draftree.registry import build
from draftree.target.target import HiddenStateSpec, Target
from draftree.utils.files import check_writable
from draftree.utils.validated_dataclass import Part

CONFIG_KEY = "draftree"
"""Name of the entry with draftree's options in vLLM's additional config."""


@dataclass(frozen=True)
class ProposerOptions(Part):
    """Set the options of the proposer.

    By default, chains are drafted from suffix matches and a corpus with one native call per step.

    Attributes:
        datastore: folder of a datastore for `rest`, in which contexts are searched for, too; None
            to draft from the texts of the requests alone.
        drafter: spec of a drafter to use instead. It may be any that reads only text: suffix, pld,
            rest, aded, or several joined by `+`.
        policy: spec of the policy that chooses the lengths of that drafter's chains; `yield` by
            default, which grows chains here instead of trees.
        report: path of a JSON file for figures, which is written about once a second while requests
            run; None for no file.
        any_version: whether versions of vLLM with which the proposer was not tested are accepted.
    """

    datastore: str | None = None
    drafter: str | None = None
    policy: str | None = None
    report: str | None = None
    any_version: bool = False

    @classmethod
    def of(cls, additional: Any) -> Self:
        """Read the options from vLLM's additional config.

        Raises:
            UserError: an option does not exist, its value is not allowed, or the report cannot be
                written.
        """
        given = (
            (additional or {}).get(CONFIG_KEY, {}) if isinstance(additional, Mapping | None) else {}
        )
        if not isinstance(given, Mapping):
            raise UserError(
                f"'{CONFIG_KEY}' of the additional config is {format_value(given)}, allowed is an object of options"
            )
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownName("option of the proposer", str(name), known)
        options = cls(**given)
        if options.drafter is None and options.policy is not None:
            raise UserError("option 'policy' of the proposer needs option 'drafter'")
        if options.drafter is not None and options.datastore is not None:
            raise UserError(
                "options 'drafter' and 'datastore' of the proposer exclude each other: "
                "a drafter's own datastore is given in its spec"
            )
        if options.report is not None:
            check_writable(Path(options.report))
        return options


def open_corpus(folder: str | None, vocab: int, tokenizer: Any, name: str) -> IndexedCorpus:
    """Return the corpus of a datastore; an empty one if no folder is given.

    The other arguments are those of `open_drafter`.

    Raises:
        UserError: the folder is not a datastore for `rest`, or was built for another tokenizer.
    """
    if folder is None:
        return IndexedCorpus.none()
    read_note(Path(folder))  # before the tokenizer is loaded
    found = REST(datastore=folder or ".").store(_stand_in(vocab, tokenizer(), name))
    assert found is not None
    return IndexedCorpus.of(load_corpus(found))


def open_drafter(spec: str, vocab: int, tokenizer: Any, name: str) -> Drafter[Any]:
    """Open a drafter that reads only text, without a target.

    Args:
        spec: spec of the drafter.
        vocab: number of token ids of the target.
        tokenizer: function that returns the target's tokenizer; it is called only for a drafter
            with a datastore.
        name: name of the target, for messages.

    Raises:
        UserError: the drafter does not exist, or needs the target's hidden states or its own
            network.
    """
    method: Method = build("drafter", spec)
    parts = method.parts if isinstance(method, Fused) else (method,)
    told = "allowed are those that read text alone: suffix, pld, rest, aded, or several of them with '+'"
    if any(isinstance(part, TrainableMethod) for part in parts):
        raise UserError(
            f"drafter {format_value(spec)} needs the target's hidden states, which vLLM does not show: {told}"
        )
    stored = any(isinstance(part, DatastoreMethod) and part.datastore for part in parts)
    try:
        drafter = method.open(_stand_in(vocab, tokenizer() if stored else None, name))
    except AttributeError as error:  # it looked for a network that only a loaded target has
        raise UserError(f"drafter {format_value(spec)} cannot draft inside vLLM: {told}") from error
    if not drafter.searches or drafter.needs != HiddenStateSpec() or drafter.sends_probes:
        raise UserError(f"drafter {format_value(spec)} cannot draft inside vLLM: {told}")
    return drafter


def _stand_in(vocab: int, tokenizer: Any, name: str) -> Target:
    """Return an object with what a drafter that reads only text asks of its target."""
    decoder = SimpleNamespace(vocab=vocab)
    return cast(Target, SimpleNamespace(decoder=decoder, tokenizer=tokenizer, name=name))


def open_policy(spec: str, longest: int) -> Policy:
    """Return the policy of a spec; `yield` grows chains of up to `longest` tokens.

    Raises:
        UserError: the policy does not exist.
    """
    policy: Policy = build("policy", spec)
    if isinstance(policy, Yield):
        return replace(
            policy, width=1, depth=longest if policy.depth == Yield.depth else policy.depth
        )
    return policy
