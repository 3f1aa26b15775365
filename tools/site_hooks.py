"""Fill the pages of the site that describe the program itself, and write llms.txt; called by mkdocs.

`<!-- commands -->` becomes the options of every command, `<!-- parts: KIND -->` the options of every drafter, policy or
acceptor. So these pages are never out of date, and need no copy in the repository.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from draftree import registry
from draftree.cli.app import app

PARTS = re.compile(r"<!-- parts: (\w+) -->")
COMMANDS = "<!-- commands -->"
SUMMARY = "draftree: lossless speculative decoding with draft trees, for stock Hugging Face models."


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n\n".join(commands()))
    return PARTS.sub(lambda found: "\n\n".join(parts(found[1])), markdown)


def commands() -> Iterator[str]:
    """Yield the options of every command as Markdown."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        below = command.commands if isinstance(command, TyperGroup) else {}
        for title, one in (
            {f"{name} {key}": c for key, c in below.items()} or {name: command}
        ).items():
            yield f"### draftree {title}\n\n{inspect.cleandoc(one.help or '')}"
            yield table(
                ("option", "default", "meaning"), [row(p) for p in one.params if p.name != "help"]
            )


def row(option: Any) -> tuple[str, str, str]:
    """Return the line of an option: its names, its default and its help."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = None if option.required or callable(option.default) else option.default
    return names, shown(default), getattr(option, "help", "") or ""


def shown(default: Any) -> str:
    """Return a default as Markdown; nothing for an empty one."""
    return "" if default is None or default in ("", (), []) else f"`{default}`"


def parts(kind: str) -> Iterator[str]:
    """Yield the options of every part of a kind as Markdown."""
    for name in registry.own_names(kind):
        yield f"### {name}\n\n{registry.summary(kind, name)}"
        described = attributes(registry.part(kind, name))
        options = [
            (f"`{k}`", shown(v), described.get(k, ""))
            for k, v in registry.knobs(kind, name).items()
        ]
        yield table(("option", "default", "meaning"), options) if options else "No options."


def attributes(of: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say of its fields."""
    found: dict[str, str] = {}
    for base in reversed(of.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in rows]
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *cells)
    )


def on_nav(nav: Any, **_: Any) -> None:
    """Remember the pages for llms.txt."""
    PAGES[:] = nav.pages


PAGES: list[Any] = []


def on_post_build(config: Any, **_: Any) -> None:
    """Write llms.txt: a list of all pages with a sentence each, for readers that are programs."""
    lines = ["# draftree", "", f"> {SUMMARY}", "", "## Pages", ""]
    for page in PAGES:
        source = Path(page.file.abs_src_path).read_text("utf-8")
        lines.append(f"- [{page.title}]({page.file.dest_uri}): {sentence(source)}")
    Path(config["site_dir"], "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def sentence(source: str) -> str:
    """Return the first sentence of a page's text."""
    text = re.sub(r"<!--.*?-->|```.*?```", "", source, flags=re.DOTALL)
    plain = [
        block
        for block in re.split(r"\n\s*\n", text)
        if block.strip() and block.lstrip()[0] not in "#|!-:>"
    ]
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join((plain or [""])[0].split()))
    return re.split(r"(?<=[.:?])\s", words)[0].rstrip(":") if words else ""
