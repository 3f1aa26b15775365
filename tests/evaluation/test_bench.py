"""Suites, runs beside the baseline, the figures made of them, and the shown_tables."""

import importlib
import io
import json
import os
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from rich.console import Console

from draftree.cli.app import main
from draftree.cli.terminal import drop_wide_columns, table
from draftree.costs.cost_table import CostTable, estimate_seconds
from draftree.costs.step_costs import Costs
from draftree.drafters.pld import PLD
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.evaluation import bootstrap, result_rows, step_codec, suites
from draftree.evaluation import text_tables as shown_tables
from draftree.evaluation.bench import Bench
from draftree.evaluation.compare import first_difference
from draftree.evaluation.grid import (
    QUESTION_STRIDE,
    Cell,
    PromptResult,
    assemble,
    choose_requests,
    product,
)
from draftree.evaluation.report_text import name_of
from draftree.evaluation.resume import Journal, files_of, hash_prompts
from draftree.evaluation.roofline import Machine
from draftree.metrics import Stats, Step, Work
from draftree.policies.chain import Chain
from draftree.registry import part
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.fakes import tiny_target
from folders import target_folder

pytestmark = pytest.mark.usefixtures("quick")

ROOT = Path(__file__).parents[2]
ROW = {"drafter", "policy", "rule", "acceptor", "draw", "lossy", "promises_text", "temperature", "prompts",
       "new_tokens", "steps", "acceptance_length", "alpha", "alpha_bound", "nodes_per_step", "depth_per_step", "draft_seconds",
       "verify_seconds", "seconds", "tokens_per_second", "speedup", "same_output", "different_prompts",
       "repeated_ngrams", "intervals", "overlap", "cost_ratio", "expected_speedup", "draft_steps_per_step", "counted_seconds",
       "phases", "state_bytes", "counted_speedup", "draft_share", "per_prompt", "work", "τ"}  # fmt: skip
COSTS = Costs({1: 0.5, 4: 2.0}, {1: 4.0, 8: 11.0}, commit=0.5)
PROMPTS = [
    {"category": "a", "turns": ["first?", "second?"]},
    {"category": "a", "question": "how?", "answer": "so"},
    {"category": "b", "prompt": "abcabcabc"},
    {"category": "b", "prompt": "x" * 150},
    {"messages": [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "yes"}]},
    {"conversations": [{"from": "human", "value": "hm"}]},
    {"text": "raw"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)))
    return path


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args])
    return int(ended.value.code or 0)


def test_rows_are_chats_or_raw_text(prompts: Path) -> None:
    suite = suites.load(str(prompts))
    chat = lambda text: [{"role": "user", "content": text}]
    assert [p.content for p in suite.prompts] == [
        chat("first?"), chat("how?"), "abcabcabc", "x" * 150, chat("hm"), chat("hm"), "raw",
    ]  # fmt: skip
    assert [p.number for p in suite.select(["b"])] == [2, 3]
    assert suites.load("demo").categories == ("math", "code")


