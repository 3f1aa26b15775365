"""Attributes and methods of other tools that draftree's objects have under another name."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from math import isfinite
from operator import attrgetter
from typing import Any

Reader = Callable[[Any], Any]
"""Function that returns the value of an alias, given the object on which it is looked up."""
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", None: None}
"""OpenAI's names of reasons for the end of a text, by draftree's names."""


@dataclass(frozen=True)
class Usage:
    """Store the numbers of tokens in a prompt and a generated text, as in OpenAI's API."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens in prompt and generated text together."""
        return self.prompt_tokens + self.completion_tokens

    def __getitem__(self, name: str) -> Any:
        """Return an attribute by its name, because other tools store usage in dictionaries."""
        return getattr(self, name)


class Resource:
    """Wrap a method as a resource of OpenAI's client, whose `create` calls the method.

    The argument `model` is ignored, because an engine has only one model.

    Args:
        call: the method to call.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        update_wrapper(self, call)

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Call the wrapped method with all arguments."""
        return self._call(*given, **options)

    def create(self, **options: Any) -> Any:
        """Call the wrapped method without the argument `model`."""
        return self._call(**{name: value for name, value in options.items() if name != "model"})

    @property
    def completions(self) -> "Resource":
        """Return the resource itself, because OpenAI's client calls `chat.completions.create`."""
        return self


def by_reader(*groups: tuple[str | Reader, str]) -> dict[str, Reader]:
    """Return a table of readers by alias.

    Args:
        groups: pairs of a reader and its aliases, which are separated by spaces. The reader is a
            function or the path of an attribute.

    Raises:
        ValueError: an alias has two readers.
    """
    pairs = [
        (word, attrgetter(how) if isinstance(how, str) else how)
        for how, words in groups
        for word in words.split()
    ]
    found = dict(pairs)
    if len(found) < len(pairs):
        words = sorted({word for word, _ in pairs if [w for w, _ in pairs].count(word) > 1})
        raise ValueError(f"these words are read in two ways: {', '.join(words)}")
    return found


def same_object(of: Any) -> Any:
    """Return the object itself.

    This reads aliases such as `message` and `delta`. In other tools they name a nested object that
    has the text. Here the object itself has the text.
    """
    return of


def in_list(of: Any) -> list[Any]:
    """Return a list with only the object, for other tools' lists of texts."""
    return [of]


def log_prob_reader(read: Reader) -> Reader:
    """Return a reader of completions that applies `read` to the log-probabilities of each token.

    The reader raises an `AttributeError` if a completion has no log-probabilities.
    """

    def read_all(completion: Any) -> list[Any]:
        if not completion.logprobs:
            raise AttributeError(
                "engine.complete(…, logprobs=N) fills completion.logprobs, which this is read from"
            )
        return [read(found) for found in completion.logprobs]

    return read_all


def as_dict(completion: Any) -> dict[str, Any]:
    """Return a completion's prompt, text, tokens, ending and figures as a dictionary."""
    parts = {
        name: getattr(completion, name) for name in ("prompt", "text", "tokens", "ending", "stop")
    }
    return {**parts, "stats": completion.stats.as_json()}


def device_move_reader(engine: Any) -> Callable[..., Any]:
    """Return a method `to` for an engine, which accepts only the device that the engine is on."""

    def to(device: Any) -> Any:
        if str(device).partition(":")[0] == engine.device.type:
            return engine
        raise AttributeError(
            f"an engine stays on its device: draftree.load(…, device={str(device)!r})"
        )

    return to


def method_reader(path: str) -> Reader:
    """Return a reader whose result is a method that returns the attribute at `path`."""
    return lambda of: lambda: attrgetter(path)(of)


def rate(stats: Any) -> float:
    """Return the share of drafted tokens that were accepted; 0 without drafted tokens."""
    drafted = sum(step.nodes for step in stats.steps)
    return sum(step.accepted for step in stats.steps) / drafted if drafted else 0.0


