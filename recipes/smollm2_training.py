"""Write SmolLM2's answers to `smollm2_prompts.jsonl.gz`, and train drafters on them, within a bounded time.

    python recipes/smollm2_training.py write --gsm8k gsm8k_train.jsonl \\
        --exclude spec_bench.jsonl --seconds 120 --out data
    python recipes/smollm2_training.py train eagle3 --data data/samples.npz \\
        --seconds 240 --out drafters/eagle3
    python recipes/smollm2_training.py chats --gsm8k gsm8k_train.jsonl \\
        --data data/answers.jsonl.gz --out chats

`write` lets the target make up questions, answers them and the prompts, and stores the answers as
text (`answers.jsonl.gz`) and as token ids (`samples.npz`). Half of the answers are sampled at
temperature 0.7. The others are greedy, and so are all held-out ones. `train` does what `draftree
train` does, on these ids and within `--seconds`. Then it measures the drafter on the held-out
prompts of each kind. `chats` joins prompts and answers to files of `draftree train --data`:
`chats.jsonl`, and `held.jsonl` with the held-out ones.

On a GPU, `gpu_answers` writes the answers, and several trainings may share the GPU. On a CPU the
engine writes them in batches: some 350 tokens a second on one core with AVX-512 and bfloat16. There
the same command goes on where it stopped, and several processes may share the prompts:

    gunzip -c recipes/smollm2_journal.jsonl.gz > data/journal-0.jsonl
    python recipes/smollm2_training.py write … --rows 32 --parts 24 --made-up 1100 \\
        --shard 0 --shards 2 --seconds 7200 --out data

`smollm2_journal.jsonl.gz` holds all 27,971 answers of 5.43 million tokens. A CPU with AVX-512 and
bfloat16 wrote 1.38 million of them, an H100 the others in some two minutes. With this file, `write`
only joins prompts and answers. The shipped `eagle3` learnt from them on that GPU in 244 seconds
(2.1 epochs, with `--spec eagle3:preset=fast,draft_vocab=8192,steps=5`), while another training ran
there: `train eagle3 --epochs 100 --seconds 244`. Then it learnt for 73 minutes more (0.59 epochs)
on two cores of an Intel Xeon with AMX: `train eagle3 --init-from FOLDER --batch-size 8 --lr 6e-4
--epochs 100 --seconds 4400`.

The shipped `edd` had learnt from 3,348 other answers. It went on with 0.29 epochs of these on two
cores of an AMD EPYC (Zen 4): `train edd --init-from FOLDER --batch-size 8 --lr 1.5e-3 --epochs
100`, first with `--seconds 2100` and other work (272 steps), then with `--seconds 1800` (679
steps). `peagle` is not shipped. It started from the shipped `eagle3`: `train peagle --init-from
EAGLE3_FOLDER --batch-size 8 --lr 6e-4 --epochs 100 --seconds 3000` (670 steps, 0.21 epochs).

The answers are the target's in bfloat16, except where two tokens are almost equally likely: there
the rounding of a batch decides.
"""

import argparse
import dataclasses
import gzip
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from engine_answers import AnswerWriter, EngineWriter, Journal
from gpu_answers import Layers, Question, Writer

from draftree.data.decontamination import Excluded
from draftree.data.samples import Sample
from draftree.drafters.base import Trainable, TrainableMethod
from draftree.drafters.eagle3 import EAGLE3
from draftree.drafters.peagle import PEAGLE
from draftree.engine import target_of
from draftree.errors import UserError
from draftree.models.sdpa_backends import unplanned_attention
from draftree.registry import build, in_folder
from draftree.target.target import LAST, HiddenStateSpec, Target
from draftree.training import resume, teacher, trainer
from draftree.training.distributed import Processes
from draftree.training.feature_cache import Features
from draftree.training.held_out_metrics import evaluate
from draftree.training.synthesize import Opening, select_questions
from draftree.training.teacher import Teacher

