"""Checks of a command's options that need no model and no torch, made before either is loaded.

What is refused here would be refused later, in the same words: the names, keys and ranges of specs are read from the source of
the parts, which are not imported. What cannot be decided here is left to the parts themselves.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from importlib.metadata import entry_points
from os.path import exists
from pathlib import Path
from typing import Any, Literal, get_args

import typer

from draftree.aliases import accepted
from draftree.boundary.files import writable
from draftree.boundary.knobs import knob, read, rule_of, rules
from draftree.errors import UnknownName, UserError, shown
from draftree.models.sources import DEMO, SMOLLM2, Loading, Source
from draftree.text.parameters import Parameters

ROOT = Path(__file__).parents[1]
FOLDERS = {"drafter": "drafters", "policy": "policies", "acceptor": "acceptors"}
BARE = {"Policy", "Layered", "Acceptor", "Method"}
"""Bases of parts without options of their own."""
READ = ("costs", "data", "result", "init_from", "exclude", "grammar")
"""Options that name a file or folder which is read."""
WRITTEN = ("trees", "profile", "plot")
"""Options that name a file which is written, and its endings where not all are allowed."""
PICTURES = {"trees": (".html", ".svg"), "profile": (".png", ".svg", ".pdf"), "plot": (".png", ".svg", ".pdf")}
KNOWN = {DEMO, SMOLLM2}


def check(of: type, given: Mapping[str, Any], parts: Mapping[str, type]) -> None:
    """Refuse values of a command's options that cannot be right.

    Args:
        of: the dataclass of the options.
        given: the values, by the name of the field; of a dataclass that stands for several options a mapping of its own.
        parts: these dataclasses.

    Raises:
        UserError: a value is not allowed, or a file or folder does not exist or cannot be written.
    """
    for name, part in parts.items():
        if issubclass(part, Source | Loading | Parameters):
            _check_values(part, given[name])
    _check_values(of, given)
    for kind in FOLDERS:
        for spec in _several(given.get(kind)):
            check_spec(kind, spec)
    for pair in _several(given.get("pair")):
        for kind, spec in zip(FOLDERS, pair.split(), strict=False):
            check_spec(kind, spec)
    for name in READ:
        for path in _several(given.get(name)):
            if isinstance(path, Path) and not path.exists():
                raise UserError(f"{name.replace('_', '-')} is '{path}', but there is no such file or folder")
    for name in WRITTEN:
        if isinstance(path := given.get(name), Path):
            writable(path, endings=PICTURES[name])
    if isinstance(suite := given.get("suite"), str):
        check_suite(suite)
    for machine in _several(given.get("machine")):
        if machine not in (names := [p.stem for p in (ROOT / "machines").glob("*.json")]):
            raise UnknownName("machine", machine, names)
    if isinstance(target := given.get("target"), str):
        check_target(target, given.get("loading") or {})


def _several(value: Any) -> Sequence[Any]:
    return [] if value is None else value if isinstance(value, list | tuple) else [value]


def _check_values(of: type, values: Mapping[str, Any]) -> None:
    """Refuse values out of their range, of the options whose value the command line has as the dataclass has it."""
    same: dict[str, Field[Any]] = {f.name: f for f in fields(of) if f.metadata.get("kind") in (None, str | None, list[int])}
    kind: Any = of
    for name, (words, fine) in rules(kind):
        if name in same and values.get(name) is not None and not fine(values[name]):
            allowed = words.removeprefix("none or ")  # which is not typed
            raise UserError(f"{name} is {shown(values[name])}, allowed is {allowed}")
    for item in values.get("logit_bias") or ():
        bias(item)
    if {"min_new_tokens", "max_new_tokens"} <= values.keys() and values["min_new_tokens"] > values["max_new_tokens"]:
        most = values["max_new_tokens"]
        raise UserError(f"min_new_tokens is {values['min_new_tokens']}, allowed is at most max_new_tokens, {most}")


def bias(item: str) -> tuple[int | str, float]:
    """Return the token and the bias that an item TOKEN=BIAS names; a token in quotes is text, be it a number.

    Raises:
        UserError: it is no such item.
    """
    token, _, value = item.rpartition("=")
    try:
        named = json.loads(token) if token.startswith('"') else token
        return int(token) if token.isdecimal() else named, float(value)
    except ValueError as error:
        raise UserError(f"--logit-bias is '{item}', allowed is TOKEN=BIAS: an id or a text, and a number") from error


def check_target(name: str, loading: Mapping[str, Any]) -> None:
    """Refuse a model that is neither a path that exists nor one that the hub or its cache can have.

    Raises:
        UserError: there is no such path, or the hub cannot be reached.
    """
    if name in KNOWN or exists(name):
        return
    from draftree.models.hub import located

    try:
        located(name, loading.get("revision"))
    except FileNotFoundError as error:
        known = f"{DEMO}, {SMOLLM2}, a Hugging Face folder, a file .gguf, a hub id"
        raise UserError(f"cannot load target {shown(name)} (allowed: {known}): {error}") from error


def check_suite(name: str) -> None:
    """Refuse prompts that do not exist.

    Raises:
        UnknownName: there is no such suite, file or format.
    """
    from draftree.evaluation.formats import FORMATS

    shipped = [p.stem for p in (ROOT / "evaluation" / "prompts").glob("*.jsonl")]
    benchmark, _, file = name.partition(":")
    if exists(name) or name in shipped or (benchmark in FORMATS and (not file or exists(file))):
        return
    if benchmark in FORMATS:
        raise UserError(f"suite '{name}': there is no file '{file}'")
    raise UnknownName("suite (a file, or the name of a shipped one or of a format)", name, (*shipped, *FORMATS))


def check_spec(kind: str, spec: str) -> None:
    """Refuse a spec that names no part, or gives one a key or a value that it does not take.

    Raises:
        UserError: the spec is wrong.
    """
    if kind == "drafter" and (exists(spec) or "/" in spec or "+" in spec):
        for one in spec.split("+") if "+" in spec and "/" not in spec and not exists(spec) else []:
            check_spec(kind, one)
        return
    name, _, rest = spec.partition(":")
    names = sorted({*_files(kind), *(e.name for e in entry_points(group=f"draftree.{FOLDERS[kind]}"))})
    name = accepted(kind, name, names)
    if name == "published" and kind == "drafter":
        return
    if name not in names:
        raise UnknownName(kind, name, names)
    if name in _files(kind):
        _check_keys(kind, name, [item for item in rest.split(",") if item])


@cache
def _files(kind: str) -> tuple[str, ...]:
    found = (p.stem for p in (ROOT / FOLDERS[kind]).glob("*.py"))
    return tuple(sorted(name.removesuffix("_") for name in found if name != "base" and not name.startswith("_")))


def _check_keys(kind: str, name: str, items: Sequence[str]) -> None:
    known, whole = _knobs(kind, name)
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"'{item}' is not key=value; keys of {kind} '{name}': {', '.join(known) or 'none'}")
        if key not in known and whole:
            raise UnknownName(f"key of {kind} '{name}'", key, known)
        if (rule := known.get(key)) is None:
            continue
        hint, bounds = rule
        words, fine = rule_of(hint, bounds) or ("", lambda _: True)
        if not fine(got := read(value, hint)):
            raise UserError(f"{name}: {key} is {shown(got)}, allowed is {words}")


@cache
def _knobs(kind: str, name: str) -> tuple[dict[str, Any], bool]:
    """Return the keys of a part, each with its type and range where its source says them, and whether these are all."""
    folder = ROOT / FOLDERS[kind]
    path = next(p for p in (folder / f"{name}.py", folder / f"{name}_.py") if p.exists())
    classes = (c for c in ast.parse(path.read_text("utf-8")).body if isinstance(c, ast.ClassDef) and c.name.lower() == name)
    found, whole = dict[str, Any](), False
    for made in classes:
        whole = all(isinstance(base, ast.Name) and base.id in BARE for base in made.bases)
        found = dict(_fields(made))
    return found, whole


def _fields(made: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for line in made.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if re.match(r"ClassVar\b", ast.unparse(line.annotation)):
            continue
        hint, field = _evaluated(line.annotation), _evaluated(line.value)
        bounds = getattr(field, "metadata", {}).get("range")
        simple = hint in (int, float, bool) or bool(get_args(hint))
        yield line.target.id, (hint, bounds or knob().metadata["range"]) if simple else None


def _evaluated(source: ast.expr | None) -> Any:
    """Return the value of an annotation or a default that consists of literals and `knob`; None for any other."""
    if source is None:
        return None
    names = {"__builtins__": {}, "knob": knob, "Literal": Literal, "int": int, "float": float, "bool": bool, "str": str}
    try:
        return eval(compile(ast.Expression(source), "<a part's field>", "eval"), names)
    except Exception:  # it names something that is defined elsewhere
        return None


def may_overwrite(path: Path, force: bool) -> None:
    """Ask before a file is overwritten; with nobody to ask, refuse to overwrite what is no saved result.

    Raises:
        UserError: there is such a file, and it is to stay.
    """
    if force or not path.exists():
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        if typer.confirm(f"'{path}' is there already; overwrite it?", err=True):
            return
    elif path.read_bytes()[:1] == b"{":  # a script that is run again
        return
    raise UserError(f"'{path}' is there already; --force overwrites it, --out names another")
