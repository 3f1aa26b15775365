"""Values in the forms of other tools, turned into options of draftree."""

import re
from collections.abc import Mapping
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
)
"""Arguments that hold options."""
_FORMS = ("response_format", "format", "structured_outputs", "guided_decoding", "guided_choice", "json_mode", "grammar")
"""Arguments that constrain the form of a text."""
_SCHEMAS = ("json_schema", "schema", "guided_json", "response_format", "format")
"""Arguments that may be a class of pydantic, which stands for its JSON schema."""
_OBJECT = {"type": "object"}


def rewritten(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those in another tool's form replaced by draftree's, where they mean the same.

    Options in an object, as ollama's `options`, stand by themselves; `response_format` and its like become `json_schema` or
    `regex`; `logprobs=True` asks for each token's own; `top_k=-1` keeps all tokens. Anything else stays as it is.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SCHEMAS and isinstance(value, type) and callable(schema := getattr(value, "model_json_schema", None)):
            found["json_schema"] = schema()
        elif name in _LISTS and isinstance(value, Mapping) and not value.keys() & given.keys():
            found |= rewritten(value)
        elif name in _FORMS and (form := _form(name, value)) is not None:
            found |= form
        else:
            found[name] = value
    if isinstance(found.get("logprobs"), bool):
        asked = found.pop("logprobs")
        if asked and found.get("top_logprobs") is None:
            found["logprobs"] = 0
    if isinstance(top := found.get("top_k"), int) and top == -1:
        found["top_k"] = 0
    return found


def _form(name: str, value: Any) -> dict[str, Any] | None:
    """Return the options that constrain a text as an argument does; None where it is not understood."""
    if (name, value) == ("format", "json") or (name, value) == ("json_mode", True):
        return {"json_schema": _OBJECT}
    if name == "guided_choice":
        return _choice(value)
    if not isinstance(value, Mapping):
        return None
    if name == "format":  # ollama: the schema itself
        return {"json_schema": value}
    kind, schema = value.get("type"), value.get("json_schema", value.get("schema"))
    if name == "grammar":  # text-generation-inference
        return {{"json": "json_schema", "regex": "regex"}[kind]: value["value"]} if kind in ("json", "regex") else None
    if name == "response_format" and kind == "json_object":  # llama-cpp-python gives a schema beside it
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
    """Return the expression that allows a choice of texts; None where these are no texts."""
    if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts):
        return {"regex": "|".join(map(re.escape, texts))}
    return None


def filled(name: str, value: Any) -> str | None:
    """Return what to write instead of an option with its value, where the hint can hold that value."""
    if name in ("assistant_model", "draft_model") and isinstance(value, str):
        return f"draftree.load(…, drafter='lm:model={value}')"
    if name in ("speculative_config", "speculative") and isinstance(value, Mapping):
        model, length = value.get("model"), value.get("num_speculative_tokens")
        told = [f"drafter='lm:model={model}'"] * isinstance(model, str)
        told += [f"policy='chain:length={length}'"] * isinstance(length, int)
        return f"draftree.load(…, {', '.join(told)})" if told and value.get("method") in (None, "draft_model") else None
    return None
