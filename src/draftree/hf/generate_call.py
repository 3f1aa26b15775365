"""Convert a call of transformers' `generate` to requests, and the results back."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import logits_process as stock
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from draftree.batch import EngineMethods
from draftree.errors import DraftreeWarning, UserError
from draftree.metrics import Stats, total
from draftree.request import Emitted, Ending, Request, Scores
from draftree.sampling.logits_processors import WrappedProcessor
from draftree.sampling.params import Sampling

WARPERS: frozenset[type] = frozenset(
    (
        stock.TemperatureLogitsWarper,
        stock.TopKLogitsWarper,
        stock.TopPLogitsWarper,
        stock.MinPLogitsWarper,
        stock.TypicalLogitsWarper,
        stock.TopHLogitsWarper,
        stock.EpsilonLogitsWarper,
        stock.EtaLogitsWarper,
    )
)
"""Processors that depend only on the scores.

Those at the end of a list turn logits into p, for drafts too.
"""
PURE_PROCESSORS: frozenset[type] = frozenset(
    (
        stock.RepetitionPenaltyLogitsProcessor,
        stock.NoRepeatNGramLogitsProcessor,
        stock.NoBadWordsLogitsProcessor,
        stock.SequenceBiasLogitsProcessor,
        stock.SuppressTokensLogitsProcessor,
        stock.SuppressTokensAtBeginLogitsProcessor,
        stock.ForcedBOSTokenLogitsProcessor,
        stock.ForcedEOSTokenLogitsProcessor,
        stock.MinLengthLogitsProcessor,
        stock.MinNewTokensLengthLogitsProcessor,
        stock.ExponentialDecayLengthPenalty,
    )
)
"""Processors that are cheap functions of one sequence's text and scores.

They are therefore applied to drafts, too (`Request.guides`).
"""
ROW_INDEPENDENT: frozenset[type] = (
    WARPERS
    | PURE_PROCESSORS
    | {
        stock.InfNanRemoveLogitsProcessor,
        stock.LogitNormalization,
        stock.WatermarkLogitsProcessor,
        MaxTimeCriteria,
        StopStringCriteria,
    }
)
"""Processors and criteria that ignore the batch size and a sequence's index in the batch."""
STATELESS: frozenset[type] = ROW_INDEPENDENT | {
    stock.PrefixConstrainedLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
}
"""Processors and criteria without state between calls, so that sequences can share them."""


@dataclass(frozen=True)
class PaddedPrompt:
    """Store the prompt of a sequence in a padded batch.

    Attributes:
        padding: the padding ids before the text.
        text: the ids that the model reads.
        hidden: all ids of the sequence, if the mask hides ids inside the text from the model;
            processors and criteria receive all of them.
    """

    padding: list[int]
    text: list[int]
    hidden: list[int] | None = None


def prompt_ids(
    input_ids: Tensor, model_kwargs: Mapping[str, Any], windowed: bool = False
) -> list[PaddedPrompt]:
    """Return the ids of each sequence that the model reads.

    An id that the mask hides is not attended to and has no position, so that the text consists of
    the other ids.

    Args:
        input_ids: [B, n] the ids, with padding.
        model_kwargs: arguments of the model; its mask and positions, if any, are [B, n].
        windowed: whether the model's attention windows also count hidden ids.

    Raises:
        UserError: a mask hides the last id of a sequence, or an id inside the text of a model with
            windows; or positions do not count the visible ids from 0.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    if seen.shape != input_ids.shape:
        raise UserError(
            f"attention_mask is {list(seen.shape)}, allowed is the shape of input_ids, {list(input_ids.shape)}"
        )
    if positions is not None:
        counted = seen.long().cumsum(-1) - 1
        fits = (
            positions.dim() == 2
            and positions.shape[0] in (1, len(seen))
            and positions.shape[1] == seen.shape[1]
        )
        if not fits or bool((positions.expand_as(counted) != counted)[seen].any()):
            raise UserError(
                "position_ids are not 0, 1, 2 … after the padding, allowed are none: they are counted by the mask"
            )
    return [
        _prompt(r, *row, windowed)
        for r, row in enumerate(zip(input_ids.tolist(), seen.tolist(), strict=True))
    ]


def _prompt(row: int, ids: list[int], seen: list[bool], windowed: bool) -> PaddedPrompt:
    if not all(seen[-1:]):  # the first new token follows the last id
        raise UserError(
            f"row {row} of attention_mask has a zero at its last place, {len(ids) - 1}: pad on the left"
        )
    text = list(compress(ids, seen))
    if all(seen[-len(text) :]):
        return PaddedPrompt(ids[: -len(text)], text)
    if windowed:
        place = seen.index(False, seen.index(True))
        told = (
            "allowed are zeros on the left alone: the model's window counts places, hidden or not"
        )
        raise UserError(
            f"row {row} of attention_mask has a zero at place {place}, behind a one; {told}"
        )
    return PaddedPrompt([], text, ids)


@dataclass
class RowOutput:
    """Store the new tokens and scores of a sequence, and the reason for its end."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    ending: Ending | None = None

    def take(self, new: Emitted) -> None:
        """Add the new tokens and scores of a step."""
        self.tokens += new.tokens
        self.scores += new.scores
        self.ending = new.ending


