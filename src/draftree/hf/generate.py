"""The hook for transformers' `custom_generate`, and the options that it accepts.

transformers prepares prompts, processors and criteria, and calls the hook instead of its own loop.
Whatever the hook cannot honour it refuses by name, so that nobody gets another output than asked
for.

Shapes: B rows of the batch, n ids of a padded prompt, T new tokens, V vocabulary.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from draftree.aliases import OPTION, PROMPT, canonical_name, replacement_with_value, suggestion
from draftree.batch import EngineMethods
from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.errors import UserError, format_value
from draftree.hf.generate_call import GenerateCall, prompt_ids, write
from draftree.metrics import Stats
from draftree.models.model_config import CACHES
from draftree.text.options import Options
from draftree.utils.token_ids import row_of_ids
from draftree.utils.validated_dataclass import is_whole

UNSUPPORTED_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {
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
    "cache_implementation": (  # hybrid stands in configs of Gemma, and transformers ignores it
        ("dynamic", "hybrid"),
        "none; draftree has a cache of its own",
    ),
    "output_attentions": (
        (False,),
        "false; passes over trees have other attentions than plain decoding's",
    ),
    "output_hidden_states": (
        (False,),
        "false; passes over trees have other states than plain decoding's",
    ),
}
"""Options of a generation config that are not supported.

For each there are the values without effect, in addition to None, and the advice for the error
message.
"""
NOT_HERE: Mapping[str, str] = {
    "assistant_model": "none; the engine has its drafter: draftree.load(model, drafter=assistant) drafts with a model",
    "assistant_tokenizer": "none; drafters share the target's tokenizer",
    "custom_generate": "none; this is a loop of its own",
    "synced_gpus": "none; an engine runs on one process",
}
"""Arguments of `generate` that transformers does not pass to a hook."""
FORWARD_ARGUMENTS = frozenset(
    ("attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep")
)
"""Arguments of the model's forward, prepared by transformers, that the hook reads or ignores."""
COMPLETE_OPTIONS = tuple(field.name for field in fields(Options))
"""Names of the options of `Engine.complete`."""
TRANSFORMERS_NAMES: Mapping[str, str] = {
    "stop": "stop_strings",
    "n": "num_return_sequences",
    "suppress": "suppress_tokens",
    "stop_ids": "eos_token_id",
}
"""transformers' names for options of `Engine.complete` that are named differently."""
TEXT_METHODS_HINT = "engine.chat('text') answers, engine.complete('text') continues a text"
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""The allowed dtypes of prompt ids."""


class Hook:
    """Run the decoding loop for `model.generate(…, custom_generate=hook)`; `speculate` returns it.

    Args:
        opened: returns the engine for a model and for the assistant model given to `generate`,
            which may be None.
        seed: the sampling seed; by default a new random one for each call.
        streamer: receives the prompt, the accepted tokens one by one, and the end; by default the
            streamer of `generate`.
        tokenizer: the tokenizer for stop strings; the target's own by default.
        reuse: whether the cached prefix of the last call is reused; allowed only if no other code
            can change the model's weights between calls.

    Attributes:
        stats: figures of the last call.
    """

    def __init__(
        self,
        opened: Callable[[PreTrainedModel, PreTrainedModel | None], EngineMethods],
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reuse: bool = False,
    ) -> None:
        self._seed = (
            None if seed is None else Options(seed=seed).seed
        )  # by the rule of options, in greedy calls too
        if not isinstance(streamer, BaseStreamer | None):
            raise UserError(
                f"streamer is {format_value(streamer)}, allowed is one of transformers' streamers, or None"
            )
        self._opened = opened
        self._streamer = streamer
        self._tokenizer = tokenizer
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
        """Generate the same tokens as transformers' own loop, in fewer passes.

        Arguments that are parameters here but not of transformers' loop are passed on by
        transformers. `stop_strings` and `token_healing` therefore arrive here instead of in the
        generation config, where they would need a tokenizer that transformers drops. `seed` becomes
        another argument of `generate`.
        """
        refuse_options({"token_healing": token_healing})
        refuse(model, generation_config, logits_processor, model_kwargs)
        theirs = arguments_of_generate(model)
        streamer = self._streamer_of(theirs.get("streamer"), input_ids)
        with inference(model):
            engine = self._opened(model, theirs.get("assistant_model"))
            criteria = [*stopping_criteria]
            if stop_strings is not None and not any(
                type(c) is StopStringCriteria for c in criteria
            ):  # the user's argument wins
                try:
                    criteria.append(
                        StopStringCriteria(self._tokenizer or engine.tokenizer, stop_strings)
                    )
                except UserError as error:
                    raise UserError(
                        f"stop_strings need a tokenizer, speculate(tokenizer=…) takes one: {error}"
                    ) from error
            rows = prompt_ids(input_ids, model_kwargs, engine.target.decoder.hf.window is not None)
            call = GenerateCall(input_ids, rows, generation_config, [*logits_processor], criteria)
            sampling = call.sampling(self._seed if seed is None else Options(seed=seed).seed)
            written, self.stats = write(engine, call, sampling, streamer, self._reuse)
        if streamer is not None:
            streamer.end()
        return call.output(written)

    def _streamer_of(self, theirs: BaseStreamer | None, input_ids: Tensor) -> BaseStreamer | None:
        """Return the streamer of a call, and pass the prompt to it.

        transformers itself passes the prompt to the streamer of `generate`.

        Raises:
            UserError: there are two streamers, or several sequences.
        """
        if self._streamer is not None and theirs is not None:
            raise UserError(
                "streamer is given to generate and to speculate, allowed is one of them"
            )
        streamer = theirs if self._streamer is None else self._streamer
        if streamer is not None and len(input_ids) > 1:
            raise UserError(f"the batch has {len(input_ids)} rows, a streamer takes 1")
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        return streamer


def takes_hook_calls(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of an engine so that it can be the `custom_generate` of the engine's model.

    transformers then calls it with the model as first argument.
    """

    @wraps(method)
    def call(engine: Any, *given: Any, **named: Any) -> Any:
        if (
            len(given) != 2
            or not isinstance(given[0], PreTrainedModel)
            or "generation_config" not in named
        ):
            return method(engine, *given, **named)
        if given[0] is not engine.target.decoder.model:
            raise UserError(
                "custom_generate is of an engine with another model: draftree.load(model) makes one of this model"
            )
        return Hook(lambda model, assistant: engine)(*given, **named)

    return call


