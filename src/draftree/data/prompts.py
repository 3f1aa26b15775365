"""Encode a prompt: a chat with the target's chat template, or plain text."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard
from weakref import WeakSet

import numpy as np
import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from draftree.data.readers import Messages
from draftree.errors import UserError, format_value
from draftree.utils.files import as_user_error
from draftree.utils.token_ids import row_of_ids
from draftree.utils.validated_dataclass import is_list_of, unicode

Prompt = str | Sequence[int] | Messages
"""A prompt: a text to be continued, token ids, or a chat to be answered."""
Prompts = list[str] | list[list[int]] | list[Messages]
"""Several prompts, which are processed in one batch."""


def prompts_of(prompt: Any) -> list[Any] | None:
    """Return the prompts in a list or in a two-dimensional array.

    Return None if the value is a single prompt, or not a prompt at all.

    Raises:
        UserError: a tokenizer has padded the prompts.
    """
    if isinstance(prompt, BatchEncoding):
        if _hides(prompt.get("attention_mask", [])):
            raise UserError(
                "the tokenizer's ids are padded, allowed are ids without padding: give the texts themselves"
            )
        prompt = prompt["input_ids"]
    prompt = _unwrap_prompt(prompt)
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return list(prompt) if prompt.ndim == 2 else None
    if not is_list_of(prompt, _may_be_prompt) or not len(prompt) or row_of_ids(prompt) is not None:
        return None
    return list(prompt)


def _hides(mask: Any) -> bool:
    """Return whether a tokenizer's attention mask, for one or several prompts, hides an id."""
    rows = mask.tolist() if isinstance(mask, np.ndarray | torch.Tensor) else mask
    return any(0 in (row if isinstance(row, list) else [row]) for row in rows)


def _may_be_prompt(value: Any) -> bool:
    """Return whether a value may be a prompt in a list of several; it is checked fully later."""
    value = _unwrap_prompt(value)
    return isinstance(value, str | np.ndarray | torch.Tensor) or is_list_of(value, lambda _: True)


def _unwrap_prompt(prompt: Any) -> Any:
    """Return the content of a prompt in vLLM's form; return any other prompt unchanged.

    vLLM's forms are `{"prompt": …}` and `{"prompt_token_ids": …}`.
    """
    if (
        isinstance(prompt, dict)
        and len(prompt) == 1
        and next(iter(prompt)) in ("prompt", "prompt_token_ids")
    ):
        return next(iter(prompt.values()))
    return prompt


def ids_of(tokenizer: PreTrainedTokenizerBase, prompt: Any) -> list[int]:
    """Return the ids of a prompt: a chat is rendered by the template, a text is used as it is.

    Raises:
        UserError: the value is not a text, ids or a chat.
    """
    prompt = _unwrap_prompt(prompt)
    if isinstance(prompt, str):
        return encode(tokenizer, prompt)
    if isinstance(prompt, BatchEncoding):
        prompt = prompt["input_ids"]
    if (ids := row_of_ids(prompt)) is not None:
        return ids
    if is_chat(prompt):
        return encode(tokenizer, [dict(m) for m in prompt])
    told = "allowed is a text, ids in one row, or messages that each have a role and a content; or a list of these"
    raise UserError(f"the prompt is {format_value(prompt)}, {told}")


def is_chat(messages: Any) -> TypeGuard[Messages]:
    """Return whether a value is a list of chat messages, for any template.

    Contents may be texts or parts. A message with a tool call may have no content.
    """
    return is_list_of(messages, _is_message)


