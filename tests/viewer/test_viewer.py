"""The trees that a run drew: in the terminal, as a picture, as JSON."""

import io
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from draftree import viewer
from draftree.cli import terminal
from draftree.cli.app import main
from draftree.data.prompts import encode
from draftree.request import Emitted
from draftree.target.target import Target
from draftree.tree import Candidates, Tree
from draftree.viewer import html, svg
from draftree.viewer.layout import HEIGHT, layout
from draftree.viewer.terminal import lines
from draftree.viewer.token_text import Spellings, mark_line_ends, show_bytes
from draftree.viewer.trace import Node, Step, Watch
from folders import byte_tokenizer, target_folder

TOKENIZER = byte_tokenizer()
NASTY = [
    "</script>",
    "<b>&amp;\"'",
    "\u2028",
    "\x07",
    "]]>",
    "{{js}}",
    "😀",
    "\ufffe",
    "⟨C3⟩",
    "$1\\1",
]
ABOUT = {"prompt": "<i>&\x00\u2028</script>{{data}}", "policy": "pct"}


def tokens(text: str) -> list[int]:
    return encode(TOKENIZER, text)


def grown(rows: int = 1) -> Tree:
    """Behind every root 'a': b (b: c, d (d: e)), f. The numbers of rows are mixed, as they are where rows grow together."""
    tree = Tree.from_roots(np.arange(rows), np.array(tokens("a") * rows))
    nowhere = Candidates(np.zeros((0, 0), np.int64), np.zeros((0, 0)))
    places = {"a": list(range(rows))}
    for parent, letter, q in [
        ("a", "b", 0.5),
        ("a", "f", 0.25),
        ("b", "c", 0.5),
        ("b", "d", 0.2),
        ("d", "e", 1.0),
    ]:
        behind = np.array(places[parent])
        places[letter] = list(range(len(tree), len(tree) + rows))
        log_q = np.full(rows, np.log(q))
        entropy = np.full(rows, 1.5 if letter == "b" else 0.0)
        ids = np.array(tokens(letter) * rows)
        tree = tree.append(behind, ids, log_q, tree.score[behind] + log_q, nowhere, entropy=entropy)
    return tree


def prefilled(row: int = 0) -> Emitted:
    return Emitted(
        row,
        tokens("a"),
        ["prefill"],
        Tree.from_roots(np.arange(1), np.array(tokens("!"))),
        np.array([], np.int64),
    )


def verified(
    path: list[int], written: str, bonus: bool = True, tree: Tree | None = None, row: int = 0
) -> Emitted:
    origins = ["drafted"] * (len(written) - bonus) + ["bonus"] * bonus
    return Emitted(row, tokens(written), origins, tree or grown(), np.array(path, np.int64))


def watched(*events: Emitted) -> list[Step]:
    watch = Watch(TOKENIZER)
    for event in events:
        watch([event])
    return watch.steps


def drawn(step: Step, width: int = 80) -> list[str]:
    return [line.plain for line in lines(step, width)]


def test_a_tree_in_the_terminal() -> None:
    shown = io.StringIO()
    watch = Watch(TOKENIZER, lambda step: viewer.draw(Console(file=shown, width=80), step))
    watch([prefilled()])
    watch([verified([1, 4], "bdX")])  # the walk a → b → d, and the target chose X in place of e
    # values: b 0.5; c 0.5 · 0.5 = 0.25; d 0.5 · 0.2 = 0.1; e 0.1 · 1; f 0.25
    assert shown.getvalue().splitlines() == [
        "✓ accepted · ⇒ chosen by the target · drafted tokens: q/value in percent",
        "the prompt's forward · 1 token",
        "! ▸ ⇒ a",
        "",
        "step 1 · 3 tokens · 5 nodes, depth 3",
        "a",
        "├ ✓ b 50/50",
        "│ ├ c 50/25",
        "│ └ ✓ d 20/10",
        "│   ├ e 100/10",
        "│   └ ⇒ X",
        "└ f 25/25",
        "",
    ]


def test_accepted_rejected_and_bonus_differ_in_colour_too() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, color_system="standard")
    for step in watched(prefilled(), verified([1, 4], "bdX")):
        viewer.draw(console, step)
    assert "\x1b[1;32m✓ b\x1b[0m" in shown.getvalue()
    assert "\x1b[2mc\x1b[0m" in shown.getvalue()
    assert "\x1b[1m⇒ X\x1b[0m" in shown.getvalue()


