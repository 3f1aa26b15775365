"""Convert option values in the formats of other tools to draftree's options."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_LISTS = (
    "options",  # ollama
    "sampling_params",  # SGLang
    "gen_kwargs",  # lm_eval
    "generate_kwargs",  # pipelines of transformers
    "generation_kwargs",
    "extra_body",  # OpenAI
    "parameters",  # text-generation-inference
    "params",
    "generation_config",  # transformers
    "sampler",  # mlx_lm
)
"""Arguments of other tools whose value is an object with options."""
_FORMS = (
    "response_format",
    "format",
    "structured_outputs",
    "guided_decoding",
    "guided_choice",
    "choices",
    "choice",
    "json_mode",
    "grammar",
)
"""Arguments of other tools that constrain the form of the generated text."""
_SCHEMAS = ("json_schema", "schema", "guided_json", "response_format", "format")
"""Arguments whose value may be a pydantic model class, which is replaced by its JSON schema."""
_OBJECT = {"type": "object"}


CHAIN = "chain:length={}"
"""Spec of the policy that drafts a chain of a given number of tokens, as other tools do."""
_LENGTHS = (
    "num_speculative_tokens",  # vLLM
    "num_assistant_tokens",  # transformers
    "num_draft_tokens",  # mlx_lm
    "num_pred_tokens",  # llama-cpp-python
    "speculative_num_steps",  # SGLang
    "draft_max",  # llama.cpp
    "draft_tokens",
    "draft_length",
    "max_draft_len",
    "gamma",
    "num_steps",
)
"""Arguments of other tools that set the number of tokens drafted in a row."""
_LOOKUPS = (
    "prompt_lookup_num_tokens",
    "prompt_lookup_max",
    "ngram_prompt_lookup_max",
    "max_ngram_size",
    "ngram_size",
)
_METHODS = {
    "ngram": "pld",
    "prompt_lookup": "pld",
    "suffix": "suffix",
    "draft_model": None,
    "standalone": None,
}
"""Drafters for vLLM's speculative methods that need no model name. None stands for a method that
drafts with a small language model."""


def options_in(value: Any) -> dict[str, Any] | None:
    """Return the options in a dictionary, an `Options`, or a generation config of transformers.

    Return None for any other object.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "max_new_tokens"):
        return {
            f.name: held for f in fields(value) if (held := getattr(value, f.name)) != f.default
        }
    if callable(told := getattr(value, "to_diff_dict", None)):
        found = {
            name: held
            for name, held in told().items()
            if name not in ("transformers_version", "_from_model_config")
        }
        return (
            found
            if "do_sample" in found
            else {name: held for name, held in found.items() if name not in _SAMPLED}
        )
    return None


