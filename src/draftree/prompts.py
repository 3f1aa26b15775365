"""A prompt as token ids: a chat through the target's template, or text as it is."""

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from draftree.errors import UserError
from draftree.training.data import Messages

Content = str | Messages
"""Text to be continued as it is, or a chat to be answered."""


def question(text: str) -> Messages:
    """A chat of one question."""
    return [{"role": "user", "content": text}]


def encode(tokenizer: PreTrainedTokenizerBase, content: Content) -> list[int]:
    """The ids of a prompt; without a chat template, a chat is the text of its messages, line by line.

    Raises:
        UserError: the template refuses the chat, or the text is not valid Unicode.
    """
    try:
        if isinstance(content, str) or not tokenizer.chat_template:
            text = content if isinstance(content, str) else "\n".join(m["content"] for m in content)
            return list(tokenizer(text)["input_ids"])
        encoded: Any = tokenizer.apply_chat_template(content, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    except TemplateError as error:
        raise UserError(f"the target's chat template refuses the prompt: {error}") from error
    except (UnicodeEncodeError, TypeError) as error:
        raise UserError(f"the prompt is not valid Unicode text: {error}") from error
