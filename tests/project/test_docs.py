"""What README, CONTRIBUTING and the pages of docs/ show is run as it stands there.

**Python** blocks of a page run one after the other in one namespace, with the demo's folder in the
place of the hub id HUB. Where a block without a language follows, it is what the one before prints.

**Commands**, `draftree …` and `python -m draftree…`, run in the order of their page, in a folder
with small files of the names that they use. For FOLDER stands a small target, or a drafter of the
target that is named; on a page that makes a package, it is installed. Costs are timed in fewer
rounds, training takes one epoch, texts have few tokens, and of the conformance suite every
32nd case runs. Of some lines only the options are
parsed, by the command's own parser: those after `accelerate launch`, those of a block behind `<!--
only parsed -->`, and those that hold one of the words in `<!-- only parsed: WORD, … -->`; behind
these marks are commands for data and machines that are not here, and some that take minutes.
Commands that need an optional package run where it is installed. Of scripts (`python benchmarks/…`,
`python recipes/…`) and of commands inside a sentence it is tested that they and their options
exist.
"""

import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml
from typer.core import TyperGroup

import draftree as public
from draftree.cli.app import app, main
from draftree.registry import names
from draftree.testing import __main__ as testing
from draftree.testing import cases
from draftree.weights import demo_folder
from folders import target_folder
from packages import forget, install