@dataclass
class GenerateCall:
    """Store a call of `generate` as prepared by transformers.

    Attributes:
        input_ids: [B, n] the ids, with padding.
        prompts: the prompt of each sequence.
        config: the generation config.
        processors: the logits processors for all sequences.
        criteria: the stopping criteria for all sequences.
    """

    input_ids: Tensor
    prompts: list[PaddedPrompt]
    config: GenerationConfig
    processors: list[LogitsProcessor]
    criteria: list[Any]

    def sampling(self, seed: int | None) -> Sampling:
        """Return the sampling settings of the call: greedy decoding, or sampling with a seed.

        The settings for sampling contain the warpers, which are the last processors.
        """
        if not self.config.do_sample:
            return Sampling()
        seed = (
            int(torch.randint(2**63 - 1, ())) if seed is None else seed
        )  # then torch's seed is used
        return Sampling(
            temperature=self.config.temperature or 1.0, seed=seed, warpers=tuple(self._warpers)
        )

    @property
    def _warpers(self) -> list[LogitsProcessor]:
        if not self.config.do_sample or self._tells_criteria:
            return []
        return list(takewhile(lambda p: type(p) in WARPERS, reversed(self.processors)))[::-1]

    @property
    def keeps_scores(self) -> bool:
        """Return whether the output contains scores or logits."""
        config = self.config
        return bool(
            config.return_dict_in_generate and (config.output_scores or config.output_logits)
        )

    @property
    def _tells_criteria(self) -> bool:
        """Return whether criteria receive the scores of all steps, as in transformers."""
        return bool(self.keeps_scores and self.config.output_scores and self._stopping)

    @property
    def _stopping(self) -> list[Any]:
        """Return the stopping criteria that draftree has to call itself.

        These are all except `MaxLengthCriteria` and `EosTokenCriteria`, which become the limit and
        the end tokens of each request.
        """
        return [c for c in self.criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]

    def requests(self, sampling: Sampling) -> list[Request]:
        """Return a request for each sequence, whose noise depends on its index in the batch."""
        longest = min(
            (c.max_length for c in self.criteria if type(c) is MaxLengthCriteria), default=2**31
        )
        eos = frozenset(
            i for c in self.criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.tolist()
        )
        own = self.processors[: len(self.processors) - len(self._warpers)]
        requests, rows = [], len(self.prompts)
        for row, prompt in enumerate(self.prompts):
            mine = [in_full(prompt, of_row(p, row, rows)) for p in own]
            guides = tuple(
                p for p, given in zip(mine, own, strict=True) if type(given) in PURE_PROCESSORS
            )
            stateless = tuple(
                p for p, given in zip(mine, own, strict=True) if type(given) in STATELESS
            )
            record = ScoreRecorder() if self._tells_criteria else None
            requests.append(
                Request(
                    prompt.text,
                    max(1, longest - self.input_ids.shape[1]),
                    eos,
                    number=row,
                    processors=(*mine, *(() if record is None else (in_full(prompt, record),))),
                    guides=guides,
                    stateless=stateless,
                    criteria=tuple(
                        in_full(prompt, RowCriterion(c, row, rows, record)) for c in self._stopping
                    ),
                    before=prompt.padding,
                    keep_scores=self.keeps_scores,
                    sampling=sampling,
                )
            )
        return requests

    def output(self, rows: Sequence[RowOutput]) -> Tensor | GenerateDecoderOnlyOutput:
        """Return the output of `generate`.

        Sequences that ended early are padded with the padding token, and their scores with 0.
        """
        steps = max(len(row.tokens) for row in rows)
        padding = getattr(self.config, "_pad_token_tensor", None)
        pad = 0 if padding is None else int(padding)
        new = torch.tensor(
            [row.tokens + [pad] * (steps - len(row.tokens)) for row in rows],
            device=self.input_ids.device,
        )
        sequences = torch.cat((self.input_ids, new), dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        output: dict[str, Any] = {"sequences": sequences}
        if self.config.output_scores:
            output["scores"] = self._columns(
                [[s.processed for s in row.scores] for row in rows], steps
            )
        if self.config.output_logits:
            output["logits"] = self._columns([[s.raw for s in row.scores] for row in rows], steps)
        return GenerateDecoderOnlyOutput(**output)

    def _columns(self, kept: Sequence[Sequence[Tensor]], steps: int) -> tuple[Tensor, ...]:
        """Return one tensor of scores [B, V] for each position, over B sequences.

        Args:
            kept: scores [V] for each sequence and position.
            steps: the number of positions. Sequences that have ended get zeros.
        """
        nothing = torch.zeros_like(kept[0][0])
        columns = (
            torch.stack([row[t] if t < len(row) else nothing for row in kept]) for t in range(steps)
        )
        return tuple(column.to(self.input_ids.device, torch.float32) for column in columns)


def write(
    engine: EngineMethods,
    call: GenerateCall,
    sampling: Sampling,
    streamer: BaseStreamer | None,
    reuse: bool,
) -> tuple[list[RowOutput], Stats]:
    """Generate all sequences of a call until transformers would stop; return them with statistics.

    Raises:
        UserError: a request is not supported.
    """
    requests = call.requests(sampling)
    rows = [RowOutput() for _ in requests]

    def tell(numbers: Sequence[int], events: Sequence[Emitted]) -> None:
        for event in events:
            rows[numbers[event.row]].take(event)
            if streamer is not None:
                for token in event.tokens:
                    streamer.put(torch.tensor([token]))

    stats = [engine.write(requests, on_tokens=partial(tell, range(len(rows))), reuse=reuse).stats]
    steps = max(len(row.tokens) for row in rows)
    short = [r for r, row in enumerate(rows) if len(row.tokens) < steps and row.ending != "context"]
    pads = any(getattr(c, "eos_token_id", None) is not None for c in call.criteria)
    if (
        short and not pads
    ):  # transformers pads ended sequences; without EOS criteria they continue until all have
        rest = [requests[r] for r in short]
        longer = [
            replace(
                r,
                prompt=[*r.prompt, *rows[n].tokens],
                max_new_tokens=steps - len(rows[n].tokens),
                criteria=(),
            )
            for n, r in zip(short, rest, strict=True)
        ]
        stats.append(engine.write(longer, on_tokens=partial(tell, short), reuse=reuse).stats)
    if not reuse:
        engine.forget()
    if any(row.ending == "context" for row in rows):
        context = engine.target.decoder.context
        warnings.warn(
            f"a text has filled the target's context of {context} tokens and ends there",
            DraftreeWarning,
            stacklevel=2,
        )
    return rows, total(stats)


class Finite(LogitsProcessor):
    """Apply transformers' `InfNanRemoveLogitsProcessor` with the limits of float32.

    In transformers this processor always receives float32 scores.
    """

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = torch.finfo(torch.float32)
        return torch.nan_to_num(scores, nan=0.0, posinf=ends.max, neginf=ends.min)


class OneRow(WrappedProcessor):
    """Apply a processor for batches to one sequence.

    Args:
        processor: the processor, which may distinguish sequences by their index.
        row: the index of the sequence in the batch.
        rows: B, the batch size; the processor receives that many identical sequences.
    """

    def __init__(self, processor: LogitsProcessor, row: int, rows: int) -> None:
        self.inner = processor
        self._row = row
        self._rows = rows

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        every = scores.repeat(self._rows, 1)
        made: Tensor = self.inner(input_ids.repeat(self._rows, 1), every)
        scores.copy_(every[self._row : self._row + 1])  # the processor may write into them
        return scores if made is every else made[self._row : self._row + 1]


class Whole(WrappedProcessor):
    """Wrap a processor or criterion so that it receives ids that are hidden from the model.

    Args:
        inner: the processor or criterion.
        prompt: the prompt of the sequence.
    """

    def __init__(self, inner: Any, prompt: PaddedPrompt) -> None:
        self.inner = inner
        self._read = len(prompt.text)
        self._ids = prompt.hidden

    @override
    def __call__(self, input_ids: Tensor, scores: Any = None) -> Any:
        whole = torch.tensor([self._ids], device=input_ids.device)
        return self.inner(torch.cat((whole, input_ids[:, self._read :]), dim=1), scores)


def in_full(prompt: PaddedPrompt, part: Any) -> Any:
    """Return a processor or criterion that receives its sequence as in transformers."""
    return part if prompt.hidden is None else Whole(part, prompt)


def of_row(processor: LogitsProcessor, row: int, rows: int) -> LogitsProcessor:
    """Return a processor for batches as the processor of one sequence."""
    if type(processor) is stock.InfNanRemoveLogitsProcessor:  # float64 stays float64 here
        return Finite()
    if rows == 1:
        return processor
    if type(processor) is stock.RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, Tensor
    ):
        mine = copy.copy(processor)
        mine.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return mine
    if (
        type(processor) is stock.PrefixConstrainedLogitsProcessor
    ):  # the user's function need not know other texts of its sequence
        ask, each = processor._prefix_allowed_tokens_fn, processor._num_beams
        return stock.PrefixConstrainedLogitsProcessor(lambda _, ids: ask(row // each, ids), 1)
    return (
        processor
        if type(processor) in ROW_INDEPENDENT
        else OneRow(own_copy(processor, row), row, rows)
    )


def own_copy(part: Any, row: int) -> Any:
    """Return a copy of a processor or criterion for one sequence, if it may have state.

    Sequences advance by different numbers of tokens, so that they cannot share it.

    Raises:
        UserError: it cannot be copied.
    """
    if row == 0 or type(part) in STATELESS:
        return part
    try:
        return copy.deepcopy(part)
    except Exception as error:  # a user's class may raise anything
        name = type(part).__name__
        raise UserError(
            f"{name} cannot be copied for each row of a batch, allowed is one row at a time: {error}"
        ) from error


class ScoreRecorder(LogitsProcessor):
    """Record the processed scores of each position for criteria, as the last processor."""

    def __init__(self) -> None:
        self._scores: dict[int, Tensor] = {}

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._scores[input_ids.shape[1]] = scores
        return scores

    def until(self, length: int, rows: int) -> tuple[Tensor, ...]:
        """Return one tensor of processed scores [rows, V] for each new token of a text.

        Args:
            length: number of tokens of the text, with the prompt; later scores are left out.
            rows: number of rows for which the scores are repeated.
        """
        return tuple(
            self._scores[n].float().repeat(rows, 1) for n in sorted(self._scores) if n < length
        )


class RowCriterion:
    """Apply a stopping criterion for batches to one sequence.

    Args:
        criterion: a criterion of transformers or of the user.
        row: the index of the sequence in the batch.
        rows: B, the batch size; the criterion receives that many identical sequences.
        record: the scores of the sequence, if criteria receive them.
    """

    def __init__(self, criterion: Any, row: int, rows: int, record: ScoreRecorder | None) -> None:
        self._criterion = own_copy(criterion, row)
        self._row = row
        self._rows = rows
        self._record = record

    def __call__(self, input_ids: Tensor, scores: Any = None) -> bool:
        """Return whether the sequence ends here."""
        told = None if self._record is None else self._record.until(input_ids.shape[1], self._rows)
        said = self._criterion(input_ids.repeat(self._rows, 1), told)
        each = torch.zeros(self._rows, dtype=torch.bool, device=input_ids.device) | said
        return bool(each[self._row])