HERE = pathlib.Path(__file__).parent
ROWS, SLOTS, MOST, LONGEST = 512, 1280, 288, 900
"""Sequences at a time; the longest prompt with its answer; the longest answer; the longest prompt.
"""
WARM = 0.7
"""The temperature of every second answer."""
MADE_UP, QUESTION = 3500, 160
"""Questions that the target makes up, and the most tokens of one."""
MADE_UP_FROM = 1 << 24
"""The number of the first of them, above those of all answers."""
PASSAGE = 1300
"""Characters of the target's own passage that are asked about, at most."""
SPECS = {
    "eagle3": ("eagle3:preset=fast,draft_vocab=8192,steps=4", 1.5e-3),
    "edd": ("edd:preset=fast,draft_vocab=8192", 3e-3),
    "dspark": ("dspark:draft_vocab=8192,rank=32", 2e-3),
    "peagle": ("peagle:draft_vocab=8192", 1e-3),
}
"""Each drafter and its rate."""
NUMBERS: dict[str, Any] = {
    "batch_size": 32,
    "accumulate": 1,
    "group_by_length": 16,
    "schedule": "cosine",
    "floor": 0.02,
    "warmup": 100,
    "betas": (0.9, 0.95),
    "weight_decay": 0.01,
    "clip": 1.0,
    "max_tokens": SLOTS,
    "held_out": 0.0,
    "bf16": True,
    "evaluate_every": 10**9,
    "save_every": 10**9,
}
"""The same for all drafters."""
Row = dict[str, Any]


@dataclasses.dataclass
class Talk:
    """A prompt on its way: its row, the ids so far, which of them were written, and the answers.

    Attributes:
        number: of the prompt; made-up questions follow behind the others.
        row: of the prompts file.
        turns: texts of the user.
        temperature: of its answers.
    """

    number: int
    row: Row
    turns: list[str]
    temperature: float
    ids: list[int] = dataclasses.field(default_factory=list)
    learn: list[bool] = dataclasses.field(default_factory=list)
    answers: list[str] = dataclasses.field(default_factory=list)
    cut: list[int] = dataclasses.field(default_factory=list)


def loaded(device: str | None, name: str = "smollm2") -> Target:
    """Return the target in bfloat16; on a GPU without what the engine needs."""
    if device == "cpu" or not (device or torch.cuda.is_available()):
        return target_of(name, device="cpu", dtype="bfloat16")
    return target_of(
        name,
        device=device,
        dtype="bfloat16",
        exactness="ties",
        compile=False,
        kernels="stock",
    )


