"""transformers' `generate`, with drafts: the hook for its `custom_generate`, and what becomes of its options.

transformers prepares prompts, processors and criteria, and calls the hook instead of its own loop. Whatever the hook cannot
honour it refuses by name, so that nobody gets another output than asked for.

Shapes: B rows of the batch, n ids of a padded prompt, T new tokens, V vocabulary.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, takewhile
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from draftree.acceptors.base import Acceptor
from draftree.costs import Costs, CostTable
from draftree.drafters.base import Method
from draftree.engine import Engine, check_types, load, part_of
from draftree.errors import DraftreeWarning, UserError, shown
from draftree.options import Options
from draftree.policies.base import Policy
from draftree.processors import Around
from draftree.sampling import Sampling
from draftree.stats import Stats, total
from draftree.text import Emitted, Ending, Request, Scores

WARPERS: frozenset[type] = frozenset(
    (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper, TopHLogitsWarper,
     EpsilonLogitsWarper, EtaLogitsWarper)
)  # fmt: skip
"""Processors that look at the scores alone: the last ones of a list turn logits into p, for drafts as well."""
PURE: frozenset[type] = frozenset(
    (RepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor,
     SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor, ForcedBOSTokenLogitsProcessor,
     ForcedEOSTokenLogitsProcessor, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, ExponentialDecayLengthPenalty)
)  # fmt: skip
"""Processors that are cheap functions of one row's text and scores: they are applied to drafts, too (`Request.guides`)."""
STATELESS: frozenset[type] = (
    WARPERS
    | PURE
    | {InfNanRemoveLogitsProcessor, LogitNormalization, PrefixConstrainedLogitsProcessor, WatermarkLogitsProcessor,
       EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor, MaxTimeCriteria, StopStringCriteria}
)  # fmt: skip
"""Processors and criteria that remember nothing from call to call, so that rows can share them."""
ALONE: frozenset[type] = (
    WARPERS
    | PURE
    | {InfNanRemoveLogitsProcessor, LogitNormalization, WatermarkLogitsProcessor, MaxTimeCriteria, StopStringCriteria}
)  # fmt: skip
"""Those that treat a row the same whatever its number and however many there are."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "1; beam search is not offered, leave custom_generate away for it"),
    "num_beam_groups": ((1,), "none; beam search is not offered"),
    "constraints": ((), "none; constrain the text with a logits processor or a grammar"),
    "force_words_ids": ((), "none; constrain the text with a logits processor or a grammar"),
    "penalty_alpha": ((0,), "none; contrastive search is not offered"),
    "dola_layers": ((), "none; DoLa is not offered"),
    "guidance_scale": ((1,), "none; guidance needs a second pass for every token"),
    "prompt_lookup_num_tokens": ((), "none; drafter='pld' looks drafts up in the prompt"),
    "use_mtp": ((False,), "none; drafter='mtp' drafts with heads for further tokens"),
    "assistant_early_exit": ((), "none; draftree has drafters of its own"),
    "speculation_type": ((), "none; draftree has drafters of its own"),
    "is_assistant": ((False,), "false; draftree drafts for a model, and not with it"),
    "token_healing": ((False,), "false; heal the prompt before"),
    "use_cache": ((True,), "true; draftree always keeps keys and values"),
    "cache_implementation": (("dynamic",), "none; draftree has a cache of its own"),
    "output_attentions": ((False,), "false; passes over trees have other attentions than plain decoding's"),
    "output_hidden_states": ((False,), "false; passes over trees have other states than plain decoding's"),
}
"""Options of a generation config that are not honoured: values beside None that ask for nothing, and what to do instead."""
NOT_HERE: Mapping[str, str] = {
    "assistant_model": "none; name a drafter instead, drafter='lm:…' is a small language model",
    "assistant_tokenizer": "none; drafters share the target's tokenizer",
    "custom_generate": "none; this is a loop of its own",
    "synced_gpus": "none; an engine runs on one process",
}
"""Arguments of `generate` that transformers does not pass on to a hook."""
READ = frozenset(("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"))
"""What transformers prepares for the model's forward that a hook knows what to do with."""

IDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""What ids may be given in."""
ENGINES = "_draftree"
"""The attribute of a model that keeps its engines, so that they live as long as it does."""


class Hook:
    """What `speculate` returns: called by `model.generate(…, custom_generate=hook)`.

    Args:
        opened: the engine for a model.
        seed: of the draws; drawn anew for each call where there is none.
        streamer: told the prompt, each token and the end.
        tokenizer: for stop strings; the target's own by default.
        reuse: whether a prefix shared with the last call is taken from the caches; only where nobody else can have
            changed the model's weights between the calls.

    Attributes:
        stats: figures of the last call.
    """

    def __init__(
        self,
        opened: Callable[[PreTrainedModel], Engine],
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reuse: bool = False,
    ) -> None:
        self._seed = None if seed is None else checked(seed)
        if not isinstance(streamer, BaseStreamer | None):
            raise UserError(f"streamer is {shown(streamer)}, allowed is one of transformers' streamers, or None")
        self._opened, self._streamer, self._tokenizer = opened, streamer, tokenizer
        self._reuse = reuse
        self.stats = Stats()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        token_healing: bool | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Writes what transformers' own loop would write, in fewer passes.

        transformers hands over what its user gave for those of our parameters that its own loop does not have: `stop_strings`
        and `token_healing` come here instead of into the generation config, where they would ask for a tokenizer that
        transformers drops, and `seed` becomes one more argument of `generate`.
        """
        refuse_options({"token_healing": token_healing})
        refuse(model, generation_config, logits_processor, model_kwargs)
        if self._streamer is not None:
            if len(input_ids) > 1:
                raise UserError(f"the batch has {len(input_ids)} rows, a streamer takes 1")
            self._streamer.put(input_ids.cpu())
        with inference(model):
            engine = self._opened(model)
            criteria = [*stopping_criteria]
            if stop_strings is not None and not any(type(c) is StopStringCriteria for c in criteria):  # the user's own one wins
                criteria.append(stops(self._tokenizer, engine, stop_strings))
            rows = prompts(input_ids, model_kwargs, engine.target.decoder.window is not None)
            batch = Batch(input_ids, rows, generation_config, [*logits_processor], criteria)
            sampling = batch.sampling(self._seed if seed is None else checked(seed))
            written, self.stats = write(engine, batch, sampling, self._streamer, self._reuse)
        if self._streamer is not None:
            self._streamer.end()
        return batch.output(written)