ROOT = Path(__file__).resolve().parents[2]
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
MARK = r"(?:<!-- only parsed(?P<mark>[^>]*?) ?-->\n)?"
BLOCK = re.compile(MARK + r"^ *```(?P<kind>[^\n]*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:accelerate launch .* -m|python -m)? ?draftree\b")
INLINE = re.compile(r"`(draftree [^`]+|python (?:benchmarks|recipes)/[^`]+)`")
PROMPT = '{"prompt": "Tom has 3 apples. How many?", "completion": "He has 3 apples."}\n'
NEEDS = {
    "--plot": "matplotlib",
    "--pictures": "matplotlib",
    "draftree tune": "optuna",
    "draftree report": "jinja2",
}
"""Words of commands, and the optional package without which these are only parsed."""
TOP = {"--help", "--version", "--install-completion", "--show-completion"}
"""Options of the program itself."""
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that a reader may take; the demo stands for it in the tests, which need no network."""
TOKENS = 8
"""The most that a command writes here for a prompt, where it says how many."""
CHATS = "".join(PROMPT.replace("3", str(n)) for n in range(12))


@dataclass
class Page:
    """What is to be run of a page.

    Attributes:
        python: each block with what it prints, None where that is not shown.
        commands: each line, with whether it is only parsed.
        modules: files that are shown as a whole, by name.
        points: entry points that a `pyproject.toml` on it names.
    """

    python: list[tuple[str, str | None]] = field(default_factory=list)
    commands: list[tuple[str, bool]] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    points: dict[str, dict[str, str]] = field(default_factory=dict)


def read(path: Path) -> Page:
    page = Page()
    text = path.read_text("utf-8")
    end = 0
    for block in BLOCK.finditer(text):
        kind, body = block["kind"], block["text"]
        follows = not text[end : block.start()].strip()
        end = block.end()
        if kind.startswith("python"):
            page.python.append((body, None))
            if named := re.search(r'title="(\w+)\.py"', kind):
                page.modules[named[1]] = body
        elif kind == "toml":
            page.points |= tomllib.loads(body)["project"]["entry-points"]
        elif page.python and follows and not COMMAND.match(body):
            page.python[-1] = page.python[-1][0], body
        else:
            mark = (
                None
                if block["mark"] is None
                else [w.strip() for w in block["mark"].lstrip(":").split(",") if w.strip()]
            )
            page.commands += [(line, _only_parsed(line, mark)) for line in lines(body)]
    return page


def _only_parsed(line: str, mark: list[str] | None) -> bool:
    return line.startswith("accelerate") or (
        mark is not None and (not mark or any(word in line for word in mark))
    )


def lines(block: str) -> Iterator[str]:
    """Its commands, each on a line, without comments."""
    for line in re.sub(
        r" *(&& )?\\\n\s*", lambda found: "\n" if found[1] else " ", block
    ).splitlines():
        line = re.sub(r"\s+#.*", "", line.strip())
        if COMMAND.match(line):
            yield line


def parsed(line: str) -> None:
    """Lets the command's own parser read a line; `…` stands for more of the same."""
    words = shlex.split(re.sub(r"\s…(?=\s)", "", line.partition("draftree ")[2]))
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        command = command.commands[words.pop(0)]
    command.make_context("draftree", words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all pages use: a small target with a drafter that was trained for it, and a place where costs are kept."""
    folder = tmp_path_factory.mktemp("home")
    target_folder(folder / "target")
    (folder / "chats.jsonl").write_text(CHATS)
    words = f"train edd --target {folder}/target --data {folder}/chats.jsonl --out {folder}/edd --epochs 1"
    with pytest.raises(SystemExit, match="0"):
        main(words.split())
    return folder


@pytest.fixture(autouse=True)
def sandbox(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with small files of the names that the pages use."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(home / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "pile.jsonl", "text.jsonl"):
        Path(name).write_text(CHATS)
    Path("prompts.jsonl").write_text(PROMPT)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    Path("schema.json").write_text(json.dumps(schema))
    for name in ("src", "corpus"):
        Path(name).mkdir()
        Path(name, "one.py").write_text("def one():\n    return 1\n" * 20)
    yield tmp_path
    forget()


def filled(line: str, home: Path) -> list[str]:
    """A line's words with folders for FOLDER."""
    drafter = (
        home / "edd"
        if "--target FOLDER" in line
        else demo_folder("eagle" if " export " in line else "edd")
    )
    words = shlex.split(line.replace("--target FOLDER", f"--target {home / 'target'}"))
    if "--max-new-tokens" in words:
        at = words.index("--max-new-tokens") + 1
        words[at] = str(min(int(words[at]), TOKENS))
    if " train " in line and "--epochs" not in words:
        words += ["--epochs", "1"]
    return [str(drafter) if word == "FOLDER" else word for word in words]


NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


@pytest.mark.parametrize(
    "name", [n for n, p in zip(NAMES, map(read, PAGES), strict=True) if p.python]
)
def test_the_python_of_a_page_runs(name: str) -> None:
    space = {"__name__": "page"}
    for text, prints in read(ROOT / name).python:
        with redirect_stdout(StringIO()) as out:
            exec(text.replace(HUB, str(demo_folder())), space)
        assert prints is None or out.getvalue() == prints


@pytest.mark.parametrize(
    "name", [n for n, p in zip(NAMES, map(read, PAGES), strict=True) if p.commands]
)
def test_the_commands_of_a_page_run(
    name: str,
    draftree: Callable[..., tuple[int, str, str]],
    sandbox: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = read(ROOT / name)
    if page.points:
        (sandbox / "package").mkdir()
        install(monkeypatch, sandbox / "package", "its-package", page.modules, page.points)
        for module in page.modules:  # not to be found by other tests
            monkeypatch.setitem(sys.modules, module, None)
            monkeypatch.delitem(sys.modules, module)
    for line, parse_only in page.commands:
        parsed(line) if "testing" not in line else None
        long = (
            "draftree tune" in line and "--trials" not in line
        )  # 40 settings, along more prompts than there are here
        if (
            parse_only
            or long
            or any(word in line and find_spec(package) is None for word, package in NEEDS.items())
        ):
            continue
        if line.startswith("python -m draftree.testing"):
            monkeypatch.setattr(sys, "argv", shlex.split(line)[2:])
            monkeypatch.setattr(
                testing, "cases", lambda *given: cases(*given)[::32]
            )  # test_plugins.py runs more
            assert testing.main() == 0, line
        else:
            words = filled(line, home)
            status, _, err = draftree(*words[words.index("draftree") + 1 :])
            allowed = (
                (0, 1) if "doctor" in words else (0,)
            )  # 1: its verdict on a drafter that was trained for a moment is bad
            assert status in allowed, f"{line}: {err}"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_names_is_there(name: str) -> None:
    """Source files, scripts and their options, links to other pages, and commands inside a sentence with their options."""
    path = ROOT / name
    text = path.read_text("utf-8")
    for file in re.findall(
        r"(?<![\w/.])(?:src/draftree|benchmarks|recipes|tests|docs)/[\w/.-]+\.(?:py|sh|json|md|svg)\b",
        text,
    ):
        assert (ROOT / file).is_file() or "NAME" in file, file
    for file in re.findall(
        r"`((?:drafters|policies|acceptors|models|sampling|formats)/\w+(?:/\w+)*\.py)`", text
    ):
        assert (ROOT / "src" / "draftree" / file).is_file(), file
    for script, words in re.findall(r"python ((?:benchmarks|recipes)/\w+\.py)([^`\n]*)", text):
        known = set(
            re.findall(
                r"[\w-]+",
                "".join(p.read_text("utf-8") for p in (ROOT / script).parent.glob("*.py")),
            )
        )
        for option in re.findall(r"--([\w-]+)", words.partition("#")[0]):
            assert {f"--{option}", option.replace("-", "_")} & known, (script, option)
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (path.parent / link).exists(), link
        assert (
            not name.startswith("docs/")
            or (ROOT / "docs") in (path.parent / link).resolve().parents
        ), "the site ends there"
    commands = {word for c in typer.main.get_command(app).commands.values() for word in _options(c)}  # type: ignore[attr-defined]
    for line in INLINE.findall(text):
        if line.startswith("draftree "):
            assert set(re.findall(r"--[\w-]+", line)) <= commands | TOP, line
            assert line.split()[1] in commands | TOP, line


def _options(command: typer.core.TyperCommand | TyperGroup) -> set[str]:
    deeper = (
        [_options(c) for c in command.commands.values()] if isinstance(command, TyperGroup) else []
    )
    return {
        str(command.name),
        *(option for p in command.params for option in p.opts + p.secondary_opts),
    }.union(*deeper)


def test_every_page_is_listed() -> None:
    """In the site's navigation, and in the page that lists all."""
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES[len(FRONT) :]}
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert set(re.findall(r"[\w/-]+\.md", str(nav))) == pages
    decisions = {page for page in pages if "/decisions/0" in page}
    index = (ROOT / "docs" / "index.md").read_text()
    assert set(re.findall(r"\]\(([\w/-]+\.md)\)", index)) == pages - {"index.md"} - decisions
    listed = (ROOT / "docs" / "explanation" / "decisions" / "index.md").read_text()
    assert {
        f"explanation/decisions/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", listed)
    } == decisions


