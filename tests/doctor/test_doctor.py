"""The doctor: what it measures, and that each fault planted in a trained drafter is named."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree import Costs
from draftree.cli.app import main
from draftree.costs.cost_table import CostTable
from draftree.doctor import block_drafter_faults as doctor_blocks
from draftree.doctor import drafter_report, faults, numerical_noise
from draftree.doctor.drafter_report import (
    FORWARDS,
    NUMBERS,
    TOKENIZER,
    UNTRAINED_CAUSE,
    Report,
    examine,
)
from draftree.doctor.finding import Finding
from draftree.drafters import edd, medusa
from draftree.drafters.dflash import DFlashDrafter
from draftree.drafters.eagle3 import EAGLE3Drafter
from draftree.drafters.edd import EDD, EDDDrafter
from draftree.drafters.glide import GLIDE, GLIDEDrafter
from draftree.drafters.lm import LMDrafter
from draftree.drafters.neural.draft_masks import block_starts, dual_block
from draftree.errors import NotANumber, UserError
from draftree.evaluation import teacher_forcing, time_estimate
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.evaluation.teacher_forcing import ComparedDrafts, drive
from draftree.models.kv_cache import SlotCache
from draftree.registry import build
from draftree.target.target import HiddenStateSpec, Target
from draftree.target.target_names import shipped_drafters
from draftree.testing.fakes import tiny_target
from draftree.weights import demo_folder
from folders import byte_tokenizer, target_folder
from selection import one_in

GOLDENS = Path(__file__).parents[3] / "shared" / "goldens"
traced = pytest.mark.skipif(not GOLDENS.is_dir(), reason="the traces are not here")
FLAT = Costs({1: 0.1}, {1: 1.0})


@pytest.fixture(scope="module")
def demo() -> Target:
    return Target.load("demo")


@pytest.fixture(scope="module")
def texts(demo: Target) -> list[TokenText]:
    return teacher_forcing.suite_answers(demo, count=6, tokens=32)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own checks are made on few tokens; they have tests of their own."""
    monkeypatch.setattr(drafter_report, "COMPARED_TOKENS", 11)
    monkeypatch.setattr(numerical_noise, "NARROW_TOKENS", 2)


def finding(report: Report, name: str) -> Finding:
    return next(f for f in report.findings if f.name == name)


def causes(report: Report) -> list[str]:
    return [s.cause for s in report.suspects]


@pytest.mark.parametrize("name", ["edd", "vdm", "pld"])
def test_a_shipped_drafter_is_healthy(demo: Target, texts: list[TokenText], name: str) -> None:
    report = examine(demo, build("drafter", name).open(demo), texts, FLAT)
    assert report.healthy
    assert report.suspects == ()
    assert finding(report, "agreement").verdict == finding(report, "attention").verdict == "ok"
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["healthy"] is True
    assert sum(d.places for d in report.depths) == sum(len(t.tokens) - 1 - t.start for t in texts)
    tau = 1 + sum(np.cumprod([d.accepted for d in report.depths]))
    assert finding(report, "acceptance length").value == pytest.approx(tau)
    lengths = 1 + np.cumsum(np.cumprod([d.accepted for d in report.depths]))
    assert finding(report, "speed-up").value == pytest.approx(
        max(tau / (1 + n * 0.1) for n, tau in enumerate(lengths, 1))
    )


