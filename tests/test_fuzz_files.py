"""Whatever a file holds, a program that reads it succeeds or ends with one line.

Small files of every kind that is opened are broken by chance: entries of JSON are removed, renamed and replaced, bytes are
cut and changed, tensors replaced. What still opens is used, and its text must be the target's.
"""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from architectures import VOCAB, target
from byte_vocabulary import byte_vocabulary
from draftree.cli.inputs import quiet
from draftree.costs.curves import CostTable
from draftree.data import samples
from draftree.data.prompts import encode, question
from draftree.drafters.aded import ADED
from draftree.drafters.base import TrainableMethod
from draftree.drafters.lookup.datastore import Stored
from draftree.drafters.rest import REST, RESTDrafter, stored
from draftree.engine import Engine
from draftree.errors import LONGEST, DraftreeError
from draftree.evaluation import report, suites
from draftree.models.target import Target
from draftree.policies.c2t import Classifier
from draftree.policies.chain import Chain
from draftree.policies.static import Static
from draftree.registry import KINDS, build, knobs, names, part
from draftree.request import Request
from draftree.sampling.grammar import Constrained, Grammar, Vocabulary
from draftree.testing.conformance import COSTS
from folders import byte_tokenizer, target_folder
from test_formats import LAYOUTS, there

DEEP = "[" * 10000 + "]" * 10000
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 10**6, 10**12, 2**63, 10**400, -(10**12), 0.5, -1.5, 1e300, float("nan"),
    float("inf"), "", "x", "7", "\ud800", "a" * 9000, [], [0], [[]], [1, "x"], {}, {"a": None}, {"x": {"y": [1]}},
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of a JSON value: what holds it, and its key or number."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def with_odd_entry(text: str, rng: random.Random) -> str:
    """JSON with one entry of it broken; or nested too deep, or no JSON at all."""
    value = json.loads(text)
    found = list(places(value))
    if not found or rng.random() < 0.05:
        return rng.choice([text[: rng.randrange(len(text))], "", "null", "[]", "{}", "3", '"x"', DEEP, '{"a":' * 10000, "\0"])
    holder, key = rng.choice(found)
    how = rng.randrange(10)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[rng.choice([f"{key}x", "", "draftree"])] = holder.pop(key)
    elif how == 2:
        return json.dumps(value).replace(json.dumps(holder[key]), DEEP, 1)
    elif how == 3:
        holder[key] = rng.choice([[holder[key]], {"x": holder[key]}, str(holder[key])])
    else:
        holder[key] = rng.choice(ODD)
    return json.dumps(value)


def with_odd_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes cut, emptied, repeated or changed; the changes mostly near the beginning, where headers are."""
    how = rng.randrange(8)
    if how < 2:
        return content[: rng.choice([0, rng.randrange(1 + len(content))])]
    if how == 2 or not content:
        return content + rng.randbytes(rng.randrange(1, 99))
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 20])):
        place = rng.randrange(len(changed) if rng.random() < 0.3 else min(len(changed), 2000))
        changed[place] = rng.randrange(256)
    return bytes(changed)


def with_odd_tensor(path: Path, rng: random.Random) -> None:
    """One tensor of a file gone, renamed, or of another kind."""
    tensors: dict[Any, Any] = dict(load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True))
    key = rng.choice(sorted(tensors))
    value = tensors.pop(key)
    plain: list[Any] = [None, value.reshape(-1), value.reshape(-1)[:1], value.new_zeros(0), value.sum(), value.to(torch.int8),
                        value.to(torch.complex64), value.double(), value.to(torch.float8_e4m3fn), value.bool()]  # fmt: skip
    odd = [value.float().to_sparse(), value.to("meta"), 3, "x", [value], {"x": value}]
    names_ = [key, key, key, f"{key}x", "", key.replace("0", "999999999")]
    new = rng.choice(plain if path.suffix == ".safetensors" else plain + odd)
    if new is not None:
        tensors[rng.choice(names_)] = new
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path)
    else:
        torch.save(rng.choice([tensors, tensors, tensors, list(tensors.values()), {1: value}, value]), path)


def broken(folder: Path, rng: random.Random) -> str:
    """Breaks one file of a folder; says which."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    if path.suffix == ".json":
        path.write_text(with_odd_entry(path.read_text(), rng))
    elif path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        number = rng.randrange(len(lines))
        lines[number] = with_odd_entry(lines[number], rng)
        path.write_text("\n".join(lines))
    elif (path.suffix == ".safetensors" or path.read_bytes()[:2] == b"PK") and rng.random() < 0.5:  # as torch pickles
        with_odd_tensor(path, rng)
    else:
        path.write_bytes(with_odd_bytes(path.read_bytes(), rng))
    return path.name


