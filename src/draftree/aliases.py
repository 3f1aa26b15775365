"""Names that other tools use for options, commands and parts, each with draftree's own.

The tools are transformers, vLLM, the OpenAI API, ollama, llama.cpp, llama-cpp-python, mlx_lm and lm_eval.

A name in `SAME` means what draftree's name means and is accepted for it. A name in `INSTEAD` means something else, or something
that draftree does not have: the error says what to write. Both are keyed by the kind of name, as `UnknownName` is given it.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

OPTION, LOADING, COMMAND, DRAFTER, POLICY, ACCEPTOR = (
    "option",
    "option of loading a target",
    "command",
    "drafter",
    "policy",
    "acceptor",
)
ENGINE, MODULE, RESULT = "attribute of an Engine", "name in draftree", "attribute of a Completion"

NEAR = 0.65
"""The least similarity (difflib) of a name that is suggested."""

SAME: Mapping[str, Mapping[str, str]] = {
    OPTION: {
        "max_tokens": "max_new_tokens",  # OpenAI, vLLM, mlx_lm, llama-cpp-python
        "max_completion_tokens": "max_new_tokens",  # OpenAI
        "max_output_tokens": "max_new_tokens",  # OpenAI
        "n_predict": "max_new_tokens",  # llama.cpp
        "predict": "max_new_tokens",  # llama.cpp
        "num_predict": "max_new_tokens",  # ollama
        "max_gen_toks": "max_new_tokens",  # lm_eval
        "min_tokens": "min_new_tokens",  # vLLM
        "temp": "temperature",  # mlx_lm, llama.cpp
        "typical": "typical_p",  # llama.cpp
        "stop_strings": "stop",  # transformers
        "stop_sequences": "stop",
        "until": "stop",  # lm_eval
        "reverse_prompt": "stop",  # llama.cpp
        "suppress_tokens": "suppress",  # transformers
        "guided_json": "json_schema",  # vLLM
        "guided_regex": "regex",  # vLLM
        "top_logprobs": "logprobs",  # OpenAI
        "timeout": "max_time",
        "num_return_sequences": "n",  # transformers
    },
    LOADING: {
        "model": "target",  # vLLM
        "model_id": "target",
        "model_path": "target",  # llama-cpp-python
        "model_name": "target",
        "model_name_or_path": "target",
        "pretrained_model_name_or_path": "target",  # transformers
        "assistant_model": "drafter",  # transformers
        "draft_model": "drafter",  # mlx_lm, llama-cpp-python
        "speculative_model": "drafter",  # vLLM
        "torch_dtype": "dtype",  # transformers
        "lora": "adapter",
        "lora_path": "adapter",  # llama-cpp-python
        "adapter_path": "adapter",  # mlx_lm
    },
    COMMAND: {"benchmark": "bench", "ls": "list", "gen": "generate", "check": "doctor", "convert": "export"},
    DRAFTER: {
        "ngram": "pld",  # vLLM
        "prompt_lookup": "pld",  # transformers
        "prompt_lookup_decoding": "pld",
        "suffix_decoding": "suffix",
        "suffix_tree": "suffix",
        "lookahead_decoding": "lookahead",
        "eagle_1": "eagle",
        "eagle1": "eagle",
        "deepseek_mtp": "mtp",  # vLLM
        "qwen3_next_mtp": "mtp",  # vLLM
        "glm4_moe_mtp": "mtp",  # vLLM
    },
    POLICY: {"linear": "chain", "sequence": "chain"},
    ACCEPTOR: {"rejection_sampling": "rejection", "rejection_sampler": "rejection", "typical_acceptance": "typical"},
}
"""Names that are accepted, by kind."""

_SAMPLING = "temperature=1.0 samples, temperature=0 (the default) is greedy"
_BEAMS = "beam search is not offered"
_ENGINES = "draftree runs on one device; `draftree export` writes drafters for vLLM"
_THREADS = "set OMP_NUM_THREADS, or call torch.set_num_threads(N)"
_TOKENS = "the text is without special tokens; the `tokens` of a Completion are all ids"
_SMALL = "give the loaded model itself, its folder or hub id, or lm:model=FOLDER"
_CALL = "an option of each call: engine.chat(…), engine.complete(…)"
_POLICY = "the policy bounds the draft: policy='chain:length=5', or let the default policy choose"
_CONTEXT = "the context is the model's own; the cache grows as it is used"
_TODAY = "type draftree generate MODEL -p 'PROMPT'"

INSTEAD: Mapping[str, Mapping[str, str]] = {
    OPTION: {
        "do_sample": _SAMPLING,
        "max_length": "max_new_tokens counts new tokens, without the prompt",
        "min_length": "min_new_tokens counts new tokens, without the prompt",
        "num_beams": _BEAMS,
        "use_beam_search": _BEAMS,
        "beam_width": _BEAMS,
        "best_of": f"n=N writes N texts; {_BEAMS}",
        "length_penalty": _BEAMS,
        "early_stopping": _BEAMS,
        "generation_config": "give its values as options (temperature, top_p, …), or call engine.generate",
        "sampling_params": "give its values as options: temperature, top_p, max_new_tokens, …",
        "gen_kwargs": "give its values as options: temperature, top_p, max_new_tokens, …",
        "options": "give its values as options: temperature, top_p, max_new_tokens, …",
        "extra_body": "give its values as options: temperature, top_p, max_new_tokens, …",
        "streamer": "for token in engine.stream(…): print(token, end=''); engine.generate takes a streamer",
        "callback": "for token in engine.stream(…): print(token, end='')",
        "echo": "the text is without the prompt; write prompt + completion.text",
        "return_full_text": "the text is without the prompt; write prompt + completion.text",
        "skip_special_tokens": _TOKENS,
        "spaces_between_special_tokens": _TOKENS,
        "include_stop_str_in_output": "the stop text is in completion.stop; write completion.text + completion.stop",
        "detokenize": _TOKENS,
        "return_dict_in_generate": "engine.generate takes it; a Completion has text, tokens, logprobs and stats",
        "output_scores": "engine.generate takes it; logprobs=N gives the log-probabilities of a Completion",
        "output_logits": "engine.generate takes it; logprobs=N gives the log-probabilities of a Completion",
        "prompt_logprobs": "logprobs=N gives those of the new tokens; those of the prompt are not offered",
        "eos_token_id": "stop='TEXT' takes special tokens by their text; ignore_eos=True writes on",
        "stop_token_ids": "stop='TEXT' takes special tokens by their text",
        "pad_token_id": "it is not needed: the prompts of a list are padded internally",
        "attention_mask": "it is not needed: the prompts of a list are padded internally; engine.generate takes one",
        "input_ids": "engine.complete(ids) takes a list of ids, engine.generate(input_ids=…) a tensor",
        "inputs": "engine.complete('text') or engine.generate(input_ids)",
        "repeat_penalty": "repetition_penalty, which counts the whole prompt and answer, not the last 64 tokens",
        "repeat_last_n": "repetition_penalty counts the whole prompt and answer",
        "repetition_context_size": "repetition_penalty counts the whole prompt and answer",
        "presence": "presence_penalty",
        "frequency": "frequency_penalty",
        "format": 'json_schema=… takes a schema; json_schema=\'{"type": "object"}\' is any JSON object',
        "response_format": 'json_schema=… takes a schema; json_schema=\'{"type": "object"}\' is any JSON object',
        "guided_grammar": "grammar=Grammar.lark(…) takes a Lark grammar",
        "guided_choice": "regex='yes|no' allows a choice of texts",
        "guided_decoding": "json_schema=…, regex=… or grammar=…",
        "structured_outputs": "json_schema=…, regex=… or grammar=…",
        "logits_processors": "engine.generate takes logits_processor=…",
        "logits_processor": "engine.generate takes it",
        "stopping_criteria": "engine.generate takes it; stop='TEXT' ends a text",
        "tools": "put them into the messages, in the words of the model's chat template",
        "tool_choice": "json_schema=… forces the form of a call",
        "chat_template": "set engine.tokenizer.chat_template",
        "add_generation_prompt": "chat always adds it; complete continues the text as it is",
        "batch_size": "a list of prompts is one batch",
        "use_tqdm": "no progress bar is shown; engine.stream gives tokens as they come",
        "verbose": "completion.stats holds the figures",
        "keep_alive": "the engine lives as long as its object",
        "num_ctx": _CONTEXT,
        "n_ctx": _CONTEXT,
        "mirostat": "temperature, top_k, top_p, min_p and typical_p choose tokens",
        "tfs_z": "temperature, top_k, top_p, min_p and typical_p choose tokens",
        "xtc_probability": "temperature, top_k, top_p, min_p and typical_p choose tokens",
        "dry_multiplier": "repetition_penalty, frequency_penalty, presence_penalty or no_repeat_ngram_size",
        "penalty_alpha": "contrastive search is not offered",
        "num_assistant_tokens": _POLICY,
        "num_speculative_tokens": _POLICY,
        "prompt_lookup_num_tokens": "draftree.load(…, drafter='pld') drafts from the prompt",
        "assistant_model": f"draftree.load(…, drafter=…): {_SMALL}",
        "draft_model": f"draftree.load(…, drafter=…): {_SMALL}",
        "drafter": "draftree.load(…, drafter=…)",
        "policy": "draftree.load(…, policy=…)",
        "model": "draftree.load(MODEL)",
        "role": "messages=[{'role': 'user', 'content': '…'}]",
        "prompt": "the prompt is the first argument",
        "raw": "engine.complete continues a text as it is; engine.chat applies the chat template",
        "system": "engine.chat(text, system=…) takes a system message; complete continues a text as it is",
        "system_prompt": "engine.chat(text, system=…)",
        "instruction": "engine.chat(text, system=…)",
    },
    LOADING: {
        "load_in_8bit": "quantize='int8'",
        "load_in_4bit": "quantize='int4'",
        "quantization": "quantize='int8' or quantize='int4'",
        "quantization_config": "quantize='int8' or quantize='int4', or load the model with transformers and give it",
        "cache_dir": "set HF_HOME, or give the folder of a model",
        "download_dir": "set HF_HOME, or give the folder of a model",
        "token": "run `hf auth login`, or set HF_TOKEN",
        "use_auth_token": "run `hf auth login`, or set HF_TOKEN",
        "hf_token": "run `hf auth login`, or set HF_TOKEN",
        "local_files_only": "set HF_HUB_OFFLINE=1",
        "low_cpu_mem_usage": "it is not needed",
        "use_fast": "load the tokenizer with transformers and give it as tokenizer=…",
        "use_safetensors": "it is not needed",
        "config": "load the model with transformers and give it",
        "max_memory": "device_map='auto' or device='cuda:0': the whole model has to fit on one device",
        "tensor_parallel_size": _ENGINES,
        "pipeline_parallel_size": _ENGINES,
        "gpu_memory_utilization": "memory is taken as it is needed",
        "max_model_len": _CONTEXT,
        "n_ctx": _CONTEXT,
        "num_ctx": _CONTEXT,
        "enforce_eager": "compile=False",
        "n_gpu_layers": "device='cuda' or device='cpu'",
        "num_gpu": "device='cuda' or device='cpu'",
        "ngl": "device='cuda' or device='cpu'",
        "n_threads": _THREADS,
        "num_thread": _THREADS,
        "threads": _THREADS,
        "n_batch": "it is not needed",
        "flash_attn": "attn_implementation='sdpa'",
        "enable_lora": "adapter=FOLDER merges a PEFT adapter",
        "tokenizer_config": "load the tokenizer with transformers and give it as tokenizer=…",
        "tokenizer_name": "load the tokenizer with transformers and give it as tokenizer=…",
        "speculative_config": "drafter=… and policy=…: load(MODEL, drafter='eagle3', policy='chain:length=5')",
        "speculative_draft_tensor_parallel_size": _ENGINES,
        "num_speculative_tokens": _POLICY,
        "num_draft_tokens": _POLICY,
        "num_assistant_tokens": _POLICY,
        "draft_max": _POLICY,
        "num_pred_tokens": _POLICY,
        "prompt_lookup_num_tokens": "drafter='pld' drafts from the prompt",
        "model_args": "give them as arguments: load(MODEL, dtype=…)",
        "temperature": _CALL,
        "seed": _CALL,
        "max_tokens": _CALL,
        "max_new_tokens": _CALL,
        "top_p": _CALL,
        "stream": _CALL,
        "streamer": "an argument of engine.generate; for token in engine.stream(…) reads a text as it comes",
        "system": "an argument of engine.chat and engine.conversation",
    },
    COMMAND: {
        "run": _TODAY,
        "chat": f"{_TODAY}; in Python engine.conversation() keeps the messages",
        "serve": f"there is no server; {_TODAY}, or load the model in Python",
        "server": f"there is no server; {_TODAY}, or load the model in Python",
        "complete": "type draftree generate MODEL -p 'TEXT' --raw",
        "completion": "type draftree generate MODEL -p 'TEXT' --raw",
        "prompt": _TODAY,
        "cli": _TODAY,
        "eval": "type draftree bench MODEL, or lm_eval --model draftree",
        "perf": "type draftree bench MODEL",
        "pull": "models are downloaded when they are first used; `hf download ID` fetches one ahead",
        "download": "models are downloaded when they are first used; `hf download ID` fetches one ahead",
        "models": "any Hugging Face folder, hub id or .gguf file is a model; `draftree drafters` lists trained drafters",
        "ps": "nothing runs in the background",
        "rm": "`hf cache` shows and removes downloaded models",
        "show": "type draftree list, or draftree drafters --for MODEL",
        "info": "type draftree list, or draftree drafters --for MODEL",
        "policies": "type draftree list",
        "version": "type draftree --version",
        "help": "type draftree --help, or draftree COMMAND --help",
        "quantize": "type draftree generate MODEL --quantize int8",
        "finetune": "type draftree train DRAFTER --target MODEL",
        "profile": "type draftree generate MODEL -p 'PROMPT' --profile",
        "verify": "type draftree doctor --lossless",
        "test": "type draftree doctor --lossless",
        "upload": "type draftree push FOLDER OWNER/NAME",
    },
    DRAFTER: {
        "eagle2": "eagle2 is a policy: drafter 'eagle', policy 'eagle2'",
        "draft_model": _SMALL,
        "assistant": _SMALL,
        "assistant_model": _SMALL,
        "assisted": _SMALL,
        "small_model": _SMALL,
        "mlp_speculator": "that layout is not read; 'medusa' and 'hydra' have heads for further tokens",
        "none": "engine.plain, or --baseline on the command line, decodes without a drafter",
        "off": "engine.plain, or --baseline on the command line, decodes without a drafter",
        "plain": "engine.plain, or --baseline on the command line, decodes without a drafter",
        "auto": "leave the drafter out for the default one",
        "default": "leave the drafter out for the default one",
        "pct": "pct is a policy: policy='pct'",
        "greedy": "greedy is an acceptor: acceptor='greedy'",
    },
    POLICY: {
        "tree": "pct, yield and eagle2 grow trees",
        "auto": "leave the policy out for the default one",
        "default": "leave the policy out for the default one",
        "greedy": "greedy is an acceptor: acceptor='greedy'",
        "sequoia": "type draftree train static --method sequoia, and use policy 'static'",
    },
    ACCEPTOR: {
        "typical_acceptance_sampler": "acceptor='typical', which is lossy",
        "exact": "leave the acceptor out: the default keeps the target's text",
        "auto": "leave the acceptor out: the default keeps the target's text",
        "temperature": "temperature is an option of each call",
    },
    ENGINE: {
        "create_completion": "engine.complete('text')",
        "create_chat_completion": "engine.chat(messages)",
        "completions": "engine.complete('text')",
        "stream_generate": "engine.stream('text')",
        "stream_chat": "engine.chat(messages, stream=True)",
        "invoke": "engine.chat('text')",
        "predict": "engine.chat('text')",
        "ask": "engine.chat('text')",
        "say": "engine.chat('text'), or engine.conversation().say('text')",
        "answer": "engine.chat('text')",
        "run": "engine.chat('text')",
        "generate_text": "engine.complete('text')",
        "agenerate": "await engine.acomplete('text')",
        "batch": "engine.complete([…]) takes a list of prompts",
        "model": "engine.target.decoder.model is transformers' model",
        "config": "engine.target.decoder.model.config",
        "device": "engine.target.decoder.device",
        "dtype": "engine.target.decoder.dtype",
        "get_tokenizer": "engine.tokenizer",
        "tokenize": "engine.tokenizer(text)",
        "encode": "engine.tokenizer.encode(text)",
        "decode": "engine.tokenizer.decode(ids)",
        "to": "draftree.load(…, device=…)",
        "cuda": "draftree.load(…, device='cuda')",
        "eval": "the model is in evaluation mode already",
        "from_pretrained": "draftree.load(MODEL)",
        "stats": "each Completion has its own: completion.stats",
        "benchmark": "draftree bench MODEL",
    },
    MODULE: {
        "LLM": "draftree.load(MODEL)",
        "Llama": "draftree.load(MODEL)",
        "SamplingParams": "give its values as options: engine.chat('text', temperature=0.7, max_new_tokens=100)",
        "AutoModelForCausalLM": "draftree.load(MODEL)",
        "AutoModel": "draftree.load(MODEL)",
        "Model": "draftree.load(MODEL)",
        "OpenAI": "draftree.load(MODEL)",
        "Client": "draftree.load(MODEL)",
        "pipeline": "draftree.load(MODEL)",
        "from_pretrained": "draftree.load(MODEL)",
        "load_model": "draftree.load(MODEL)",
        "generate": "draftree.load(MODEL).chat('text')",
        "stream_generate": "draftree.load(MODEL).stream('text')",
        "chat": "draftree.load(MODEL).chat('text')",
        "complete": "draftree.load(MODEL).complete('text')",
        "stream": "draftree.load(MODEL).stream('text')",
        "Chat": "draftree.load(MODEL).conversation()",
        "serve": "there is no server",
        "drafters": "`draftree list` lists them; draftree.load(MODEL, drafter='NAME') takes one",
    },
    RESULT: {
        "outputs": "completion.text, completion.tokens",
        "choices": "completion.text, completion.tokens",
        "content": "completion.text",
        "message": "completion.text",
        "response": "completion.text",
        "generated_text": "completion.text",
        "output": "completion.text",
        "token_ids": "completion.tokens",
        "ids": "completion.tokens",
        "sequences": "completion.tokens; engine.generate returns sequences",
        "finish_reason": "completion.ending",
        "stop_reason": "completion.stop",
        "usage": "completion.stats, len(completion.tokens)",
        "speedup": "`draftree generate --baseline` compares with plain decoding",
        "acceptance_rate": "completion.stats.acceptance_length",
    },
}
"""What to write instead of names that are not accepted, by kind."""


def plain(name: str) -> str:
    """Return a name in lower case and without separators, as `eagle3` for `EAGLE-3`."""
    return re.sub(r"[-_ .]", "", name.lower())


def accepted(kind: str, got: str, known: Iterable[str]) -> str:
    """Return draftree's name for a name: that of `SAME`, or the known one that differs in case and separators alone.

    Args:
        kind: of the name.
        got: the name.
        known: draftree's own names.

    Returns:
        draftree's name; the given one where it stands for none.
    """
    known = list(known)
    if got in known:
        return got
    same = {plain(word): ours for word, ours in SAME.get(kind, {}).items() if ours in known}
    own = {plain(name): name for name in known}
    return own.get(plain(got)) or same.get(plain(got)) or got


def instead(kind: str, got: str) -> str | None:
    """Return what to write instead of a name of another tool, None where it is not in the table."""
    return next((told for word, told in INSTEAD.get(kind, {}).items() if plain(word) == plain(got)), None)


def nearest(kind: str, got: str, known: Iterable[str]) -> str | None:
    """Return draftree's name nearest in spelling to a name, by way of other tools' names too; None where nothing is near."""
    known = sorted(known)
    same = {word: ours for word, ours in SAME.get(kind, {}).items() if ours in known}
    near = difflib.get_close_matches(got, [*known, *same], n=1, cutoff=NEAR)
    return same.get(near[0], near[0]) if near else None