def speculate(
    drafter: str | Path | Method | None = None,
    policy: str | Policy = "pct",
    acceptor: str | Acceptor | None = None,
    costs: Costs | CostTable | None = None,
    seed: int | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Hook:
    """Makes transformers' `generate` speculate: `model.generate(**inputs, custom_generate=draftree.speculate(…))`.

    Prompts with padding on the left and hidden ids, `GenerationConfig`, logits processors, stopping criteria, `stop_strings`,
    `num_return_sequences`, `return_dict_in_generate` with `output_scores` and `output_logits` mean what they mean without it;
    what cannot be honoured is refused by name. Greedy ids are those of `generate`; sampled ones are of the same distribution,
    and with the default acceptor those of plain decoding with the same seed, whatever the drafter. Beyond that:

    - `generate` takes one more argument, `seed`. Without one it is drawn from torch's global generator, so that
      `torch.manual_seed` repeats a call.
    - transformers keeps three of its arguments from every hook: `streamer`, which therefore is one here (and must not be given
      to `generate` as well: it would never be told the tokens); `tokenizer`, which is one here where the model's own is not to
      be used for `stop_strings`; and `assistant_model`, which is ignored. Stop strings in a generation config need
      that tokenizer, so transformers refuses them: give `stop_strings=` itself. With `cache_implementation="paged"`
      transformers goes another way before it asks any hook. `Engine.generate` has none of these limits.
    - `scores` and `logits` of rows that have ended are 0, where transformers goes on computing after padding;
      `past_key_values` is None.
    - A row's processors and criteria see a batch whose rows all are that row, because rows are not written in step; rows after
      the first get copies of those that may remember something. Every processor is called once for each token, in order.
    - A text ends with the model's context, with a warning; transformers goes on beyond it.
    - A processor that forbids every token is an error which names it, where transformers writes token 0. Ids that a mask hides
      inside a row are refused for models with windows, and at the end of a row.
    - The model is in evaluation mode during the call. Logits that are not numbers are an error, whatever
      `remove_invalid_values` says.
    - In half precision a pass over a tree rounds otherwise than one over a token, so that ids may part where two scores are
      as good as equal.

    The engine is kept with the model: a second call with the same arguments opens nothing again.

    Args:
        drafter: a spec, a checkpoint folder, or a method's knobs; by default the one that `load` takes.
        policy: a spec or a policy.
        acceptor: a spec or an acceptor; chosen by the temperature where it is not given.
        costs: a cost model to use instead of measuring.
        seed: of the draws, for every call.
        streamer: told the prompt, each token and the end, as transformers does; for one row.
        tokenizer: for stop strings; the model's own by default.

    Raises:
        UserError: a part does not exist or is of the wrong type; when called: one does not fit the model, or an option cannot
            be honoured.
    """
    check_types(costs, tokenizer)  # a mistake is told here, and not by the first call
    method, grown, rule = part_of("drafter", drafter, True), part_of("policy", policy), part_of("acceptor", acceptor, True)
    return Hook(lambda model: opened(model, method, grown, rule, costs), seed, streamer, tokenizer)


def checked(seed: int) -> int:
    """The seed, by the rule that options have for it; in greedy calls too.

    Raises:
        UserError: it is none.
    """
    return int(Options(seed=seed).seed)


def generate(
    engine: Engine,
    inputs: Tensor | None,
    seed: int | None,
    streamer: BaseStreamer | None,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> Tensor | GenerateDecoderOnlyOutput:
    """`Engine.generate`: transformers' `generate` of the engine's own model, with what it keeps from a hook.

    Raises:
        UserError: an option cannot be honoured.
    """
    model: Any = engine.target.decoder.model
    check_types(None, tokenizer)
    if not (inputs is None or (isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.dtype in IDS)):
        raise UserError(f"inputs is {shown(inputs)}, allowed is a tensor of ids [B, n]")
    for name, allowed in NOT_HERE.items():
        if options.get(name) not in (None, False):
            raise UserError(f"{name} is given, allowed is {allowed}")
    config, default = options.get("generation_config"), model.generation_config
    told = [options, *(vars(c) for c in (config, default) if c is not None)]
    asked = {n: next((o[n] for o in told if o.get(n) is not None), None) for n in ("stop_strings", *REFUSED)}
    refuse_options(asked)
    if (strings := asked["stop_strings"]) is not None:
        options = without_stop_strings(options, config, default)
        if not any(type(c) is StopStringCriteria for c in options["stopping_criteria"]):  # the user's own one wins
            options["stopping_criteria"].append(stops(tokenizer, engine, strings))
    hook = Hook(lambda model: engine, seed, streamer, reuse=True)

    def loop(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Tensor | GenerateDecoderOnlyOutput:
        return hook(model, input_ids, **prepared)  # without parameters of its own, which would take options away

    written: Tensor | GenerateDecoderOnlyOutput = model.generate(inputs, custom_generate=loop, **options)
    return written


def without_stop_strings(
    options: Mapping[str, Any], config: GenerationConfig | None, default: GenerationConfig | None
) -> dict[str, Any]:
    """The options with criteria that can be added to, and without stop strings: transformers drops their tokenizer."""
    changed = {**options, "stopping_criteria": StoppingCriteriaList(options.get("stopping_criteria") or ())}
    if config is not None:
        changed["generation_config"] = copy.deepcopy(config)
        changed["generation_config"].stop_strings = None
    if "stop_strings" in options or (default is not None and default.stop_strings is not None):
        changed["stop_strings"] = None
    return changed


class Engines(dict[Any, Engine]):
    """The engines of one model; a copy of the model begins without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


def opened(
    model: PreTrainedModel,
    drafter: str | Path | Method | None,
    policy: str | Policy,
    acceptor: str | Acceptor | None,
    costs: Costs | CostTable | None,
) -> Engine:
    """The engine of these parts around a model, made once; anew where the model has moved or changed its dtype."""
    kept: Engines = vars(model).setdefault(ENGINES, Engines())
    # A shallow copy of a model shares the dict, and costs need not be hashable; the engine keeps both alive.
    key = (id(model), drafter, policy, acceptor, None if costs is None else id(costs), model.device, model.dtype)
    if key not in kept:
        kept[key] = load(model, drafter, policy, acceptor, costs)
    return kept[key]


def stops(tokenizer: PreTrainedTokenizerBase | None, engine: Engine, strings: str | list[str]) -> StopStringCriteria:
    """The criterion for stop strings, with the target's own tokenizer where no other is given.

    Raises:
        UserError: there is no tokenizer.
    """
    try:
        return StopStringCriteria(tokenizer=tokenizer or engine.tokenizer, stop_strings=strings)
    except UserError as error:
        raise UserError(f"stop_strings need a tokenizer, speculate(tokenizer=…) takes one: {error}") from error


@contextmanager
def inference(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is in evaluation mode: with dropout, no two passes would agree."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def refuse(
    model: PreTrainedModel,
    config: GenerationConfig,
    processors: Sequence[LogitsProcessor],
    model_kwargs: Mapping[str, Any],
) -> None:
    """Raises a `UserError` for what cannot be honoured."""
    if model.config.is_encoder_decoder:
        raise UserError(f"{type(model).__name__} is an encoder-decoder model, allowed are decoder-only ones")
    refuse_options(vars(config))
    if (mode := config.get_generation_mode()) not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UserError(f"generation mode '{mode.value}' is not offered, allowed are greedy_search and sample")
    if any(type(p) is UnbatchedClassifierFreeGuidanceLogitsProcessor for p in processors):
        raise UserError("a processor for guidance is given, allowed is none: it needs a second pass for every token")
    if getattr(model_kwargs.get("past_key_values"), "_is_user_defined", False):  # transformers' mark of a cache that was given
        raise UserError("past_key_values is given, allowed is none: give the whole text, draftree has a cache of its own")
    others = [name for name, value in model_kwargs.items() if name not in READ and value is not None and value is not False]
    if others:
        raise UserError(f"{', '.join(sorted(others))} may change what the model computes, allowed are input_ids and their mask")
    many = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if many and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        raise UserError("the model's weights are spread over processes, allowed is one process: gather them first")


def refuse_options(values: Mapping[str, Any]) -> None:
    """Raises a `UserError` for an option of a generation config that cannot be honoured."""
    for name, (nothing, allowed) in REFUSED.items():
        got = values.get(name)
        if got is not None and got not in nothing:
            raise UserError(f"{name} is {got!r}, allowed is {allowed}")


@dataclass(frozen=True)
class Prompted:
    """A row of a batch.

    Attributes:
        padding: the ids in front of its text.
        text: what the model reads.
        hidden: the whole row, where ids inside it are hidden from the model; processors and criteria are shown them all.
    """

    padding: list[int]
    text: list[int]
    hidden: list[int] | None = None


def prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any], windowed: bool = False) -> list[Prompted]:
    """What each row asks the model to read.

    An id that the mask hides is seen by nobody and counts in no position: the text is the others'.

    Args:
        input_ids: [B, n].
        model_kwargs: with a mask and positions, both [B, n], or without.
        windowed: whether the model's windows count places, hidden ones with the others.

    Raises:
        UserError: a mask hides a row's last id, or one inside a row from a model with windows; or positions are not counted
            from 0 without what it hides.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask != 0
    if seen.shape != input_ids.shape:
        raise UserError(f"attention_mask is {list(seen.shape)}, allowed is the shape of input_ids, {list(input_ids.shape)}")
    if positions is not None:
        counted = seen.long().cumsum(-1) - 1
        fits = positions.dim() == 2 and positions.shape[0] in (1, len(seen)) and positions.shape[1] == seen.shape[1]
        if not fits or bool((positions.expand_as(counted) != counted)[seen].any()):
            raise UserError("position_ids are not 0, 1, 2 … after the padding, allowed are none: they are counted by the mask")
    return [_prompt(r, *row, windowed) for r, row in enumerate(zip(input_ids.tolist(), seen.tolist(), strict=True))]


def _prompt(row: int, ids: list[int], seen: list[bool], windowed: bool) -> Prompted:
    if not all(seen[-1:]):  # the first new token would be read off a hidden one
        raise UserError(f"row {row} of attention_mask has a zero at its last place, {len(ids) - 1}: pad on the left")
    text = list(compress(ids, seen))
    if all(seen[-len(text) :]):
        return Prompted(ids[: -len(text)], text)
    if windowed:
        place = seen.index(False, seen.index(True))
        told = "allowed are zeros on the left alone: the model's window counts places, hidden or not"
        raise UserError(f"row {row} of attention_mask has a zero at place {place}, behind a one; {told}")
    return Prompted([], text, ids)


@dataclass
class Row:
    """What was written for a row, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    ending: Ending | None = None

    def take(self, new: Emitted) -> None:
        self.tokens += new.tokens
        self.scores += new.scores
        self.ending = new.ending


@dataclass
class Batch:
    """A call of `generate`, as transformers has prepared it.

    Attributes:
        input_ids: [B, n].
        prompts: of each row.
        config: options.
        processors: one list for all rows.
        criteria: one list for all rows.
    """

    input_ids: Tensor
    prompts: list[Prompted]
    config: GenerationConfig
    processors: list[LogitsProcessor]
    criteria: list[Any]

    def sampling(self, seed: int | None) -> Sampling:
        """How tokens are chosen: greedily, or after the warpers that end the list of processors."""
        if not self.config.do_sample:
            return Sampling()
        seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed  # torch's own seed decides then
        return Sampling(temperature=self.config.temperature or 1.0, seed=seed, warpers=tuple(self._warpers))

    @property
    def _warpers(self) -> list[LogitsProcessor]:
        if not self.config.do_sample or self._tells_criteria:
            return []
        return list(takewhile(lambda p: type(p) in WARPERS, reversed(self.processors)))[::-1]

    @property
    def keeps_scores(self) -> bool:
        """Whether the output holds scores or logits."""
        config = self.config
        return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))

    @property
    def _tells_criteria(self) -> bool:
        """Whether criteria are told the scores of all steps, as transformers tells them if they are kept."""
        return bool(self.keeps_scores and self.config.output_scores and self._stopping)

    @property
    def _stopping(self) -> list[Any]:
        """The criteria that have to be asked."""
        return [c for c in self.criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]

    @property
    def pads(self) -> bool:
        """Whether transformers fills rows that have ended; without EOS criteria they go on until all have."""
        return any(getattr(c, "eos_token_id", None) is not None for c in self.criteria)

    def requests(self) -> list[Request]:
        """One for each row, its number in the batch deciding its noise."""
        longest = min((c.max_length for c in self.criteria if type(c) is MaxLengthCriteria), default=2**31)
        eos = frozenset(i for c in self.criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.tolist())
        own = self.processors[: len(self.processors) - len(self._warpers)]
        found, rows = [], len(self.prompts)
        for row, prompt in enumerate(self.prompts):
            mine = [in_full(prompt, of_row(p, row, rows)) for p in own]
            guides = tuple(p for p, given in zip(mine, own, strict=True) if type(given) in PURE)
            stateless = tuple(p for p, given in zip(mine, own, strict=True) if type(given) in STATELESS)
            record = Record() if self._tells_criteria else None
            request = Request(
                prompt.text,
                max(1, longest - self.input_ids.shape[1]),
                eos,
                number=row,
                processors=(*mine, *(() if record is None else (in_full(prompt, record),))),
                guides=guides,
                stateless=stateless,
                criteria=tuple(in_full(prompt, RowCriterion(c, row, rows, record)) for c in self._stopping),
                before=prompt.padding,
                keep_scores=self.keeps_scores,
            )
            found.append(request)
        return found

    def output(self, rows: Sequence[Row]) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns: rows that have ended are filled with the padding token, and their scores with 0."""
        steps = max(len(row.tokens) for row in rows)
        padding = getattr(self.config, "_pad_token_tensor", None)
        pad = 0 if padding is None else int(padding)
        new = torch.tensor([row.tokens + [pad] * (steps - len(row.tokens)) for row in rows], device=self.input_ids.device)
        sequences = torch.cat((self.input_ids, new), dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        processed = [[s.processed for s in row.scores] for row in rows] if self.config.output_scores else None
        raw = [[s.raw for s in row.scores] for row in rows] if self.config.output_logits else None
        told: list[Any] = [None if kept is None else self._columns(kept, steps) for kept in (processed, raw)]
        output: Any = GenerateDecoderOnlyOutput  # its annotations are narrower than what it holds
        written: GenerateDecoderOnlyOutput = output(sequences=sequences, scores=told[0], logits=told[1])
        return written

    def _columns(self, kept: Sequence[Sequence[Tensor]], steps: int) -> tuple[Tensor, ...]:
        """[T] scores [B, V] of all rows' tokens in one place."""
        nothing = torch.zeros_like(kept[0][0])
        columns = (torch.stack([row[t] if t < len(row) else nothing for row in kept]) for t in range(steps))
        return tuple(column.to(self.input_ids.device, torch.float32) for column in columns)


def write(
    engine: Engine, batch: Batch, sampling: Sampling, streamer: BaseStreamer | None, reuse: bool
) -> tuple[list[Row], Stats]:
    """Writes all rows of a batch, as long as transformers would.

    Raises:
        UserError: a request cannot be served.
    """
    requests = batch.requests()
    rows = [Row() for _ in requests]

    def tell(numbers: Sequence[int], events: Sequence[Emitted]) -> None:
        for event in events:
            rows[numbers[event.row]].take(event)
            if streamer is not None:
                for token in event.tokens:
                    streamer.put(torch.tensor([token]))

    stats = [engine.write(requests, sampling, partial(tell, range(len(rows))), reuse).stats]
    steps = max(len(row.tokens) for row in rows)
    short = [r for r, row in enumerate(rows) if len(row.tokens) < steps and row.ending != "context"]
    if short and not batch.pads:
        rest = [requests[r] for r in short]
        longer = [
            replace(r, prompt=[*r.prompt, *rows[n].tokens], max_new_tokens=steps - len(rows[n].tokens), criteria=())
            for n, r in zip(short, rest, strict=True)
        ]
        stats.append(engine.write(longer, sampling, partial(tell, short), reuse).stats)
    if not reuse:
        engine.held = None
    if any(row.ending == "context" for row in rows):
        context = engine.target.decoder.context
        warnings.warn(
            f"a text has filled the target's context of {context} tokens and ends there", DraftreeWarning, stacklevel=2
        )
    return rows, total(stats)


class Finite(LogitsProcessor):
    """transformers' `InfNanRemoveLogitsProcessor` with the largest numbers of float32, in which it is called there."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = torch.finfo(torch.float32)
        return torch.nan_to_num(scores, nan=0.0, posinf=ends.max, neginf=ends.min)


class OneRow(Around):
    """A processor of a batch, for one of its rows.

    Args:
        processor: may tell rows apart by their numbers.
        row: which one this is for.
        rows: B; the processor is shown so many, all alike.
    """

    def __init__(self, processor: LogitsProcessor, row: int, rows: int) -> None:
        self.inner, self._row, self._rows = processor, row, rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        every = scores.repeat(self._rows, 1)
        made: Tensor = self.inner(input_ids.repeat(self._rows, 1), every)
        scores.copy_(every[self._row : self._row + 1])  # it may have written into them
        return scores if made is every else made[self._row : self._row + 1]


class Whole(Around):
    """A processor or criterion of a row some of whose ids are hidden from the model: it is shown them all.

    Args:
        inner: the processor or criterion.
        prompt: of the row.
    """

    def __init__(self, inner: Any, prompt: Prompted) -> None:
        self.inner, self._read, self._ids = inner, len(prompt.text), prompt.hidden

    def __call__(self, input_ids: Tensor, scores: Any = None) -> Any:
        whole = torch.tensor([self._ids], device=input_ids.device)
        return self.inner(torch.cat((whole, input_ids[:, self._read :]), dim=1), scores)


def in_full(prompt: Prompted, part: Any) -> Any:
    """A processor or criterion that is shown its row as transformers shows it."""
    return part if prompt.hidden is None else Whole(part, prompt)


def of_row(processor: LogitsProcessor, row: int, rows: int) -> LogitsProcessor:
    """A processor of a batch as one row's own."""
    if type(processor) is InfNanRemoveLogitsProcessor:  # float64 stays float64 here
        return Finite()
    if rows == 1:
        return processor
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        mine = copy.copy(processor)
        mine.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return mine
    if type(processor) is PrefixConstrainedLogitsProcessor:  # the user's function need not know other texts in its row
        ask = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: ask(row, ids), 1)
    return processor if type(processor) in ALONE else OneRow(own_copy(processor, row), row, rows)


def own_copy(part: Any, row: int) -> Any:
    """A processor or criterion for one row alone, if it may remember something: rows are not written in step.

    Raises:
        UserError: it cannot be copied.
    """
    if row == 0 or type(part) in STATELESS:
        return part
    try:
        return copy.deepcopy(part)
    except Exception as error:  # whatever a user's own class raises
        name = type(part).__name__
        raise UserError(f"{name} cannot be copied for each row of a batch, allowed is one row at a time: {error}") from error


class Record(LogitsProcessor):
    """Keeps the processed scores of each place, for criteria; the last of a row's processors."""

    def __init__(self) -> None:
        self._scores: dict[int, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._scores[input_ids.shape[1]] = scores
        return scores

    def until(self, length: int, rows: int) -> tuple[Tensor, ...]:
        """Scores [B, V] of every token so far of a text with so many."""
        return tuple(self._scores[n].float().repeat(rows, 1) for n in sorted(self._scores) if n < length)


class RowCriterion:
    """A stopping criterion of a batch, for one of its rows.

    Args:
        criterion: transformers' or the user's.
        row: which one this is for.
        rows: B; the criterion is shown so many, all alike.
        record: the row's scores, where criteria are told them.
    """

    def __init__(self, criterion: Any, row: int, rows: int, record: Record | None) -> None:
        self._criterion, self._row, self._rows, self._record = own_copy(criterion, row), row, rows, record

    def __call__(self, input_ids: Tensor, scores: Any = None) -> bool:
        told = None if self._record is None else self._record.until(input_ids.shape[1], self._rows)
        said = self._criterion(input_ids.repeat(self._rows, 1), told)
        each = torch.zeros(self._rows, dtype=torch.bool, device=input_ids.device) | said
        return bool(each[self._row])
