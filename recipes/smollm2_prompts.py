"""Make the prompts that SmolLM2's drafters are trained on: of several kinds, and with none of an evaluation.

    pip install countryinfo==1.0.1 mendeleev==1.3.0
    python recipes/smollm2_prompts.py --gsm8k gsm8k_train.jsonl --exclude spec_bench.jsonl --out smollm2_prompts.jsonl.gz

Kinds: `math` (GSM8K's training questions, by their number in the file), `code` (about functions of
packages at hand), `summary` and `rag` (of passages: documentation, facts about countries and
elements, and what the target itself writes), `translation`, `chat` (two turns, by category),
`question` (short ones), and `passage`: what the target writes for the second and third. A row is

    {"kind", "turns": [text, …]} or {"kind": "math", "gsm8k": number}, with "held": true for those that are measured on,
    "id" of a passage, and "passages": [id, …] whose texts take the places {0}, {1}, … in the first turn.

The same packages and seed give the same rows. Texts of packages are under free licences
(`PACKAGES`; countryinfo and mendeleev are MIT's); words and templates are in `smollm2_words.toml`.
"""

import argparse
import ast
import gzip
import importlib.util
import json
import pathlib
import re
import sqlite3
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from draftree.data.decontamination import Excluded, normalise_words

WORDS = pathlib.Path(__file__).with_name("smollm2_words.toml")
PACKAGES = {
    "PSF-2.0": """
        asyncio collections concurrent ctypes dbm distutils email encodings html http importlib json logging
        multiprocessing sqlite3 tkinter unittest urllib wsgiref xml argparse ast bisect calendar cmd configparser
        copy csv dataclasses datetime decimal difflib dis doctest enum filecmp fractions functools glob graphlib
        gzip heapq inspect ipaddress locale mailbox mimetypes numbers optparse os pathlib pdb pickle pickletools
        platform plistlib pprint profile queue random sched secrets selectors shelve shlex shutil smtplib socket
        socketserver statistics string subprocess tarfile tempfile textwrap threading timeit tokenize trace
        traceback turtle typing uuid warnings weakref zipfile zoneinfo""",
    "BSD-3-Clause": """
        numpy scipy sympy networkx mpmath jinja2 httpx starlette click torch psutil""",
    "MIT": """
        rich pydantic fastapi sqlalchemy alembic optuna anyio pluggy h11 tqdm""",
    "Apache-2.0": """
        transformers requests accelerate safetensors huggingface_hub prometheus_client""",
}
"""Whose functions are asked about and whose documentation is read, by licence."""
EACH = 300
"""Functions and passages of one package at most, evenly taken from all of it."""
LISTS = re.compile(r"(Args|Parameters|Returns|Arguments)\b")
MOST = 2600
"""Characters of a summary's or question's passages at most, about as in Spec-Bench."""
HELD = 30
"""Prompts of each kind that are measured on instead of learnt."""
COUNTS = {
    "code": 2600,
    "summary": 2000,
    "rag": 2000,
    "translation": 2600,
    "chat": 3200,
    "question": 1500,
    "passage": 1900,
}
OWN = 120
"""Passages that only prompts which are measured on refer to; they are not learnt."""
Row = dict[str, Any]


class Filler:
    """Fills templates with words.

    Args:
        words: of `smollm2_words.toml`.
        random: draws them.
    """

    def __init__(self, words: dict[str, Any], random: np.random.Generator) -> None:
        self.words, self.random = words, random
        plain = {
            "topic": "topics",
            "place": "places",
            "person": "people",
            "role": "roles",
            "style": "styles",
            "product": "products",
            "name": "names",
            "event": "events",
        }
        self.lists: dict[str, list[str]] = {
            one: words[many] for one, many in plain.items()
        } | words["extra"]

    def one(self, values: Sequence[Any]) -> Any:
        """One of some values."""
        return values[int(self.random.integers(len(values)))]

    def __call__(
        self, *texts: str, lists: Mapping[str, list[str]] = MappingProxyType({}), **given: str
    ) -> list[str]:
        """Texts with the same word in the same braces; {name2} is another one than {name}."""
        chosen = dict(given)

        def word(match: re.Match[str]) -> str:
            key = match[1]
            if key not in chosen:
                chosen[key] = self._word(key, lists)
            return chosen[key]

        found = list(texts)
        while any(
            re.search(r"\{[a-z]+\d?\}", text) for text in found
        ):  # what is filled in may have braces itself
            found = [re.sub(r"\{([a-z]+\d?)\}", word, text) for text in found]
        return [" ".join(text.split(" ")).strip() for text in found]

    def _word(self, key: str, lists: Mapping[str, list[str]]) -> str:
        kind = key.rstrip("0123456789")
        numbers = {"number": (12, 95), "small": (2, 12), "hour": (6, 22)}
        if kind in numbers:
            return str(int(self.random.integers(*numbers[kind])))
        return str(self.one({**self.lists, **lists}[kind]))


