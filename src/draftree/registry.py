"""Resolve specs such as `pct:width=3` to drafters, policies and acceptors; find plug-ins.

The file name of a part is its name, and the fields of its dataclass are the keys. A file whose
name would be a Python keyword ends with an underscore.

    name                        the part with its defaults
    name:key=value,key=value    the part with some options set
    FOLDER                      a trained drafter's checkpoint, a datastore, or a language model (lm)
    OWNER/NAME                  the same from the Hugging Face hub
    FILE.gguf, demo, smollm2    a plain language model (lm)
    a+b                         drafters fused, each of them a spec or a folder

Other packages add parts by entry points in the groups `draftree.drafters`, `draftree.policies` and
`draftree.acceptors`. The name of the entry point is the part's name. It refers to a dataclass of
the part's options that has the same name. Parts that ship with draftree take precedence, so that a
spec has the same meaning everywhere. A plug-in that cannot be imported is reported only when it is
requested.
"""

import importlib
import inspect
import keyword
import pkgutil
import re
import types
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from os.path import exists, isdir
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftree import acceptors, drafters, policies
from draftree.acceptors.base import Acceptor
from draftree.aliases import canonical_name
from draftree.drafters._fused import Fused
from draftree.drafters.base import Method, Stage, TrainableMethod
from draftree.drafters.retrieval.datastore_drafter import DatastoreMethod
from draftree.errors import UnknownName, UserError, format_value
from draftree.formats.checkpoint import CONFIG, DRAFTREE_ENTRY, Checkpoint, tensor_names
from draftree.policies.base import Policy
from draftree.request import Request
from draftree.sampling.logits_processors import processor_name
from draftree.target.hub import check_path, download_model, is_hub_id
from draftree.target.target_names import shipped_name
from draftree.utils.files import Entries, as_user_error
from draftree.utils.validated_dataclass import parse_options


def check_exact(policy: Policy, acceptor: Acceptor, requests: Sequence[Request] = ()) -> None:
    """Check that policy and acceptor keep the target's distribution, unless the acceptor is lossy.

    Args:
        policy: grows the trees.
        acceptor: accepts paths of the trees.
        requests: the requests to run, if they are known.

    Raises:
        UserError: the acceptor is not exact for the kind of draw it uses, for a policy that prunes
            on draws, or for a request's temperature; or the acceptor reads p after nodes that it
            rejects, and a request has a processor that may have a state.
    """
    name, rule = type(policy).__name__.lower(), type(acceptor).__name__.lower()
    if acceptor.draw not in acceptor.exact_for and not acceptor.lossy:
        allowed = ", ".join(sorted(d.value for d in acceptor.exact_for))
        raise UserError(
            f"acceptor '{rule}' is not exact for {acceptor.draw.value} draws; allowed: {allowed}"
        )
    if acceptor.draw.is_sampled and policy.prunes_on_draws and not acceptor.survives_pruning:
        raise UserError(
            f"acceptor '{rule}' is not exact where policy '{name}' prunes on what was drawn; allowed: match"
        )
    for request in requests:
        sampling = request.sampling
        if not (acceptor.greedy if sampling.greedy else acceptor.sampling):
            other = (
                "greedy, match" if sampling.greedy else "match (the default), or one for sampling"
            )
            raise UserError(
                f"acceptor '{rule}' does not serve temperature {sampling.temperature:g}; allowed: {other}"
            )
        for unknown in (
            p for p in request.processors if p not in request.guides and p not in request.stateless
        ):
            if acceptor.looks_ahead:
                told = f"processor {processor_name(unknown)} may keep count of its calls"
                also = (
                    "another acceptor (match), or a processor that the request names as stateless"
                )
                raise UserError(
                    f"acceptor '{rule}' asks for p ahead of what it accepts, and {told}; allowed: {also}"
                )


def is_exact(policy: Policy, acceptor: Acceptor, requests: Sequence[Request] = ()) -> bool:
    """Return whether `check_exact` accepts a policy with an acceptor, for the given requests."""
    try:
        check_exact(policy, acceptor, requests)
    except UserError:
        return False
    return True


