"""Check the options of a command without importing torch or loading a model.

What is refused here would be refused later, in the same words: the names, keys and ranges of specs
are read from the source of the parts, which are not imported. What cannot be decided here is left
to the parts themselves.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from importlib.metadata import entry_points
from os.path import exists
from pathlib import Path
from typing import Any, Literal, get_args

from draftree.aliases import canonical_name
from draftree.cli.output_files import check_output
from draftree.errors import UnknownName, UserError, format_value
from draftree.target.load_options import Loading, Source
from draftree.target.target_names import DEMO, SMOLLM2
from draftree.text.option_fields import Parameters
from draftree.utils.validated_dataclass import PRESET, knob, parse_value, rule_of, rules

ROOT = Path(__file__).parents[1]
FOLDERS = {"drafter": "drafters", "policy": "policies", "acceptor": "acceptors"}
OPTIONLESS_BASES = {"Policy", "Layered", "Acceptor", "Method", "Part", "ABC"}
"""Names of base classes that have no options."""
INPUT_PATH_OPTIONS = ("costs", "data", "result", "init_from", "exclude", "grammar")
"""Names of options whose values are files or folders to read."""
NAMED_TARGETS = {DEMO, SMOLLM2}


def check_options(of: type, given: Mapping[str, Any], parts: Mapping[str, type]) -> None:
    """Raise an error for wrong values of a command's options, before anything is loaded.

    Args:
        of: dataclass that defines the options.
        given: values by the name of the field. For a field that is itself a dataclass of options,
            the value is a mapping of their values.
        parts: such dataclasses of options by the name of the field.

    Raises:
        UserError: a value is not allowed, or a file or folder does not exist or cannot be written.
    """
    checked = [
        (p, given[name])
        for name, p in parts.items()
        if issubclass(p, Source | Loading | Parameters)
    ]
    if wrong := [
        told for part, values in [*checked, (of, given)] for told in _wrong_values(part, values)
    ]:
        raise UserError("; ".join(wrong))
    for values in (*(given[name] for name in parts), given):
        _check_readable(values)
    for kind in FOLDERS:
        for spec in _several(given.get(kind)):
            check_spec(kind, spec)
    for pair in _several(given.get("pair")):
        for kind, spec in zip(FOLDERS, pair.split(), strict=False):
            check_spec(kind, spec)
    for f in fields(of):
        if "written" in f.metadata and isinstance(path := given.get(f.name), Path):
            check_output(path, bool(given.get("force")), flag(f), endings=f.metadata["written"])
    for f in fields(of):
        if f.metadata.get("flag") == "--set":
            check_items(given[f.name], str(given.get("name", "")).partition(":")[0])
        elif f.metadata.get("flag") == "--knob":
            check_searched_options(given["policy"].partition(":")[0], given[f.name])
    for suite in _several(given.get("suite")):
        check_suite(suite)
    for machine in _several(given.get("machine")):
        if machine not in (names := [p.stem for p in (ROOT / "machines").glob("*.json")]):
            raise UnknownName("machine", machine, names)
    loading = given.get("loading") or {}
    if isinstance(target := given.get("target"), str):
        check_target(target, loading)
    for spec in _several(given.get("drafter")):
        check_downloads(spec)
    if (adapter := loading.get("adapter")) is not None:
        check_repository(
            adapter, f"adapter '{adapter}' cannot be loaded", file="adapter_config.json"
        )


def flag(f: Field[Any]) -> str:
    """Return the option, such as `--max-new-tokens`, for a field of a command's options."""
    name: str = f.metadata.get("flag", "--" + f.name.replace("_", "-"))
    return name.partition("/")[0]


def _check_readable(values: Mapping[str, Any]) -> None:
    """Raise an error for a missing file or folder that an option names for reading."""
    for name in INPUT_PATH_OPTIONS:
        for path in _several(values.get(name)):
            if isinstance(path, Path) and not path.exists():
                raise UserError(
                    f"--{name.replace('_', '-')} is '{path}', but there is no such file or folder"
                )
    schema = values.get("json_schema")
    if isinstance(schema, str) and not is_json(schema) and not exists(schema):
        raise UserError(
            f"--json-schema is {format_value(schema)}, which is neither JSON nor a file"
        )


def is_json(text: str) -> bool:
    """Return whether a text looks like JSON by its first character, and not like a file name."""
    return text.lstrip()[:1] in ("{", "[", '"', "") or text.strip() in ("true", "false")


def check_items(items: Sequence[str], name: str) -> None:
    """Raise an error for settings that are not KEY=VALUE, or that the drafter `name` lacks.

    Raises:
        UserError: a setting is not KEY=VALUE, or its key is unknown.
    """
    for item in items:
        if not item.partition("=")[0] or "=" not in item:
            raise UserError(f"--set is '{item}', allowed is KEY=VALUE")
    if name in _files("drafter"):
        _check_keys("drafter", name, items)


