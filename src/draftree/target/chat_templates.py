"""Chat templates from a file or by name, and a default system message.

A model's tokenizer often lacks the template that the model was tuned with (Vicuna's and the first
LLaMA-2's do). Prompts then reach the model as bare text, and a drafter that was trained on the
template drafts worse.
"""

import re
from functools import lru_cache
from pathlib import Path

from draftree.errors import UnknownName, UserError

TEMPLATES_FOLDER = Path(__file__).with_suffix("")
GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Pattern for transformers' tags around what the model writes, which are not Jinja's."""


def template_names() -> tuple[str, ...]:
    """Return the names of the shipped templates."""
    return tuple(sorted(p.stem for p in TEMPLATES_FOLDER.glob("*.jinja")))


def read_template(given: str) -> str:
    """Return a chat template, given by the name of a shipped one or by the path of a file.

    Raises:
        UserError: neither exists, or the file is not a template.
    """
    path = TEMPLATES_FOLDER / f"{given}.jinja" if given in template_names() else Path(given)
    if not path.is_file():
        raise UnknownName(
            "chat template (a file, or the name of a shipped one)", given, template_names()
        )
    try:
        text = path.read_text("utf-8")
        _check_template(text)
    except (OSError, UnicodeError, ValueError) as error:
        raise UserError(f"chat template '{given}' cannot be read: {error}") from error
    return text


def _check_template(text: str) -> None:
    """Refuse a text that is not a Jinja template over `messages`.

    Raises:
        ValueError: the message gives the reason.
    """
    if "messages" not in variables_of(text):
        raise ValueError("it does not read 'messages'")


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads.

    Raises:
        ValueError: the text is not a Jinja template; the message gives the line.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # parsed, never rendered
    try:
        parsed = environment.parse(GENERATION_TAG.sub("", template))
        return frozenset(meta.find_undeclared_variables(parsed))
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error


def with_default_system(template: str, system: str) -> str:
    """Return a template that starts each chat without a system message with the given one."""
    quoted = system.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    message = f"[{{'role': 'system', 'content': '{quoted}'}}]"
    return f"{{%- if messages[0]['role'] != 'system' -%}}{{%- set messages = {message} + messages -%}}{{%- endif -%}}{template}"
