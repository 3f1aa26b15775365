"""A prompt as token ids: a chat through the target's template, or text as it is."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftree.files import understood
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
    with understood("the prompt is not valid Unicode text"):
        json.dumps(content, ensure_ascii=False).encode()
    if isinstance(content, str) or not tokenizer.chat_template:
        with understood("the target's tokenizer refuses the prompt"):
            text = content if isinstance(content, str) else "\n".join(m["content"] for m in content)
            return list(tokenizer(text)["input_ids"])
    with understood("the target's chat template refuses the prompt"):
        encoded: Any = tokenizer.apply_chat_template(content, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