class Writing:
    """Writes the answers to prompts.

    Args:
        target: answers.
        rows: sequences at a time.
        deadline: when no further answer is begun, by `time.monotonic`.
        seed: of what is drawn.
        journal: keeps the answers of a writer, so that an interrupted run goes on.
    """

    def __init__(
        self,
        target: Target,
        rows: int,
        deadline: float,
        seed: int = 0,
        journal: Callable[[AnswerWriter], AnswerWriter] = lambda writer: writer,
    ) -> None:
        self.target = target
        self.rows = rows
        self.deadline = deadline
        self.seed = seed
        self.slots = min(SLOTS, target.decoder.context)
        self.writer = journal(
            Writer(target.decoder.model, rows, self.slots, sorted(target.eos), seed)
            if target.decoder.device.type == "cuda"
            else EngineWriter(target, rows, self.slots, seed)
        )
        self.done = list[Talk]()

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def make_up(self, count: int, excluded: Excluded) -> list[str]:
        """Questions that the target makes up."""
        opening, tokenizer = Opening.of(self.target.tokenizer), self.target.tokenizer
        writer, self.writer.top_p = self.writer, 0.99
        asked = [
            Question(MADE_UP_FROM + i, opening.ids, QUESTION, 1.0) for i in range(int(1.25 * count))
        ]
        texts = []
        for q, ids in writer.write(asked, self.late):
            text, ended = (
                str(tokenizer.decode(ids[:-1] if ids[-1] in self.target.eos else ids)),
                ids[-1] in self.target.eos,
            )
            texts.append({"number": q.number, "text": text, "ended": ended})
        writer.top_p = 1.0
        writer.forget()
        return select_questions(
            sorted(texts, key=lambda t: t["number"]), count, tokenizer, excluded=excluded
        )[0]

    def talk(self, number: int, row: Row, turns: Sequence[str]) -> Talk:
        """A prompt that nothing was answered to."""
        warm = (
            row["kind"] == "passage" or np.random.default_rng([self.seed, 5, number]).random() < 0.5
        )
        return Talk(number, row, list(turns), WARM if warm and not row.get("held") else 0.0)

    def answer(self, talks: Sequence[Talk]) -> list[Talk]:
        """Answers the next turn of each; returns those that have another one."""
        asked = dict[int, Talk]()
        for talk, ids in zip(talks, self._next(talks), strict=True):
            if len(ids) <= min(LONGEST, self.slots - MOST):
                talk.learn += [False] * (len(ids) - len(talk.learn))
                talk.ids, asked[talk.number] = ids, talk
            elif talk.answers:
                self.done.append(talk)
        order = sorted(asked.values(), key=lambda talk: (len(talk.ids), talk.number))
        further = list[Talk]()
        questions = [
            Question(t.number + (len(t.answers) << 20), t.ids, MOST, t.temperature) for t in order
        ]
        for q, ids in self.writer.write(questions, self.late):
            talk = asked.pop(q.number % (1 << 20))
            ended = ids[-1] in self.target.eos
            talk.ids, talk.learn = [*talk.ids, *ids], [*talk.learn, *[True] * len(ids)]
            talk.cut += [] if ended else [2 * len(talk.answers) + 1]
            talk.answers.append(str(self.target.tokenizer.decode(ids[:-1] if ended else ids)))
            if len(talk.answers) < len(talk.turns) and ended:
                further.append(talk)
            else:
                self.done.append(talk)
        self.done += [
            talk for talk in asked.values() if talk.answers
        ]  # it was too late for their next turn
        return further

    def _next(self, talks: Sequence[Talk]) -> list[list[int]]:
        """The ids up to the next answer of each; behind an earlier answer stand those that were written."""
        tokenizer, marks = self.target.tokenizer, ("draftree5question", "draftree5answer")
        chat = [{"role": "user", "content": marks[0]}]
        further = [*chat, {"role": "assistant", "content": marks[1]}, *chat]
        first, second = (
            str(tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True))
            for each in (chat, further)
        )
        frames = [first.split(marks[0]), second.partition(marks[1])[2].split(marks[0])]
        texts = [
            turn.join(frames[bool(t.answers)])
            for t in talks
            for turn in t.turns[len(t.answers) :][:1]
        ]
        found = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [
            [*t.ids, *(ids[1:] if ids[:1] == t.ids[-1:] else ids)]
            for t, ids in zip(talks, found, strict=True)
        ]


def beginning_of_passage(text: str) -> str:
    """Return the first `PASSAGE` characters of a text, up to the end of a sentence."""
    text = text[:PASSAGE]
    return text[: text.rfind(".") + 1] or text


def passages(talks: Sequence[Talk]) -> dict[int, str]:
    """The beginnings of the passages that were written, by their ids."""
    return {
        talk.row["id"]: beginning_of_passage(talk.answers[0])
        for talk in talks
        if talk.row["kind"] == "passage" and talk.answers
    }


def write(
    writing: Writing,
    rows: Sequence[Row],
    gsm8k: Sequence[str],
    excluded: Excluded,
    made_up: int = MADE_UP,
    parts: int = 3,
    tell: Callable[[str], None] = print,
) -> list[Talk]:
    """All prompts with their answers, as many as the time allows; passages come first, as others wait for them.

    Prompts are answered in several parts of all kinds, each in the order of their lengths.
    """
    begun = time.monotonic()

    def said(what: str) -> None:
        count = sum(sum(talk.learn) for talk in writing.done)
        tell(
            f"{time.monotonic() - begun:.1f} s: {what}, {len(writing.done)} done, {count} tokens written"
        )

    asked = [
        (i, row, [gsm8k[row["gsm8k"]]] if row["kind"] == "math" else row["turns"])
        for i, row in enumerate(rows)
    ]
    free = [writing.talk(i, row, turns) for i, row, turns in asked if "passages" not in row]
    first = [talk for talk in free if talk.row["kind"] == "passage"]
    others = [talk for talk in free if talk.row["kind"] != "passage"]
    questions = writing.make_up(made_up, excluded)
    said(f"{len(questions)} questions made up")
    further = writing.answer([*first, *others[::parts]])
    said(f"part 1 of {parts}")
    told = passages(writing.done)
    for i, row, turns in asked:
        if "passages" in row and all(number in told for number in row["passages"]):
            texts = [told[number] for number in row["passages"]]
            others.append(writing.talk(i, row, [_placed(turns[0], texts)]))
    others += [
        writing.talk(len(rows) + i, {"kind": "made up"}, [text]) for i, text in enumerate(questions)
    ]
    waiting = [talk for talk in others if not talk.ids]
    for part in range(parts - 1):
        further = writing.answer([*waiting[part :: parts - 1], *further])
        said(f"part {part + 2} of {parts}")
    while further and not writing.late():
        further = writing.answer(further)
    writing.done += [talk for talk in further if talk.answers]
    said("end")
    return sorted(writing.done, key=lambda talk: talk.number)


