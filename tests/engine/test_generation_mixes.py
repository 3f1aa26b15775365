"""Random mixes of `generate`'s options: ids, scores and logits are transformers' own, or the mix is refused by name."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    WatermarkingConfig,
)

from architectures import VOCAB, fresh
from draftree import UserError
from draftree.engine import Engine
from draftree.errors import NotANumber
from draftree.models.causal_lm import CausalLM
from draftree.registry import build
from draftree.target.target import Target
from draftree.testing.fakes import Sometimes
from generating import (
    PAD,
    Counting,
    Divisible,
    Forbidding,
    Forcing,
    Options,
    Rowwise,
    Shifting,
    plans,
)

POLICIES = (
    "eagle2:nodes=12,depth=4,width=3",
    "chain",
    "vct:width=2,depth=3",
    "pct:max_depth=4,ratio=0.1",
    "cape",
)
NOISE = 1e-5
"""How far scores of the same text may be apart: a pass over a tree rounds otherwise than one over a
token."""
NAMED = (
    "Forbidding",
    "Forcing",
    "Suppress",
    "Prefix",
    "NoBadWords",
    "Shifting",
    "NoRepeat",
    "Exponential",
    "Temperature",
)
"""What may leave nothing to choose, or an infinity."""
KINDS = ("llama", "qwen3", "mistral-sliding")


class Scaling(LogitsProcessor):
    """Writes into what it is given, and returns something else."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 5::9] -= 2.0
        return scores * 1.5


