"""The formats that draftree reads: how a small whole file or folder of each is made, and how it is used.

A use raises `DraftreeError` where the files are refused. Where it returns, the output was the
target's.
"""

import atexit
import io
import json
import math
import shutil
import struct
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import recount
from architectures import VOCAB, target
from byte_vocabulary import byte_vocabulary
from checkpoint_layouts import LAYOUTS, there
from draftree import cost_estimate
from draftree.cli import arguments
from draftree.cli.app import main
from draftree.costs import machine_probe
from draftree.costs.cost_model import PassShape, Speed
from draftree.costs.cost_table import CostTable
from draftree.costs.online_costs import OnlineCosts
from draftree.costs.step_costs import Costs
from draftree.data import samples
from draftree.data.prompts import encode, question
from draftree.data.samples import Sample
from draftree.drafters.aded import ADED
from draftree.drafters.base import TrainableMethod
from draftree.drafters.rest import REST, RESTDrafter, load_corpus
from draftree.drafters.retrieval.datastore_drafter import DatastoreMethod
from draftree.drafters.vdm import VDM
from draftree.engine import Engine
from draftree.errors import MAX_MESSAGE_CHARACTERS, DraftreeError, UserError
from draftree.evaluation import resume, roofline, suites
from draftree.evaluation.trace_store import Recordings
from draftree.policies.c2t import Classifier
from draftree.policies.chain import Chain
from draftree.policies.static import Static
from draftree.registry import build, names, part
from draftree.request import Request
from draftree.sampling.grammar import Constrained, Grammar, Vocabulary
from draftree.target import batch_invariance_choice, gguf_conversion
from draftree.target.target import HiddenStateSpec, Target
from draftree.testing.conformance import COSTS
from draftree.text.option_fields import Parameters
from draftree.training.distributed import Processes
from draftree.training.feature_cache import Shards
from draftree.training.trainer import TrainingPlan, train
from draftree.tuning._tree_dataset import Collected, Nodes
from draftree.utils import hardware
from folders import byte_tokenizer, target_folder
from gguf_files import write_gguf
from suite_rows import ROWS

# Kinds of files: how a whole one is made, and how it is used.


PROMPT = Request([5, 6, 7, 5, 6], 6)


@cache
def plain() -> list[list[int]]:
    return (
        Engine(target("llama"), build("drafter", "pld").open(target("llama")), Chain())
        .plain([PROMPT])
        .tokens
    )


def drafted(folder: Path) -> None:
    """Opens a drafter and writes a short text with it, which is the target's."""
    t = target("llama")
    engine = Engine(t, build("drafter", str(folder)).open(t), Chain(3), costs=COSTS)
    assert engine.write([PROMPT]).tokens == plain()


def written(folder: Path, **how: Any) -> None:
    """Loads a target and writes a short answer with it, with a drafter and without."""
    t = Target.load(str(folder), **how)
    ids = encode(t.tokenizer, question("ab ab ab"))
    engine, request = (
        Engine(t, build("drafter", "pld").open(t), Chain(3), costs=COSTS),
        Request(ids, 4),
    )
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
            load_file(path),
            folder
            / path.name.replace("model.safetensors", "pytorch_model.bin").replace(
                ".safetensors", ".pt"
            ),
        )
        path.unlink()


TRAINABLE = [n for n in names("drafter") if issubclass(part("drafter", n), TrainableMethod)]
PUBLISHED = [n for n in TRAINABLE if n not in ("edd", "vdm")]
# Files that stand alone.


def saved(name: str, value: object) -> Callable[[Path], Path]:
    """Writes a file of a folder; an `object` as JSON."""
    return lambda folder: write(
        folder / name, value if isinstance(value, str) else json.dumps(value)
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


ENTRY = {
    "draft": {"1": 0.001, "4": 0.002},
    "target": {"1": 0.03, "64": 0.09},
    "commit": 0.001,
    "context": 100,
    "rows": 2,
}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
SHARED = [
    {"text": "plain"},
    {"question": "q", "answer": "a <<1=1>>"},
    CHAT,
    {"prompt": "p", "completion": "c"},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
]
ASKED = [*SHARED, {"prompt": "once", "category": "a"}, {"turns": ["who", "why"]}]
LEARNT = [*SHARED, {"data": ["a", "b", "c"]}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "array", "items": {"type": "string", "pattern": "a+"}}},
}
LARK = 'start: a " " B\na: "x" | "y" a\nB: /[0-9]{1,3}/\n%ignore /;+/\n'
WORDS = [*(bytes([i]) for i in range(256)), b"<eos>"]