def test_the_public_names_are_listed() -> None:
    told = re.findall(
        r"^::: draftree\.(\w+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE
    )
    assert sorted(told) == sorted([*public.__all__, "testing"])


def script(path: str) -> ModuleType:
    """A file that is no part of a package, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short() -> None:
    text = FRONT[0].read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 150
    assert len(text.split()) <= 1200
    assert max(map(len, lines)) <= 100
    assert any("import draftree" in line for line in lines[:40])
    assert len(FRONT[2].read_text("utf-8").splitlines()) <= 60


@pytest.mark.parametrize("kind", ["drafter", "policy", "acceptor"])
def test_the_readme_names_every_part(kind: str) -> None:
    assert set(names(kind)) <= set(re.findall(r"`([\w+]+)`", FRONT[0].read_text("utf-8")))


def test_the_readme_shows_what_the_demo_prints() -> None:
    """But for figures by the clock."""
    demo = script("benchmarks/demo.py")
    shown = re.findall(r"<!-- demo -->\n```\n(.*?)```", FRONT[0].read_text("utf-8"), re.DOTALL)[
        0
    ].splitlines()
    stats = {
        "steps": 10,
        "new_tokens": 34,
        "acceptance_length": 35 / 10,
        "tokens_per_second": 192.0,
    }
    plain = {"same_output": True, "same_bits": True, "tokens_per_second": 94.0}
    result = {"text": " ".join(shown[:2]), "stats": stats, "baseline": plain, "speedup": 2.04}
    assert demo.report(result) == shown
    del plain["same_bits"]  # float32, in which they are not compared
    assert demo.report(result)[2] == shown[2].removesuffix(", bit for bit")
    assert len(shown) <= 6


def test_the_site_fills_in_options_of_commands_and_parts() -> None:
    hooks = script("tools/site_hooks.py")
    page = hooks.on_page_markdown("a\n\n<!-- commands -->\n\n<!-- parts: policy -->\n")
    assert "<!--" not in page
    assert "### draftree datastore build" in page
    assert "| `--drafter` |" in page
    assert "| `probe` | `0.01` | when drafting" in page
    assert hooks.sentence("# T\n\n| a |\n\nSee [that](x.md). More.") == "See that."


def test_there_is_something_to_run() -> None:
    pages = [read(path) for path in PAGES]
    assert len(pages[0].python) == 2
    assert sum(len(page.commands) for page in pages) > 30
    assert any(prints for page in pages for _, prints in page.python)