def _placed(text: str, texts: Sequence[str]) -> str:
    """A turn with passages in the places {0}, {1}, …."""
    for i, each in enumerate(texts):
        text = text.replace(f"{{{i}}}", each)
    return text


def keep(talks: Sequence[Talk], out: pathlib.Path) -> None:
    """Writes answers as text and as ids."""
    out.mkdir(parents=True, exist_ok=True)
    kinds = sorted({talk.row["kind"] for talk in talks})
    partial = out / "partial.npz"  # others may be waiting for the file
    np.savez_compressed(
        partial,
        tokens=np.concatenate([talk.ids for talk in talks]).astype(np.int32),
        learn=np.concatenate([talk.learn for talk in talks]).astype(np.bool_),
        length=np.array([len(talk.ids) for talk in talks]),
        kind=np.array([kinds.index(talk.row["kind"]) for talk in talks]),
        kinds=np.array(kinds),
        held=np.array([bool(talk.row.get("held")) for talk in talks]),
    )
    partial.rename(out / "samples.npz")
    with gzip.open(out / "answers.jsonl.gz", "wt", 6, encoding="utf-8") as file:
        for talk in talks:
            said: Row = {"prompt": talk.number, "answers": talk.answers}
            said |= {"question": talk.turns[0]} if talk.row["kind"] == "made up" else {}
            said |= {"cut": talk.cut} if talk.cut else {}
            said |= {"temperature": talk.temperature} if talk.temperature else {}
            file.write(json.dumps(said, ensure_ascii=False) + "\n")


def chats(rows: Sequence[Row], gsm8k: Sequence[str], answers: Sequence[Row]) -> Iterator[Row]:
    """Yield each answered prompt as a chat.

    Args:
        rows: the prompts.
        gsm8k: GSM8K's training questions.
        answers: the rows of `answers.jsonl.gz`.

    Yields:
        `{"messages", "cut", "kind", "held"}`; `cut` lists the messages that the limit of tokens
        ended, and `held` is true for a held-out prompt.
    """
    texts = {
        rows[each["prompt"]]["id"]: beginning_of_passage(each["answers"][0])
        for each in answers
        if each["prompt"] < len(rows) and rows[each["prompt"]]["kind"] == "passage"
    }
    for each in answers:
        row: Row = {"kind": "made up", "turns": [each.get("question")]}
        if each["prompt"] < len(rows):
            row = rows[each["prompt"]]
        turns = [gsm8k[row["gsm8k"]]] if row["kind"] == "math" else list(row["turns"])
        turns[0] = _placed(turns[0], [texts[number] for number in row.get("passages", ())])
        messages = []
        for turn, answer in zip(turns, each["answers"], strict=False):
            messages += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": answer},
            ]
        yield {
            "messages": messages,
            "cut": each.get("cut", []),
            "kind": row["kind"],
            "held": bool(row.get("held")),
        }


def read(path: pathlib.Path, share: float = 1.0) -> tuple[list[Sample], dict[str, list[Sample]]]:
    """The samples to learn from, a share of them, and those to measure on by kind."""
    with np.load(path) as found:
        stored = {name: found[name] for name in found.files}
    ends = np.cumsum(stored["length"])
    held: dict[str, list[Sample]] = {}
    learnt = []
    for end, count, kind, apart in zip(
        ends, stored["length"], stored["kind"], stored["held"], strict=True
    ):
        part = slice(int(end - count), int(end))
        sample = Sample(stored["tokens"][part].astype(np.int64), stored["learn"][part])
        if apart:
            held.setdefault(str(stored["kinds"][kind]), []).append(sample)
        else:
            learnt.append(sample)
    order = np.random.default_rng(7).permutation(len(learnt))[
        : max(int(share * len(learnt)), 1)
    ]  # prompts stand by number
    return [learnt[i] for i in sorted(order.tolist())], {
        kind: some for kind, some in held.items() if kind != "passage"
    }