def priced(path: Path) -> None:
    step = CostTable.load(path / "costs.json").at(50, 3)
    assert step.draft_seconds(2) > 0 < step.target_seconds(9)


def asked(path: Path) -> None:
    for prompt in suites.load(str(path / "suite.jsonl")).prompts:
        encode(byte_tokenizer(), prompt.content)


def fed(path: Path) -> None:
    samples.read_samples([path / "data.jsonl"], byte_tokenizer(), 40)
    samples.read_samples([path / "data.json"], byte_tokenizer(), 40)


@cache
def vocabulary() -> Vocabulary:
    return byte_vocabulary(WORDS, [256])


PARAMETERS = asdict(Parameters()) | {"logit_bias": ()}


def guided(path: Path) -> None:
    asked = arguments.options(PARAMETERS | {"json_schema": str(path / "schema.json")})
    Constrained(Grammar.json_schema(asked.json_schema), vocabulary(), 0)


def guided_by_lark(path: Path) -> None:
    asked = arguments.options(PARAMETERS | {"grammar": str(path / "grammar.lark")})
    Constrained(asked.grammar, vocabulary(), 0)


def grown(path: Path) -> None:
    t = target("llama")
    engine = Engine(
        t, build("drafter", "pld").open(t), Static(str(path / "tree.json")), costs=COSTS
    )
    assert engine.write([PROMPT]).tokens == plain()


def classified(path: Path) -> None:
    found = Classifier.load(path)
    assert found.confidence(np.zeros(2), np.ones(2), np.ones(2)).shape == (2,)


def net(folder: Path) -> None:
    rng = np.random.default_rng(0)
    Classifier(
        rng.normal(size=(4, 3)),
        rng.normal(size=4),
        rng.normal(size=4),
        np.zeros(()),
        trained_on={"a": 1},
    ).save(folder)


def measured(folder: Path) -> None:
    provenance = {"version": "1", "suite": "x", "target": "demo"}
    write(
        folder / "result.json",
        json.dumps({"provenance": provenance, "rows": [{"drafter": "edd", "policy": "pct"}]}),
    )


DOCUMENTS = [np.arange(200) * step % VOCAB for step in (1, 3, 11)] + [np.array([5, 6, 7] * 20)]


def datastore(method: type[DatastoreMethod], folder: Path) -> None:
    folder.mkdir()
    method.build(DOCUMENTS, VOCAB, folder, {}, lambda _: None)


def searched(method: type[DatastoreMethod], folder: Path) -> None:
    t = target("llama")
    drafter = (
        ADED().searching(folder)
        if method is ADED
        else RESTDrafter(REST(), (load_corpus(folder),), VOCAB)
    )
    assert Engine(t, drafter, Chain(3), costs=COSTS).write([PROMPT]).tokens == plain()


def training_rows(folder: Path) -> None:
    saved("data.jsonl", "\n".join(map(json.dumps, LEARNT)))(folder)
    saved("data.json", LEARNT)(folder)


def benchmark_rows(folder: Path) -> None:
    for name, row in ROWS.items():
        write(folder / f"{name}.jsonl", "\n".join([json.dumps(row), json.dumps(row)]))


def asked_of_benchmarks(folder: Path) -> None:
    """Read the rows of every benchmark; the first that is refused ends it."""
    for name in ROWS:
        for prompt in suites.load(f"{name}:{folder / name}.jsonl").prompts:
            encode(byte_tokenizer(), prompt.content)


def command(*words: object) -> str:
    """Run a command in this process; return its output."""
    return output_of(main, *words)


