"""Aliases of draftree's API under the names that other tools use, for example vLLM's `LLM`.

They load a draftree `Engine`, generate text with one, or build generation options.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftree.engine import Engine, get_engine, load, speculate
from draftree.errors import UserError, format_value
from draftree.text.options import Options

TASKS = ("text-generation", "text2text-generation", "conversational")
"""Tasks of transformers' pipelines that generate text."""


class _Loader:
    """Load an engine under the name of another tool's model class.

    Calling the object, or its `from_pretrained`, returns an engine.
    """

    def __call__(self, *given: Any, **named: Any) -> Engine:
        return load(*given, **named)

    from_pretrained = __call__


Loader = _Loader()


def pipeline(task: str | None = None, model: Any = None, *more: Any, **named: Any) -> Engine:
    """Load an engine with the arguments of transformers' `pipeline`.

    Raises:
        UserError: the task does not generate text, or no model is given.
    """
    if task is not None and task not in TASKS:
        if model is not None:
            raise UserError(
                f"the task is {format_value(task)}, allowed is {TASKS[0]}: draftree writes text"
            )
        task, model = None, task
    if model is None:
        raise UserError(
            f"no model is given: pipeline('{TASKS[0]}', model=MODEL), or draftree.load(MODEL)"
        )
    return load(model, *more, **named)


def options(**values: Any) -> Options:
    """Return generation options from values under the names that any known tool uses.

    They can be passed to `engine.complete(prompts, options)`.
    """
    return Options.of(None, values)


def complete(*given: Any, **named: Any) -> Any:
    """Continue a prompt with a model.

    Examples: `complete(engine, tokenizer, prompt=…)`, `complete(model="demo", prompt=…)`.

    If transformers calls it as `custom_generate`, it acts as `speculate`.
    """
    if "generation_config" in named and len(given) > 1 and isinstance(given[1], torch.Tensor):
        return speculate(*given, **named)
    engine, prompt = _engine_of(given, named)
    return engine.complete(*prompt, **named)


def stream(*given: Any, **named: Any) -> Iterator[Any]:
    """Yield a continuation token by token as it is generated; see `complete`."""
    engine, prompt = _engine_of(given, named)
    return engine.stream(*prompt, **named)


def chat(*given: Any, **named: Any) -> Any:
    """Answer the messages of a chat with a model: `chat(model="demo", messages=…)`."""
    engine, prompt = _engine_of(given, named)
    return engine.chat(*prompt, **named)


def _engine_of(given: Sequence[Any], named: dict[str, Any]) -> tuple[Engine, list[Any]]:
    """Return the engine for the arguments of a call, and the remaining arguments.

    A tokenizer among the arguments is dropped, because the engine has one.

    Raises:
        UserError: no model or no prompt is given.
    """
    first: Any
    first, *others = [named.pop("model"), *given] if "model" in named else [*(given or [None])]
    named.pop("tokenizer", None)
    others = [one for one in others if not isinstance(one, PreTrainedTokenizerBase)]
    if not others and not named:
        told = "draftree.load(MODEL).chat('text') answers, draftree.load(MODEL).complete('text') continues a text"
        raise UserError(
            f"a model and a prompt are needed, and {format_value(first)} is given: {told}"
        )
    if isinstance(first, Engine):
        return first, others
    if isinstance(first, PreTrainedModel):
        return get_engine(first, None, None, None, None), others
    return _cached_engine(first) if isinstance(first, str | Path) else load(target=first), others


@lru_cache(maxsize=1)
def _cached_engine(model: str | Path) -> Engine:
    """Load the engine for a model's name.

    The engine of the last name is kept for further calls, as ollama keeps its model.
    """
    return load(model)