def read_fast(target: Target) -> None:
    """Lets batches be read by `Layers`, which takes a third of the operations; it gives the same but for rounding."""
    layers = Layers(target.decoder.model, SLOTS)

    def read(of: Target, ids: torch.Tensor, needs: HiddenStateSpec) -> Features:
        entries = {layer: of.decoder.hidden_index(layer) for layer in (*needs.hidden, LAST)}
        with torch.autocast(ids.device.type, enabled=False):
            found = layers.read(ids, list(entries.values()))
        return Features({layer: found[entry] for layer, entry in entries.items()}, {})

    teacher.read_features = read


def start_drafter(
    method: TrainableMethod, folder: pathlib.Path, target: Target, learnt: Sequence[Sample]
) -> Trainable[Any]:
    """Return a drafter that starts from the weights of a checkpoint.

    `peagle` may also start from `eagle3`: its layer has the same shapes. Its vector for unknown
    features, which `eagle3` does not have, starts as the mean features of some texts.
    """
    found = in_folder(str(folder))
    if not (isinstance(method, PEAGLE) and isinstance(found, EAGLE3)):
        return resume.start_from(method, folder, target)
    drafter = method.fresh(target)
    weights = found.load_drafter(target).model.float().state_dict()
    renamed = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
    missing, unknown = drafter.model.load_state_dict(renamed, strict=False)
    if missing != ["mask_hidden"] or unknown:
        raise UserError(f"'{folder}' cannot begin peagle: {missing} {unknown}")
    teacher = Teacher(target, drafter.needs, learnt[:16])
    each = [teacher.batch([number], 0) for number in range(len(teacher.samples))]
    read = [torch.cat([batch.hidden[layer] for layer in drafter.model.reads], -1) for batch in each]
    with torch.no_grad():
        drafter.model.mask_hidden.copy_(torch.cat(read, 1).float().mean((0, 1)))
    return drafter


def measured(
    target: Target, drafter: Any, held: dict[str, list[Sample]], together: int = 10
) -> Row:
    """Held-out figures by kind, and their mean."""
    found = {}
    for kind, samples in sorted(held.items()):
        of = Teacher(target, drafter.needs, samples)
        device = target.decoder.device
        with torch.autocast(device.type, torch.bfloat16), unplanned_attention(device):
            figures = evaluate(of, drafter, range(len(samples)), together, Processes.on(device))
        assert figures is not None
        found[kind] = dataclasses.asdict(figures)
    lengths = [figures["acceptance_length"] for figures in found.values()]
    return {"mean_acceptance_length": float(np.mean(lengths)), "kinds": found}


def train(
    target: Target,
    spec: str,
    data: pathlib.Path,
    out: pathlib.Path,
    share: float,
    seconds: float,
    epochs: float,
    init_from: pathlib.Path | None = None,
    **numbers: Any,
) -> Row:
    """Train a drafter on a share of the data within a time limit, measure it, and save both."""
    learnt, held = read(data, share)
    torch.manual_seed(0)
    method = build("drafter", spec)
    drafter: Any = init_from and start_drafter(method, init_from, target, learnt)
    if drafter is None:
        counted = np.concatenate([s.tokens[s.learn] for s in learnt])
        drafter = method.fresh(target)
        drafter.fit_vocabulary(np.bincount(counted, minlength=target.decoder.vocab))
    drafter.resolve_auto([s.tokens for s in learnt[:64]])
    if target.decoder.device.type == "cuda":
        read_fast(target)
    plan = trainer.TrainingPlan(**{**NUMBERS, "epochs": epochs, "max_seconds": seconds, **numbers})
    losses, begun = list[float](), time.monotonic()

    def listen(progress: trainer.Progress) -> None:
        losses.append(progress.loss)
        if progress.step == 10 or progress.step % 100 == 0:
            print(
                f"{time.monotonic() - begun:.1f} s: {spec} {share:g}, "
                f"{progress.step} of {progress.steps} steps, loss {np.mean(losses[-100:]):.4f}",
                flush=True,
            )

    end = trainer.train(target, drafter, learnt, plan, out, listen)
    spent, tokens = time.monotonic() - begun, sum(len(s.tokens) for s in learnt)
    figures = {
        "drafter": spec,
        "share": share,
        "samples": len(learnt),
        "tokens": tokens,
        "learnt": sum(int(s.learn.sum()) for s in learnt),
        "steps": end.steps,
        "epochs": end.steps * plan.batch_size / len(learnt),
        "seconds": spent,
        "lr": plan.lr,
        "batch_size": plan.batch_size,
        "loss": float(np.mean(losses[-50:])),
        "losses": [float(np.mean(losses[i : i + 50])) for i in range(0, len(losses), 50)],
    } | measured(target, drafter, held)
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(
        json.dumps({k: v for k, v in figures.items() if k not in ("kinds", "losses")}), flush=True
    )
    return figures