def chained(length: int, text: str = "token") -> Step:
    nodes = [
        Node(1, text, i - 1, i, 0.5, 0.5**i, None, int(i > 0), 0 < i <= 2)
        for i in range(length + 1)
    ]
    return Step(1, (1,), ("bonus",), (text,), tuple(nodes), None)


def test_a_chain_goes_on_below_where_the_line_ends() -> None:
    assert drawn(chained(4), 44) == [
        "token ▸ ✓ token 50/50 ▸ ✓ token 50/25",
        "  ▸ token 50/12 ▸ token 50/6",
    ]


def random_step(data: st.DataObject, most: int = 60) -> Step:
    count = data.draw(st.integers(0, most))
    words = st.sampled_from(
        ["a", "␣the", "世界世界", "x" * 60, *(show_bytes(t.encode()) for t in NASTY)]
    )
    nodes = [Node(0, "root", -1, 0, 1.0, 1.0, None, 0, False)]
    last = 0
    for i in range(1, count + 1):
        parent = data.draw(
            st.integers(max(0, i - data.draw(st.sampled_from([1, 2, 5, 60]))), i - 1)
        )
        accepted = parent == last and data.draw(st.booleans())
        last = i if accepted else last
        q = data.draw(st.floats(0, 1))
        depth = nodes[parent].depth + 1
        nodes.append(
            Node(i, data.draw(words), parent, depth, q, q * nodes[parent].value, None, 1, accepted)
        )
    return Step(
        1, (1,), ("bonus",), ("x",), tuple(nodes), data.draw(st.sampled_from([None, (7, "end")]))
    )


@given(st.data(), st.sampled_from([40, 80, 150]))
@settings(max_examples=60, deadline=None)
def test_no_line_is_wider_than_the_terminal(data: st.DataObject, width: int) -> None:
    step = random_step(data)
    found = list(lines(step, width))
    assert max(line.cell_len for line in found) <= width
    assert sum(line.plain.count("✓") for line in found) == step.accepted


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_boxes_do_not_overlap_and_edges_go_to_the_right(data: st.DataObject) -> None:
    step = random_step(data)
    boxes, size = layout(step).boxes, layout(step)
    assert len(boxes) == len(step.items)
    for a, b in combinations(boxes, 2):
        beside = a.x + a.width <= b.x or b.x + b.width <= a.x
        assert beside or abs(a.y - b.y) >= HEIGHT
    for item, box in zip(step.items, boxes, strict=True):
        assert box.x + box.width <= size.width
        assert box.y + HEIGHT <= size.height
        if item.parent >= 0:
            assert boxes[item.parent].x + boxes[item.parent].width < box.x


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_edge_crosses_a_box(data: st.DataObject) -> None:
    """An edge runs along its parent's line, down in a gap between columns, and into its child from the left."""
    step = random_step(data, 30)
    boxes = layout(step).boxes
    for item, box in zip(step.items, boxes, strict=True):
        if item.parent < 0:
            continue
        parent = boxes[item.parent]
        others = [b for b in boxes if b not in (parent, box)]
        bend = float(re.search(r"H([\d.]+)V", svg.edge(item, parent, box))[1])
        for other in others:
            between = other.x < bend and other.x + other.width > parent.x + parent.width
            assert not (other.y == parent.y and between)
            assert not other.x < bend < other.x + other.width


def test_tokens_can_be_read() -> None:
    spellings = Spellings(TOKENIZER)
    heart = tokens("é")
    assert [spellings.text(t) for t in tokens(" \n\t\r\x07a")] == ["␣", "⏎", "⇥", "␍", "\\x07", "a"]
    assert [spellings.text(t) for t in heart] == ["⟨C3⟩", "⟨A9⟩"]
    assert spellings.text(1) == "<eos>"
    assert spellings.text(9999) == "#9999"
    assert show_bytes("\u2028\u200bé \u0301".encode()) == "\\u2028\\u200bé␣\u0301"
    assert show_bytes("\u0301".encode()) == "◌\u0301"
    assert mark_line_ends("a b\n\x00c") == "a b⏎\n\\x00c"


class SentencePiece:
    """What is asked of a tokenizer whose pieces are text, with ▁ for a space and <0xE4> for a byte."""

    all_special_ids = (0,)
    pieces = ("<s>", "▁the", "the", "é", "<0xE4>", "▁")

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.pieces[token] if token < len(self.pieces) else None

    def decode(self, ids: list[int], **_: object) -> str:
        text = "".join(
            "\ufffd" if self.pieces[i].startswith("<0x") else self.pieces[i] for i in ids
        )
        return text.replace("▁", " ").removeprefix(" ")