@pytest.mark.parametrize(
    ("row", "told"),
    [('{"id": 1}', "allowed is turns"), ('{"turns": []}', "'turns' is"), ('{"prompt": 3}', "'prompt' is 3"),
     ("{", "not JSON"), ('{"messages": [{"role": "assistant", "content": "x"}]}', "no question"), ("", "no prompts")],
)  # fmt: skip
def test_a_row_that_is_no_prompt_is_told_with_its_line(tmp_path: Path, row: str, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(row)
    with pytest.raises(UserError, match=told):
        suites.load(str(path))


def test_the_first_so_many_of_each_category(folder: str, prompts: Path, tmp_path: Path) -> None:
    engine = next(iter(assemble(lambda: Target.load(folder), [("pld", "chain")], None).values()))
    asked = suites.load(str(prompts)).prompts
    numbers = lambda limit, each=None: [
        r.number for r in choose_requests(asked, engine, 12, limit, each)[0]
    ]
    everyone = numbers(None)
    firsts: dict[str, int] = {}
    for prompt in asked:
        if prompt.number in everyone:
            firsts.setdefault(prompt.category, prompt.number)
    assert numbers(None, 1) == sorted(firsts.values()) != everyone
    assert numbers(2, 1) == sorted(firsts.values())[:2]
    assert numbers(None, 9) == everyone


def test_pairs_stand_beside_the_product(folder: str, prompts: Path, tmp_path: Path) -> None:
    def ran(*args: str) -> list[tuple[str, str]]:
        out = tmp_path / "r"
        run("--suite", str(prompts), "--target", folder, "--max-new-tokens", "2", "--limit", "1", "--force",
            "--out", str(out), *args)  # fmt: skip
        return [(r["drafter"], r["policy"]) for r in json.loads(out.read_text())["rows"][1:]]

    assert ran("--pair", "pld chain:length=2") == [("pld", "chain:length=2")]
    assert ran("--pair", "pld trie", "--pair", "suffix trie", "--drafter", "pld", "--policy", "chain", "--policy", "trie") == [
        ("pld", "chain"), ("pld", "trie"), ("suffix", "trie"),
    ]  # fmt: skip


def test_a_pair_is_two_specs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--suite", "demo", "--pair", "pld", "--out", str(tmp_path / "r")) == 2
    assert (
        "--pair is 'pld', allowed are the specs of a drafter and a policy"
        in capsys.readouterr().err
    )
    assert run("--suite", "demo", "--pair", "pld pct match x", "--out", str(tmp_path / "r")) == 2
    assert (
        "--pair is 'pld pct match x', allowed are the specs of a drafter and a policy"
        in capsys.readouterr().err
    )


def test_acceptors_side_by_side(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--suite",
        str(prompts),
        "--target",
        folder,
        "--temperature",
        "1",
        "--max-new-tokens",
        "8",
        "--out",
        str(tmp_path / "r"),
    ]
    assert (
        run(
            *options,
            "--pair",
            "pld chain",
            "--pair",
            "pld pct match",
            "--acceptor",
            "match",
            "--acceptor",
            "block",
            "--json",
        )
        == 0
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    said = [
        (r["policy"], r["rule"], r["acceptor"], r["draw"], r["promises_text"]) for r in rows[1:]
    ]
    assert said == [
        ("chain", "match", "match", "coupled", True),
        ("chain", "block", "block", "with-replacement", False),
        ("pct", "match", "match", "coupled", True),
    ]
    assert all(r["same_output"] for r in rows if r["promises_text"])
    assert shown_tables.cells(rows[2])["same output"] == "not promised"


def test_a_pairing_that_is_not_exact_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pair, temperature, told in (
        ("pld pct block", "1", "prunes on what was drawn"),
        ("pld chain block", "0", "temperature 0"),
    ):
        options = (
            "--suite",
            "demo",
            "--temperature",
            temperature,
            "--out",
            str(tmp_path / "r"),
            "--target",
            str(tmp_path),
        )
        assert run(*options, "--pair", pair) == 2
        assert told in capsys.readouterr().err


def test_bench_runs_the_whole_product(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "r.json"
    status = run("--suite", str(prompts), "--target", folder, "--drafter", "pld", "--drafter", "pld:ngram=1",
                 "--policy", "chain", "--policy", "vct:width=2,depth=2", "--temperature", "0", "--temperature", "1",
                 "--max-new-tokens", "12", "--repeats", "2", "--out", str(out), "--json")  # fmt: skip
    said, told = capsys.readouterr()
    found = json.loads(said)
    assert status == 0
    assert found == json.loads(out.read_text())
    assert [p.name for p in out.parent.iterdir()] == ["r.json"]
    assert "too long for the target's context: 1 of " in told
    assert list(found["provenance"]["suite"]["skipped_too_long"].values()) == [1]
    assert found["format"] == 2
    assert not found["simulated"]
    assert {
        "commit",
        "versions",
        "hardware",
        "command",
        "seed",
        "date",
        "target",
        "costs",
        "drafting",
    } <= set(found["provenance"])
    assert len(found["rows"]) == 2 * (1 + 2 * 2)
    for row in found["rows"]:
        assert set(row) == ROW
        assert row["same_output"]
        assert row["prompts"] == 6
        low, high = row["intervals"]["speedup"]
        assert low <= high
        each = row["per_prompt"]
        assert {k: len(v) for k, v in each.items() if v is not None} == dict.fromkeys(
            (
                "accepted",
                "nodes",
                "steps",
                "tokens",
                "seconds",
                *(["counted_seconds", "counted_plain"] if row["policy"] else []),
            ),
            6,
        )
        assert (sum(each["tokens"]), sum(each["steps"])) == (row["new_tokens"], row["steps"])
        assert row["acceptance_length"] == pytest.approx(
            (sum(each["accepted"]) + row["steps"]) / row["steps"]
        )
        if row["policy"]:
            assert row["counted_seconds"] == pytest.approx(sum(each["counted_seconds"]))
            low, high = row["intervals"]["counted_speedup"]
            # Of equal prompts the interval is one point, by way of logarithms of sums: two of at
            # most 20 in absolute value, each rounded to 2⁻⁵³ of it, and some twenty roundings
            # around them.
            rounding = 64 * 2**-53
            assert low * (1 - rounding) <= row["counted_speedup"] <= high * (1 + rounding)
            assert 0 < row["draft_share"] < 1
    assert set(found["provenance"]["costs"]) == {"pld", "pld:ngram=1"}
    assert "counted_seconds" in out.read_text()
    assert len(out.read_text().splitlines()) < 1700, "arrays of numbers stand on a line each"
    plain = found["rows"][0]
    assert plain["counted_seconds"] is plain["counted_speedup"] is plain["draft_share"] is None
    assert (plain["drafter"], plain["policy"], plain["speedup"], plain["acceptance_length"]) == (
        "plain",
        None,
        1,
        1,
    )
    assert plain["new_tokens"] == plain["steps"] + plain["prompts"]
    assert plain["overlap"] is plain["cost_ratio"] is None
    own = {(r["drafter"], r["overlap"], r["cost_ratio"]) for r in found["rows"][1:]}
    assert {d for d, _, _ in own} == {"plain", "pld", "pld:ngram=1"}
    assert len(own) == 3  # a drafter's own figures do not depend on policy and temperature
    assert all(0 <= overlap <= 1 and ratio > 0 for d, overlap, ratio in own if d != "plain")


def test_the_overlap_is_along_texts_sampled_at_temperature_1(
    folder: str, prompts: Path, tmp_path: Path
) -> None:
    """Whatever temperatures a run has, and whether it writes or replays: it is what rejection at temperature 1 accepts."""
    found = dict[tuple[str, ...], float]()
    for command in ("bench", "replay"):
        more = ["--recording", str(tmp_path / "of")] if command == "replay" else []
        for temperatures in (("0",), ("1",), ("0", "1")):
            out = tmp_path / f"{command}{'-'.join(temperatures)}.json"
            ask = [
                "--suite",
                str(prompts),
                "--target",
                folder,
                "--pair",
                "pld:ngram=1 chain",
                "-n",
                "8",
                "--out",
                str(out),
                *more,
            ]
            with pytest.raises(SystemExit) as end:
                main([command, *ask, *(f"--temperature={t}" for t in temperatures)])
            assert end.value.code == 0
            found[command, *temperatures] = json.loads(out.read_text())["rows"][-1]["overlap"]
    assert len({round(overlap, 9) for overlap in found.values()}) == 1, found


def test_an_interrupted_bench_goes_on(
    folder: str, prompts: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "r.json"
    whole = Bench.prompt
    calls = []

    def prompt(self: Bench, index: int) -> dict[Cell, PromptResult]:
        calls.append(index)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(self, index)

    monkeypatch.setattr(Bench, "prompt", prompt)
    ask = ["--suite", str(prompts), "--target", folder, "--drafter", "pld", "--policy", "chain", "--max-new-tokens", "8",
           "--out", str(out)]  # fmt: skip
    assert run(*ask) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not out.exists()
    assert run(*ask) == 0
    assert calls == [0, 1, 2, 2, 3, 4, 5, 6]
    assert [p.name for p in tmp_path.glob("r.json*")] == ["r.json"]
    assert "speed-up" in capsys.readouterr().out


def test_a_prompt_that_cannot_fit_is_told(
    folder: str, prompts: Path, tmp_path: Path, capsys
) -> None:
    ask = [
        "--suite",
        str(prompts),
        "--target",
        folder,
        "--drafter",
        "pld",
        "--policy",
        "chain",
        "--out",
        str(tmp_path / "r.json"),
    ]
    assert run(*ask, "--max-new-tokens", "400") == 2
    assert "too long" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def written(tokens: int, accepted: list[int], seconds: list[float]) -> PromptResult:
    steps = [Step(a, 4, 4) for a in accepted]
    return PromptResult(list(range(tokens)), [Stats(tokens, steps, 0.0, 0.0, s) for s in seconds])


def test_figures_are_of_one_repeat_and_seconds_means_of_all() -> None:
    cell = Cell("d", "p", 0.0)
    mine = [written(10, [3, 1], [1.0, 3.0]), written(20, [2, 2, 2], [2.0, 2.0])]
    plain = [written(10, [0] * 9, [4.0, 4.0]), written(20, [0] * 19, [8.0, 8.0])]
    row = result_rows.row(cell, mine, plain, seed=0)
    assert (row["new_tokens"], row["steps"], row["seconds"]) == (30, 5, 4.0)
    assert row["acceptance_length"] == pytest.approx(15 / 5)
    assert row["speedup"] == pytest.approx(12 / 4)
    assert row["same_output"]
    bounds = row["intervals"]
    assert bounds["acceptance_length"] == pytest.approx([3.0, 3.0])
    assert bounds["speedup"] == pytest.approx([2.0, 4.0])
    mine[0].tokens[3] = 99
    row = result_rows.row(cell, mine, plain, seed=0)
    assert (row["same_output"], row["different_prompts"]) == (False, 1)


def test_expected_speedup_is_the_papers() -> None:
    # GLIDE, Table 1: Vicuna 7B on GSM8K has a = .648, c = .067, γ = 5 and 1.97; LLAMA-160m a = .58,
    # c = .49 and .66.
    row = lambda a, c, nodes=5.0: {
        "overlap": a,
        "cost_ratio": c,
        "nodes_per_step": nodes,
        "depth_per_step": 5.0,
    }
    assert result_rows.expected_speedup(row(0.648, 0.067)) == pytest.approx(1.97, abs=0.01)
    assert result_rows.expected_speedup(row(0.58, 0.49)) == pytest.approx(0.66, abs=0.01)
    assert result_rows.expected_speedup(row(1.0, 0.1)) == pytest.approx(6 / 1.5)
    assert result_rows.expected_speedup(row(0.5, 0.1, nodes=20.0)) is None, "it is of chains"
    assert result_rows.expected_speedup(row(None, 0.1)) is None


def counts(
    tokens: int, accepted: list[int], work: list[Work], seconds: float = 1.0
) -> PromptResult:
    return PromptResult(
        list(range(tokens)),
        [Stats(tokens, [Step(a, 4, 4) for a in accepted], 0.0, 0.0, seconds, work)],
    )


def test_work_is_counted_in_the_costs_whatever_the_clock_said() -> None:
    alone = [Work((), 1, 1, 0)]
    plain = [counts(5, [0] * 4, alone * 4), counts(9, [0] * 8, alone * 8, 99.0)]
    # a chain of 4: 4 · sₐ(1) + sₜ(5) + commit = 2 + 8 + .5, of which drafting is 2.5; a step
    # without drafts is 4.5
    chain = [Work((1, 1, 1, 1), 5, 1, 0)]
    mine = [counts(5, [3], chain), counts(9, [3, 3], [*chain, *chain])]
    row = result_rows.row(Cell("d", "p", 0.0), mine, plain, 0, COSTS)
    assert row["counted_seconds"] == 3 * 10.5
    assert row["counted_speedup"] == pytest.approx(12 * 4 / (3 * 10.5))
    assert row["draft_share"] == pytest.approx(2.5 / 10.5)
    assert row["draft_steps_per_step"] == 4.0
    assert row["intervals"]["counted_speedup"] == pytest.approx([16 / 10.5, 16 / 10.5])
    assert row["per_prompt"] == {
        "accepted": [3, 6], "nodes": [4, 8], "steps": [1, 2], "tokens": [5, 9], "seconds": [1.0, 1.0],
        "counted_seconds": [10.5, 21.0], "counted_plain": [16.0, 32.0],
    }  # fmt: skip
    text = shown_tables.cells(row | {"overlap": None, "cost_ratio": None})
    assert (text["counted speed-up [95 %]"], text["draft share"], text["drafts/step"]) == (
        "1.52 [1.52, 1.52]",
        "0.24",
        "4.00",
    )
    without = result_rows.row(Cell("d", "p", 0.0), mine, plain, 0)
    assert (
        without["counted_seconds"] is without["counted_speedup"] is without["draft_share"] is None
    )
    assert shown_tables.cells(without)["counted speed-up [95 %]"] == ""
    assert without["per_prompt"]["counted_seconds"] is None


def test_drafting_nothing_costs_plain_decoding_and_a_commit() -> None:
    alone = [counts(5, [0] * 4, [Work((), 1, 1, 0)] * 4)] * 3
    row = result_rows.row(Cell("d", "p", 0.0), alone, alone, 0, COSTS)
    assert row["counted_speedup"] == pytest.approx(4 / 4.5)
    nothing = [counts(1, [], [])] * 2
    assert (
        result_rows.row(Cell("d", "p", 0.0), nothing, nothing, 0, COSTS)["counted_speedup"] is None
    )


def module(name: str) -> ModuleType:
    """A script among the benchmarks."""
    return importlib.import_module(name)


def compared(tokens: list[int], seconds: list[float]) -> dict[str, object]:
    return {
        "per_prompt": {
            "tokens": tokens,
            "seconds": list(map(float, seconds)),
            "counted_seconds": None,
        }
    }


def test_paired_ratios_do_not_feel_what_prompts_differ_in() -> None:
    paired, rng = bootstrap.paired_ratio, np.random.default_rng(0)
    tokens, slow = [10] * 30, rng.uniform(1, 99, 30)
    noise = rng.uniform(0.98, 1.02, 30)
    found = paired(compared(tokens, slow * 0.9 * noise), compared(tokens, slow), "seconds")
    assert found.value == pytest.approx((slow * 0.9 * noise).sum() / slow.sum())
    assert 0.89 < found.low < found.value < found.high < 0.915
    assert found.p < 0.001
    assert found.verdict == "faster"
    same = paired(compared(tokens, slow), compared(tokens, slow), "seconds")
    assert (same.value, same.low, same.high, same.p, same.verdict) == (1, 1, 1, 1, "not told apart")
    twice = paired(compared([20] * 30, slow), compared(tokens, slow), "seconds")
    assert twice.value == pytest.approx(0.5), "it is of a token"


def test_rows_that_cannot_be_paired_are_told() -> None:
    paired = bootstrap.paired_ratio
    one = compared([1], [1.0])
    two = compared([1, 2], [1.0, 2.0])
    with pytest.raises(UserError, match="does not say 'counted_seconds'"):
        paired(one, one)
    with pytest.raises(UserError, match="does not say 'seconds'"):
        paired(one, {}, "seconds")
    with pytest.raises(UserError, match="rows of 1 and 2 prompts"):
        paired(one, two, "seconds")


def test_a_result_keeps_arrays_of_numbers_on_a_line(tmp_path: Path) -> None:
    result = {"a [1,\n 2]": [1, 2.5, None], "b": [[1], ["x", "y]"]], "c": [], "d": "[\n1,  2\n]"}
    result_rows.save(result, tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == result
    assert ": [1, 2.5, null]" in text


def test_work_is_counted_by_what_was_learnt_while_it_was_done(
    folder: str, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    asked = (
        "--suite",
        str(prompts),
        "--target",
        folder,
        "--drafter",
        "pld",
        "--policy",
        "pct",
        "--max-new-tokens",
        "16",
    )
    assert run(*asked, "--out", str(out)) == 0
    found = json.loads(out.read_text())
    about = found["provenance"]
    learnt = {name: int(about[name]["pld"]["about"]["learnt"]) for name in ("costs", "counted_by")}
    assert learnt["counted_by"] > learnt["costs"] > 0
    assert about["counted_by"]["pld"]["entries"] != about["costs"]["pld"]["entries"], (
        "which the policy has read"
    )
    by = tmp_path / "by.json"
    by.write_text(json.dumps(about["counted_by"]["pld"]))
    works = [
        w for _, each in step_codec.decode_steps(found["rows"][1]["work"], "row") for w in each
    ]
    assert found["rows"][1]["counted_seconds"] == pytest.approx(
        estimate_seconds(CostTable.load(by), works)[0]
    )


def test_a_policy_is_compared_with_the_others(
    folder: str, prompts: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    script, out = module("paired"), tmp_path / "r.json"
    for drafter, entry in (("one", 1.0), ("two", 2.0)):
        CostTable((Costs({1: entry}, {1: 4.0 * entry}),)).save(tmp_path / f"{drafter}.json")
    assert run("--suite", str(prompts), "--target", folder, "--drafter", "pld", "--drafter", "pld:ngram=1", "--policy", "chain",
               "--policy", "chain:length=1", "--max-new-tokens", "24", "--out", str(out), "--costs",
               str(tmp_path / "one.json"), "--costs", str(tmp_path / "two.json")) == 0  # fmt: skip
    found = json.loads(out.read_text())
    assert [c["entries"][0]["target"]["1"] for c in found["provenance"]["costs"].values()] == [
        4.0,
        8.0,
    ]
    assert [r["cost_ratio"] for r in found["rows"]] == [None, *[0.25] * 4]
    capsys.readouterr()

    def compare(*args: str) -> int:
        monkeypatch.setattr("sys.argv", ["paired.py", str(out), *args])
        return int(script.main())

    lines = list(script.lines(found, "policy", "chain", "counted_seconds"))
    assert [(x["with"], x["beside"]) for x in lines] == [
        ("pld", "chain:length=1"),
        ("pld:ngram=1", "chain:length=1"),
    ]
    lines = list(script.lines(found, "drafter", "pld", "steps"))
    assert [(x["with"], x["beside"]) for x in lines] == [
        ("chain", "pld:ngram=1"),
        ("chain:length=1", "pld:ngram=1"),
    ]
    assert compare("--drafter", "pld", "--by", "steps") in (0, 1)
    assert "pld:ngram=1" in capsys.readouterr().out
    assert compare("--policy", "chain") in (0, 1)
    assert "chain:length=1" in capsys.readouterr().out
    assert compare("--policy", "chian") == 2
    assert "did you mean 'chain'" in capsys.readouterr().err
    beside = bootstrap.compare_to_plain(found)
    assert [(c.mine["drafter"], c.other["policy"]) for c in beside] == [
        (d, None) for d in ["pld"] * 2 + ["pld:ngram=1"] * 2
    ]
    assert beside[0].ratio.value == pytest.approx(1 / found["rows"][1]["counted_speedup"])


def test_intervals_are_paired_and_seeded() -> None:
    rng = np.random.default_rng(0)
    plain = [written(10, [0] * 9, [s]) for s in rng.uniform(1, 9, 30)]
    half = [written(10, [1] * 5, [w.repeats[0].seconds / 2]) for w in plain]
    mine, base = result_rows.Totals.of(half), result_rows.Totals.of(plain)
    found = result_rows.intervals(mine, base, 1)
    assert found["speedup"] == pytest.approx([2, 2])  # prompts differ ninefold, the pairs do not
    assert found == result_rows.intervals(mine, base, 1)
    assert found["tokens_per_second"][0] < 2 * 10 / 5 < found["tokens_per_second"][1]


def test_a_journal_of_another_run_or_a_broken_line_is_not_read(tmp_path: Path) -> None:
    cells, path = product([("d", "p", None)], [0.0]), tmp_path / "j"
    done = {cell: counts(3, [1], [Work((1, 2), 4, 1, 7), Work((), 1, 1, 9)]) for cell in cells}
    journal = Journal(path, {"run": 1})
    assert journal.read(cells) == []
    journal.add(done)
    journal.add(done)
    path.write_text(path.read_text()[:-9])
    assert Journal(path, {"run": 1}).read(cells) == [done]
    assert Journal(path, {"run": 2}).read(cells) == []


def test_a_narrow_terminal_loses_the_last_columns() -> None:
    rows = [
        {"drafter": "pld", "τ [95 %]": "1.00 [1.00, 1.00]", "nodes/step": "3.2", "seconds": "1.00"}
    ]
    keep = ("drafter", "τ [95 %]")
    assert drop_wide_columns(rows, 80, keep) == rows
    assert list(drop_wide_columns(rows, 47, keep)[0]) == ["drafter", "τ [95 %]", "nodes/step"]
    assert list(drop_wide_columns(rows, 10, keep)[0]) == ["drafter", "τ [95 %]"]


def test_the_speed_up_is_shown_in_80_columns() -> None:
    done = [written(3, [1], [0.5])] * 2
    rows = shown_tables.readable(
        shown_tables.result_table(
            [result_rows.row(Cell("edd", "chain:length=5", 0.0), done, done, 0)]
        )
    )
    shown = drop_wide_columns(rows, 80, shown_tables.FIRST)
    console = Console(width=80, file=io.StringIO())
    console.print(table("", shown))
    for text in ("chain:length=5", "2.00", "1.00 [1.00, 1.00]", "yes"):
        assert f" {text} " in console.file.getvalue()
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return module("tables")


def test_a_table_is_written_from_its_result(
    tables: ModuleType, folder: str, prompts: Path, tmp_path: Path
) -> None:
    run("--suite", str(prompts), "--target", folder, "--drafter", "pld", "--policy", "chain", "--max-new-tokens", "8",
        "--limit", "2", "--out", str(tmp_path / "short.json"))  # fmt: skip
    after = tables.block({"result": "short"}, tmp_path)
    assert (
        "| drafter | policy | τ [95 %] | nodes/step | depth/step | speed-up [95 %] | same output |"
        in after
    )
    assert "| plain |  | 1.00 [1.00, 1.00] |" in after
    assert after.endswith("Saved as `benchmarks/results/short.json`.*")
    left = tables.block(
        {"result": "short", "columns": ["policy", "same output"], "without": ["chain"]}, tmp_path
    )
    assert "| policy | same output |" in left
    assert "| chain |" not in left
    assert "| chain |" in after.replace("pld | chain", "| chain")
    page = {
        "title": "T",
        "intro": "I",
        "section": [{"heading": "H", "text": "S", "table": [{"result": "short"}]}],
    }
    assert tables.rendered(page, tmp_path).startswith(
        f"{tables.GENERATED}\n\n# T\n\nI\n\n## H\n\nS\n\n| drafter |"
    )


def test_pages_picture_and_readme_say_what_the_saved_results_say(tables: ModuleType) -> None:
    for path, text in tables.written().items():
        assert (ROOT / path).read_text("utf-8") == text, f"{path}: run python benchmarks/tables.py"


def test_the_factors_in_the_readme_are_those_of_the_results(tables: ModuleType) -> None:
    def factor(name: str, way: str, other: str) -> float:
        known = tables.fair_rates(ROOT / "benchmarks" / "results", name)
        return float(known[way] / known[other])

    tasks, text = "smollm2_peers_tasks", " ".join((ROOT / "README.md").read_text("utf-8").split())
    whole, kernels = (
        factor(tasks, tables.OURS, tables.STOCK),
        factor(tasks, tables.PLAIN, tables.STOCK),
    )
    drafts, math = (
        factor(tasks, tables.OURS, tables.PLAIN),
        factor("smollm2_peers_compiled", tables.OURS, tables.PLAIN),
    )
    assert f"{whole:.1f} times as fast as greedy `generate` of `transformers`" in text
    assert (
        f"kernels bring {kernels:.1f} ×, drafting {drafts:.1f} ×, on math alone {math:.1f} ×."
        in text
    )


def test_speeds_of_warmed_up_questions_are_lowered(tables: ModuleType) -> None:
    results = ROOT / "benchmarks" / "results"
    for name in tables.WARMED_UP:
        told = tables.rates(tables.read_result(results / f"{name}.json"))
        fair = tables.fair_rates(results, name)
        changed = {way for way in told if told[way] != fair[way]}
        assert changed == {tables.OURS, tables.FOUR}
        assert all(0.8 < fair[way] / told[way] < 1 for way in changed)


def test_tokens_of_a_step_by_where_in_the_text_it_begins() -> None:
    places, text = module("places"), list(range(11))
    # Steps begin behind 1, 4, 5 and 9 written tokens, in stretches of four: 0–3, 4–7, 4–7, and 9 in
    # the last of two; of the tokens that come next there, 1 and 5 stand in the prompt.
    first = places.by_place(
        [Step(2, 4, 4), Step(0, 4, 4), Step(3, 4, 4), Step(1, 4, 4)], text, [1, 5], 4, 2
    )
    assert first.tolist() == [[3, 1 + 4 + 2, 2, 1], [1, 3, 2, 2]]
    sums = np.array([first, places.by_place([Step(0, 4, 4)], text, [1, 5], 4, 2)])
    assert places.lengths(sums, np.array([0, 1])).tolist() == [4 / 2, 7 / 3, 2 / 3, 1 / 2], (
        "of all steps, not of texts"
    )
    assert np.isnan(places.lengths(sums, np.array([[1, 1], [0, 1]]))[:, 1]).tolist() == [
        True,
        False,
    ]
    sampled = np.array([[1.0, np.nan, 0.5, 0.5], [3.0, 1.0, 0.5, 0.5]])
    shown = places.told(np.array([2.0, np.nan, 0.5, 0.5]), sampled, 4)
    assert shown == {"0–3": "2.00 [1.05, 2.95]", "4–7": ""} | dict.fromkeys(
        places.COPIED, "0.50 [0.50, 0.50]"
    )


def test_a_replayed_table_has_the_counts_of_a_bench_and_no_clock(
    tmp_path: Path, tables: ModuleType
) -> None:
    live, out = tmp_path / "live.json", tmp_path / "result.json"
    costs = tmp_path / "costs.json"
    CostTable((COSTS,)).save(costs)
    asked = ["--suite", "demo", "--pair", "edd chain", "--pair", "edd+suffix yield", "--per-category", "1",
             "--max-new-tokens", "6", "--temperature", "0", "--temperature", "1", "--costs", costs]  # fmt: skip
    assert run(*map(str, asked), "--out", str(live)) == 0
    for _ in range(2):  # the second time along texts from the folder
        with pytest.raises(SystemExit, match="0"):
            main(
                list(
                    map(
                        str,
                        ["replay", *asked, "--recording", tmp_path / "of", "--force", "--out", out],
                    )
                )
            )
        mine, theirs = result_rows.read_result(out), result_rows.read_result(live)
        counts = (
            "steps",
            "new_tokens",
            "acceptance_length",
            "alpha",
            "counted_seconds",
            "counted_speedup",
            "work",
            "τ",
        )
        assert [{c: r[c] for c in counts} for r in mine["rows"]] == [
            {c: r[c] for c in counts} for r in theirs["rows"]
        ]
        same = ("drafter", "starts", "lengths", "reach", "counted_speedup", "interval")
        assert [[b[k] for k in same] for b in mine["oracle"]] == [
            [b[k] for k in same] for b in theirs["oracle"]
        ]
        text = (
            json.dumps(mine["rows"])
            .replace("counted_seconds", "")
            .replace("counted_speedup", "")
            .replace("expected_speedup", "")
        )
        assert not re.search("seconds|speedup", text)
    assert set(mine["rows"][1]["τ"]) == {p.category for p in suites.load("demo").prompts}
    assert "by no clock" in tables.markdown(mine, ("drafter", "τ [95 %]"))
    for bound in mine["oracle"]:
        best = max(
            r["counted_speedup"]
            for r in mine["rows"]
            if r["drafter"] == bound["drafter"] and r["temperature"] == 0
        )
        assert bound["counted_speedup"] >= best, "no policy beats what knows the text"


def test_only_cells_that_learn_write_again_what_is_done() -> None:
    target = tiny_target()
    for name, learns in (("pld", False), ("suffix", True)):
        cell = Cell(name, "chain", 0.0)
        engine = Engine(target, part("drafter", name)().open(target), Chain())
        work = Bench([Cell(None, None, 0.0), cell], {(name, "chain"): engine}, [])
        work.remember([Request([3, 1, 4], 4)])
        assert (cell in work.sessions) is learns


def test_a_resumed_conversation_has_its_caches_in_all_ways() -> None:
    target, cell, plain = tiny_target(), Cell("pld", "chain", 0.0), Cell(None, None, 0.0)
    engine = Engine(target, part("drafter", "pld")().open(target), Chain())
    turns = [Request([3, 1, 4], 4), Request([3, 1, 4, 1, 5, 9, 2], 4, number=QUESTION_STRIDE)]
    other = Request([7, 7], 4, number=1)
    work = Bench([plain, cell], {("pld", "chain"): engine}, [other, *turns])
    work.remember([other, turns[0]])
    assert work.sessions[cell].held is not None
    assert work.plains[plain][0][:3] == (3, 1, 4)
    fresh = Bench([plain, cell], {("pld", "chain"): engine}, [*turns, other])
    fresh.remember(turns)
    assert not fresh.sessions


def test_a_journal_tells_the_prompts_and_the_files_of_drafters(tmp_path: Path) -> None:
    assert hash_prompts([Request([1, 2], 3)]) == hash_prompts([Request([1, 2], 9)])
    assert hash_prompts([Request([1, 2], 3)]) != hash_prompts([Request([1], 3), Request([2], 3)])
    (tmp_path / "weights").write_text("a")
    for text in (str(tmp_path), f"eagle3:checkpoint={tmp_path},dtype=float32+suffix"):
        ((name, size, _),) = files_of(text)
        assert (Path(name).name, size) == ("weights", 1)
    before = files_of(str(tmp_path))
    os.utime(tmp_path / "weights", (1, 1))
    assert files_of(str(tmp_path)) != before
    assert files_of("suffix:memory=100") == []


def test_phases_are_means_like_the_seconds() -> None:
    several = [Stats(seconds=s, phases={"draft": s / 2, "model": s / 2}) for s in (1.0, 3.0)]
    stats = PromptResult([], several).stats
    assert (stats.seconds, stats.phases) == (2.0, {"draft": 1.0, "model": 1.0})


def test_names_of_rows_tell_them_apart() -> None:
    row = {"drafter": "pld", "policy": "chain", "temperature": 0.0, "rule": None}
    assert name_of(row) == "pld chain"
    assert name_of(row | {"rule": "match", "temperature": 1.0}) == "pld chain match T = 1"


def test_a_profile_of_a_simulated_machine_is_refused(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["--suite", str(prompts), "--target", folder, "--machine", "h100-8b"]
    assert run(*ask, "--profile", str(tmp_path / "p.svg"), "--out", str(tmp_path / "r.json")) == 2
    assert "--profile is given with --machine" in capsys.readouterr().err
    assert not list(tmp_path.glob("r.json*"))
    costs = tmp_path / "costs.json"
    Machine.load("h100-8b").table.save(costs)
    ask = ["--suite", str(prompts), "--target", folder, "--costs", str(costs)]
    assert run(*ask, "--profile", str(tmp_path / "p.svg"), "--out", str(tmp_path / "r.json")) == 2
    assert "--costs of a simulated machine" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_a_difference_is_told_with_its_place_and_margin() -> None:
    target = tiny_target()
    request = Request([3, 1, 4], 6)
    plain = Engine(target, PLD().open(target), Chain()).plain([request]).tokens[0]
    wrong = [*plain[:2], (plain[2] + 1) % target.decoder.vocab, *plain[3:]]
    found = first_difference(target, request, wrong, plain)
    logits = target.decoder.model(torch.tensor([[3, 1, 4, *plain[:2]]])).logits[0, -1]
    second, best = logits.sort().values[-2:].tolist()
    assert found.token == 2
    assert found.margin == pytest.approx(best - second, abs=1e-5)


def test_figures_of_other_scripts_become_a_table(tables: ModuleType, tmp_path: Path) -> None:
    rows = [
        {"draft": "guided", "found": {"1.0": 0.123}, "n": 4},
        {"draft": "free", "found": {"1.0": 2.0}, "n": 5},
    ]
    (tmp_path / "some.json").write_text(json.dumps({"provenance": {"seed": 0}, "rows": rows}))
    table = {
        "result": "some",
        "columns": ["draft", "found/1.0", "n"],
        "names": {"n": "count"},
        "words": {"guided": "with a guide"},
    }
    after = tables.block(table, tmp_path)
    assert after.startswith(
        "| draft | found/1.0 | count |\n| --- | --- | --- |\n| with a guide | 0.12 | 4 |\n| free | 2.00 | 5 |\n"
    )
    with pytest.raises(UserError, match="unknown column 'm': known are draft, found, n"):
        tables.block(table | {"columns": ["draft", "m"]}, tmp_path)