def lines(path: pathlib.Path) -> Iterator[Row]:
    """The rows of a file of JSON lines, compressed or not."""
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8") as file
    ):
        yield from map(json.loads, file)


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("what", choices=("write", "train", "chats"))
    ap.add_argument("name", nargs="?", choices=SPECS)
    ap.add_argument("--target", default="smollm2")
    ap.add_argument("--device")
    ap.add_argument("--prompts", type=pathlib.Path, default=HERE / "smollm2_prompts.jsonl.gz")
    ap.add_argument("--gsm8k", type=pathlib.Path)
    ap.add_argument("--exclude", type=pathlib.Path, action="append", default=[])
    ap.add_argument("--rows", type=int, default=ROWS)
    ap.add_argument("--parts", type=int, default=3)
    ap.add_argument("--shard", type=int, default=0, help="of the prompts, for several processes")
    ap.add_argument("--shards", type=int, default=1)
    ap.add_argument("--made-up", type=int, default=MADE_UP)
    ap.add_argument("--limit", type=int, default=10**9, help="prompts at most, for a try")
    ap.add_argument("--data", type=pathlib.Path)
    ap.add_argument("--share", type=float, default=1.0)
    ap.add_argument("--spec", help="spec of the drafter, instead of the recipe's")
    ap.add_argument("--init-from", type=pathlib.Path, help="folder of weights to start from")
    ap.add_argument("--epochs", type=float, default=6.0)
    ap.add_argument("--batch-size", type=int, default=NUMBERS["batch_size"])
    ap.add_argument("--accumulate", type=int, default=NUMBERS["accumulate"])
    ap.add_argument("--lr", type=float)
    ap.add_argument("--keep-every", type=int, default=0)
    ap.add_argument("--seconds", type=float, default=600.0)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    args = ap.parse_args()
    if args.what == "chats":
        args.out.mkdir(parents=True, exist_ok=True)
        asked = [row["question"] for row in lines(args.gsm8k)]
        joined = list(chats(list(lines(args.prompts)), asked, list(lines(args.data))))
        for name, held in (("chats", False), ("held", True)):
            texts = [json.dumps(chat) for chat in joined if chat["held"] == held]
            (args.out / f"{name}.jsonl").write_text("".join(f"{text}\n" for text in texts))
        return
    target = loaded(args.device, args.target)
    if args.what == "write":
        args.out.mkdir(parents=True, exist_ok=True)
        asked = [row["question"] for row in lines(args.gsm8k)]
        journal = partial(Journal, folder=args.out, shard=args.shard, shards=args.shards)
        deadline = time.monotonic() + args.seconds
        writing = Writing(target, args.rows, deadline, journal=journal)
        prompts, excluded = list(lines(args.prompts)), Excluded.of(args.exclude)
        with unplanned_attention(target.decoder.device):
            written = write(
                writing, prompts[: args.limit], asked, excluded, args.made_up, args.parts
            )
        keep(written, args.out)
    else:
        while not args.data.is_file():  # it is being written: begin at once when it is there
            time.sleep(0.2)
        numbers = {
            "batch_size": args.batch_size,
            "accumulate": args.accumulate,
            "keep_every": args.keep_every,
        }
        usual, rate = SPECS[args.name]
        numbers["lr"] = args.lr or rate
        train(
            target,
            args.spec or usual,
            args.data,
            args.out,
            args.share,
            args.seconds,
            args.epochs,
            args.init_from,
            **numbers,
        )


if __name__ == "__main__":
    main()