_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Options that a generation config uses only if `do_sample` is true."""


def rewrite_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options in the forms of other tools into draftree's options.

    The options in an object, such as ollama's `options`, are moved to the top level.
    `response_format` and similar options become `json_schema` or `regex`. `logprobs=True` becomes
    0, for the log-probability of each generated token only. `top_k=-1` becomes 0, for all tokens.
    `do_sample=True` becomes temperature 1 if none is given, and `do_sample=False` becomes
    temperature 0. Other options are not changed.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if (
            name in _SCHEMAS
            and isinstance(value, type)
            and callable(schema := getattr(value, "model_json_schema", None))
        ):
            found["json_schema"] = schema()
        elif (
            name in _LISTS
            and (held := options_in(value)) is not None
            and not held.keys() & given.keys()
        ):
            found |= rewrite_options(held)
        elif name in _FORMS and (form := _form(name, value)) is not None:
            found |= form
        elif name in ("stop_token_ids", "eos_token_id", "eos_token_ids", "end_id") and isinstance(
            value, int
        ):
            found[name] = [value]
        elif (
            name == "bad_words_ids"
            and isinstance(value, list)
            and all(len(ids) == 1 for ids in value)
        ):
            found["suppress"] = [ids[0] for ids in value]
        elif name == "t_max_predict_ms" and isinstance(value, int | float):
            found["max_time"] = value / 1000
        elif name == "return_logprob" and isinstance(value, bool):
            found |= {"logprobs": 0} if value and "top_logprobs_num" not in given else {}
        elif not (name in ("n_probs", "top_n_tokens") and value == 0):
            found[name] = value
    if isinstance(found.get("logprobs"), bool):
        asked = found.pop("logprobs")
        if asked and found.get("top_logprobs") is None:
            found["logprobs"] = 0
    if isinstance(top := found.get("top_k"), int) and top == -1:
        found["top_k"] = 0
    return _replace_sampling_options(found)


def _replace_sampling_options(given: dict[str, Any]) -> dict[str, Any]:
    """Replace `do_sample`, `greedy` and similar options by the temperature that they imply.

    An option that contradicts the given temperature is not replaced.
    """
    temperature = next(
        (name for name in ("temperature", "temp") if given.get(name) is not None), None
    )
    for name, samples in (
        ("do_sample", True),
        ("sample", True),
        ("sampling", True),
        ("greedy", False),
    ):
        if isinstance(asked := given.get(name), bool):
            if asked is not samples:
                given = {**{n: v for n, v in given.items() if n != temperature}, "temperature": 0}
            elif temperature is None:
                given = {**given, "temperature": 1.0}
            elif not given[temperature]:
                continue
            given = {n: v for n, v in given.items() if n != name}
    return given


def speculation(given: Any) -> dict[str, Any] | None:
    """Convert vLLM's speculative config into options `drafter` and `policy`.

    Return None if the config cannot be converted.
    """
    if not isinstance(given, Mapping):
        return None
    method, model, length = (
        given.get(name) for name in ("method", "model", "num_speculative_tokens")
    )
    lookup = given.get("prompt_lookup_max")
    method = (
        re.sub(r"[-_ \[\]]", "_", method.strip("[]").lower()) if isinstance(method, str) else method
    )
    if method in (None, "draft_model", "standalone"):
        drafter = f"lm:model={model}" if isinstance(model, str) else None
    elif method in _METHODS:
        drafter = (
            f"pld:ngram={lookup}"
            if method == "ngram" and isinstance(lookup, int)
            else _METHODS[method]
        )
    else:
        drafter = model if isinstance(model, str) else method
    if drafter is None or (length is not None and not isinstance(length, int)):
        return None
    return {"drafter": drafter} | ({} if length is None else {"policy": CHAIN.format(length)})


def rewrite_load_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return draftree's arguments of `load` for arguments that are written as in other tools.

    Arguments that need no conversion are returned unchanged.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if (
            name in ("speculative_config", "speculative")
            and (parts := speculation(value)) is not None
        ):
            found |= parts
        elif name in ("model_kwargs", "model_init_kwargs", "kwargs") and isinstance(value, Mapping):
            found |= rewrite_load_arguments(value)
        elif name in _LENGTHS and number:
            found["policy"] = CHAIN.format(value)
        elif name in _LOOKUPS and number and "lookup_num" in name:
            found |= {"drafter": f"pld:length={value}", "policy": CHAIN.format(value)}
        elif name in _LOOKUPS and number:
            found["drafter"] = f"pld:ngram={value}"
        elif name in ("load_in_8bit", "load_in_4bit") and value is True:
            found["quantize"] = "int8" if "8" in name else "int4"
        elif name in ("bits", "q_bits", "w_bit") and value in (4, 8):
            found["quantize"] = f"int{value}"
        elif name in ("enforce_eager", "disable_cuda_graph") and value is True:
            found["compile"] = False
        elif name in ("n_gpu_layers", "num_gpu", "ngl", "gpu_layers") and value == 0 and number:
            found["device"] = "cpu"
        elif name in ("flash_attn", "use_sdpa") and value is True:
            found["attn_implementation"] = "sdpa"
        else:
            found[name] = value
    return found


def _form(name: str, value: Any) -> dict[str, Any] | None:
    """Convert an argument that constrains the generated text into draftree's option.

    Return None if the argument cannot be converted.
    """
    if (name, value) == ("format", "json") or (name, value) == ("json_mode", True):
        return {"json_schema": _OBJECT}
    if name in ("guided_choice", "choices", "choice"):
        return _choice(value)
    if not isinstance(value, Mapping):
        return None
    if name == "format":  # ollama: the schema itself
        return {"json_schema": value}
    kind, schema = value.get("type"), value.get("json_schema", value.get("schema"))
    if name == "grammar":  # text-generation-inference
        return (
            {{"json": "json_schema", "regex": "regex"}[kind]: value["value"]}
            if kind in ("json", "regex")
            else None
        )
    if (
        name == "response_format" and kind == "json_object"
    ):  # llama-cpp-python gives a schema next to it
        return {"json_schema": _OBJECT if schema is None else schema}
    if name == "response_format" and kind == "json_schema" and isinstance(schema, Mapping):
        return {"json_schema": schema.get("schema", schema)}
    if dict(value) == {"json_object": True}:  # vLLM
        return {"json_schema": _OBJECT}
    if len(value) == 1 and "json" in value:
        return {"json_schema": value["json"]}
    if len(value) == 1 and "regex" in value:
        return {"regex": value["regex"]}
    return _choice(value["choice"]) if len(value) == 1 and "choice" in value else None


def _choice(texts: Any) -> dict[str, Any] | None:
    """Return an option `regex` that allows only the given texts; None if they are not texts."""
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        return {"regex": "|".join(map(re.escape, texts))}
    return None


def replacement_with_value(name: str, value: Any) -> str | None:
    """Return the replacement for an option with its value filled in; None if there is none."""
    if name in ("assistant_model", "draft_model") and isinstance(value, str):
        return f"draftree.load(…, drafter='lm:model={value}')"
    if name in _LENGTHS and isinstance(value, int):
        return f"draftree.load(…, policy='{CHAIN.format(value)}')"
    if name in ("speculative_config", "speculative") and (parts := speculation(value)) is not None:
        return f"draftree.load(…, {', '.join(f'{part}={told!r}' for part, told in parts.items())})"
    return None