def sum_log_probs(completion: Any) -> float:
    """Return the sum of the finite log-probabilities of a completion's tokens.

    Raises:
        AttributeError: the completion was generated without log-probabilities.
    """
    if not completion.logprobs:
        raise AttributeError(
            "engine.complete(…, logprobs=0) fills completion.logprobs, of which this is the sum"
        )
    return float(sum(found.logprob for found in completion.logprobs if isfinite(found.logprob)))


_STATS = (
    ("tokens_per_second", "tps tokens_per_sec speed throughput generation_tps"),
    ("seconds", "decode_time e2e_latency time elapsed duration latency total_time wall_time"),
    (
        "acceptance_length",
        "tau spec_accept_length mean_acceptance_length tokens_per_pass accept_length tokens_per_step",
    ),
    (rate, "acceptance_rate accept_rate draft_acceptance_rate spec_accept_rate"),
    (lambda s: [step.accepted for step in s.steps], "accepted_per_step accept_lengths"),
    (
        lambda s: sum(step.accepted for step in s.steps),
        "accepted accepted_tokens num_accepted num_accepted_tokens",
    ),
    (
        lambda s: sum(step.nodes for step in s.steps),
        "drafted draft_tokens num_draft_tokens nodes proposed",
    ),
    (lambda s: len(s.steps), "passes num_steps num_passes verifications num_drafts spec_verify_ct"),
)

STATS_READERS: Mapping[str, Reader] = by_reader(
    *_STATS,
    ("new_tokens", "num_tokens n_tokens generated_tokens completion_tokens"),
    ("as_json", "to_dict dict asdict as_dict"),
)


def _of_stats(how: str | Reader) -> Reader:
    read = attrgetter(how) if isinstance(how, str) else how
    return lambda completion: read(completion.stats)