def told(use: Callable[[Any], object], given: Path | str) -> str | None:
    """What a program says of files, or of a spec; None where they can be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use(given)
        except DraftreeError as error:
            return str(error)
    return None


# Kinds of files: how a whole one is made, and how it is used.


PROMPT = Request([5, 6, 7, 5, 6], 6)


@cache
def plain() -> list[list[int]]:
    return Engine(target("llama"), build("drafter", "pld").open(target("llama")), Chain()).plain([PROMPT]).tokens


def drafted(folder: Path) -> None:
    """Opens a drafter and writes a short text with it, which is the target's."""
    t = target("llama")
    engine = Engine(t, build("drafter", str(folder)).open(t), Chain(3), costs=COSTS)
    assert engine.write([PROMPT]).tokens == plain()


def written(folder: Path) -> None:
    """Loads a target and writes a short answer with it, with a drafter and without."""
    t = Target.load(str(folder))
    ids = encode(t.tokenizer, question("ab ab ab"))
    engine, request = Engine(t, build("drafter", "pld").open(t), Chain(3), costs=COSTS), Request(ids, 4)
    assert engine.write([request]).tokens == engine.plain([request]).tokens


def ours(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    part("drafter", name)().fresh(target("llama")).save(folder)


def as_published(name: str, legacy: bool, folder: Path) -> None:
    """A drafter of ours without the entry that names it, its tensors pickled or not."""
    ours(name, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["draftree"]
    (folder / "config.json").write_text(json.dumps(config))
    path = next(folder.glob("*.safetensors"))
    if legacy:
        torch.save(
            load_file(path), folder / path.name.replace("model.safetensors", "pytorch_model.bin").replace(".safetensors", ".pt")
        )
        path.unlink()


TRAINABLE = [n for n in names("drafter") if issubclass(part("drafter", n), TrainableMethod)]
PUBLISHED = [n for n in TRAINABLE if n not in ("edd", "vdm")]
FOLDERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = (
    {f"ours, {n}": (partial(ours, n), drafted) for n in TRAINABLE}
    | {f"published, {n}": (partial(as_published, n, False), drafted) for n in PUBLISHED}
    | {f"legacy, {n}": (partial(as_published, n, True), drafted) for n in PUBLISHED}
    | {n: (partial(there, n), drafted) for n in LAYOUTS}
    | {"target": (target_folder, written)}
)


# Files that stand alone.


def saved(name: str, value: object) -> Callable[[Path], Path]:
    """Writes a file of a folder; an `object` as JSON."""
    return lambda folder: write(folder / name, value if isinstance(value, str) else json.dumps(value))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


ENTRY = {"draft": {"1": 0.001, "4": 0.002}, "target": {"1": 0.03, "64": 0.09}, "commit": 0.001, "context": 100, "rows": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
SHARED = [{"text": "plain"}, {"question": "q", "answer": "a <<1=1>>"}, CHAT, {"prompt": "p", "completion": "c"},
          {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}]  # fmt: skip
ASKED = [*SHARED, {"prompt": "once", "category": "a"}, {"turns": ["who", "why"]}]
LEARNT = [*SHARED, {"data": ["a", "b", "c"]}]
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"enum": ["x", "y"]}}, "required": ["a"],
    "additionalProperties": False, "$defs": {"n": {"type": "array", "items": {"type": "string", "pattern": "a+"}}},
}  # fmt: skip
WORDS = [*(bytes([i]) for i in range(256)), b"<eos>"]


def priced(path: Path) -> None:
    step = CostTable.load(path / "costs.json").at(50, 3)
    assert step.draft_seconds(2) > 0 < step.target_seconds(9)


def asked(path: Path) -> None:
    for prompt in suites.load(str(path / "suite.jsonl")).prompts:
        encode(byte_tokenizer(), prompt.content)


def fed(path: Path) -> None:
    samples.read([path / "data.jsonl"], byte_tokenizer(), 40)
    samples.read([path / "data.json"], byte_tokenizer(), 40)


@cache
def vocabulary() -> Vocabulary:
    return byte_vocabulary(WORDS, [256])


def guided(path: Path) -> None:
    Constrained(Grammar.json_schema((path / "schema.json").read_text()), vocabulary(), 0)


def grown(path: Path) -> None:
    t = target("llama")
    engine = Engine(t, build("drafter", "pld").open(t), Static(str(path / "tree.json")), costs=COSTS)
    assert engine.write([PROMPT]).tokens == plain()