def sources(names: Sequence[str]) -> Iterator[pathlib.Path]:
    """The source files of packages that are at hand, in their order."""
    for name in names:
        found = importlib.util.find_spec(name)
        folders = list((found and found.submodule_search_locations) or ())
        files = (
            sorted(pathlib.Path(folders[0]).rglob("*.py"))
            if folders
            else [pathlib.Path(found.origin)]
            if found and found.origin
            else []
        )
        yield from (
            f for f in files if f.suffix == ".py" and "test" not in str(f).lower() and f.is_file()
        )


def documented(
    files: Sequence[pathlib.Path],
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Functions (signature, docstring, source) of files, and passages (subject, text) of their documentation."""
    functions, passages = list[tuple[str, str, str]](), list[tuple[str, str]]()
    for path in files:
        text = path.read_text("utf-8", errors="replace")
        lines = text.splitlines()
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or not (
                told := ast.get_docstring(node)
            ):
                continue
            name = path.stem if isinstance(node, ast.Module) else node.name
            if (prose := passage(told)) and not name.startswith("_"):
                passages.append((name.replace("_", " "), prose))
            if (
                isinstance(node, ast.FunctionDef)
                and not name.startswith("_")
                and 30 < len(told) < 600
            ):
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                signature = f"{name}({ast.unparse(node.args)})"
                if (
                    100 < len(source) < 1500
                    and len(signature) < 120
                    and not LISTS.match(first(told))
                ):
                    functions.append((signature, told, source))
    return functions, passages


def passage(told: str) -> str:
    """The prose of a docstring, without its lists of parameters and its examples; nothing where that is short."""
    prose = re.split(
        r"\n\s*(?:Parameters|Args|Arguments|Returns|Examples?|See Also|References|Notes)\b[^\n]*:?\s*\n",
        told,
    )[0]
    lines = [
        line
        for line in prose.splitlines()
        if not line.lstrip().startswith((">>>", "...", "..", ":", "@", "-", "="))
    ]
    text = re.sub(r"[ \t]+", " ", re.sub(r"\n\s*\n\s*", "\n\n", "\n".join(lines))).strip()
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    letters = sum(c.isalpha() or c in " ,." for c in text)
    return (
        text
        if 350 <= len(text) <= 4000 and letters > 0.94 * len(text) and "Tensor" not in text
        else ""
    )


def listed(fact: Row, key: str) -> str:
    """Some values of a country, in a row."""
    return ", ".join(fact.get(key) or ["unknown"])


def countries() -> Iterator[tuple[str, str]]:
    """Passages about countries, of countryinfo's facts."""
    found = importlib.util.find_spec("countryinfo")
    folder = (
        pathlib.Path(next(iter((found and found.submodule_search_locations) or ["missing"])))
        / "data"
    )
    for path in sorted(folder.glob("*.json")):
        fact = json.loads(path.read_text("utf-8"))
        name, region = fact.get("name"), fact.get("subregion") or fact.get("region")
        if not name or not region or not fact.get("capital"):
            continue
        text = [f"{name} is a country in {region}. Its capital is {fact['capital']}."]
        if fact.get("area") and fact.get("population"):
            text.append(
                f"It has an area of {fact['area']:,} square kilometres and a population of {fact['population']:,}."
            )
        if fact.get("borders"):
            text.append(
                f"It has borders with {len(fact['borders'])} other countries ({', '.join(fact['borders'])})."
            )
        text.append(
            f"People from there are called {fact.get('demonym') or name}, and the currency is {listed(fact, 'currencies')}."
        )
        text.append(
            f"The languages have the codes {listed(fact, 'languages')}; the telephone code is {listed(fact, 'callingCodes')}."
        )
        provinces = [p for p in fact.get("provinces") or () if isinstance(p, str)][:12]
        if provinces:
            text.append(f"Among its provinces are {', '.join(provinces)}.")
        yield name, " ".join(text)


def elements() -> Iterator[tuple[str, str]]:
    """Passages about chemical elements, of mendeleev's table."""
    found = importlib.util.find_spec("mendeleev")
    path = (
        pathlib.Path(next(iter((found and found.submodule_search_locations) or ["missing"])))
        / "elements.db"
    )
    if path.is_file():
        rows = sqlite3.connect(path).execute(
            "select name, symbol, atomic_number, description, discoverers, discovery_year, discovery_location, name_origin, "
            "sources, uses from elements order by atomic_number"
        )
        for name, symbol, number, told, who, year, where, origin, source, uses in rows:
            text = [
                f"{name} ({symbol}) is the chemical element with the atomic number {number}.",
                told or "",
            ]
            text.append(
                f"It was discovered by {who}{f' in {year}' if year else ''}{f' in {where}' if where else ''}."
                if who
                else ""
            )
            text.append(f"The name comes from {origin}" if origin else "")
            yield name, " ".join(part for part in [*text, source or "", uses or ""] if part)


CODE: tuple[Callable[[Filler, str, str, str], list[str]], ...] = (
    lambda f, name, told, source: [f"Write a Python function `{name}`. {first(told)}"],
    lambda f, name, told, source: [
        f"Write a Python function with this docstring:\n\n{told}",
        "Add types and a test.",
    ],
    lambda f, name, told, source: [f"Explain what this code does:\n\n```python\n{source}\n```"],
    lambda f, name, told, source: [
        f"```python\n{source}\n```\n\nHow can this function be improved?"
    ],
    lambda f, name, told, source: [
        f"Write unit tests for this function:\n\n```python\n{source}\n```"
    ],
    lambda f, name, told, source: [
        f'Complete this Python function:\n\ndef {name}:\n    """{first(told)}"""'
    ],
    lambda f, name, told, source: [
        f"Translate this to {f.one(f.lists['language'][1:])}:\n\n```python\n{source}\n```"
    ],
    lambda f, name, told, source: f(*f.one(f.words["chat"]["coding"])),
)


def first(told: str) -> str:
    """The first sentence of a docstring."""
    return re.split(r"(?<=[.!?])\s|\n\s*\n", " ".join(told.split("\n\n")[0].split()))[0]


def code(fill: Filler, functions: Sequence[tuple[str, str, str]]) -> Row:
    """A question about code."""
    return {"turns": fill.one(CODE)(fill, *fill.one(functions))}


def translation(fill: Filler) -> Row:
    """A sentence to be translated, most often from German to English."""
    if fill.random.random() < 0.75:
        german = fill.words["german"]
        plain = (
            fill.one(german["other"])
            if fill.random.random() < 0.35
            else f"{fill.one(german['who'])} {fill.one(german['does'])}."
        )
        (text,) = fill(f"{plain} {fill.one(german['more'])}", lists=german)
        return {
            "turns": [
                fill.one(
                    [
                        "Translate German to English: {0}",
                        "Translate German to English: {0}",
                        "Translate into English: {0}",
                    ]
                ).format(text)
            ]
        }
    english = fill.words["english"]
    (text,) = fill(f"{fill.one(english['who'])} {fill.one(english['does'])}.", lists=english)
    return {"turns": [f"Translate English to {fill.one(english['to'])}: {text}"]}


def read(
    fill: Filler, kind: str, passages: Sequence[tuple[str, str]], written: Sequence[tuple[int, str]]
) -> Row:
    """A summary of passages, or a question about them; three fifths of these are the target's own, yet to be written."""
    asks, own = fill.words["asks"], fill.random.random() < 0.6
    count = (
        int(fill.random.integers(1, 3)) if kind == "summary" else int(fill.random.integers(2, 5))
    )
    if own:
        chosen = [fill.one(written) for _ in range(count)]
        text, subjects = (
            "\n\n".join(f"{{{i}}}" for i in range(count)),
            [subject for _, subject in chosen],
        )
    else:
        some = [fill.one(passages) for _ in range(2 * count)]
        text, subjects = (
            "\n\n".join(told for _, told in some)[: int(fill.random.integers(700, MOST))],
            [some[0][0]],
        )
        text = text[: text.rfind(".") + 1] or text
    (question,) = fill(fill.one(asks["about"]), subject=fill.one(subjects))
    row: Row = {
        "turns": [fill.one(asks[kind]).replace("{question}", question).replace("{text}", text)]
    }
    return row | ({"passages": [number for number, _ in chosen]} if own else {})


def chat(fill: Filler) -> Row:
    """Two turns of one of the categories."""
    category = fill.one(list(fill.words["chat"]))
    return {"category": category, "turns": fill(*fill.one(fill.words["chat"][category]))}


def asked_of(
    kind: str,
    words: dict[str, Any],
    seed: int,
    excluded: Excluded,
    make: Callable[[Filler], Row],
    count: int,
) -> list[Row]:
    """Rows of a kind, each another one and none of them excluded; the first ones are measured on."""
    fill = Filler(words, np.random.default_rng([seed, *kind.encode()]))
    found = list[Row]()
    seen = set[str]()
    for _ in range(20 * count):
        row = make(fill)
        text = normalise_words(" ".join(row["turns"]) + str(row.get("passages", "")))
        if text and text not in seen and not any(map(excluded.holds, row["turns"])):
            seen.add(text)
            found.append({"kind": kind} | row)
        if len(found) == count:
            break
    return found


def prompts(
    gsm8k: Sequence[str], excluded: Excluded, seed: int = 0, share: float = 1.0
) -> list[Row]:
    """All rows, in an order in which every beginning is a fair sample.

    Args:
        gsm8k: the training questions.
        excluded: prompts that must not come.
        seed: of all that is drawn.
        share: of the counts, for tests.
    """
    words = tomllib.loads(WORDS.read_text("utf-8"))
    functions, told = list[tuple[str, str, str]](), list[tuple[str, str]]()
    for name in (name for names in PACKAGES.values() for name in names.split()):
        some, texts = documented(list(sources([name])))
        functions += some[:: -(-len(some) // EACH) or 1]
        told += texts[:: -(-len(texts) // EACH) or 1]
    facts = [*countries(), *elements()]
    passages = [
        *told,
        *facts * max(len(told) // max(3 * len(facts), 1), 1),
    ]  # a fourth of them are facts
    count = {kind: max(int(share * number), 4) for kind, number in COUNTS.items()}
    held = max(int(share * HELD), 1)

    def subject(fill: Filler) -> Row:
        topic, event = fill.one(fill.lists["topic"]), fill.one(fill.lists["event"])
        ask = fill.one(fill.words["asks"]["passage"])
        return {
            "turns": fill(ask, topic=topic, event=event),
            "subject": topic if "{topic}" in ask else event,
        }

    written = asked_of("passage", words, seed, excluded, subject, count["passage"])
    own = max(int(share * OWN), 1)
    numbered = [(i, row.pop("subject")) for i, row in enumerate(written)]
    found = [row | {"id": i} | ({"held": True} if i < own else {}) for i, row in enumerate(written)]
    for kind in ("summary", "rag"):
        for part, of, number in (
            ("held", numbered[:own], held),
            ("", numbered[own:], count[kind] - held),
        ):
            made = asked_of(
                kind,
                words,
                seed + (part == "held"),
                excluded,
                partial(read, kind=kind, passages=passages, written=of),
                number,
            )
            found += [row | ({"held": True} if part else {}) for row in made]
    makers: dict[str, Callable[[Filler], Row]] = {
        "code": lambda fill: code(fill, functions),
        "translation": translation,
        "chat": chat,
        "question": lambda fill: {"turns": fill(fill.one(fill.words["asks"]["question"]))},
    }
    for kind, make in makers.items():
        rows = asked_of(kind, words, seed, excluded, make, count[kind])
        found += [row | ({"held": True} if i < held else {}) for i, row in enumerate(rows)]
    order = np.random.default_rng([seed, 1])
    maths = [i for i in order.permutation(len(gsm8k)).tolist() if not excluded.holds(gsm8k[i])]
    maths = maths[: max(int(share * len(maths)), 4)]
    found += [
        {"kind": "math", "gsm8k": i} | ({"held": True} if n < held else {})
        for n, i in enumerate(maths)
    ]
    return [found[i] for i in order.permutation(len(found))]


def main() -> None:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ap.add_argument("--gsm8k", type=pathlib.Path, required=True)
    ap.add_argument("--exclude", type=pathlib.Path, action="append", default=[])
    ap.add_argument("--out", type=pathlib.Path, required=True)
    args = ap.parse_args()
    questions = [json.loads(line)["question"] for line in args.gsm8k.open()]
    rows = prompts(questions, Excluded.of(args.exclude))
    with args.out.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    kinds = sorted({row["kind"] for row in rows})
    print(
        {kind: sum(row["kind"] == kind for row in rows) for kind in kinds},
        len(rows),
        args.out.stat().st_size,
    )


if __name__ == "__main__":
    main()