def output_of(program: Callable[[list[str]], object], *words: object) -> str:
    """Run a program that ends the process; return its output."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            program(list(map(str, words)))
        except SystemExit as ended:
            status = int(ended.code or 0)
    if status == 2:
        raise UserError(err.getvalue().strip())
    assert status == 0, err.getvalue()
    return out.getvalue()


def benched(folder: Path) -> None:
    """Write a result of two drafters on the tiny target, and the model card's folder of one."""
    target_folder(folder / "target")
    CostTable((Costs({1: 0.5, 4: 2.0}, {1: 4.0, 8: 11.0}, commit=0.5),)).save(folder / "costs.json")
    write(
        folder / "prompts.jsonl",
        "\n".join(json.dumps({"prompt": "ab" * (i + 1), "category": str(i)}) for i in range(3)),
    )
    bench(folder)
    shutil.rmtree(folder / "target")
    (folder / "prompts.jsonl").unlink()


def bench(folder: Path) -> None:
    """Measure two drafters on the target and the prompts of a folder."""
    pairs = ("--pair", "pld chain", "--pair", "suffix vct:width=2,depth=3")
    asked = (
        "--suite",
        folder / "prompts.jsonl",
        "--costs",
        folder / "costs.json",
        "--max-new-tokens",
        8,
    )
    command("bench", "--target", folder / "target", *pairs, *asked, "--out", folder / "result.json")


def shown_and_recounted(folder: Path) -> None:
    result = folder / "result.json"
    again = ("--costs", folder / "costs.json", "--out", folder / "again.json")
    output_of(recount.main, result, *again)
    output_of(recount.main, result, "--machine", "h100-8b", "--json")
    command("report", result, "--out", folder / "report.html")


SPEED = Speed(1e10, 1e11, 1e-6)


def learning(folder: Path) -> tuple[OnlineCosts, Engine]:
    """Return the learnt costs that a cache folder holds, as a new process reads them, and an engine that uses them."""
    t = target("llama")
    drafter = build("drafter", "pld").open(t)
    with (
        mock.patch.dict("os.environ", {"DRAFTREE_CACHE": str(folder)}),
        mock.patch.dict(cost_estimate._LEARNERS, clear=True),
        mock.patch.object(cost_estimate, "machine_speed", return_value=SPEED),
    ):
        costs = cost_estimate.learnt_costs(t, drafter)
    for learner in (costs.target, costs.drafter):
        atexit.unregister(learner.save)
    return costs, Engine(t, drafter, build("policy", "yield"), costs=costs)


def learnt(folder: Path) -> None:
    folder.mkdir()
    costs, engine = learning(folder)
    engine.write([PROMPT, PROMPT])
    costs.target.save()
    costs.drafter.save()


def relearnt(folder: Path) -> None:
    costs, engine = learning(folder)
    step = costs.at(50, 2)
    assert all(
        math.isfinite(s) and s > 0
        for n in (1, 4, 30)
        for s in (step.target_seconds(n), step.draft_seconds(n))
    )
    assert engine.write([PROMPT]).tokens == plain()
    costs.target.save()


def findings(folder: Path) -> None:
    """Write what is found out about a machine and a model into a cache folder."""
    with (
        mock.patch.dict("os.environ", {"DRAFTREE_CACHE": str(folder)}),
        mock.patch.object(machine_probe, "probe", return_value=SPEED),
    ):
        machine_probe._known_speed("cpu", torch.float32)
        batch_invariance_choice.probe_batch_invariance(target("llama").decoder, priced=True)
        hardware.second_is_faster("kernels", {}, lambda: (lambda: None, lambda: None))


def refound(folder: Path) -> None:
    with (
        mock.patch.dict("os.environ", {"DRAFTREE_CACHE": str(folder)}),
        mock.patch.object(machine_probe, "probe", return_value=SPEED),
    ):
        size = cost_estimate.target_size(target("llama").decoder)
        assert (
            0
            < size.estimate(machine_probe._known_speed("cpu", torch.float32), PassShape(4, 50, 1))
            < math.inf
        )
        batch_invariance_choice.probe_batch_invariance(target("llama").decoder, priced=True)
        hardware.second_is_faster("kernels", {}, lambda: (lambda: None, lambda: None))


def recordings(folder: Path) -> None:
    recorded(folder)


def recorded(folder: Path) -> None:
    found = Recordings.open(folder, recorded_target(), [HiddenStateSpec((1,), (0,))])
    found.record([PROMPT])
    assert found.source(PROMPT)
    tokens = (
        found.recording(PROMPT).texts[0].tokens
    )  # the text itself cannot be checked: the recording is the only source
    assert 0 <= tokens.min() <= tokens.max() < VOCAB