RESULT_READERS: Mapping[str, Reader] = by_reader(
    *((_of_stats(how), words) for how, words in _STATS),
    *((f"stats.{name}", name) for name in ("tokens_per_second", "seconds", "acceptance_length")),
    ("stats", "metrics timings perf figures meta_info details"),
    (same_object, "message delta completion generation"),
    (in_list, "outputs choices results candidates generations"),
    ("text", "content response generated_text output answer result output_text reply string"),
    ("tokens", "token_ids ids output_ids output_token_ids generated_ids"),
    (
        lambda c: len(c.tokens),
        "num_tokens n_tokens completion_tokens generation_tokens eval_count new_tokens num_generated_tokens token_count "
        "num_output_tokens generated_token_count output_tokens",
    ),
    (lambda c: REASONS[c.ending], "finish_reason done_reason"),
    (lambda c: True, "done finished is_finished"),
    ("stop", "stop_reason stop_sequence stopped_by matched_stop stopping_word"),
    ("pieces", "text_tokens token_texts token_strings decoded_tokens tokens_text"),
    (sum_log_probs, "cumulative_logprob"),
    (log_prob_reader(attrgetter("logprob")), "token_logprobs"),
    (log_prob_reader(attrgetter("top")), "top_logprobs"),
    (lambda c: lambda **_: as_dict(c), "to_dict dict model_dump asdict as_dict as_json"),
    (lambda c: lambda **_: json.dumps(as_dict(c)), "json to_json model_dump_json"),
    (lambda c: "assistant", "role"),
    ("prompt_ids", "prompt_token_ids"),
    ("prompt", "prompt_text"),
    ("full_text", "text_with_prompt"),
    (lambda c: len(c.prompt_ids), "prompt_tokens num_prompt_tokens prompt_eval_count input_tokens"),
    (lambda c: len(c.prompt_ids) + len(c.tokens), "total_tokens"),
    (lambda c: Usage(len(c.prompt_ids), len(c.tokens)), "usage"),
)
TOKEN_READERS: Mapping[str, Reader] = by_reader(
    (same_object, "delta message"),
    (in_list, "choices"),
    ("text", "content response output piece string value decoded_token new_text data"),
    ("id", "token_id"),
    (lambda t: "assistant", "role"),
    (lambda t: [t.id], "token_ids ids tokens"),
    (lambda t: REASONS[t.ending], "finish_reason done_reason"),
    (lambda t: t.ending is not None, "done finished is_finished is_last"),
    (lambda t: t.origin == "drafted", "from_draft drafted accepted is_draft"),
)
CONVERSATION_READERS: Mapping[str, Reader] = by_reader(
    (
        "say",
        "chat ask send send_message reply complete generate respond answer invoke run predict query prompt create submit",
    ),
    ("stream", "send_message_stream stream_say stream_chat stream_message chat_stream"),
    ("asay", "achat asend ask_async say_async asend_message"),
    ("messages", "history turns chat_history context transcript"),
    (method_reader("messages"), "get_history"),
    ("engine", "model llm"),
)
ENGINE_READERS: Mapping[str, Reader] = by_reader(
    (
        "complete",
        "create_completion completion text_completion complete_text text_generation generate_text generate_one "
        "create continue_text complete_batch complete_many generate_batch batch_generate generate_many batch_complete",
    ),
    (
        "chat",
        "create_chat_completion create_chat_completion_openai_v1 chat_completion chat_completions chat_complete invoke "
        "predict ask answer run query respond reply infer inference batch chat_batch chat_many say send send_message",
    ),
    (
        "stream",
        "stream_generate generate_stream stream_complete stream_completion complete_stream iter_tokens stream_text "
        "stream_response stream_answer stream_tokens generate_iter token_stream",
    ),
    (lambda e: Resource(e.complete), "completions"),
    (lambda e: Resource(e.chat), "responses"),
    (lambda e: partial(e.chat, stream=True), "stream_chat chat_stream stream_chat_completion"),
    ("acomplete", "agenerate async_generate generate_async complete_async async_complete"),
    ("achat", "async_chat chat_async chat_completion_async ainvoke abatch"),
    ("astream", "async_stream stream_async"),
    (
        "conversation",
        "start_chat new_chat chat_session start_conversation create_conversation new_conversation",
    ),
    (
        "forget",
        "reset clear clear_cache reset_cache reset_prefix_cache flush_cache empty_cache close shutdown",
    ),
    (
        "target.decoder.model",
        "model hf_model transformer base_model llm module target_model language_model",
    ),
    ("target.decoder.model.config", "config model_config hf_config"),
    ("target.decoder.model.generation_config", "generation_config"),
    (method_reader("target.decoder.model.generation_config"), "get_default_sampling_params"),
    ("target.decoder.model.parameters", "parameters"),
    ("target.decoder.model.num_parameters", "num_parameters"),
    ("target.decoder.model.state_dict", "state_dict"),
    (lambda e: lambda: e, "eval"),
    (lambda e: lambda *_, **__: None, "warmup warm_up"),
    (device_move_reader, "to"),
    ("target.name", "name model_name name_or_path model_path"),
    ("target.decoder.device", "device"),
    ("target.decoder.dtype", "dtype"),
    ("target.decoder.vocab", "vocab_size"),
    (method_reader("target.decoder.vocab"), "n_vocab"),
    ("target.decoder.context", "context_length max_model_len max_seq_len context_window"),
    (method_reader("target.decoder.context"), "n_ctx"),
    ("tokenizer", "processor"),
    (method_reader("tokenizer"), "get_tokenizer"),
    ("tokenizer.encode", "tok_encode encode"),
    (lambda e: lambda text: len(e.tokenizer.encode(text)), "token_count count_tokens"),
    ("tokenizer.decode", "tok_decode decode detokenize"),
    ("tokenizer.batch_decode", "batch_decode"),
    ("tokenizer.apply_chat_template", "apply_chat_template"),
    ("tokenizer.eos_token_id", "eos_token_id eot_token_id"),
    (method_reader("tokenizer.eos_token_id"), "token_eos"),
    ("tokenizer.bos_token_id", "bos_token_id"),
    (method_reader("tokenizer.bos_token_id"), "token_bos"),
)
