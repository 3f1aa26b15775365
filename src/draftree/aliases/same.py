"""Names of other tools that mean what draftree's own mean, and are accepted for them."""

from collections.abc import Mapping

from draftree.aliases.kinds import ACCEPTOR, COMMAND, DRAFTER, DTYPE, FLAG, LOADING, OPTION, POLICY

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
    FLAG: {
        "hf": "target",  # llama.cpp
        "hf_repo": "target",  # llama.cpp
        "md": "drafter",  # llama.cpp
        "model_draft": "drafter",  # llama.cpp
        "spec_model": "drafter",  # vLLM
        "system_prompt": "system",  # mlx_lm, llama.cpp
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
    DTYPE: {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
        "double": "float64",
    },
    POLICY: {"linear": "chain", "sequence": "chain"},
    ACCEPTOR: {"rejection_sampling": "rejection", "rejection_sampler": "rejection", "typical_acceptance": "typical"},
}
"""Names that are accepted, by kind."""