def classified(path: Path) -> None:
    found = Classifier.load(path)
    assert found.confidence(np.zeros(2), np.ones(2), np.ones(2)).shape == (2,)


def net(folder: Path) -> None:
    rng = np.random.default_rng(0)
    Classifier(rng.normal(size=(4, 3)), rng.normal(size=4), rng.normal(size=4), np.zeros(()), trained_on={"a": 1}).save(folder)


def measured(folder: Path) -> None:
    provenance = {"version": "1", "suite": "x", "target": "demo"}
    write(folder / "result.json", json.dumps({"provenance": provenance, "rows": [{"drafter": "edd", "policy": "pct"}]}))


DOCUMENTS = [np.arange(200) * step % VOCAB for step in (1, 3, 11)] + [np.array([5, 6, 7] * 20)]


def datastore(method: type[Stored], folder: Path) -> None:
    folder.mkdir()
    method.build(DOCUMENTS, VOCAB, folder, {}, lambda _: None)


def searched(method: type[Stored], folder: Path) -> None:
    t = target("llama")
    drafter = ADED().searching(folder) if method is ADED else RESTDrafter(REST(), (stored(folder),), VOCAB)
    assert Engine(t, drafter, Chain(3), costs=COSTS).write([PROMPT]).tokens == plain()


ALONE: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "costs": (saved("costs.json", {"entries": [ENTRY, ENTRY | {"context": 900}], "about": {"device": "cpu"}}), priced),
    "suite": (saved("suite.jsonl", "\n".join(map(json.dumps, ASKED))), asked),
    "data": (
        lambda folder: (saved("data.jsonl", "\n".join(map(json.dumps, LEARNT)))(folder), saved("data.json", LEARNT)(folder)),
        fed,
    ),
    "schema": (saved("schema.json", SCHEMA), guided),
    "tree": (saved("tree.json", {"paths": [[0], [0, 0], [1], [0, 1]], "tau": 2.0}), grown),
    "classifier": (net, classified),
    "aded": (partial(datastore, ADED), partial(searched, ADED)),
    "rest": (partial(datastore, REST), partial(searched, REST)),
    "result": (measured, lambda path: report.read(path / "result.json")),
}
FOLDERS |= ALONE


# Specs.

VALUES = [
    "", "x", "-1", "0", "1", "2", "3", "0.5", "1.5", "-0.5", "nan", "inf", "1e400", "1000000000000", "9" * 5000, "true", "none",
    "None", "ce", "a" * 9000, "\0", "\ud800", "..", "/", "=", "+", "1+2",
]  # fmt: skip


def odd_spec(kind: str, rng: random.Random) -> str:
    """A spec with odd values, keys or characters."""
    name = rng.choice(names(kind))
    keys = [*knobs(kind, name), "x", ""]
    items = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(rng.randrange(3))]
    spec = f"{name}:{','.join(items)}" if items else name
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        place = rng.randrange(1 + len(spec))
        spec = (
            spec[:place] + rng.choice([":", ",", "=", "+", "\0", "a", "é", "a" * 9000, ""]) + spec[place + rng.randrange(2) :]
        )
    return spec


def used(kind: str, spec: str) -> None:
    """Builds a part and, where it asks for no files, writes a short text with it, which is the target's."""
    if spec.startswith("lm:"):
        return  # its models may lie on the hub
    made = build(kind, spec)
    t = target("llama")
    drafter = made.open(t) if kind == "drafter" else build("drafter", "pld").open(t)
    policy, acceptor = made if kind == "policy" else Chain(3), made if kind == "acceptor" else None
    engine = Engine(t, drafter, policy, acceptor, COSTS)
    assert engine.write([PROMPT]).tokens == plain() or not engine.keeps_text()


# The tests.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A whole folder of each kind, made once."""
    quiet()
    root = tmp_path_factory.mktemp("whole")

    @cache
    def made(name: str) -> Path:
        folder = root / str(list(FOLDERS).index(name))
        FOLDERS[name][0](folder)
        return folder

    return made