def _is_message(message: Any) -> bool:
    """Return whether a value is a chat message, for any template."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        return False
    content = message["content"]
    return unicode(message["role"]) and (
        content is None or unicode(content) or is_list_of(content, lambda p: isinstance(p, Mapping))
    )


def chats_of(given: Any, system: str | None = None) -> Any:
    """Return the messages of a question or a chat.

    For a list of questions or chats, return a list of their messages.

    Args:
        given: a question, a message, the messages of a chat, or a list of questions or chats.
        system: the system message, placed before the messages.

    Raises:
        UserError: the value is none of these, or there are two system messages.
    """
    if isinstance(given, Mapping):
        given = [given]
    if _is_question_or_chat(given):
        return _to_messages(given, system)
    if is_list_of(given, _is_question_or_chat) and len(given):
        return [_to_messages(chat, system) for chat in given]
    told = "allowed is a text, messages that each have a role and a content, or a list of either"
    if row_of_ids(given) is not None and len(given):
        told += "; `complete` takes token ids"
    raise UserError(f"messages is {format_value(given)}, {told}")


def _is_question_or_chat(given: Any) -> bool:
    """Return whether a value is a question, or a chat of at least one message."""
    return unicode(given) or (is_chat(given) and len(given) > 0)


def _to_messages(given: str | Messages, system: str | None) -> Messages:
    return add_system_message(system, question(given) if isinstance(given, str) else given)


def add_system_message(system: str | None, messages: Messages) -> Messages:
    """Return messages with a system message before them.

    Without a system message, return a copy of the messages.

    Raises:
        UserError: the system message is not a text, or the messages begin with one.
    """
    if system is None:
        return [*messages]
    if not unicode(system):
        raise UserError(f"system is {format_value(system)}, allowed is a text")
    if messages and messages[0]["role"] == "system":
        raise UserError(
            "system is given, but the messages begin with a system message; allowed is one of them"
        )
    return [{"role": "system", "content": system}, *messages]


Content = str | Messages
"""A text to be continued, or a chat to be answered."""


def question(text: str) -> Messages:
    """Return a chat that consists of one question."""
    return [{"role": "user", "content": text}]


LOG = logging.getLogger(__name__)
WARNED: "WeakSet[PreTrainedTokenizerBase]" = WeakSet()
"""Tokenizers without a chat template about which the user has been warned."""


def warn_without_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn once about a tokenizer without a chat template.

    The model may expect a template, and a drafter may have been trained with one.
    """
    if tokenizer not in WARNED:
        WARNED.add(tokenizer)
        name = tokenizer.name_or_path or "the target"
        LOG.warning(
            "the tokenizer of %s has no chat template, so questions are read as bare text, which a model tuned for "
            "chats does not expect: --chat-template names one (a file, vicuna, llama-2, alpaca)",
            name,
        )


def render_chats(tokenizer: PreTrainedTokenizerBase, chats: Any, values: Mapping[str, Any]) -> Any:
    """Return the ids of a chat, or of each chat of a list, rendered with values for the template.

    If there are no values, the chats are returned unchanged, and are rendered later.

    Args:
        tokenizer: the tokenizer, whose chat template is used.
        chats: one chat, or a list of chats.
        values: further variables of the template by name.

    Raises:
        UserError: the template refuses the values or a chat.
    """
    if not values:
        return chats
    return (
        encode(tokenizer, chats, values)
        if is_chat(chats)
        else [encode(tokenizer, chat, values) for chat in chats]
    )


def encode(
    tokenizer: PreTrainedTokenizerBase, content: Content, values: Mapping[str, Any] = {}
) -> list[int]:
    """Return the ids of a prompt.

    Without a chat template, a chat is encoded as the text of its messages, line by line, and a
    warning is given.

    Args:
        tokenizer: the target's tokenizer.
        content: a text or a chat.
        values: values of the template's own variables, such as `enable_thinking`.

    Raises:
        UserError: the template refuses the chat, or the text is not valid Unicode.
    """
    with as_user_error("the prompt is not valid Unicode text"):
        json.dumps(content, ensure_ascii=False).encode()
    if isinstance(content, str) or not tokenizer.chat_template:
        if not isinstance(content, str):
            warn_without_template(tokenizer)
        with as_user_error("the target's tokenizer refuses the prompt"):
            text = content if isinstance(content, str) else "\n".join(m["content"] for m in content)
            return list(tokenizer(text)["input_ids"])
    with as_user_error("the target's chat template refuses the prompt"):
        encoded: Any = tokenizer.apply_chat_template(
            content, add_generation_prompt=True, return_dict=True, **values
        )
        return list(encoded["input_ids"])
