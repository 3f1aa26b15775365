"""What is shipped for the demo target."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from draftree.data.prompts import encode, question
from draftree.drafters.base import TrainableMethod
from draftree.engine import Engine, generate_plain
from draftree.formats.checkpoint import Checkpoint, fingerprint
from draftree.policies.chain import Chain
from draftree.registry import build, names, part
from draftree.request import Request
from draftree.target.target import Target
from draftree.target.target_names import shipped_folder
from draftree.weights import demo_folder
from selection import one_in

TRAINED = [
    n
    for n in names("drafter")
    if issubclass(part("drafter", n), TrainableMethod) and shipped_folder("demo", n)
]
LACKING = {"dflash", "dspark", "jetspec", "peagle"}
"""Drafters of blocks are to be trained for targets that they are worth it for."""
README = Path(__file__).parents[2] / "weights" / "README.md"


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("demo")


@cache
def plainly(target: Target, requests: tuple[Request, ...]) -> list[list[int]]:
    """What plain decoding writes, once for all drafters."""
    return generate_plain(target, requests).tokens


def test_what_is_not_shipped() -> None:
    every = {n for n in names("drafter") if issubclass(part("drafter", n), TrainableMethod)}
    assert every - {*TRAINED} <= LACKING


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_is_shipped_trained(name: str, target: Target) -> None:
    """Its drafts are accepted, and the text is the target's."""
    assert Checkpoint.at(demo_folder(name)).about["target_hash"] == fingerprint(
        target.decoder.config
    )
    engine = Engine(target, build("drafter", name).open(target), Chain(length=4))
    prompts = [
        "How many legs do 3 dogs and 2 birds have together?",
        "A pen costs $2 and a book $7. What do 5 of each cost?",
    ]
    requests = tuple(
        Request(tuple(encode(engine.tokenizer, question(p))), 32, engine.eos, number=i)
        for i, p in enumerate(prompts)
    )
    written = engine.write(requests)
    assert written.tokens == plainly(target, requests)
    assert written.stats.acceptance_length > 1.3


@pytest.mark.parametrize("name", one_in(2, TRAINED))
def test_a_drafter_may_draft_in_another_dtype_than_the_target_has(
    name: str, target: Target
) -> None:
    drafter = build("drafter", f"{name}:dtype=bfloat16").open(target)
    assert {p.dtype for p in drafter.model.parameters()} == {torch.bfloat16}
    assert (
        drafter.description == f"{build('drafter', name).open(target).description} in bfloat16"
    )  # costs are its own
    engine = Engine(target, drafter, Chain(length=4))
    request = Request(
        tuple(encode(engine.tokenizer, question("How many legs do 3 dogs and 2 birds have?"))),
        32,
        engine.eos,
    )
    written = engine.write([request])
    assert written.tokens == plainly(target, (request,))
    own = (
        Engine(target, build("drafter", name).open(target), Chain(length=4))
        .write([request])
        .stats.acceptance_length
    )
    assert written.stats.acceptance_length > 0.8 * own


def test_all_were_trained_by_the_same_recipe_as_long() -> None:
    """On the target's answers to the same questions; those of two makes of CPU, whose greedy texts part at near ties."""
    said = [json.loads((demo_folder(n) / "training.json").read_text()) for n in TRAINED]
    assert (
        len(
            {
                tuple(s[k] for k in ("epochs", "batch_size", "lr", "max_tokens", "seed"))
                for s in said
            }
        )
        == 1
    )
    assert {s["data"] for n, s in zip(TRAINED, said, strict=True) if n != "glide"} == {
        "801e763de3c40462"
    }
    assert {s["data"] for n, s in zip(TRAINED, said, strict=True) if n == "glide"} == {
        "979823db62f566f3"
    }


def test_the_demo_is_small() -> None:
    size = sum(f.stat().st_size for f in demo_folder("").rglob("*") if f.is_file())
    assert size < 90e6
    told = re.search(r"The whole demo is\s(\d+) MB", README.read_text())
    assert told is not None
    assert abs(int(told[1]) - size / 1e6) < 1