@cache
def recorded_target() -> Target:
    return Target(target("llama").decoder, "llama", byte_tokenizer())


def interrupted_training(folder: Path) -> None:
    """Write a run that was interrupted after its third step, of eight."""

    def interrupt(progress: Any) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        trained(folder, interrupt)


def trained(folder: Path, tell: Callable[[Any], None] = lambda _: None) -> None:
    t = target("llama")
    torch.manual_seed(1)
    texts = np.random.default_rng(0).integers(0, 61, (8, 12))
    samples = [Sample(text, np.arange(12) >= 3) for text in texts]
    plan = TrainingPlan(batch_size=2, epochs=2, held_out=0, save_every=2, evaluate_every=1)
    assert train(t, VDM().fresh(t), samples, plan, folder, tell).step == 8


def collected(folder: Path) -> None:
    trees = Collected(folder, {"drafter": "x"})
    trees.begin()
    trees[0] = Nodes(
        np.ones(2), np.ones(2), np.ones(2, np.int64), np.ones(2, np.bool_), np.zeros(2, np.int64)
    )


def read_trees(folder: Path) -> None:
    trees = Collected(folder, {"drafter": "x"})
    trees.begin()
    trees[0]


def shards(folder: Path) -> None:
    sharded(folder)


def sharded(folder: Path) -> None:
    samples = [
        Sample(np.arange(3, 15), np.arange(12) >= 3),
        Sample(np.arange(5, 17), np.arange(12) >= 3),
    ]
    found = Shards.at(folder, target("llama"), samples, HiddenStateSpec((1,), (0,)))
    found.fill(Processes.on(torch.device("cpu")))
    found.batch([0, 1])


def gguf_file(folder: Path) -> None:
    folder.mkdir()
    write_gguf(folder / "target.gguf")


def dequantised(folder: Path) -> None:
    """Load a GGUF file with an empty cache folder, and write a short answer with it."""
    with mock.patch.dict("os.environ", {"DRAFTREE_CACHE": str(folder / "cache")}):
        gguf_conversion._converted_folder.cache_clear()
        written(folder / "target.gguf")


def adapter(folder: Path) -> None:
    """Write a target and a LoRA for it."""
    target_folder(folder / "target")
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        peft.get_peft_model(model, config).save_pretrained(folder / "lora")


def merged(folder: Path) -> None:
    written(folder / "target", adapter=str(folder / "lora"))


def measured_half(folder: Path) -> None:
    """Write what a benchmark has measured so far, as an interrupted one leaves it."""
    with mock.patch.object(resume.Journal, "remove"):
        benched(folder)
    (folder / "result.json").unlink()
    target_folder(folder / "target")
    write(
        folder / "prompts.jsonl",
        "\n".join(json.dumps({"prompt": "ab" * (i + 1), "category": str(i)}) for i in range(3)),
    )


def gone_on(folder: Path) -> None:
    """Run the benchmark again, which goes on, and count its result."""
    bench(folder)
    output_of(
        recount.main,
        folder / "result.json",
        "--costs",
        folder / "costs.json",
        "--out",
        folder / "again.json",
    )


def machine(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(roofline.MACHINES_FOLDER / "h100-8b.json", folder / "machine.json")


def counted(folder: Path) -> None:
    with mock.patch.object(roofline, "MACHINES_FOLDER", folder):
        found = roofline.Machine.load("machine")
        assert found.costs(roofline.Drafting(layers=1, heads=1)).at(50, 2).target_seconds(3) > 0
        assert found.summary


def official(width: str, folder: Path) -> None:
    """Write a file as REST's code does, of two chunks."""
    folder.mkdir()
    parts = b""
    for chunk in ([5, 6, 7] * 20, list(range(60))):
        suffixes = sorted(range(len(chunk)), key=lambda i: chunk[i:])
        for code, numbers in ((width, chunk), ("i", suffixes)):
            packed = struct.pack(f"<{len(numbers)}{code}", *numbers)
            parts += struct.pack("<I", len(packed)) + packed
    (folder / "datastore.idx").write_bytes(parts)


def searched_officially(folder: Path) -> None:
    t = target("llama")
    drafter = REST(str(folder / "datastore.idx")).open(t)
    assert Engine(t, drafter, Chain(3), costs=COSTS).write([PROMPT]).tokens == plain()


def parquet(folder: Path) -> None:
    """Write rows of training data as parquet."""
    folder.mkdir()
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"prompt": "ab", "completion": "c", "n": 1},
        {"prompt": "b", "completion": "cd", "n": 2},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows * 3), folder / "data.parquet")