def some(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def hashed(row: int, ids: Tensor) -> list[int]:
    """Tokens allowed after a text."""
    return [(int(ids.sum()) * 5 + i) % VOCAB for i in range(9)]


CHOICES: dict[str, Callable[[random.Random, int], Options]] = {
    "repetition": lambda rng, n: {"repetition_penalty": rng.choice([0.3, 1.2, 1.9])},
    "ngrams": lambda rng, n: {"no_repeat_ngram_size": rng.choice([1, 2, 3])},
    "bad words": lambda rng, n: {"bad_words_ids": [some(rng, k) for k in (1, 1, 2, 3)]},
    "bias": lambda rng, n: {
        "sequence_bias": [[some(rng, 1), -6.0], [some(rng, 1), 4.0], [some(rng, 2), 7.0]]
    },
    "suppress": lambda rng, n: {"suppress_tokens": some(rng, 30)},
    "begin": lambda rng, n: {"begin_suppress_tokens": some(rng, 50)},
    "forced": lambda rng, n: {"forced_eos_token_id": 33},
    "min length": lambda rng, n: {"min_length": n + rng.randrange(12)},
    "min new": lambda rng, n: {"min_new_tokens": rng.randrange(1, 10)},
    "ends": lambda rng, n: {"eos_token_id": some(rng, rng.choice([1, 5, 12]))},
    "no end": lambda rng, n: {"eos_token_id": -1},
    "decay": lambda rng, n: {"exponential_decay_length_penalty": (rng.randrange(5), 1.3)},
    "renormalize": lambda rng, n: {"renormalize_logits": True},
    "invalid": lambda rng, n: {"remove_invalid_values": True},
    "encoder": lambda rng, n: {
        "encoder_repetition_penalty": rng.choice([0.5, 4.0]),
        "encoder_no_repeat_ngram_size": 2,
    },
    "watermark": lambda rng, n: {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "prefix": lambda rng, n: {
        "prefix_allowed_tokens_fn": lambda row, ids: [
            (int(ids.sum()) * 5 + i) % VOCAB for i in range(9)
        ]
    },
    "sampled": lambda rng, n: {
        "do_sample": True,
        "top_k": 1,
        "temperature": rng.choice([0.6, 1.4]),
    },
    "cut": lambda rng, n: {
        "do_sample": True,
        "top_k": 1,
        "eta_cutoff": 0.01,
        "min_p": 0.1,
        "typical_p": 0.9,
    },
    "several": lambda rng, n: {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "criterion": lambda rng, n: {"stopping_criteria": [Divisible(rng.randrange(7, 15))]},
    "call": lambda rng, n: {"stopping_criteria": [Counting(rng.randrange(4, 9))]},
}
OWN: tuple[Callable[[int], LogitsProcessor], ...] = (
    lambda n: Shifting(),
    lambda n: Scaling(),
    lambda n: Rowwise(),
    lambda n: Forcing(),
    lambda n: Forbidding(n + 6),
    lambda n: SuppressTokensLogitsProcessor(list(range(VOCAB))),
)


@dataclass(frozen=True)
class Mix:
    """A call of `generate`, drawn by a seed.

    Attributes:
        kind: of model.
        prompted: ids and mask.
        options: made anew for each call, because some of them remember.
        what: names of what was drawn.
        policy: of ours.
    """

    kind: str
    prompted: dict[str, Tensor]
    options: Callable[[], Options]
    what: tuple[str, ...]
    policy: str


def mix(seed: int) -> Mix:
    rng = random.Random(seed)
    rows, n = rng.choice([1, 1, 2, 3]), rng.randrange(2, 9)
    names = [name for name in CHOICES if rng.random() < 0.13]
    own = [rng.randrange(len(OWN) - (rng.random() > 0.15)) for _ in range(rng.choice([0, 0, 1, 2]))]
    again = rng.randrange(2**32)
    ids = torch.tensor([some(rng, n) for _ in range(rows)])
    ids[torch.arange(rows), -1] = ids[torch.arange(rows), -1].clamp(min=3)
    mask = torch.ones_like(ids)
    holes = rng.random() < 0.4
    for row in range(rows):
        left = rng.randrange(n) if rng.random() < 0.5 else 0
        ids[row, :left], mask[row, :left] = PAD, 0
        if holes:
            mask[row, [i for i in range(n - 1) if rng.random() < 0.3]] = 0

    def options() -> Options:
        drawn, told = random.Random(again), Options()
        for name in names:
            told |= CHOICES[name](drawn, n)
        if own:
            told["logits_processor"] = [OWN[i](n) for i in own]
        return {
            "max_new_tokens": 12,
            "return_dict_in_generate": True,
            "output_scores": True,
            "output_logits": True,
            **told,
        }

    what = (*names, *(type(OWN[i](n)).__name__ for i in own), *(["holes"] if holes else []))
    return Mix(
        rng.choice(KINDS),
        {"input_ids": ids, "attention_mask": mask},
        options,
        what,
        rng.choice(POLICIES),
    )


@cache
def model(kind: str) -> PreTrainedModel:
    return fresh(kind).float()


def tried(call: Callable[[], Any]) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except (ValueError, RuntimeError, UserError, NotANumber) as error:
        return error


def engine(m: Mix, theirs: Any) -> Engine:
    """An engine whose drafter knows what transformers has written."""
    known = [[3]] * 6 if isinstance(theirs, Exception) else plans(m.prompted, theirs.sequences)
    return Engine(
        Target(CausalLM(model(m.kind))), Sometimes(known, VOCAB), build("policy", m.policy)
    )


def compared(seed: int) -> str:
    """Asserts that both write the same, and says how the call ended."""
    m = mix(seed)
    where = f"mix {seed} of {m.kind}: {m.what}"
    theirs = tried(lambda: model(m.kind).generate(**m.prompted, **m.options()))
    ours = tried(lambda: engine(m, theirs).generate(**m.prompted, **m.options()))
    if isinstance(ours, UserError | NotANumber):
        return refused(m, theirs, str(ours), where)
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        assert type(ours) is type(theirs), f"{where}: {ours!r}, {theirs!r}"
        return "raised by both"
    assert torch.equal(ours.sequences, theirs.sequences), where
    for name in ("scores", "logits"):
        for t, (mine, other) in enumerate(
            zip(getattr(ours, name), getattr(theirs, name), strict=True)
        ):
            assert mine.dtype == other.dtype
            there = mine.any(dim=1)  # of rows that have ended all are 0
            assert there.all() or t, where
            mine, other = mine[there], other[there]
            same = (mine == other) | ((mine - other).abs() <= NOISE * other.abs().clamp(min=1))
            assert same.all(), f"{where}: {name} at {t} are {(mine - other).abs().max()} apart"
    return "written"


def refused(m: Mix, theirs: Any, told: str, where: str) -> str:
    """Asserts that a refusal has a reason, and names what cannot be honoured."""
    assert "\n" not in told
    if "attention_mask" in told:
        assert m.kind == "mistral-sliding"
        assert "holes" in m.what
        return "refused: hidden ids under a window"
    assert "processor" in told, f"{where}: {told}"
    assert any(name in told for name in NAMED), f"{where}: {told}"
    if not isinstance(theirs, Exception):
        assert any(not torch.isfinite(s.max(-1).values).all() for s in theirs.scores), (
            f"{where}: {told}"
        )
    return "refused: nothing left"


def many(seeds: range) -> Counter[str]:
    return Counter(compared(seed) for seed in seeds)


def test_mixes_of_options_write_what_generate_writes() -> None:
    ends = many(range(24))
    assert ends["written"] > 12, ends


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_mixes(part: int) -> None:
    ends = many(range(1000 + part * 100, 1100 + part * 100))
    print(dict(ends))
    assert ends["written"] > 50, ends