def fuzzed(name: str, seeds: range, folder: Path, scratch: Path) -> None:
    """Breaks copies of a folder by chance, and uses them."""
    for seed in seeds:
        shutil.copytree(folder, scratch)
        file = broken(scratch, random.Random(f"{name} {seed}"))
        try:
            said = told(FOLDERS[name][1], scratch)
        except BaseException as error:
            error.add_note(f"{name}, case {seed}: {file}")
            raise
        assert said is None or ("\n" not in said and 0 < len(said) <= 2 * LONGEST), said
        shutil.rmtree(scratch)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_whole_is_used_and_what_is_broken_is_told(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    assert told(FOLDERS[name][1], whole(name)) is None
    fuzzed(name, range(3), whole(name), tmp_path / "case")


@pytest.mark.long
@pytest.mark.parametrize("name", FOLDERS)
def test_many_broken_files(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    fuzzed(name, range(3, 203), whole(name), tmp_path / "case")


def specs(kind: str, seeds: range) -> None:
    for seed in seeds:
        spec = odd_spec(kind, random.Random(f"{kind} {seed}"))
        try:
            said = told(partial(used, kind), spec)
        except BaseException as error:
            error.add_note(f"{kind}, case {seed}: {spec[:200]}")
            raise
        assert said is None or ("\n" not in said and 0 < len(said) <= 2 * LONGEST), said


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_is_used_or_told(kind: str) -> None:
    specs(kind, range(15))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_specs(kind: str) -> None:
    specs(kind, range(15, 700))


@pytest.mark.parametrize("name", [n for n in names("drafter") if n not in TRAINABLE])
def test_no_knob_makes_a_drafter_larger_than_memory(name: str) -> None:
    for knob in knobs("drafter", name):
        told(partial(used, "drafter"), f"{name}:{knob}=1000000000000")


# What chance seldom finds.


def test_sizes_are_bounded_by_the_weights(whole: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("ours, edd", "ours, vdm", "ours, eagle", "ours, eagle3", "published, glide", "target"):
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim"):
            folder = tmp_path / name / key
            shutil.copytree(whole(name), folder)
            config = json.loads((folder / "config.json").read_text())
            for size in (10**9, 10**12, 0, -1) if key != "head_dim" else (10**9, 10**12):
                (folder / "config.json").write_text(json.dumps(config | {key: size}))
                one_anyway = key == "num_hidden_layers" and name in ("ours, edd", "ours, vdm", "ours, eagle", "ours, eagle3")
                assert one_anyway or told(FOLDERS[name][1], folder) is not None, (name, key, size)


@pytest.mark.parametrize("name", ["ours, eagle", "ours, eagle3", "published, glide"])
def test_nothing_is_allocated_before_shapes_are_compared(name: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(whole(name), tmp_path / "x")
    change(tmp_path / "x", intermediate_size=10**14)  # more than any machine has
    assert "mis-shaped tensors" in (told(drafted, tmp_path / "x") or "")


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 10000 + "1" + "}" * 10000], ids=["lists", "objects"])
def test_json_nested_ten_thousand_deep_is_told(text: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    for name in (*ALONE, "target", "ours, edd"):
        for file in whole(name).glob("*.json*"):
            folder = tmp_path / name / file.name
            shutil.copytree(whole(name), folder)
            (folder / file.name).write_text(text)
            assert "nested too deep" in (told(FOLDERS[name][1], folder) or ""), (name, file.name)


TEMPLATES = ["{{ 1 / 0 }}", "{{ messages[9].x.y }}", "{% for i in range(10 ** 12) %}{% endfor %}", "{{ x(", 3]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_may_raise_anything(template: Any, whole: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(whole("target"), tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert told(written, tmp_path / "t") is not None


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1",)


LINES: dict[str, Callable[[Path], list[str]]] = {
    "a pickle": lambda t: torch.save({"x": Evil()}, t / "pytorch_model.bin") or (t / "model.safetensors").unlink() or [],
    "a tokenizer that is a list": lambda t: (t / "tokenizer.json").write_text("[]") and [],
    "no layers": lambda t: change(t, num_hidden_layers=0),
    "layers below none": lambda t: change(t, num_hidden_layers=-3),
    "odd heads": lambda t: change(t, num_attention_heads=7),
    "text for a number": lambda t: change(t, hidden_size="32"),
    "an unknown dtype": lambda t: change(t, dtype="float12"),
    "a dtype of whole numbers": lambda t: change(t, dtype="int8"),
    "other sizes": lambda t: change(t, intermediate_size=40),
    "a long spec": lambda t: ["--policy", "a" * 9000],
    "a long value": lambda t: ["--top-k", "a" * 9000],
    "a long name": lambda t: ["--target", "a" * 9000],
    "a long option": lambda t: ["--" + "a" * 9000],
}  # fmt: skip


def change(folder: Path, **values: Any) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return []


@pytest.mark.parametrize("case", LINES)
def test_the_command_line_tells_it_in_one_line(draftree, case: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(whole("target"), tmp_path / "t")
    options = LINES[case](tmp_path / "t")
    usual = ("--target", tmp_path / "t", "--drafter", "pld", "--policy", "chain", "--max-new-tokens", "2")
    status, out, err = draftree("generate", "x", *usual, *options)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert len(err) < 2 * LONGEST