PLUS = re.compile(r"(?<![\d.]e)\+|\+(?!\d)", re.IGNORECASE)
"""Matches the + between two drafters, but not the sign of a number, as in 1e+2."""
KINDS: dict[str, tuple[types.ModuleType, type]] = {
    "drafter": (drafters, Method),
    "policy": (policies, Policy),
    "acceptor": (acceptors, Acceptor),
}


def files(package: types.ModuleType) -> tuple[str, ...]:
    """Return the names of a package's parts, which are its file names.

    The file `base` and files whose names begin with an underscore are not parts.
    """
    found = (m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg)
    return tuple(
        sorted(n.removesuffix("_") for n in found if n != "base" and not n.startswith("_"))
    )


def in_file(package: types.ModuleType, name: str, base: type) -> type:
    """Return the dataclass that a part's file defines.

    Args:
        package: the package that contains the file.
        name: name of the part, which is also the name of the file.
        base: class from which the dataclass is derived.
    """
    module = importlib.import_module(f"{package.__name__}.{name}{'_' * keyword.iskeyword(name)}")
    own = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__
    ]
    assert [is_dataclass(c) for c in own] == [True], (
        f"{module.__name__} must hold one dataclass of a {base.__name__}"
    )
    return own[0]


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the names of the parts of a kind (`drafter`, `policy`, `acceptor`), with plug-ins."""
    return tuple(sorted({*own_names(kind), *plugins(kind)}))


@cache
def own_names(kind: str) -> tuple[str, ...]:
    """Return the names of the parts of a kind that ship with draftree."""
    return files(KINDS[kind][0])


@cache
def plugins(kind: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return other packages' entry points for a kind, by name; several if packages clash."""
    found = list(entry_points(group=KINDS[kind][0].__name__))
    return {entry.name: tuple(e for e in found if e.name == entry.name) for entry in found}


def packages(kind: str, name: str) -> list[str]:
    """Return the names of the other packages that provide a part of this name."""
    return [entry.dist.name if entry.dist else "unknown" for entry in plugins(kind).get(name, ())]


@cache
def part(kind: str, name: str) -> type:
    """Return the options dataclass of the part with the given name.

    Raises:
        UnknownName: there is no such part.
        UserError: the part is a plug-in that cannot be used.
    """
    if name not in names(kind):
        raise UnknownName(kind, name, names(kind))
    package, base = KINDS[kind]
    if name not in own_names(kind):
        return _load_plugin(kind, name, base)
    return in_file(package, name, base)


def _load_plugin(kind: str, name: str, base: type) -> type:
    if len(brought := packages(kind, name)) > 1:
        raise UserError(
            f"{kind} '{name}' is provided by several packages, {', '.join(sorted(brought))}: allowed is one of them"
        )
    entry = plugins(kind)[name][0]
    where = f"{kind} '{name}' of package '{brought[0]}' cannot be used: entry point {entry.value}"
    with as_user_error(where):
        cls: type = entry.load()
    fits = (
        inspect.isclass(cls)
        and issubclass(cls, base)
        and issubclass(cls, Hashable)
        and is_dataclass(cls)
    )
    if (
        not fits or inspect.isabstract(cls) or cls.__name__.lower() != name
    ):  # results and checkpoints name a part by its class
        raise UserError(
            f"{where} is {format_value(cls)}, allowed is a whole {base.__name__}: a frozen dataclass {name}, in any case"
        )
    return cls


def parts(kind: str) -> dict[str, type]:
    """Return all parts of a kind by name, without plug-ins that cannot be used."""
    found = {}
    for name in names(kind):
        with suppress(UserError):
            found[name] = part(kind, name)
    return found


def build(kind: str, spec: str) -> Any:
    """Return the part that a spec names.

    Raises:
        UserError: the name, a key or a value is unknown.
    """
    if kind == "drafter" and len(several := split_fused_spec(spec)) > 1:
        return Fused(tuple(build(kind, one) for one in several))
    if kind == "drafter" and (isdir(spec) or is_hub_id(spec)):
        return in_folder(spec if isdir(spec) else str(download_model(spec)))
    if kind == "drafter" and (shipped_name(spec) is not None or spec.lower().endswith(".gguf")):
        return part("drafter", "lm")(model=spec)
    name, _, rest = spec.partition(":")
    name = canonical_name(kind, name, names(kind))
    if kind == "drafter" and name not in names(kind) and not rest:
        with as_user_error(f"unknown drafter '{spec}'"):
            check_path(spec)
    cls = part(kind, name)
    values = parse_options(filter(None, rest.split(",")), cls, f"{kind} '{name}'")
    return (
        cls(**values, named=frozenset(values))
        if issubclass(cls, TrainableMethod)
        else cls(**values)
    )