def generate(
    engine: EngineMethods,
    inputs: Tensor | None,
    seed: int | None,
    streamer: BaseStreamer | None,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> Tensor | GenerateDecoderOnlyOutput:
    """Run transformers' `generate` of the engine's model with the engine's decoding loop.

    This implements `Engine.generate`. It also handles arguments that transformers does not pass to
    a hook.

    Raises:
        UserError: an option is not supported.
    """
    model: Any = engine.target.decoder.model
    check_types(None, tokenizer)
    if inputs is not None:
        check_ids(inputs)
    options = rename_options(model, options)
    for name in ("max_new_tokens", "min_new_tokens", "max_length", "num_return_sequences"):
        if not (
            options.get(name) is None or is_whole(options[name], 1 - (name == "min_new_tokens"))
        ):
            raise UserError(
                f"{name} is {format_value(options[name])}, allowed is a whole number above 0"
            )
    for name, allowed in NOT_HERE.items():
        if options.get(name) not in (None, False):
            raise UserError(
                f"{name} is given, allowed is {replacement_with_value(name, options[name]) or allowed}"
            )
    config, default = options.get("generation_config"), model.generation_config
    told = [options, *(vars(c) for c in (config, default) if c is not None)]
    asked = {
        n: next((o[n] for o in told if o.get(n) is not None), None)
        for n in ("stop_strings", *UNSUPPORTED_OPTIONS)
    }
    refuse_options(asked)
    hook = Hook(lambda model, assistant: engine, seed, streamer, tokenizer, reuse=True)

    def loop(
        model: PreTrainedModel, input_ids: Tensor, **prepared: Any
    ) -> Tensor | GenerateDecoderOnlyOutput:
        # Without parameters of its own, which would take options away from transformers.
        return hook(model, input_ids, stop_strings=asked["stop_strings"], **prepared)

    options = without_stop_strings(options, default)
    written: Tensor | GenerateDecoderOnlyOutput = model.generate(
        inputs, custom_generate=loop, **options
    )
    return written


def is_text(inputs: Any) -> bool:
    """Return whether prompts are not ids but texts, messages, or in vLLM's form."""
    several = inputs if isinstance(inputs, list | tuple) else [inputs]
    return bool(several) and all(
        isinstance(one, str)
        or (
            isinstance(one, Mapping)
            and bool({"prompt", "content", "prompt_token_ids"} & one.keys())
        )
        for one in several
    )


def pop_prompt_text(options: dict[str, Any]) -> Any:
    """Remove the prompt from the options, under any of its names, and return it.

    Return None if the prompt consists of ids.
    """
    for name, value in options.items():
        if canonical_name(PROMPT, name, ["prompt"]) == "prompt" and (
            is_text(value) or name not in ("inputs", "input_ids")
        ):
            return options.pop(name)
    return None


def rename_options(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options of other tools and of `Engine.complete` to transformers' names.

    Raises:
        UserError: transformers' `generate` has no such option, or it is given twice; the message
            gives the correct form.
    """
    config, found = model.generation_config, dict[str, Any]()
    for name, value in options.items():
        if hasattr(config, name) or name in NOT_HERE:
            found[name] = value
            continue
        if canonical_name(PROMPT, name, ["prompt"]) == "prompt" and name not in (
            "inputs",
            "input_ids",
        ):
            raise UserError(f"{name} is given, but engine.generate takes ids: {TEXT_METHODS_HINT}")
        ours = canonical_name(OPTION, name, COMPLETE_OPTIONS)
        if ours in COMPLETE_OPTIONS and ours != "seed":
            if not hasattr(config, theirs := TRANSFORMERS_NAMES.get(ours, ours)):
                told = f"engine.generate takes transformers' options; engine.complete takes {ours}"
                raise UserError(f"{name} is given, but {told}")
            if theirs in options or theirs in found:
                raise UserError(f"{theirs} and {name} are given, allowed is one of them")
            if ours == "stop_ids":  # they end a text like EOS, which still does
                given = options.get("generation_config") or config
                value = sorted({*id_list(value), *id_list(given.eos_token_id)})
            elif ours == "stop" and not value:
                value = None
            found[theirs] = value
            continue
        if name in ("sampling_params", "drafter", "policy", "acceptor", "stream", "callback"):
            raise UserError(
                f"unknown option of engine.generate '{name}': {suggestion(OPTION, name) or TEXT_METHODS_HINT}"
            )
        found[name] = value
    return found


def id_list(given: Any) -> list[int]:
    """Return token ids that are given as one id, several or None."""
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def check_ids(inputs: Any) -> None:
    """Refuse prompts that are not a tensor of ids [B, n].

    Raises:
        UserError: the message explains how to make such a tensor.
    """
    if isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.dtype in ID_DTYPES:
        return
    told = "engine.complete takes a list of ids or texts"
    if isinstance(inputs, Tensor) and inputs.dim() == 1:
        told = "ids[None] is a batch of one prompt"
    elif isinstance(inputs, Tensor):
        told = (
            "ids.long() makes whole numbers"
            if inputs.is_floating_point()
            else "a prompt has ids in one row"
        )
    elif row_of_ids(inputs) is not None:
        told = f"torch.tensor([ids]) makes one; {told}"
    elif isinstance(inputs, list | tuple | np.ndarray):
        told = f"torch.tensor(ids) makes one; {told}"
    raise UserError(f"inputs is {format_value(inputs)}, allowed is a tensor of ids [B, n]: {told}")


def arguments_of_generate(model: PreTrainedModel) -> Mapping[str, Any]:
    """Return the arguments of the `generate` call that has called the hook.

    Return none if another function called it. transformers does not pass `streamer` and
    `assistant_model` to a callable `custom_generate`, so they are read from the frame of
    `generate`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name == "generate"
            and frame.f_globals.get("__name__") == GenerationMixin.__module__
        ):
            values = frame.f_locals
            return values if values.get("self") is model else {}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def without_stop_strings(
    options: Mapping[str, Any], default: GenerationConfig | None
) -> dict[str, Any]:
    """Return the options without stop strings, which the hook handles itself.

    For them transformers would need a tokenizer, which it drops.
    """
    changed = dict(options)
    if (config := options.get("generation_config")) is not None:
        changed["generation_config"] = copy.deepcopy(config)
        changed["generation_config"].stop_strings = None
    if "stop_strings" in options or (default is not None and default.stop_strings is not None):
        changed["stop_strings"] = None
    return changed


def check_types(costs: Any, tokenizer: Any) -> None:
    """Refuse costs or a tokenizer of the wrong type.

    Raises:
        UserError: the message names the argument.
    """
    if not isinstance(costs, Costs | CostTable | None):
        raise UserError(
            f"costs is {format_value(costs)}, allowed is Costs, a CostTable (CostTable.load reads a file), or None"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise UserError(
            f"tokenizer is {format_value(tokenizer)}, allowed is one of transformers' tokenizers, or None"
        )


@contextmanager
def inference(model: PreTrainedModel) -> Iterator[None]:
    """Put the model into evaluation mode inside the context.

    With dropout, no two passes would agree.
    """
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
    """Refuse arguments that are not supported.

    Raises:
        UserError: the message names the argument.
    """
    if model.config.is_encoder_decoder:
        raise UserError(
            f"{type(model).__name__} is an encoder-decoder model, allowed are decoder-only ones"
        )
    refuse_options(vars(config))
    if (mode := config.get_generation_mode()) not in (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
    ):
        raise UserError(
            f"generation mode '{mode.value}' is not offered, allowed are greedy_search and sample"
        )
    if any(type(p) is UnbatchedClassifierFreeGuidanceLogitsProcessor for p in processors):
        raise UserError(
            "a processor for guidance is given, allowed is none: it needs a second pass for every token"
        )
    for name in CACHES:
        if getattr(
            model_kwargs.get(name), "_is_user_defined", False
        ):  # set by transformers if a cache was given
            raise UserError(
                f"{name} is given, allowed is none: give the whole text, draftree has a cache of its own"
            )
    others = [
        name
        for name, value in model_kwargs.items()
        if name not in FORWARD_ARGUMENTS and value is not None and value is not False
    ]
    if others:
        raise UserError(
            f"{', '.join(sorted(others))} may change what the model computes, allowed are input_ids and their mask"
        )
    many = (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )
    if many and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        raise UserError(
            "the model's weights are spread over processes, allowed is one process: gather them first"
        )


def refuse_options(values: Mapping[str, Any]) -> None:
    """Refuse options of a generation config that are not supported.

    Raises:
        UserError: the message names the option.
    """
    for name, (nothing, allowed) in UNSUPPORTED_OPTIONS.items():
        got = values.get(name)
        if got is not None and got not in nothing:
            raise UserError(f"{name} is {got!r}, allowed is {allowed}")