def test_tokens_of_sentencepiece_keep_their_space() -> None:
    spellings = Spellings(SentencePiece())  # type: ignore[arg-type]
    assert [spellings.text(t) for t in range(7)] == ["<s>", "␣the", "the", "é", "⟨E4⟩", "␣", "#6"]


def test_the_text_is_whole_though_characters_are_spread_over_tokens() -> None:
    ids = tokens("é😀!")
    bare = Tree.from_roots(np.arange(1), np.array(tokens("a")))
    events = [Emitted(0, [t], ["bonus"], bare, np.array([], np.int64)) for t in ids]
    steps = watched(prefilled(), *events, Emitted(0, [1], ["bonus"], bare, np.array([], np.int64)))
    assert "".join(p for s in steps for p in s.pieces) == "aé😀!<eos>"
    assert [len(s.pieces) for s in steps] == [1] * (len(ids) + 2)


def test_a_text_that_ends_within_a_step_has_no_bonus() -> None:
    step = watched(prefilled(), verified([1, 4], "b", bonus=False))[1]
    assert step.bonus is None
    assert step.head == "step 1 · 3 tokens · 5 nodes, depth 3 · the text ends after 1 of them"
    assert drawn(step)[-2:] == ["│ └ ✓ d 20/10 ▸ e 100/10", "└ f 25/25"]


def test_first_of_several_sequences_is_shown() -> None:
    tree = grown(rows=3)
    watch = Watch(TOKENIZER)
    watch([prefilled(), prefilled(1)])
    row_0 = [int(n) for n in tree.of_row(0)]
    watch([verified([row_0[1]], "bX", tree=tree), verified([row_0[1] + 1], "bX", tree=tree, row=1)])
    alone = watched(prefilled(), verified([1], "bX"))
    assert watch.steps == alone


def test_json_has_every_figure() -> None:
    found = watched(prefilled(), verified([1, 4], "bdX"))[1].as_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["bonus"] == {"token": tokens("X")[0], "text": "X"}
    assert (found["step"], found["accepted"], found["origins"]) == (
        1,
        2,
        ["drafted", "drafted", "bonus"],
    )
    b, f = found["nodes"][1:3]
    assert b == {"token": tokens("b")[0], "text": "b", "parent": 0, "depth": 1, "q": 0.5, "value": 0.5, "entropy": 1.5,
                 "rank": 1, "accepted": True}  # fmt: skip
    assert (f["rank"], f["entropy"], f["accepted"]) == (2, None, False)


def nasty_steps() -> list[Step]:
    """Steps whose every token tries to break out of the picture."""
    shown = [show_bytes(t.encode()) for t in NASTY]
    nodes = [Node(0, shown[0], -1, 0, 1.0, 1.0, None, 0, False)]
    nodes += [
        Node(i, t, i - 1, i, 0.001 if i == 4 else 0.5, 0.5**i, 0.1, 1, i < 3)
        for i, t in enumerate(shown[1:], 1)
    ]
    end = (99, "<end>")
    return [
        Step(0, (0,), ("prefill",), (NASTY[0],), tuple(nodes[:1]), end),
        Step(1, (1, 2, 9), ("drafted", "drafted", "bonus"), tuple(NASTY[1:4]), tuple(nodes), end),
    ]