def check_searched_options(policy: str, knobs: Sequence[str]) -> None:
    """Raise an error for options to search that a policy does not have.

    Raises:
        UnknownName: the policy does not have an option.
    """
    known, whole = _knobs("policy", policy) if policy in _files("policy") else ({}, False)
    for name in knobs:
        if whole and name not in known:
            raise UnknownName(f"knob of policy '{policy}'", name, known)


def _several(value: Any) -> Sequence[Any]:
    return [] if value is None else value if isinstance(value, list | tuple) else [value]


def _wrong_values(of: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each option value that a dataclass's field does not allow.

    The last message is yielded if `min_new_tokens` is larger than `max_new_tokens`.

    Raises:
        UserError: an item of `logit_bias` is invalid.
    """
    same: dict[str, Field[Any]] = {
        f.name: f for f in fields(of) if f.metadata.get("kind") in (None, str | None, list[int])
    }
    kind: Any = of
    for name, (words, fine) in rules(kind):
        if name in same and values.get(name) is not None and not fine(values[name]):
            allowed = words.removeprefix("none or ")  # which is not typed
            yield f"{flag(same[name])} is {format_value(values[name])}, allowed is {allowed}"
    for item in values.get("logit_bias") or ():
        bias(item)
    if {"min_new_tokens", "max_new_tokens"} <= values.keys() and values["min_new_tokens"] > values[
        "max_new_tokens"
    ]:
        most = values["max_new_tokens"]
        least = values["min_new_tokens"]
        yield f"--min-new-tokens is {least}, allowed is at most --max-new-tokens, {most}"


def bias(item: str) -> tuple[int | str, float]:
    """Return the token and the bias of an item TOKEN=BIAS of `--logit-bias`.

    A token is given by its id in digits, or by its text, which may be in quotes.

    Raises:
        UserError: the item has another form.
    """
    token, _, value = item.rpartition("=")
    try:
        named = json.loads(token) if token.startswith('"') else token
        if named != token and str(named).isdigit():
            raise UserError(
                f"--logit-bias is '{item}', but digits are an id: give the id of the text '{named}'"
            )
        return int(token) if token.isdecimal() else named, float(value)
    except ValueError as error:
        raise UserError(
            f"--logit-bias is '{item}', allowed is TOKEN=BIAS: an id or a text, and a number"
        ) from error


def check_target(name: str, loading: Mapping[str, Any]) -> None:
    """Raise an error if a model is neither an existing path nor on the hub or in its cache.

    Raises:
        UserError: the model does not exist, or the hub cannot be reached.
    """
    if name in NAMED_TARGETS or exists(name):
        return
    if name.isdecimal():
        raise UserError(
            f"the model is '{name}', which is a number; -n {name} bounds the number of tokens"
        )
    from draftree.target.hub import locate_model

    try:
        locate_model(name, loading.get("revision"))
    except FileNotFoundError as error:
        known = f"{DEMO}, {SMOLLM2}, a Hugging Face folder, a file .gguf, a hub id"
        raise UserError(
            f"cannot load target {format_value(name)} (allowed: {known}): {error}"
        ) from error


def check_downloads(spec: str) -> None:
    """Raise an error if a part of a drafter is neither on this machine nor on the hub.

    Raises:
        UserError: a part does not exist, or the hub cannot be reached.
    """
    from draftree.target.hub import is_hub_id

    for part in spec.split("+"):
        values = [item.partition("=")[2] for item in part.partition(":")[2].split(",")]
        for name in filter(is_hub_id, (part, *values)):
            check_repository(name, f"'{name}' cannot be downloaded")


def check_repository(name: str, told: str, file: str = "config.json") -> None:
    """Raise an error if a path, or a repository on the hub or in its cache, does not exist.

    Args:
        name: a path, or a hub id with or without a revision.
        told: start of the error message.
        file: name of a file whose presence shows that the cache contains the repository.

    Raises:
        UserError: the repository or path does not exist, or the hub cannot be reached.
    """
    from draftree.target.hub import REVISION_SEPARATOR, locate_model

    repository, _, revision = (
        name.partition(REVISION_SEPARATOR) if not exists(name) else (name, "", "")
    )
    try:
        locate_model(repository, revision or None, file)
    except FileNotFoundError as error:
        raise UserError(f"{told}: {error}") from error


def is_model(word: str) -> bool:
    """Return whether an argument is a model rather than a prompt.

    A model is a known name, an existing path, or a hub id.
    """
    return (
        word in NAMED_TARGETS
        or bool(re.fullmatch(r"[\w.-]+/[\w.-]+", word))
        or (bool(word) and exists(word))
    )


def check_suite(name: str) -> None:
    """Raise an error if a suite of prompts does not exist.

    Raises:
        UnknownName: no suite, file or benchmark format has this name.
    """
    from draftree.evaluation.dataset_formats import DATASET_FORMATS

    shipped = [p.stem for p in (ROOT / "evaluation" / "prompts").glob("*.jsonl")]
    benchmark, _, file = name.partition(":")
    if (
        exists(name)
        or name in shipped
        or (benchmark in DATASET_FORMATS and (not file or exists(file)))
    ):
        return
    if benchmark in DATASET_FORMATS:
        raise UserError(f"suite '{name}': there is no file '{file}'")
    raise UnknownName("suite or file of prompts", name, (*shipped, *DATASET_FORMATS))


def check_spec(kind: str, spec: str) -> None:
    """Raise an error if a spec names an unknown part, or has an unknown key or a wrong value.

    Raises:
        UserError: the part, a key or a value in the spec is not allowed.
    """
    if kind == "drafter" and (exists(spec) or "/" in spec or "+" in spec):
        for one in spec.split("+") if "+" in spec and "/" not in spec and not exists(spec) else []:
            check_spec(kind, one)
        return
    name, _, rest = spec.partition(":")
    names = sorted(
        {*_files(kind), *(e.name for e in entry_points(group=f"draftree.{FOLDERS[kind]}"))}
    )
    name = canonical_name(kind, name, names)
    if kind == "drafter" and (name == "published" or spec in NAMED_TARGETS):
        return
    if name not in names:
        raise UnknownName(kind, name, names)
    if name in _files(kind):
        _check_keys(kind, name, [item for item in rest.split(",") if item])


def part_names(kind: str) -> tuple[str, ...]:
    """Return the names of draftree's own drafters, policies or acceptors, without plug-ins."""
    return _files(kind)


@cache
def _files(kind: str) -> tuple[str, ...]:
    found = (p.stem for p in (ROOT / FOLDERS[kind]).glob("*.py"))
    return tuple(
        sorted(
            name.removesuffix("_") for name in found if name != "base" and not name.startswith("_")
        )
    )


def _check_keys(kind: str, name: str, items: Sequence[str]) -> None:
    known, whole = _knobs(kind, name)
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(
                f"'{item}' is not key=value; keys of {kind} '{name}': {', '.join(known) or 'none'}"
            )
        if key not in known and whole:
            raise UnknownName(f"key of {kind} '{name}'", key, known)
        if (rule := known.get(key)) is None:
            continue
        hint, bounds = rule
        words, fine = rule_of(hint, bounds) or ("", lambda _: True)
        if not fine(got := parse_value(value, hint)):
            raise UserError(f"{name}: {key} is {format_value(got)}, allowed is {words}")


@cache
def _knobs(kind: str, name: str) -> tuple[dict[str, Any], bool]:
    """Return the options of a part with their types and ranges, and whether the list is complete.

    Both are read from the part's source file, without importing it, because imports take long.
    """
    folder = ROOT / FOLDERS[kind]
    path = next(p for p in (folder / f"{name}.py", folder / f"{name}_.py") if p.exists())
    return _keys(path, name.replace("_", ""))


@cache
def _keys(path: Path, name: str) -> tuple[dict[str, Any], bool]:
    """Return the fields of a class in a source file, and whether the list is complete.

    The fields of its base classes are included, if their source files can be read.
    """
    tree = ast.parse(path.read_text("utf-8"))
    made = next(
        (c for c in tree.body if isinstance(c, ast.ClassDef) and c.name.lower() == name.lower()),
        None,
    )
    if made is None:
        return {}, False
    found, whole = dict[str, Any](), True
    for base in (ast.unparse(b) for b in made.bases if ast.unparse(b) not in OPTIONLESS_BASES):
        imported = (line for line in tree.body if isinstance(line, ast.ImportFrom) and line.module)
        module = next(
            (str(line.module) for line in imported if base in [a.name for a in line.names]), ""
        )
        home = (
            ROOT.parent.joinpath(*module.split(".")).with_suffix(".py")
            if module.startswith("draftree.")
            else path
        )
        fields_of_base, known = (
            _keys(home, base) if home.is_file() and base.isidentifier() else ({}, False)
        )
        found, whole = found | fields_of_base, whole and known
    return found | dict(_fields(made)), whole


def _fields(made: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for line in made.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if line.target.id == "presets" and isinstance(line.value, ast.Dict):
            names = tuple(key.value for key in line.value.keys if isinstance(key, ast.Constant))
            yield PRESET, (Literal[names], knob().metadata["range"])
        if re.match(r"ClassVar\b", ast.unparse(line.annotation)) or _is_no_key(line.value):
            continue
        hint, field = _evaluate(line.annotation), _evaluate(line.value)
        bounds = getattr(field, "metadata", {}).get("range")
        simple = hint in (int, float, bool) or bool(get_args(hint))
        yield line.target.id, (hint, bounds or knob().metadata["range"]) if simple else None


def _is_no_key(default: ast.expr | None) -> bool:
    """Return whether a field's default has `compare=…`, so that it is not a key of a spec."""
    return isinstance(default, ast.Call) and any(k.arg == "compare" for k in default.keywords)


def _evaluate(source: ast.expr | None) -> Any:
    """Evaluate an annotation or a default that consists of literals, built-in types and `knob`.

    Return None for other expressions.
    """
    if source is None:
        return None
    names = {
        "__builtins__": {},
        "knob": knob,
        "Literal": Literal,
        "int": int,
        "float": float,
        "bool": bool,
        "str": str,
    }
    try:
        return eval(compile(ast.Expression(source), "<a part's field>", "eval"), names)
    except Exception:  # it names something that is defined elsewhere
        return None