def test_costs_that_another_program_slowed_are_measured_again(
    demo: Target, texts: list[TokenText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter is good by the least costs; one that is slow in every measurement stays bad, and a busy machine is named."""
    slow = replace(FLAT, draft={1: 1e3 * FLAT.draft[1]})
    drafter, measured = build("drafter", "edd").open(demo), list[Costs]()

    def again(costs: Costs) -> Costs:
        measured.append(costs)
        return costs

    monkeypatch.setattr(
        drafter_report, "describe_contention", lambda: "9.0 programs compete for 2 processors"
    )
    good = finding(examine(demo, drafter, texts[:2], slow, again=lambda: again(FLAT)), "speed-up")
    assert (good.verdict, len(measured)) == ("ok", 1)
    assert "measured 1 more time, and the least count" in good.text
    assert "compete" not in good.text
    bad = finding(examine(demo, drafter, texts[:2], slow, again=lambda: again(slow)), "speed-up")
    assert (bad.verdict, len(measured)) == ("bad", 1 + drafter_report.MAX_REMEASUREMENTS)
    assert (
        "9.0 programs compete for 2 processors: run it again when the machine is idle" in bad.text
    )


@pytest.mark.parametrize("name", one_in(2, [name for _, name in shipped_drafters("demo")]))
def test_every_shipped_drafter_can_be_examined(
    demo: Target, texts: list[TokenText], name: str
) -> None:
    """Nothing ends in an error, and the verdict agrees with what it is made of."""
    report = examine(demo, build("drafter", name).open(demo), texts[:1], FLAT)
    said = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert said["verdict"] == (
        "bad" if report.suspects or "bad" in [f.verdict for f in report.findings] else "ok"
    )
    assert report.suspects == ()


def test_a_hidden_layer_off_by_one_is_named(demo: Target, texts: list[TokenText]) -> None:
    edd = EDD().open(demo)
    report = examine(
        demo, EDDDrafter(replace(edd.knobs, hidden_layer=-5), edd.model, demo, edd._stored), texts
    )
    assert causes(report) == [faults.HIDDEN_LAYER_FAULT]
    assert "hidden state 21 for 20" in report.suspects[0].evidence


@pytest.mark.parametrize("base", [500.0, 1e6])
def test_a_wrong_rope_is_named(
    demo: Target, texts: list[TokenText], tmp_path: Path, base: float
) -> None:
    folder = shutil.copytree(demo_folder("edd"), tmp_path / "edd")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = base
    (folder / "config.json").write_text(json.dumps(config))
    drafter = build("drafter", str(folder)).open(demo)
    before = {
        n: faults.rotary_frequencies(m).clone()
        for n, m in faults.rotary_modules(drafter.model).items()
    }
    report = examine(demo, drafter, texts)
    assert causes(report) == [faults.ROPE]
    assert f"the target's rotary base 10000 instead of {base:.0f}" in report.suspects[0].evidence
    assert finding(report, "rope").verdict == "warn"
    for name, module in faults.rotary_modules(drafter.model).items():  # it was put back
        assert torch.equal(faults.rotary_frequencies(module), before[name])


def leaked(tokens: int, block: int, phase: int, window: int | None = None) -> Tensor:
    """The dual-block mask with the root's own hidden state."""
    mask = dual_block(tokens, block, phase, window)
    mask[torch.arange(tokens), block_starts(tokens, block, phase)] = True
    return mask


def test_a_training_mask_off_by_one_is_named(
    demo: Target, texts: list[TokenText], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edd, "dual_block", leaked)
    assert causes(examine(demo, EDD().open(demo), texts)) == [FORWARDS]


def test_a_decoding_position_off_by_one_is_named(
    demo: Target, texts: list[TokenText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soft prompt's states stand one position late."""
    drafter = EDD().open(demo)
    stock = drafter.decoder.keys_and_values
    monkeypatch.setattr(
        drafter.decoder,
        "keys_and_values",
        lambda x, at: stock(x, at + int(torch.is_inference_mode_enabled())),
    )
    assert causes(examine(demo, drafter, texts))[0] == FORWARDS


def test_states_of_the_wrong_token_are_named(
    demo: Target, texts: list[TokenText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding is handed every token's predecessor's state."""
    drafter = EDD().open(demo)
    encode = drafter._encode

    def late(state: Any, hidden_states: Any) -> Any:
        at = np.maximum(np.arange(len(hidden_states.rows)) - 1, 0)
        first = np.concatenate(([True], hidden_states.rows[1:] != hidden_states.rows[:-1]))
        moved = hidden_states.take(np.where(first, np.arange(len(at)), at))
        return encode(state, replace(hidden_states, hidden=moved.hidden))

    monkeypatch.setattr(drafter, "_encode", late)
    assert causes(examine(demo, drafter, texts))[0] == FORWARDS


def test_weights_that_are_no_numbers_are_named(demo: Target, texts: list[TokenText]) -> None:
    drafter = EDD().open(demo)
    next(drafter.model.parameters()).data[0, 0] = torch.nan
    report = examine(demo, drafter, texts)
    assert causes(report) == [NUMBERS]
    assert report.depths == ()
    json.dumps(report.as_json(), allow_nan=False)


def test_an_untrained_drafter_is_named(demo: Target, texts: list[TokenText]) -> None:
    report = examine(demo, EDD().fresh(demo), texts[:3])
    assert causes(report) == [UNTRAINED_CAUSE]
    assert finding(report, "agreement").verdict == "bad"


def trace(name: str, count: int = 6, tokens: int = 36) -> tuple[Target, list[TokenText]]:
    """A target of a trace, and what it answers to parts of the trace's texts."""
    target = Target.load(str(GOLDENS / name / "target"))
    runs = json.loads((GOLDENS / name / "golden.json").read_text())["settings"][0]["runs"]
    prompts = [r["output"][at : at + 24] for r in runs for at in range(0, 90, 15)]
    return target, teacher_forcing.greedy_answers(target, prompts[:count], tokens)


@traced
@pytest.mark.parametrize("name", ["eagle2", "eagle3", "glide", "medusa1"])
def test_an_official_drafter_is_healthy(name: str) -> None:
    target, found = trace(name, 6, 26)
    report = examine(target, build("drafter", str(GOLDENS / name / "draft")).open(target), found)
    assert report.suspects == ()


MAPS = {
    "ids as they are": lambda ids: ids,
    "no offsets": lambda ids: torch.zeros_like(ids),
    "one too high": lambda ids: ids - torch.arange(len(ids)) + 1,
}


@traced
@pytest.mark.parametrize("case", MAPS)
@pytest.mark.parametrize("marked", [True, False])
def test_a_wrong_vocabulary_map_is_named(case: str, marked: bool) -> None:
    """Where t2d is right it gives the map away; where it is as wrong as d2t, only a measurement does."""
    target, found = trace("eagle3", 4, 21)
    drafter: EAGLE3Drafter = build("drafter", str(GOLDENS / "eagle3" / "draft")).open(target)
    net = drafter.model
    net.d2t = MAPS[case](net.draft_vocabulary.ids)
    if not marked:
        net.t2d = torch.zeros_like(net.t2d)
        net.t2d[net.draft_vocabulary.ids.clamp(max=len(net.t2d) - 1)] = True
    from_roots = net.d2t.clone()
    report = examine(target, drafter, found)
    assert causes(report) == [faults.VOCABULARY]
    assert ("overlap goes from" in report.suspects[0].evidence) is not (
        case == "no offsets" and not marked
    )
    assert torch.equal(net.d2t, from_roots)


def traced_block(count: int = 6) -> tuple[Target, DFlashDrafter, list[TokenText]]:
    """The official DFlash of a trace, and what its target answers to parts of the trace's texts."""
    home = GOLDENS / "blocks" / "dflash"
    target = Target.load(str(home / "target"))
    runs = json.loads((home / "golden.json").read_text())["runs"]
    found = teacher_forcing.greedy_answers(
        target, [r["output"][at : at + 20] for r in runs for at in range(0, 48, 8)][:count], 26
    )
    drafter = build("drafter", str(home / "draft")).open(target)
    assert isinstance(drafter, DFlashDrafter)
    return target, drafter, found


BLOCKS = {
    "mask": (lambda layout: replace(layout, mask=7), doctor_blocks.MASK, "token 319 for 7"),
    "shift": (
        lambda layout: replace(layout, shifted=True),
        doctor_blocks.SHIFT,
        "what comes in its place",
    ),
    "layer": (
        lambda layout: replace(layout, reads=(2, 3)),
        faults.HIDDEN_LAYER_FAULT,
        "hidden state 1 for 2",
    ),
    "healthy": (lambda layout: layout, None, ""),
}


@traced
@pytest.mark.parametrize("case", BLOCKS)
def test_faults_of_a_block_drafter_are_named(case: str) -> None:
    plant, cause, told = BLOCKS[case]
    target, drafter, found = traced_block()
    drafter.model.layout = from_roots = plant(drafter.model.layout)
    report = examine(target, drafter, found)
    assert causes(report)[:1] == ([cause] if cause else [])
    assert told in "".join(s.evidence for s in report.suspects)
    assert drafter.model.layout == from_roots, "it was put back"


@traced
@pytest.mark.parametrize("gone", ["weights", "code"])
def test_a_missing_injection_is_named(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, found = traced_block(4)
    if gone == "weights":
        drafter.model.fc.weight.data.zero_()
        assert causes(examine(target, drafter, found))[0] == doctor_blocks.INJECTION
        return
    stock = SlotCache.insert  # in decoding alone
    monkeypatch.setattr(
        SlotCache,
        "insert",
        lambda cache, layer, rows, slots, k, v: stock(cache, layer, rows, slots, 0 * k, 0 * v),
    )
    assert causes(examine(target, drafter, found))[0] == FORWARDS


@traced
def test_a_hidden_layer_of_medusa_off_by_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medusa, "LAST", -2)
    monkeypatch.setattr(medusa.MedusaDrafter, "needs", HiddenStateSpec(hidden=(-2,)))
    target, found = trace("medusa1", 6)
    report = examine(
        target, build("drafter", str(GOLDENS / "medusa1" / "draft")).open(target), found
    )
    assert causes(report) == [faults.HIDDEN_LAYER_FAULT]
    assert "hidden state 8 for 7" in report.suspects[0].evidence


@traced
def test_a_wrong_rope_of_eagle_is_named(tmp_path: Path) -> None:
    """Its rotary frequencies are no buffers of its network."""
    target, found = trace("eagle2", 14, 64)
    folder = shutil.copytree(
        GOLDENS / "eagle2" / "draft", tmp_path / "draft", copy_function=shutil.copyfile
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").chmod(0o600)
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 200.0}))
    assert causes(examine(target, build("drafter", str(folder)).open(target), found)) == [
        faults.ROPE
    ]


@traced
def test_keys_and_values_of_the_wrong_layer_are_named() -> None:
    target, found = trace("glide", 12)
    drafter: GLIDEDrafter = build("drafter", str(GOLDENS / "glide" / "draft")).open(target)
    drafter._layers = tuple(layer - 1 for layer in drafter._layers)
    assert faults.KV in causes(examine(target, drafter, found))


def test_another_tokenizer_is_named(tmp_path: Path) -> None:
    target = Target.load(str(target_folder(tmp_path / "target")))
    same = LMDrafter(Target.load(str(target_folder(tmp_path / "same"))))
    assert list(drafter_report._tokenizer(target, same)) == []
    raw = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    raw["model"]["vocab"]["a"], raw["model"]["vocab"]["b"] = (
        raw["model"]["vocab"]["b"],
        raw["model"]["vocab"]["a"],
    )
    other = LMDrafter(Target.load(str(target_folder(tmp_path / "other"))))
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(raw))
    assert [s.cause for s in drafter_report._tokenizer(target, other)] == [TOKENIZER]


@pytest.mark.parametrize("name", ["edd", "vdm"])
def test_a_recording_drives_as_the_target_does(
    demo: Target, texts: list[TokenText], name: str
) -> None:
    drafter = build("drafter", name).open(demo)
    real = drive(demo, drafter, texts[:3])
    replayed = drive(Recording.of(demo, texts[:3], drafter.needs.hidden), drafter, texts[:3])
    for field in ComparedDrafts.__dataclass_fields__:
        assert np.allclose(getattr(real, field), getattr(replayed, field), atol=1e-4), field


def test_places_are_counted_by_chains() -> None:
    """Two blocks: one accepts a draft and fails at the second, the other leaves the text behind its first."""
    depth, root = np.array([1, 2, 3, 1, 2]), np.array([7, 7, 7, 9, 9])
    agree, followed = np.array([1, 0, 1, 1, 1], bool), np.array([1, 1, 1, 0, 1], bool)
    real, yes = np.zeros(5), np.ones(5, bool)
    places = ComparedDrafts(
        np.zeros(5, np.int64), root, depth, yes, agree, real, real, real, yes, followed
    )
    assert places.rates.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("tokens", [4, 5])
def test_texts_without_a_second_block_are_not_compared(demo: Target, tokens: int) -> None:
    drafter = EDD().open(demo)
    assert isinstance(drafter, EDDDrafter)
    short, long = (TokenText(np.arange(3, 3 + n), 2) for n in (tokens, 6))
    assert drafter_report._compare_forwards(demo, drafter, [short]) is None
    found = drafter_report._compare_forwards(demo, drafter, [short, long])
    assert found is not None
    assert found.verdict == "ok"
    assert finding(examine(demo, drafter, [short]), "agreement")


def test_the_calibration_error_is_the_gap_in_each_bin() -> None:
    confidence, right = np.array([0.12, 0.18, 0.95, 0.91]), np.array([0, 1, 1, 1], bool)
    assert drafter_report.calibration_error(confidence, right) == pytest.approx(
        (abs(0.30 - 1) + abs(1.86 - 2)) / 4
    )
    assert drafter_report.calibration_error(np.array([1.0]), np.array([True])) == 0


def test_a_margin_below_the_noise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens with the same row in the LM head are as good as each other, whatever the width of a pass."""
    monkeypatch.setattr(numerical_noise, "NARROW_TOKENS", 8)
    target = tiny_target()
    text = [TokenText(np.arange(3, 15), 4)]
    changes, margins = numerical_noise.narrow_and_wide(target, text)
    assert len(margins) == 8
    assert margins.min() > changes.max()
    assert drafter_report._noise(target, text).verdict == "ok"
    with monkeypatch.context() as same:
        same.setattr(
            drafter_report, "narrow_and_wide", lambda *_: (np.zeros(3), np.array([0.0, 1.0, 2.0]))
        )
        assert (found := drafter_report._noise(target, text)).verdict == "ok"
        assert "no choice can turn" in found.text
    with torch.no_grad():
        head = target.decoder.model.get_output_embeddings().weight
        head[1::2] = head[:-1:2]
        head[-1] = head[-2]
    found = drafter_report._noise(target, text)
    assert found.verdict == "warn"
    assert "at 8 of 8 tokens" in found.text


def test_a_planted_dead_layer_is_named() -> None:
    """Whoever reads its keys and values, or its output, is told; not who reads what the target's own head reads."""
    target, text = tiny_target(), [TokenText(np.arange(3, 35), 4)]
    said = lambda needs: drafter_report._attention(target, needs, text)[1]
    everything = HiddenStateSpec(hidden=(1, 2, 3), kv=(0, 1, 2, -1))
    assert said(everything).verdict == "ok"
    target.decoder.model.get_parameter("model.layers.1.self_attn.o_proj.weight").data.mul_(0.01)
    layers, found = drafter_report._attention(target, everything, text)
    assert [layer.dead for layer in layers] == [False, True, False, False]
    assert (found.verdict, found.value) == ("warn", layers[1].output)
    assert said(HiddenStateSpec(kv=(1,))).text.startswith(
        "of the residual stream before it, attention of layer 1, whose keys and values"
    )
    assert "layer 1, whose output it reads" in said(HiddenStateSpec(hidden=(2,))).text
    assert (
        said(HiddenStateSpec(hidden=(-3,))).verdict
        == said(HiddenStateSpec(kv=(-3,))).verdict
        == "warn"
    )
    for alive in (
        HiddenStateSpec(),
        HiddenStateSpec(hidden=(0, 1, 3)),
        HiddenStateSpec(hidden=(-1, 4)),
        HiddenStateSpec(kv=(0, 2, 3)),
    ):
        assert said(alive).verdict == "ok"
    target.decoder.model.get_parameter("model.layers.3.self_attn.o_proj.weight").data.mul_(0.01)
    assert said(HiddenStateSpec(hidden=(-1,))).verdict == "ok"
    assert said(HiddenStateSpec(kv=(-1,))).verdict == "warn"


def test_the_inserted_layers_of_the_demo_are_dead(demo: Target, texts: list[TokenText]) -> None:
    """It was grown: every other layer was inserted. What `auto` means there is what the papers' reasons ask for."""
    layers, found = drafter_report._attention(demo, GLIDE(kv_layer=23).fresh(demo).needs, texts)
    assert found.verdict == "warn"
    assert [i for i, layer in enumerate(layers) if layer.dead] == list(range(1, 24, 2))
    assert GLIDE().busiest(layers) == 20
    assert EDD.living(layers) == demo.decoder.hidden_index(EDD().hidden_layer) == 21


@pytest.fixture
def doctored(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a command: (exit status, standard output, standard error)."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    CostTable((FLAT,)).save(tmp_path / "costs.json")
    monkeypatch.setattr(
        time_estimate, "batched_seconds", lambda *_, **__: 0.0
    )  # a busy machine would be told to wait

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--costs", str(tmp_path / "costs.json"), *args])
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_the_command_shows_a_screen(doctored) -> None:
    status, out, err = doctored("--drafter", "pld")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].startswith("healthy")
    for word in (
        "agreement",
        "speed-up",
        "margin / noise",
        "by depth",
        "attention of the target's layers",
    ):
        assert word in out


def test_the_command_prints_one_json_object(doctored, tmp_path: Path) -> None:
    data = tmp_path / "some.jsonl"
    data.write_text(
        "".join(
            json.dumps({"text": f"{n} and {n} make {2 * n}, or so I was told. " * 3}) + "\n"
            for n in range(4)
        )
    )
    folder = str(target_folder(tmp_path / "target"))
    status, out, err = doctored(
        "--target", folder, "--drafter", "pld", "--data", str(data), "--json"
    )
    found = json.loads(out)
    assert (status, err) == (1, ""), "a lookup is of no use to a target of random weights"
    assert (found["healthy"], found["verdict"]) == (False, "bad")
    assert set(found) == {
        "target",
        "drafter",
        "texts",
        "tokens",
        "findings",
        "depths",
        "layers",
        "suspects",
        "healthy",
        "verdict",
    }
    assert len(found["layers"]) == 4
    assert set(found["layers"][0]) == {"output", "entropy"}
    assert (found["texts"], found["tokens"]) == (4, 4 * teacher_forcing.DEFAULT_TOKENS)


def test_drafter_of_another_target_is_a_users_mistake(doctored, tmp_path: Path) -> None:
    folder = str(target_folder(tmp_path / "target"))
    status, out, err = doctored("--target", folder, "--drafter", str(demo_folder("edd")))
    assert (status, out) == (2, "")
    assert "vocab_size" in err
    assert err.count("\n") == 1


def test_data_without_text_is_a_mistake(demo: Target, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a b")
    with pytest.raises(UserError, match="holds no text"):
        teacher_forcing.read_texts(demo, tmp_path / "short.txt")


def test_a_target_that_is_no_number_is_told(texts: Sequence[TokenText]) -> None:
    target = tiny_target()
    target.decoder.model.get_output_embeddings().weight.data[5] = torch.nan
    with pytest.raises(NotANumber):
        drive(target, build("drafter", "pld").open(target), [TokenText(np.arange(3, 15), 4)])