class Strict(HTMLParser):
    """Fails where a tag is not closed by its own; collects text, attributes and what is in scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def test_the_page_is_well_formed_whatever_the_tokens_are() -> None:
    steps = nasty_steps()
    parser = Strict()
    parser.feed(html.render(steps, ABOUT))
    parser.close()
    assert parser.open == []
    assert sum(tag == "script" and k == "type" for tag, k, _ in parser.attributes) == 1
    scripts = [text for tag, text in parser.texts if tag == "script"]
    assert len(scripts) == 2, "a token ended a script"
    data = json.loads(scripts[0])
    assert [s["text"] for s in data["steps"]] == [[i.text for i in s.items] for s in steps]
    spans = "".join(text for tag, text in parser.texts if tag == "span")
    for piece in (p for s in steps for p in s.pieces):
        assert mark_line_ends(piece) in spans
    assert ("p", mark_line_ends(ABOUT["prompt"])) in parser.texts
    assert not [a for a in parser.attributes if a[1] in ("src", "href") or a[1].startswith("on")]


def test_the_page_stays_small() -> None:
    rng = np.random.default_rng(0)
    nodes = [Node(0, "a", -1, 0, 1.0, 1.0, None, 0, False)]
    for i in range(1, 61):
        parent = int(rng.integers(max(0, i - 10), i))
        nodes.append(
            Node(
                i,
                "␣word",
                parent,
                nodes[parent].depth + 1,
                0.123456789,
                0.0123456789,
                1.2345,
                1,
                False,
            )
        )
    steps = [Step(n, (1,), ("bonus",), ("x",), tuple(nodes), (1, "x")) for n in range(129)]
    assert len(html.render(steps, {})) < 2_000_000
    assert len(svg.render(steps, {})) < 1_000_000


def test_the_svg_is_xml_and_holds_every_token() -> None:
    found = ET.fromstring(svg.render(nasty_steps(), ABOUT))
    space = "{http://www.w3.org/2000/svg}"
    tips = [t.text or "" for t in found.iter(f"{space}title")]
    for item in nasty_steps()[1].items:
        assert any(tip.startswith(f"{item.text}: ") for tip in tips)
    accepted = [g for g in found.iter(f"{space}g") if g.get("class") == "accepted"]
    assert len(accepted) == 2
    assert found.find(f"{space}desc") is not None
    width = float(found.get("width"))
    for group in found.iter(f"{space}g"):
        assert float(re.match(r"translate\(([\d.]+)", group.get("transform"))[1]) < width


def test_an_svg_of_many_steps_says_what_is_left_out() -> None:
    first, step = nasty_steps()
    many = [
        first,
        *(
            Step(n, step.tokens, step.origins, step.pieces, step.nodes, step.bonus)
            for n in range(1, 31)
        ),
    ]
    found = svg.render(many, ABOUT)
    assert "the first 24 of 30 steps are drawn" in found
    assert ("step 24 ·" in found, "step 25 ·" in found) == (True, False)
    assert "steps are drawn" not in svg.render(many[:25], ABOUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture
def draftree(capfd: pytest.CaptureFixture[str], folder: str):
    """Runs `generate`: (exit status, standard output, standard error)."""

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["generate", "abcabcab", "--target", folder, "--drafter", "pld", "--policy", "chain:length=3",
                  "--max-new-tokens", "12", *args])  # fmt: skip
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.mark.parametrize("in_terminal", [False, True])
def test_the_command_draws_the_trees_and_then_writes_the_text(
    draftree, monkeypatch, in_terminal: bool
) -> None:
    status, plain, _ = draftree()
    text = plain.rpartition("\n\n")[0]
    if in_terminal:
        monkeypatch.setattr(
            terminal, "output", lambda: Console(force_terminal=True, color_system=None, width=150)
        )
    status, out, err = draftree("--show-trees")
    assert (status, err) == (0, "")
    steps = [int(n) for n in re.findall(r"^step (\d+) ·", out, re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 3
    assert text in out[out.rindex("\nstep ") :]


def test_the_command_puts_trees_into_its_json(draftree) -> None:
    status, out, err = draftree("--show-trees", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    trees = found["trees"]
    assert len(trees) == found["stats"]["steps"]
    assert [token for t in trees for token in t["tokens"]] == found["token_ids"][1:]
    assert sum(len(t["nodes"]) - 1 for t in trees) / len(trees) == pytest.approx(
        found["stats"]["nodes_per_step"]
    )
    assert sum(t["accepted"] + 1 for t in trees) / len(trees) == pytest.approx(
        found["stats"]["acceptance_length"]
    )


@pytest.mark.parametrize("name", ["trees.html", "trees.SVG"])
def test_the_command_saves_a_picture(draftree, tmp_path: Path, name: str) -> None:
    status, out, err = draftree("--trees", str(tmp_path / name))
    assert (status, err) == (0, "")
    assert "step 1 ·" not in out
    saved = (tmp_path / name).read_text(encoding="utf-8")
    assert "step 1 ·" in saved or "step 1 \\u00b7" in saved


@pytest.mark.parametrize(
    ("name", "told"),
    [("trees.png", "known are .html, .svg"), ("trees", "known are .html, .svg"), ("file/trees.svg", "cannot be written"),
     ("trees.htm", "did you mean '.html'"), ("new/trees.html", "there is no folder")],
)  # fmt: skip
def test_a_picture_that_cannot_be_saved_is_refused_before_anything_is_loaded(
    draftree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(Target, "load", loaded)
    (tmp_path / "file").write_text("")
    status, out, err = draftree("--trees", str(tmp_path / name))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert told in err