def fed_with_parquet(folder: Path) -> None:
    samples.read_samples([folder / "data.parquet"], byte_tokenizer(), 40)


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        originals: ways to make a small whole folder.
        use: reads a folder and uses what it holds.
        files: pattern of the names of the files that are mutated.
    """

    originals: tuple[Callable[[Path], object], ...]
    use: Callable[[Path], object]
    files: str = "*"


FORMATS: dict[str, Format] = {
    "target config": Format((target_folder,), written, "[cg]*ig.json"),
    "tokenizer": Format((target_folder,), written, "[ct][ho][ak]*"),
    "safetensors": Format((target_folder,), written, "*.safetensors"),
    "GGUF": Format((gguf_file,), dequantised, "*.gguf"),
    "drafter": Format(tuple(partial(ours, n) for n in TRAINABLE), drafted),
    "published drafter": Format(tuple(partial(as_published, n, False) for n in PUBLISHED), drafted),
    "pickled drafter": Format(tuple(partial(as_published, n, True) for n in PUBLISHED), drafted),
    "drafter of another layout": Format(tuple(partial(there, n) for n in LAYOUTS), drafted),
    "data store of REST": Format((partial(datastore, REST),), partial(searched, REST)),
    "data store of ADED": Format((partial(datastore, ADED),), partial(searched, ADED)),
    "training rows": Format((training_rows,), fed),
    "questions": Format((saved("suite.jsonl", "\n".join(map(json.dumps, ASKED))),), asked),
    "questions of benchmarks": Format((benchmark_rows,), asked_of_benchmarks),
    "costs": Format(
        (
            saved(
                "costs.json",
                {"entries": [ENTRY, ENTRY | {"context": 900}], "about": {"device": "cpu"}},
            ),
        ),
        priced,
    ),
    "learnt costs": Format((learnt,), relearnt),
    "findings of a machine": Format((findings,), refound),
    "result": Format((benched,), shown_and_recounted, "result.json"),
    "recordings": Format((recordings,), recorded),
    "training state": Format((interrupted_training,), trained),
    "features": Format((shards,), sharded),
    "collected trees": Format((collected,), read_trees),
    "classifier": Format((net,), classified),
    "static tree": Format(
        (saved("tree.json", {"paths": [[0], [0, 0], [1], [0, 1]], "tau": 2.0}),), grown
    ),
    "grammar": Format((saved("grammar.lark", LARK),), guided_by_lark),
    "schema": Format((saved("schema.json", SCHEMA),), guided),
    "adapter": Format((adapter,), merged, "adapter_*"),
    "journal": Format((measured_half,), gone_on, "*.partial"),
    "machine": Format((machine,), counted),
    "official data store of REST": Format(
        (partial(official, "H"), partial(official, "i")), searched_officially
    ),
}
if find_spec("datasets") is not None:
    FORMATS["parquet"] = Format((parquet,), fed_with_parquet)
"""What draftree reads, by name."""


def original(name: str, number: int, folder: Path) -> Path:
    """Make an original of a format; return its folder."""
    FORMATS[name].originals[number](folder)
    return folder


def use(name: str, folder: Path) -> str | None:
    """Use a folder of a format; return the one-line message if it is refused, None if not.

    Raises:
        AssertionError: the output is not the target's, or the message is no short line.
    """
    message = refusal(FORMATS[name].use, folder)
    assert message is None or (
        "\n" not in message and 0 < len(message) <= 2 * MAX_MESSAGE_CHARACTERS
    ), message
    return message


def refusal(used: Callable[[Any], object], given: Path | str) -> str | None:
    """Return the message of the error that a use of files or of a spec ends with, None if it succeeds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            used(given)
        except DraftreeError as error:
            return str(error)
    return None
