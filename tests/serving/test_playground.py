"""The page of the server in a browser, by keyboard alone; skipped where there is no browser."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import draftree
from draftree.engine import Engine
from selection import one_in
from serving import Running, served

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium, of Debian's package chromium"
)
PICTURES = os.environ.get("DRAFTREE_PICTURES")
"""A folder for screenshots, to be looked at."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return draftree.load("demo", "edd", "eagle2:nodes=8,depth=3")


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    policies, drafters = ("chain",), ("suffix",)
    with served(
        engine,
        "edd",
        "eagle2:nodes=8,depth=3",
        allowed_policies=policies,
        allowed_drafters=drafters,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        found = run.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.faults, page.asked = [], []
    page.on(
        "console",
        lambda message: page.faults.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(server.url)
    page.wait_for_selector("#status:text-is('ready')")
    yield page
    context.close()


def write(page: Any, prompt: str, tokens: str = "24") -> None:
    """Type a prompt and start the writing, by keyboard."""
    page.focus("#tokens")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type(tokens)
    page.focus("#prompt")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type(prompt)
    page.keyboard.press("ControlOrMeta+Enter")


def finished(page: Any) -> None:
    """Wait until nothing is written any more."""
    page.wait_for_selector("#write:not([disabled])", timeout=60_000)


def test_a_text_streams_and_its_trees_are_shown(page: Any, server: Running, engine: Engine) -> None:
    write(page, "How many legs do three cats have?")
    finished(page)
    assert (
        page.inner_text("#text")
        == engine.chat("How many legs do three cats have?", max_new_tokens=24).text
    )
    assert page.locator("#text .drafted").count() > 0
    assert "tokens per pass" in page.inner_text("#figures")
    last = int(page.get_attribute("#slider", "max"))
    assert page.input_value("#slider") == str(last)
    heads = {page.inner_text("#head")}
    page.focus("#slider")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
        heads.add(page.inner_text("#head"))
    assert len(heads) == 4
    assert page.locator("#tree svg g.accepted, #tree svg g.rejected").count() > 0
    chosen = page.locator("#text .chosen")
    assert {span.get_attribute("data-step") for span in chosen.all()} == {str(last - 3)}
    assert page.faults == []
    assert all(url.startswith(server.url) for url in page.asked)


def test_the_policy_changes_by_keyboard_and_what_was_typed_survives(page: Any) -> None:
    page.focus("#policy")
    page.keyboard.press("ArrowDown")
    assert page.input_value("#policy") == "chain"
    write(page, "Count to ten.", "12")
    finished(page)
    page.reload()
    page.wait_for_selector("#status:text-is('ready')")
    assert page.input_value("#policy") == "chain"
    assert page.input_value("#prompt") == "Count to ten."
    assert page.faults == []


def test_everything_is_reached_by_tab(page: Any) -> None:
    write(page, "Count to ten.", "12")
    finished(page)
    page.focus("#prompt")
    reached = set()
    for _ in range(25):
        reached.add(page.evaluate("document.activeElement.id"))
        page.keyboard.press("Tab")
    wanted = {
        "prompt",
        "drafter",
        "policy",
        "temperature",
        "tokens",
        "seed",
        "write",
        "compare",
        "text",
        "slider",
        "tree",
    }
    assert wanted <= reached


def test_plain_decoding_runs_beside_it(page: Any) -> None:
    page.check("#compare")
    write(page, "How many legs do three cats have?")
    finished(page)
    assert page.inner_text("#verdict") == "The same text."
    assert "1.00 tokens per pass" in page.inner_text("#plain-figures")


def test_a_schema_forces_tokens_and_they_are_coloured(page: Any) -> None:
    page.click("#schema-part summary")
    page.fill(
        "#schema",
        '{"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": false}',
    )
    write(page, "Name a city.", "60")
    finished(page)
    assert json.loads(page.inner_text("#text")) == {"city": "Oslo"}
    assert page.locator("#text .forced").count() > 0
    if PICTURES:
        page.screenshot(path=str(Path(PICTURES) / "playground-schema.png"), full_page=True)
    page.fill("#schema", "{")
    write(page, "Name a city.", "60")
    page.wait_for_selector("#problem:not([hidden])")
    assert "JSON schema cannot be read" in page.inner_text("#problem")


def test_stop_ends_the_writing(page: Any, server: Running) -> None:
    write(page, "Tell a long story of a train.", "900")
    page.wait_for_selector("#text span")
    page.focus("#stop")
    page.keyboard.press("Enter")
    finished(page)
    assert page.inner_text("#status") in ("stopped", "done")


def test_a_mistake_is_shown(page: Any) -> None:
    write(page, "Count.", "999999")
    page.wait_for_selector("#problem:not([hidden])")
    assert "allowed are at most" in page.inner_text("#problem")


def test_a_server_that_is_gone_is_named(browser: Any, engine: Engine) -> None:
    context = browser.new_context()
    page = context.new_page()
    with served(engine, "edd", "eagle2:nodes=8,depth=3") as running:
        page.goto(running.url)
        page.wait_for_selector("#status:text-is('ready')")
    write(page, "Count to ten.")
    page.wait_for_selector("#problem:not([hidden])")
    assert "does not answer" in page.inner_text("#problem")
    assert page.input_value("#prompt") == "Count to ten."
    context.close()


@pytest.mark.parametrize(("width", "scheme"), one_in(2, [360, 800, 1200], ["light", "dark"]))
def test_no_width_is_too_small(browser: Any, server: Running, width: int, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#status:text-is('ready')")
    page.check("#compare")
    write(page, "How many legs do three cats have?", "40")
    finished(page)
    page.focus("#slider")
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if PICTURES:
        page.screenshot(
            path=str(Path(PICTURES) / f"playground-{width}-{scheme}.png"), full_page=True
        )
    context.close()
