"""Calls with a prompt: it may have the name that another tool gives it, and options have names."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from draftree.aliases import ENGINE, PROMPT, accepted
from draftree.errors import UnknownAttribute, UserError

Call = TypeVar("Call", bound=Callable[..., Any])


class OpenAICompletions:
    """Stands where OpenAI's client has `client.chat.completions`, and says what to write instead of its calls."""

    def __getattr__(self, name: str) -> Any:
        """Raise the error of an attribute that does not exist."""
        told = "engine.chat(messages, …) answers; `draftree serve MODEL` is a server for OpenAI's client"
        raise UnknownAttribute(ENGINE, f"chat.completions.{name}", self, told)


def takes_prompt(method: Call) -> Call:
    """Let a method that takes a prompt have it under any of its names, and refuse what is given without a name beside it.

    The signature stays the method's own.
    """
    name = method.__name__

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def awaited(self: Any, *given: Any, **options: Any) -> Any:
            return await method(self, prompt_of(name, given, options), **options)

        return cast(Call, awaited)

    @wraps(method)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        return method(self, prompt_of(name, given, options), **options)

    if name == "chat":
        vars(call)["completions"] = OpenAICompletions()
    return cast(Call, call)


def prompt_of(method: str, given: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return the prompt of a call, and take it out of the options where it stands there.

    Args:
        method: the name of what is called, for messages.
        given: the arguments without a name.
        options: those with a name.

    Raises:
        UserError: there is no prompt, or something beside it.
    """
    named = [name for name in options if accepted(PROMPT, name, ["prompt"]) == "prompt"]
    how = f"{method}(prompt, max_new_tokens=100, …): one prompt, and options by their names"
    if len(given) > 1:
        raise UserError(f"{len(given)} arguments without a name are given, allowed is {how}")
    if len(given) + len(named) > 1:
        raise UserError(f"{' and '.join(['a prompt', *named][1 - len(given) :])} are given, allowed is {how}")
    if not given and not named:
        raise UserError(f"no prompt is given, allowed is {how}")
    return given[0] if given else options.pop(named[0])
