"""A text that is replayed is decoded in the same steps, by trees of the same work, as when the target writes it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftree import Request, Sampling, Target, UserError
from draftree.cli.app import main
from draftree.costs.step_costs import Costs
from draftree.data.prompts import encode
from draftree.engine import Engine
from draftree.evaluation import suites
from draftree.evaluation.replay_target import ReplayTarget
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.trace_store import Recordings
from draftree.registry import build, own_names, part
from draftree.target.target import HiddenStateSpec

COSTS = Costs({1: 0.1, 32: 0.3}, {1: 1.0, 64: 2.0}, 0.05)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("demo", dtype="float64")


def engine(target: Target, drafter: str, policy: str) -> Engine:
    return Engine(
        target, build("drafter", drafter).open(target), build("policy", policy), costs=COSTS
    )


PAIRS = [
    ("edd", "pct"), ("eagle", "eagle2"), ("glide", "cape"), ("mtp", "chain"), ("suffix", "trie"), ("edd+suffix", "opttree"),
    ("vdm", "yield"), ("medusa", "chain"), ("hydra", "beam"), ("eagle3", "dymax"), ("pld", "trie"), ("eagle", "c2t"),
    ("glide+pld", "mcts"), ("eagle", "static:paths=eagle1/mc_sim_7b_63"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "temperature"),
    [(pair, float(i % 2)) for i, pair in enumerate(PAIRS)] + [(PAIRS[0], 1.0)],
)
def test_a_replay_takes_the_steps_of_the_live_run(
    target: Target, pair: tuple[str, str], temperature: float
) -> None:
    live, prompts = engine(target, *pair), suites.load("demo").prompts
    for i, prompt in enumerate(prompts[:1]):
        sampling = Sampling(temperature=temperature, seed=3)
        request = Request(
            encode(target.tokenizer, prompt.content), 10, target.eos, i, sampling=sampling
        )
        wanted = replace(live, learned={}).write([request], reuse=False)
        text = TokenText(
            np.array([*request.prompt, *wanted.tokens[0]], np.int64), len(request.prompt)
        )
        source = ReplayTarget.along(target, text, live.drafter.needs.hidden)
        for _ in range(2):  # the second finds the caches as the first has left them
            replayed = replace(live, target=source, learned={})
            found = replayed.write([request], reuse=False)
            assert found.tokens == wanted.tokens
            assert found.stats.steps == wanted.stats.steps
            assert found.stats.work == wanted.stats.work
        assert replayed.plain([request]).tokens == wanted.tokens


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in own_names("drafter")
        if n not in {"lookahead", "token_recycling", *(p[0] for p in PAIRS)}
    ],
)
def test_a_drafter_of_no_demo_is_replayed_step_by_step(target: Target, name: str) -> None:
    """Those that draft a block, and those of a corpus, with weights that nobody has trained."""
    live = Engine(
        target, part("drafter", name)().example(target), build("policy", "vct"), costs=COSTS
    )
    for temperature in (0.0, 1.0):
        (request,) = asked(target, 1, temperature, 6)
        wanted = replace(live, learned={}).write([request], reuse=False)
        text = TokenText(
            np.array([*request.prompt, *wanted.tokens[0]], np.int64), len(request.prompt)
        )
        source = ReplayTarget.along(target, text, live.drafter.needs.hidden)
        found = replace(live, target=source, learned={}).write([request], reuse=False)
        assert (found.tokens, found.stats.steps, found.stats.work) == (
            wanted.tokens,
            wanted.stats.steps,
            wanted.stats.work,
        )
        assert any(step.nodes for step in found.stats.steps) or name in ("rest", "aded")


def test_methods_that_need_target_passes_are_refused(target: Target) -> None:
    request = Request([5, 6, 7], 8)
    text = TokenText(np.array([5, 6, 7, 8, 9, 10]), 3)
    with pytest.raises(UserError, match="probes"):
        replace(
            engine(target, "lookahead", "trie"), target=ReplayTarget.along(target, text, ())
        ).write([request])
    with pytest.raises(UserError, match="reads rejected nodes"):
        replace(
            engine(target, "suffix+token_recycling", "trie"),
            target=ReplayTarget.along(target, text, ()),
        ).write([request])


def asked(
    target: Target, count: int = 2, temperature: float = 0.0, tokens: int = 24
) -> list[Request]:
    prompts, sampling = (
        suites.load("demo").prompts[:count],
        Sampling(temperature=temperature, seed=3),
    )
    return [
        Request(
            encode(target.tokenizer, p.content), tokens, target.eos, p.number, sampling=sampling
        )
        for p in prompts
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recordings_are_kept_and_read_without_a_layer_of_the_target(
    target: Target, tmp_path: Path, temperature: float
) -> None:
    requests, drafters = asked(target, 2, temperature, 12), ("edd", "glide")
    engines = [engine(target, d, "chain") for d in drafters]
    wanted = [e.write([r], reuse=False).stats for e in engines for r in requests]
    needs = [e.drafter.needs for e in engines]
    first = Recordings.open(tmp_path / "of", target, needs[:1])
    assert first.missing(requests) == requests
    first.record(requests)
    grown = Recordings.open(tmp_path / "of", target, needs)
    assert grown.missing(requests) == requests, "another drafter reads what was not recorded"
    texts = (tmp_path / "of" / "texts.jsonl").read_text()
    grown.record(requests)
    assert (tmp_path / "of" / "texts.jsonl").read_text() == texts, "texts are written once"
    sizes = [p.stat().st_size for p in (tmp_path / "of" / "taps").iterdir()]
    tokens = sum(
        len(r.prompt) + len(grown.texts[k]) for r, k in zip(requests, grown.texts, strict=True)
    )
    assert sum(sizes) == pytest.approx(tokens * grown.bytes_per_token, rel=0.05)
    again, passes = Recordings.open(tmp_path / "of", target, needs), list[int]()
    assert again.missing(requests) == []
    hooks = [
        m.register_forward_pre_hook(lambda *_: passes.append(1)) for m in target.decoder.layers
    ]
    try:
        found = [
            replace(e, target=again.source(r)).write([r], reuse=False).stats
            for e in engines
            for r in requests
        ]
    finally:
        for hook in hooks:
            hook.remove()
    assert [(s.steps, s.work) for s in found] == [(s.steps, s.work) for s in wanted]
    assert passes == []


def test_a_recording_of_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    Recordings.open(tmp_path / "of", target, [HiddenStateSpec()])
    with pytest.raises(UserError, match="its dtype is float64, this target's is float32"):
        Recordings.open(tmp_path / "of", Target.load("demo", dtype="float32"), [HiddenStateSpec()])
    about = tmp_path / "of" / "recording.json"
    saved = json.loads(about.read_text())
    for change, told in (
        ({"weights": "other"}, "its weights is other"),
        ({"tokenizer": "x"}, "its tokenizer"),
        ({"format": 2}, "format 2"),
    ):
        about.write_text(json.dumps(saved | change))
        with pytest.raises(UserError, match=told):
            Recordings.open(tmp_path / "of", target, [HiddenStateSpec()])
    about.unlink()
    (tmp_path / "of" / "else").touch()
    with pytest.raises(UserError, match=r"holds no recording\.json"):
        Recordings.open(tmp_path / "of", target, [HiddenStateSpec()])


def test_a_broken_recording_is_recorded_again_or_told(target: Target, tmp_path: Path) -> None:
    requests, folder = asked(target, 1, tokens=8), tmp_path / "of"
    here = Recordings.open(folder, target, [HiddenStateSpec((-4,))])
    here.record(requests)
    hidden_states = next((folder / "taps").iterdir())
    whole, lines = hidden_states.read_bytes(), (folder / "texts.jsonl").read_text()
    hidden_states.write_bytes(whole[:-9])
    with pytest.raises(UserError, match="is not a recording"):
        here.recording(requests[0])
    (folder / "texts.jsonl").write_text(lines[: len(lines) // 2])  # broken off
    again = Recordings.open(folder, target, [HiddenStateSpec((-4,))])
    assert again.missing(requests) == requests


@pytest.mark.parametrize(
    ("pair", "told"),
    [("edd chain rejection", "acceptor 'rejection' cannot be replayed"),
     ("lookahead trie", "drafter 'lookahead' cannot be replayed"),
     ("token_recycling trie", "drafter 'token_recycling' cannot be replayed: it reads what was not accepted"),
     ("lookahead+pld trie", "drafter 'lookahead+pld' cannot be replayed")],
)  # fmt: skip
def test_parts_that_read_more_than_the_text_are_refused_by_name(
    pair: str, told: str, tmp_path: Path, quick: None, capsys
) -> None:
    asked = [
        "replay",
        "--suite",
        "demo",
        "--temperature",
        "1",
        "--pair",
        pair,
        "--recording",
        tmp_path / "of",
        "--out",
        tmp_path / "r",
    ]
    with pytest.raises(SystemExit, match="2"):
        main(asked)
    assert told in capsys.readouterr().err
    assert not (tmp_path / "of").exists()
    assert not (tmp_path / "r").exists()


def test_policies_that_read_costs_are_replayed_on_each_machine(
    tmp_path: Path, quick: None, capsys
) -> None:
    asked = ["replay", "--suite", "demo", "--pair", "vdm yield", "--pair", "vdm chain", "--limit", "1",
             "--max-new-tokens", "16", "--recording", tmp_path / "of", "--out", tmp_path / "r.json", "--machine", "h100-8b",
             "--machine", "rtx4090-8b-int4"]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main(list(map(str, asked)))
    said = capsys.readouterr()
    assert "simulated, on h100-8b, rtx4090-8b-int4" in said.out
    assert "bytes a token" in said.err
    result = json.loads((tmp_path / "r.json").read_text())
    rows = {(r["machine"], r["policy"]): r for r in result["rows"]}
    assert len(rows) == 6
    wide, narrow = (rows[m, "yield"] for m in ("h100-8b", "rtx4090-8b-int4"))
    assert wide["nodes_per_step"] > narrow["nodes_per_step"], "each machine has trees of its own"
    assert rows["h100-8b", "chain"]["work"] == rows["rtx4090-8b-int4", "chain"]["work"]
    assert (
        rows["h100-8b", "chain"]["counted_speedup"]
        != rows["rtx4090-8b-int4", "chain"]["counted_speedup"]
    )
    assert {b["machine"] for b in result["oracle"]} == {"h100-8b", "rtx4090-8b-int4"}
    assert result["simulated"]
    assert [p.name for p in tmp_path.glob("r.json*")] == ["r.json"]


@pytest.mark.long
@pytest.mark.parametrize("pair", ["suffix trie", "pld trie", "edd chain", "eagle chain"])
def test_a_replay_takes_the_drafter_s_time(pair: str) -> None:
    """Look-ups less than a fifth of the live time, trained drafters no more than 1.2 times what drafting takes live."""
    small = Target.load("demo")
    requests, live = asked(small, 6, tokens=96), engine(small, *pair.split())
    spent = list[float]()
    drafting = list[float]()
    replayed = list[float]()
    for _ in range(4):  # the first one warms up; other programs only ever make the others slower
        done = [replace(live, learned={}).write([r], reuse=False) for r in requests]
        texts = [
            TokenText(np.array([*r.prompt, *d.tokens[0]], np.int64), len(r.prompt))
            for r, d in zip(requests, done, strict=True)
        ]
        sources = [ReplayTarget.along(small, text, live.drafter.needs.hidden) for text in texts]
        start = time.perf_counter()
        for source, request in zip(sources, requests, strict=True):
            replace(live, target=source, learned={}).write([request], reuse=False)
        replayed.append(time.perf_counter() - start)
        spent.append(sum(d.stats.seconds for d in done))
        drafting.append(sum(d.stats.draft_seconds for d in done))
    mine, whole, part = (min(seconds[1:]) for seconds in (replayed, spent, drafting))
    print(f"{pair}: {mine:.2f} s replayed, {whole:.2f} s live, of which drafting {part:.2f} s")
    assert mine < (whole / 5 if pair.endswith("trie") else 1.2 * part)
