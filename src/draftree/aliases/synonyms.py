"""Names of other tools that draftree accepts as synonyms of its own."""

from collections.abc import Mapping

from draftree.aliases.name_kinds import (
    ACCEPTOR,
    CHAT,
    COMMAND,
    DEVICE,
    DRAFTER,
    DTYPE,
    FLAG,
    LIMIT,
    LOADING,
    MODULE,
    OPTION,
    POLICY,
    PROMPT,
    QUANTIZE,
)

SAME: Mapping[str, Mapping[str, str]] = {
    OPTION: {
        "max_tokens": "max_new_tokens",  # OpenAI, vLLM, mlx_lm, llama-cpp-python
        "max_completion_tokens": "max_new_tokens",  # OpenAI
        "max_output_tokens": "max_new_tokens",  # OpenAI
        "n_predict": "max_new_tokens",  # llama.cpp
        "predict": "max_new_tokens",  # llama.cpp
        "num_predict": "max_new_tokens",  # ollama
        "max_gen_toks": "max_new_tokens",  # lm_eval
        "max_gen_tokens": "max_new_tokens",
        "max_tokens_to_sample": "max_new_tokens",
        "num_tokens": "max_new_tokens",
        "max_gen_len": "max_new_tokens",
        "min_tokens": "min_new_tokens",  # vLLM
        "temp": "temperature",  # mlx_lm, llama.cpp
        "typical": "typical_p",  # llama.cpp
        "stop_strings": "stop",  # transformers
        "stop_sequences": "stop",
        "stop_words": "stop",
        "no_repeat_ngrams": "no_repeat_ngram_size",
        "stop_sequence": "stop",
        "stop_at": "stop",
        "until": "stop",  # lm_eval
        "reverse_prompt": "stop",  # llama.cpp
        "suppress_tokens": "suppress",  # transformers
        "guided_json": "json_schema",  # vLLM
        "guided_regex": "regex",  # vLLM
        "top_logprobs": "logprobs",  # OpenAI
        "timeout": "max_time",
        "schema": "json_schema",
        "num_return_sequences": "n",  # transformers
        "num_completions": "n",
        "num_samples": "n",
        "num_outputs": "n",
        "num_generations": "n",
        "time_limit": "max_time",
        "presence": "presence_penalty",
        "present_penalty": "presence_penalty",
        "frequency": "frequency_penalty",
        "prefill": "beginning",
        "response_prefix": "beginning",
        "prefill_response": "beginning",  # mlx_lm
        "random_seed": "seed",
        "random_state": "seed",
        "sampling_seed": "seed",  # SGLang
        "manual_seed": "seed",
        "rng_seed": "seed",
        "n_probs": "logprobs",  # llama.cpp
        "top_n_tokens": "logprobs",  # text-generation-inference
        "top_logprobs_num": "logprobs",  # SGLang
        "stop_token": "stop",
        "eos_token": "stop",
        "stop_token_ids": "stop_ids",  # vLLM
        "eos_token_id": "stop_ids",  # transformers
        "eos_token_ids": "stop_ids",
        "end_id": "stop_ids",  # TensorRT-LLM
        "stop_tokens": "stop_ids",
    },
    LOADING: {
        "model": "target",  # vLLM
        "model_id": "target",
        "model_path": "target",  # llama-cpp-python
        "path": "target",
        "path_or_hf_repo": "target",  # mlx_lm
        "repo_id": "target",  # llama-cpp-python, huggingface_hub
        "hf_model": "target",
        "pretrained": "target",  # lm_eval
        "checkpoint": "target",
        "base_model": "target",
        "target_model": "target",
        "model_name": "target",
        "model_name_or_path": "target",
        "pretrained_model_name_or_path": "target",  # transformers
        "assistant_model": "drafter",  # transformers
        "draft_model": "drafter",  # mlx_lm, llama-cpp-python
        "speculative_model": "drafter",  # vLLM
        "drafter_model": "drafter",
        "draft_model_name": "drafter",
        "draft_model_path": "drafter",
        "draft_model_id": "drafter",
        "assistant_model_name": "drafter",
        "assistant_model_id": "drafter",
        "assistant": "drafter",
        "draft": "drafter",
        "speculative_draft_model_path": "drafter",  # SGLang
        "torch_dtype": "dtype",  # transformers
        "quantization": "quantize",  # vLLM
        "lora": "adapter",
        "use_cuda_graph": "compile",
        "torch_compile": "compile",
        "cuda_graph": "compile",
        "speculative_eagle_path": "drafter",
        "eagle_path": "drafter",
        "draft_head": "drafter",
        "head": "drafter",
        "ea_model_path": "drafter",  # EAGLE
        "base_model_path": "target",  # EAGLE
        "peft": "adapter",  # lm_eval
        "peft_model": "adapter",
        "method": "drafter",  # vLLM
        "draft_method": "drafter",
        "spec_method": "drafter",
        "algorithm": "drafter",
        "speculative_algorithm": "drafter",  # SGLang
        "speculator": "drafter",
        "tree_policy": "policy",
        "verification": "acceptor",
        "lora_path": "adapter",  # llama-cpp-python
        "adapter_path": "adapter",  # mlx_lm
    },
    LIMIT: {
        "max_num_seqs": "max_sequences",  # vLLM
        "parallel": "max_sequences",  # llama.cpp
        "max_num_batched_tokens": "max_batch_tokens",  # vLLM
        "kv_cache_tokens": "max_cache_tokens",
    },
    FLAG: {
        "hf": "target",  # llama.cpp
        "hf_repo": "target",  # llama.cpp
        "md": "drafter",  # llama.cpp
        "model_draft": "drafter",  # llama.cpp
        "spec_model": "drafter",  # vLLM
        "system_prompt": "system",  # mlx_lm, llama.cpp
        "chat_template_file": "chat_template",  # llama.cpp
        "max_num_seqs": "max_sequences",  # vLLM
        "max_running_requests": "max_sequences",  # SGLang
        "parallel": "max_sequences",  # llama.cpp
        "np": "max_sequences",  # llama.cpp
        "max_num_batched_tokens": "max_batch_tokens",  # vLLM
        "served_model_name": "model_name",  # vLLM
        "alias": "model_name",  # llama.cpp
        "sys": "system",  # llama.cpp
        "tasks": "suite",  # lm_eval
        "dataset": "suite",
        "dataset_name": "suite",  # vLLM
        "data": "suite",
        "prompts": "suite",
        "num_prompts": "limit",  # vLLM
        "num_samples": "limit",
        "output": "out",
        "output_path": "out",  # lm_eval
        "output_json": "out",  # vLLM
        "output_dir": "out",
        "save": "out",
        "overwrite": "force",
        "random_seed": "seed",
        "plain": "baseline",
        "compare": "baseline",
        "system_instruction": "system",  # lm_eval
        "hfr": "target",  # llama.cpp
        "repo_id": "target",
        "hf_repo_draft": "drafter",  # llama.cpp
        "hfd": "drafter",  # llama.cpp
        "speculative_draft_model_path": "drafter",  # SGLang
        "speculative_algorithm": "drafter",  # SGLang
        "method": "drafter",  # vLLM
        "spec_type": "drafter",  # llama.cpp
        "dev": "device",  # llama.cpp
        "l": "logit_bias",  # llama.cpp
        "j": "json_schema",  # llama.cpp
        "r": "stop",  # llama.cpp
        "json_schema_file": "json_schema",  # llama.cpp
        "jf": "json_schema",  # llama.cpp
        "prefill_response": "beginning",  # mlx_lm
        "prefix": "beginning",
        "num_seeds": "repeats",
        "num_runs": "repeats",
        "repetitions": "repeats",  # llama-bench
        "runs": "repeats",
        "repeat": "repeats",
        "iterations": "repeats",
        "num_iterations": "repeats",
        "batch_size": "batch",  # lm_eval
        "a": "model_name",  # llama.cpp
        "dataset_path": "suite",  # vLLM
        "input_file": "suite",
        "json_output": "as_json",
        "format_json": "as_json",
        "output_file": "out",  # llama-bench
        "outfile": "out",  # llama.cpp
        "save_path": "out",
        "save_dir": "out",
        "learning_rate": "lr",
        "num_epochs": "epochs",
        "num_train_epochs": "epochs",  # transformers
        "per_device_train_batch_size": "batch_size",  # transformers
        "gradient_accumulation_steps": "accumulate",  # transformers
        "grad_accum": "accumulate",
        "max_seq_length": "max_tokens",
        "max_seq_len": "max_tokens",
        "warmup_steps": "warmup",  # transformers
        "warmup_ratio": "warmup",  # transformers
        "lr_scheduler_type": "schedule",  # transformers
        "max_grad_norm": "clip",  # transformers
        "save_steps": "save_every",  # transformers
        "eval_steps": "evaluate_every",  # transformers
        "report_to": "track",  # transformers
        "train_file": "data",  # transformers
        "train_data": "data",
        "val_split": "held_out",
        "resume_from": "init_from",
        "iters": "trials",
        "n_trials": "trials",
    },
    COMMAND: {
        "benchmark": "bench",
        "ls": "list",
        "gen": "generate",
        "check": "doctor",
        "convert": "export",
        "collect_env": "env",
        "list_drafters": "drafters",
        "server": "serve",
        "launch_server": "serve",  # SGLang
        "llama_server": "serve",  # llama.cpp
    },
    DRAFTER: {
        "ngram": "pld",  # vLLM
        "ngram_simple": "pld",  # llama.cpp
        "ngram_cache": "pld",  # llama.cpp
        "prompt_lookup": "pld",  # transformers
        "prompt_lookup_decoding": "pld",
        "lookup": "pld",
        "suffix_decoding": "suffix",
        "suffix_tree": "suffix",
        "lookahead_decoding": "lookahead",
        "recycling": "token_recycling",  # Spec-Bench
        "eagle_1": "eagle",
        "eagle1": "eagle",
        "deepseek_mtp": "mtp",  # vLLM
        "qwen3_next_mtp": "mtp",  # vLLM
        "glm4_moe_mtp": "mtp",  # vLLM
        "nextn": "mtp",  # SGLang
        "multi_token_prediction": "mtp",
        "p_eagle": "peagle",
        "eagle3_one_model": "eagle3",  # TensorRT-LLM
    },
    DTYPE: {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
        "double": "float64",
    },
    QUANTIZE: {
        "8bit": "int8",
        "8": "int8",
        "8-bit": "int8",
        "q8_0": "int8",
        "4bit": "int4",
        "4": "int4",
        "4-bit": "int4",
    },
    POLICY: {"linear": "chain", "sequence": "chain", "list": "chain"},
    DEVICE: {"gpu": "cuda", "nvidia": "cuda"},
    PROMPT: {
        "prompts": "prompt",  # vLLM
        "messages": "prompt",  # OpenAI, ollama
        "text": "prompt",
        "texts": "prompt",
        "text_inputs": "prompt",  # pipelines of transformers
        "input": "prompt",  # OpenAI
        "inputs": "prompt",  # transformers
        "message": "prompt",
        "question": "prompt",
        "query": "prompt",
        "content": "prompt",
        "conversation": "prompt",
        "input_ids": "prompt",  # transformers
        "prompt_token_ids": "prompt",  # vLLM
        "prompt_ids": "prompt",
        "ids": "prompt",
        "tokens": "prompt",
    },
    CHAT: {
        "system_prompt": "system",
        "system_message": "system",
        "system_instruction": "system",  # Gemini
        "instruction": "system",
        "instructions": "system",  # OpenAI
        "developer": "system",
    },
    MODULE: {
        "LLM": "Loader",  # vLLM
        "Llama": "Loader",  # llama-cpp-python
        "AutoModelForCausalLM": "Loader",  # transformers, ctransformers
        "AutoModel": "Loader",
        "FastLanguageModel": "Loader",  # Unsloth
        "EaModel": "Loader",  # EAGLE
        "LanguageModel": "Loader",
        "SpeculativeModel": "Loader",
        "Model": "Loader",
        "SpeculativeDecoder": "Loader",
        "SpeculativeDecoding": "Loader",
        "SpeculativeGenerator": "Loader",
        "SpeculativeSampler": "Loader",
        "Speculator": "Loader",
        "from_pretrained": "Loader",
        "load_model": "Loader",
        "create_engine": "Loader",
        "load_engine": "Loader",
        "init_model": "Loader",
        "get_model": "Loader",
        "pipeline": "pipeline",  # transformers
        "SamplingParams": "options",  # vLLM
        "SamplingParameters": "options",
        "GenerationConfig": "options",
        "make_sampler": "options",  # mlx_lm
        "GenerationParams": "options",
        "GenerationOptions": "options",
        "CompletionConfig": "options",
        "generate": "complete",  # mlx_lm, ollama
        "complete": "complete",
        "completion": "complete",
        "text_completion": "complete",
        "batch_generate": "complete",  # mlx_lm
        "stream_generate": "stream",  # mlx_lm
        "stream": "stream",
        "chat": "chat",  # ollama
        "chat_completion": "chat",
    },
    ACCEPTOR: {
        "rejection_sampling": "rejection",
        "rejection_sampler": "rejection",
        "typical_acceptance": "typical",
    },
}
"""Names of other tools that are accepted, with draftree's name for each, by kind of name."""
