"""Handle prompt arguments that are named as in other tools."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any, TypeVar, cast

from draftree.aliases import CHAT, OPTION, PROMPT, canonical_name
from draftree.aliases.attribute_aliases import Resource
from draftree.aliases.conversions import options_in
from draftree.data.prompts import is_chat, question
from draftree.errors import UserError, format_value

ChatFunction = TypeVar("ChatFunction", bound=Callable[..., Any])


def takes_prompt(method: ChatFunction) -> ChatFunction:
    """Decorate a method so that it accepts its prompt under other names and an options object.

    The prompt may have any of the names that other tools use. The options object follows it. The
    signature of the method stays the same.
    """
    name = method.__name__

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call_async(self: Any, *given: Any, **options: Any) -> Any:
            options = of_this_model(self, options)
            return await method(self, *prompt_of(name, given, options), **options)

        return cast(ChatFunction, call_async)

    @wraps(method)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        options = of_this_model(self, options)
        return method(self, *prompt_of(name, given, options), **options)

    return cast(ChatFunction, ChatMethod(call) if name == "chat" else call)


class ChatMethod:
    """Provide the method `chat`, which also has the interface of OpenAI's client.

    An example is `engine.chat.completions.create(messages=…)`.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.__doc__ = call, call.__doc__

    def __get__(self, engine: Any, kind: type | None = None) -> Any:
        """Bind the method to an engine; the result can be called and has `completions`."""
        return self._call if engine is None else Resource(MethodType(self._call, engine))


TEMPLATE = ("chat_template_kwargs", "enable_thinking", "reasoning_effort")
"""Options that set variables of the chat template."""


def of_template(
    system: str | None, options: dict[str, Any], names: Sequence[str] = TEMPLATE
) -> tuple[str | None, dict[str, Any]]:
    """Remove the system message and the chat template's values from options, and return them.

    Args:
        system: the system message, if it was given under this name.
        options: the other options, possibly under other tools' names.
        names: names of options that are values of the template.

    Raises:
        UserError: the system message is given twice, or `chat_template_kwargs` is no object.
    """
    values = {name: value for name in names if (value := options.pop(name, None)) is not None}
    if not isinstance(more := values.pop("chat_template_kwargs", {}), Mapping):
        raise UserError(f"chat_template_kwargs is {format_value(more)}, allowed is an object")
    values |= more
    for name in [name for name in options if canonical_name(CHAT, name, ["system"]) == "system"]:
        if (given := options.pop(name)) and system is not None:
            raise UserError(f"system and {name} are given, allowed is one of them")
        system = given or system
    return system, values


def after_history(messages: Any, options: dict[str, Any]) -> Any:
    """Remove the option `history`, and return its messages followed by the given ones."""
    history = options.get("history")
    if not history or not is_chat(history):
        return messages
    del options["history"]
    if isinstance(messages, str):
        messages = question(messages)
    return [*history, *([messages] if isinstance(messages, Mapping) else messages)]


ECHO, STOP = ("echo", "return_full_text", "include_prompt"), ("include_stop_str_in_output",)
"""Options that include the prompt in the returned text.

`STOP` has those that include the stop text.
"""


def asks_for(options: dict[str, Any], names: Sequence[str]) -> bool:
    """Remove those options of the given names that are True; return whether there were any."""
    found = {name: options.pop(name) for name in names if options.get(name) is True}
    return bool(found)


def of_this_model(engine: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call without `model`, if its value is the engine's own model."""
    target = getattr(getattr(engine, "engine", engine), "target", None)
    same = "model" in options and target is not None and options["model"] == target.name
    return {name: value for name, value in options.items() if name != "model"} if same else options


def prompt_of(method: str, given: Sequence[Any], options: dict[str, Any]) -> tuple[Any]:
    """Return the prompt of a call, and remove it from the options if it is among them.

    An options object after the prompt, as in vLLM's calls, is converted to options by name. Options
    given by name take precedence.

    Args:
        method: the name of the called method, for messages.
        given: positional arguments.
        options: keyword arguments.

    Raises:
        UserError: there is no prompt, or other arguments follow it.
    """
    named = [name for name in options if canonical_name(PROMPT, name, ["prompt"]) == "prompt"]
    how = f"{method}(prompt, max_new_tokens=100, …): one prompt, and options by their names"
    if (
        len(given) + len(named) == 2
        and (held := options_in(given[-1] if given else None)) is not None
    ):
        *given, _ = given
        over = {canonical_name(OPTION, name, held) for name in options}
        options |= {name: value for name, value in held.items() if name not in over}
    if len(given) > 1:
        raise UserError(f"{len(given)} arguments without a name are given, allowed is {how}")
    if len(given) + len(named) > 1:
        raise UserError(
            f"{' and '.join(['a prompt', *named][1 - len(given) :])} are given, allowed is {how}"
        )
    if not given and not named:
        raise UserError(f"no prompt is given, allowed is {how}")
    return (given[0] if given else options.pop(named[0]),)
