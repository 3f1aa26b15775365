"""Training samples: token ids, and a mask of the tokens to learn."""

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftree.data.decontamination import Excluded
from draftree.data.readers import (
    CUT_KEY,
    Messages,
    Row,
    Skipped,
    is_completion_row,
    messages,
    prefix_errors,
    read_rows,
    skip_unreadable,
)
from draftree.errors import UserError, format_value
from draftree.tree import Bools, Ints
from draftree.utils.files import as_user_error

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark in a chat template around text that the model generates."""


@dataclass(frozen=True)
class Sample:
    """One training text: its tokens [T], and whether each is a training target [T].

    The first token is never a target. `row` is the number of its row in the data, if it is known.
    """

    tokens: Ints
    learn: Bools
    row: int | None = None


def digest(samples: Sequence[Sample]) -> str:
    """Return a hash of the training data, so that a run is not resumed with other data."""
    hashed = hashlib.sha256()
    for sample in samples:
        hashed.update(sample.tokens.tobytes() + sample.learn.tobytes())
    return hashed.hexdigest()[:16]


def chat_samples(
    tokenizer: PreTrainedTokenizerBase, chat: Messages, cut: Collection[int] = ()
) -> list[Sample]:
    """Return training samples of a rendered chat, whose responses are the training targets.

    The end marks of responses are targets too. If the template marks generated text (`{% generation
    %}`), its mask selects the targets. Otherwise a response is the text between the end of its
    prompt and its own end. Some templates render earlier responses in another way than the last
    one, for example without its thoughts. The chat then gives one sample for each response, in the
    form in which the model generates it.

    Args:
        tokenizer: the target's tokenizer.
        chat: the messages.
        cut: indices of truncated responses. The text that the template adds after them is not a
            target, unless the template marks generated text or changes the response.

    Raises:
        UserError: a rendered prompt is not the beginning of the rendered prompt with its response.
    """
    if GENERATION.search(str(tokenizer.get_chat_template())):
        return [_sample_by_template_mask(tokenizer, chat)]

    def render(part: Messages, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt)
        )

    answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    spans = [(render(chat[:i], True), render(chat[: i + 1], False)) for i in answers]
    if not all(until.startswith(prompt) for prompt, until in spans):
        raise UserError(
            "the chat template does not render a response after its prompt, and has no {% generation %} mark"
        )
    whole, learnt = render(chat, False), list[tuple[int, int]]()
    for i, (prompt, until) in zip(answers, spans, strict=True):
        said = chat[i]["content"].strip()  # templates may trim it
        at = until.rfind(said, len(prompt)) if i in cut else -1
        learnt.append((len(prompt), len(until) if at < 0 else at + len(said)))
    if all(whole.startswith(until) for _, until in spans):
        return [_span_sample(tokenizer, whole, learnt)]
    return [
        _span_sample(tokenizer, until, [part])
        for (_, until), part in zip(spans, learnt, strict=True)
    ]


def _sample_by_template_mask(tokenizer: PreTrainedTokenizerBase, chat: Messages) -> Sample:
    """Return the sample of a chat, with the template's own mask."""
    offsets = {"return_offsets_mapping": True}
    encoded: Any = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=offsets
    )
    starts, mask = (
        np.array([a for a, _ in encoded["offset_mapping"]]),
        np.array(encoded["assistant_masks"], np.bool_),
    )
    # Of a last character that is spread over several tokens, transformers' mask has the first one
    # only.
    return _sample(encoded["input_ids"], np.isin(starts, starts[mask]))


def _span_sample(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]
) -> Sample:
    """Return the sample of a text whose targets are the tokens that begin in given spans.

    Args:
        tokenizer: the target's tokenizer.
        text: the text.
        spans: begin and end of each span, in characters.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([a for a, _ in encoded["offset_mapping"]])
    learn = np.zeros(len(starts), np.bool_)
    for begin, end in spans:
        learn |= (starts >= begin) & (starts < end)
    return _sample(encoded["input_ids"], learn)


def _sample(ids: Sequence[int], learn: Bools) -> Sample:
    learn[:1] = False
    return Sample(np.array(ids, np.int64), learn)


def read_samples(
    paths: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    excluded: Excluded = Excluded(),
    vocab: int | None = None,
    skipped: Skipped | None = None,
) -> list[Sample]:
    """Return all training samples of several files.

    Texts are split into windows of `max_tokens`. Chats are truncated after `max_tokens`.

    Args:
        paths: the files, or folders of files.
        tokenizer: the target's tokenizer.
        max_tokens: the largest number of tokens of a sample.
        excluded: prompts; rows that contain one are left out.
        vocab: the number of tokens in the target's embedding; all token ids must be below it.
        skipped: counts rows that cannot be read and are left out; without it the first one raises
            an error.

    Raises:
        UserError: there is no training target, a row cannot be read, or a token is not in the
            embedding.
    """
    samples = list[Sample]()
    rows = (each for path in paths for each in read_rows(path, skipped))
    for number, (row, where) in enumerate(rows):
        with skip_unreadable(skipped):
            if excluded.keeps(row, where):
                parts = _samples(row, where, tokenizer, max_tokens)
                found = [replace(sample, row=number) for sample in parts]
                for sample in found if vocab is not None else ():
                    check_tokens(sample.tokens, where, tokenizer, vocab)
                samples += found
    if not samples:
        raise UserError(
            f"nothing to learn in {', '.join(map(str, paths))}: no text or response of at least 2 tokens"
        )
    return samples


def check_tokens(
    tokens: Ints, where: str, tokenizer: PreTrainedTokenizerBase, vocab: int | None
) -> None:
    """Refuse tokens that the tokenizer has and the embedding lacks.

    Raises:
        UserError: the message names the token, its id and the size of the embedding.
    """
    beyond = tokens[tokens >= vocab] if vocab is not None else tokens[:0]
    if len(beyond):
        number = int(beyond[0])
        named = f"token {format_value(tokenizer.convert_ids_to_tokens(number))} with id {number}"
        raise UserError(
            f"{where} has {named}, allowed are ids below the {vocab} rows of the target's embedding"
        )


def _samples(
    row: Row, where: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Iterator[Sample]:
    chat = messages(row, where)
    if chat is not None and not tokenizer.chat_template:
        raise UserError(
            f"{where} is a chat, but the target's tokenizer has no chat template; use rows of text"
        )
    refused = (
        "the target's chat template refuses this chat"
        if chat
        else "the target's tokenizer refuses this text"
    )
    with prefix_errors(where), as_user_error(refused):
        parts = (
            _row_text_samples(row, tokenizer, max_tokens)
            if chat is None
            else _row_chat_samples(row, tokenizer, chat)
            if chat
            else []
        )
    for part in parts:
        cut = Sample(part.tokens[:max_tokens], part.learn[:max_tokens])
        if cut.learn.any():
            yield cut


def _row_chat_samples(row: Row, tokenizer: PreTrainedTokenizerBase, chat: Messages) -> list[Sample]:
    cut = row.get(CUT_KEY, [])
    return chat_samples(tokenizer, chat, cut if isinstance(cut, list) else [])


def _row_text_samples(
    row: Row, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[Sample]:
    if is_completion_row(row):
        text = row["prompt"] + row["completion"]
        return [_span_sample(tokenizer, text, [(len(row["prompt"]), len(text))])]
    ids = np.array(tokenizer(row["text"], add_special_tokens=False)["input_ids"], np.int64)
    parts = [ids[i : i + max_tokens] for i in range(0, len(ids), max_tokens)]
    return [Sample(part, np.arange(len(part)) > 0) for part in parts]