def in_folder(folder: str) -> Method:
    """Return the drafter in a folder: a trained one, a datastore, or a language model (`lm`).

    Raises:
        UserError: the folder holds none of these.
    """
    try:
        name = method_of(Path(folder))
    except UserError:
        if not is_language_model(Path(folder)):
            raise
        return part("drafter", "lm")(model=folder)  # type: ignore[no-any-return]
    method = part("drafter", name)
    if not issubclass(method, DatastoreMethod | TrainableMethod):
        raise UserError(f"'{folder}' holds a '{name}', which is not opened from a folder")
    return (
        method(datastore=folder)
        if issubclass(method, DatastoreMethod)
        else method(checkpoint=folder)
    )


def is_language_model(folder: Path) -> bool:
    """Return whether a folder holds a causal language model of transformers.

    A tokenizer is not required.
    """
    config = Checkpoint.at(folder).config
    known: set[str] = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = config.get("architectures")
    return isinstance(architectures, list) and not known.isdisjoint(map(str, architectures))


def split_fused_spec(spec: str) -> list[str]:
    """Split a spec at each `+` into the specs of its drafters.

    A `+` in a path that exists does not split.

    Raises:
        UserError: one side of a `+` is empty.
    """
    found, pieces = [], PLUS.split(spec)
    if len(pieces) > 1 and "" in pieces and not exists(spec):
        raise UserError(
            f"'{spec}' has a '+' with nothing on one side, allowed are drafters on both: edd+suffix"
        )
    while pieces:
        n = next(n for n in range(len(pieces), 0, -1) if n == 1 or _is_path("+".join(pieces[:n])))
        found.append("+".join(pieces[:n]))
        del pieces[:n]
    return found


def _is_path(spec: str) -> bool:
    """Return whether a spec with a `+` names one drafter.

    It does if it is a folder, or if the `+` occurs only in values that are existing paths.
    """
    if isdir(spec):
        return True
    items = [item.partition("=") for item in spec.split(",") if "+" in item]
    return all("+" not in key and value and exists(value) for key, _, value in items)


def method_of(folder: Path) -> str:
    """Return the name of the drafter whose checkpoint is in a folder.

    The config names the drafter; a published checkpoint is recognised by its contents.

    Raises:
        UserError: no method, or more than one, recognises the checkpoint.
    """
    stored = Checkpoint.at(folder)
    if stored.about:
        return str(
            Entries(stored.about, f"'{folder / CONFIG}': {DRAFTREE_ENTRY}").get("drafter", str)
        )
    methods: dict[str, type[Method]] = parts("drafter")
    trained = {
        name: method for name, method in methods.items() if issubclass(method, TrainableMethod)
    }
    keys = tensor_names(
        folder, sorted({file for method in trained.values() for file in method.files})
    )
    with as_user_error(f"'{folder}' is not a drafter's folder"):
        found = [n for n, method in trained.items() if method.recognises(stored.config, keys)]
    if len(found) != 1:
        raise UserError(
            f"'{folder}' is not a drafter's folder: none of {', '.join(trained)} recognises what is in it"
        )
    return found[0]


def knobs(kind: str, name: str) -> dict[str, Any]:
    """Return the options of a part with their default values."""
    cls = part(kind, name)
    return {f.name: None if f.default is MISSING else f.default for f in fields(cls) if f.compare}


def stages(name: str) -> tuple[Stage, ...]:
    """Return the default training stages of a drafter, or none if it is not trained."""
    cls = part("drafter", name)
    return cls.stages if issubclass(cls, TrainableMethod) else ()


def summary(kind: str, name: str) -> str:
    """Return the first line of the docstring of a part's module, or of its class."""
    cls = part(kind, name)
    return (
        (importlib.import_module(cls.__module__).__doc__ or cls.__doc__ or "")
        .strip()
        .partition("\n")[0]
    )
