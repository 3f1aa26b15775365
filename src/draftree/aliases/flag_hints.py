"""Hints for command-line options of other tools that draftree does not accept.

The tools are llama.cpp, vLLM, ollama, mlx_lm, lm_eval, transformers and the OpenAI command line.
Options that Python has, too, are in the table of Python's arguments, whose hints the command line
rewrites. An entry here comes first.
"""

from collections.abc import Mapping

from draftree.aliases.hint_tables import LM_EVALUATION, by_word

_BEAMS = "beam search is not offered"
_BIAS = "--logit-bias TOKEN=BIAS, --suppress ID and --bad-word TEXT"
_CACHE = "keys and values are stored in the dtype of the model"
_CHAT = "draftree chat MODEL keeps a conversation"
_CONTEXT = "the context is the model's own, and the cache grows as it is used"
_DEVICE = "--device cuda or --device cpu: the whole model is on one device"
_DRAFT = "--policy chain:length=5 bounds the draft; the default policy chooses its size"
_FEWSHOT = f"{LM_EVALUATION} runs the tasks of lm_eval"
_FILE = "draftree generate MODEL < FILE reads the prompt from a file"
_FEW = "--regex 'yes|no' or --grammar FILE allows few texts"
_FOLDER = "write it into the config.json of a copy of the model's folder"
_GAP = "text before and after a gap is not taken; --raw continues the prompt as it is"
_LENGTH = f"--max-new-tokens counts new tokens, without the prompt; {_CONTEXT}"
_LOAD = "it is not needed: the model is loaded from its folder, hub id or .gguf file"
_MANY = "generate writes one text; draftree bench reads a file of prompts, draftree serve writes many at once"
_NOT_NEEDED = "it is not needed"
_ONE_DEVICE = "draftree runs on one device; draftree export writes drafters for vLLM"
_OUTPUT = "2>/dev/null drops progress and remarks; --json prints one object"
_PYTHON = "it is an option of Python alone: draftree.load(MODEL), engine.generate"
_SAMPLING = "--temperature, --top-k, --top-p, --min-p and --typical-p choose tokens"
_SEEDS = "generate writes one text; other values of --seed write other texts"
_SERVERLESS = "the model runs here; draftree serve MODEL makes a server of it"
_SHORTEN = "shorten the prompt before"
_SPECIAL = "the tokenizer adds the special tokens of the model"
_TEMPLATE = "--raw leaves the chat template out; --chat-template FILE takes another one"
_VALUES = "give its values as options: --temperature, --top-p, --max-new-tokens, …"
_VALUES_OF_TEMPLATE = (
    "the chat template decides; in Python: engine.complete(engine.tokenizer.apply_chat_template(messages, "
    "add_generation_prompt=True, enable_thinking=False))"
)
_TIMES = "--profile says where the time goes, --baseline compares with plain decoding"
_TOKENIZER = "the tokenizer is read from the model's folder"

FLAG_WORDS: Mapping[str, str] = by_word(
    {
        "--policy chain:length={}": (
            "draft draft_n draft_max spec_draft_n_max num_draft draft_len draft_length draft_tokens n_draft gamma "
            "max_draft_len speculative_num_steps num_speculative_tokens num_assistant_tokens num_draft_tokens "
            "num_pred_tokens"
        ),
        "--drafter pld:length={} --policy chain:length={}": "prompt_lookup_num_tokens",
        "--drafter pld:ngram={}": "prompt_lookup_max ngram_prompt_lookup_max",
        "--drafter eagle3": "eagle",
        "--device cpu": "cpu",
        "--device cuda": "cuda gpu",
        "--device mps": "mps",
        "--dtype float16": "fp16 half",
        "--dtype bfloat16": "bf16",
        "--quantize int8": "int8 load_in_8bit",
        "--quantize int4": "int4 load_in_4bit",
        "--no-compile": "enforce_eager disable_cuda_graph",
        "--temperature 0": "greedy",
        "--temperature 1.0": "do_sample sample sampling",
        "--raw": "no_cnv no_conversation ignore_chat_template no_chat_template no_chat",
        "--beginning {}": "prefill response_prefix",
        '--json-schema {"type":"object"}': "json_mode",
        "--prompt {}": "f file prompt_file input_file text inputs input question query message",
        "--system {}": "sysf system_prompt_file instruction",
        "--max-new-tokens {}": "output_len random_output_len sharegpt_output_len output_tokens length",
        "--repeats {}": "num_iters r",
        "--baseline": "benchmark speedup",
        "--show-trees": "tree show_tree print_tree",
        "--data {}": "dataset dataset_path",
        "--force": "yes y",
        "--help": "help_all usage",
    }
)
"""Arguments of draftree that are equivalent to options of other command lines, with these options
separated by spaces. `{}` is replaced by the option's value."""
FILE_WORDS = ("f", "file", "prompt_file", "input_file", "sysf", "system_prompt_file")
"""Options in `FLAG_WORDS` whose value is the name of a file; the file contains the value for
draftree."""
THREAD_WORDS = (
    "threads",
    "threads_batch",
    "tb",
    "num_threads",
    "n_threads",
    "n_threads_batch",
    "cpu_threads",
    "num_thread",
)
"""Options of other tools that set the number of threads."""
OVERRIDDEN = ("greedy", "do_sample", "sample", "sampling")
"""Options in `FLAG_WORDS` that are dropped if the user also gives draftree's own option."""
WRITING = (
    "run",  # ollama
    "prompt",
    "cli",
    "infer",
    "inference",
    "simple",  # llama.cpp
    "llama_cli",  # llama.cpp
    "mlx_lm_generate",
)
"""Commands of other tools that answer a prompt, or start a conversation if no prompt is given."""
COMMAND_WORDS: Mapping[str, str] = by_word(
    {
        "generate --raw": "complete completion text_completion",
        "generate --drafter pld": "lookup",
        "chat": "interactive",
        "serve": "api",
        "bench": "perf throughput latency speed llama_bench",
        "list": "models policies methods",
        "doctor --lossless": "verify test",
        "train": "finetune",
        "tune": "search optimize",
        "push": "upload",
        "report": "summary",
        "datastore build": "index build",
        "--version": "version",
    }
)
"""Arguments of draftree that are equivalent to commands of other tools, with these commands
separated by spaces."""
WITHOUT_VALUE = frozenset(
    (
        "mlock",
        "no_mmap",
        "mmap",
        "use_mmap",
        "use_mlock",
        "nowordwrap",
        "simple_io",
        "no_warmup",
        "insecure",
        "no_context_shift",
        "context_shift",
        "check_tensors",
        "kv_unified",
        "kvu",
        "no_kv_offload",
        "nkvo",
        "no_repack",
        "cont_batching",
        "cb",
        "progress_bar",
        "use_cache",
        "low_vram",
        "f16_kv",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "st",
        "single_turn",
        "jinja",
        "apply_chat_template",
        "chat",
        "add_generation_prompt",
        "no_display_prompt",
        "v",
        "verbose",
        "perf",
        "timings",
        "show_timings",
        "timings_per_token",
        "color",
        "co",
        "progress",
        "show_progress",
        "use_tqdm",
        "save_result",
        "log_samples",
        "write_out",
        "metrics",
        "enable_metrics",
        "swa_full",
        "slots",
        "props",
        "cpu_moe",
        "cmoe",
        "check_integrity",
        "show_config",
        "confirm_run_unsafe_code",
        "disable_log_requests",
        "disable_log_stats",
        "gradient_checkpointing",
        "disable_radix_cache",
        "disable_custom_all_reduce",
        "async_scheduling",
        "enable_sleep_mode",
        "parallelize",
        "lazy",
        "low_cpu_mem_usage",
        "use_safetensors",
        "force_download",
        "synced_gpus",
        "skip_tokenizer_init",
        "no_perf",
        "logits_all",
        "shift",
        "stats",
        "show_stats",
        "print_stats",
    )
)
"""Options of other tools that draftree ignores and that take no value."""

_ANSWERS_ONCE = "generate answers one prompt and ends"
_USES_TEMPLATE = "the model's chat template is used"
_IS_DEFAULT = "it is the default; --raw leaves the chat template out"
_NO_PROMPT = "the prompt is not printed"
_COLOURS = "a terminal shows colours; NO_COLOR=1 turns them off"
_PROGRESS = "2>/dev/null drops the progress"
_SAVED = "the result is always saved; --out names the file"
_TEXTS_SAVED = "the saved result has every text"
_WARMS = "bench warms up by itself"
_METRICS = "draftree serve has /metrics"
_ENDS = "nothing runs after the command"
FLAG_IGNORED = (
    *(
        _NOT_NEEDED,
        _CONTEXT,
        _ANSWERS_ONCE,
        _USES_TEMPLATE,
        _IS_DEFAULT,
        _NO_PROMPT,
        _COLOURS,
        _PROGRESS,
        _SAVED,
    ),
    *(_TEXTS_SAVED, _WARMS, _METRICS, _ENDS, _TIMES, _LOAD),
)
"""Hints for options that are ignored with a note, because the generated text is the same without
them."""

FLAG_HINTS: Mapping[str, str] = by_word(
    {
        _CHAT: (
            "i interactive interactive_first cnv conversation multiline_input history chat_history context "
            "session session_id conversation_id mli multiline if"
        ),
        _ANSWERS_ONCE: "st single_turn",
        "write it into the prompt": "in_prefix in_suffix",
        "the prompt is the user's; --system is the system's message": "role",
        _IS_DEFAULT: ("apply_chat_template add_generation_prompt instruct chat"),
        _TEMPLATE: (
            "use_default_chat_template chat_template_file chat_template_config chat_format "
            "chat_template_content_format prompt_template chat_handler no_jinja"
        ),
        _USES_TEMPLATE: "jinja",
        "what the model thinks is part of the text; its chat template turns it on": "think",
        "--max-new-tokens bounds the whole answer": "reasoning_budget thinking_budget",
        _VALUES_OF_TEMPLATE: "chat_template_kwargs enable_thinking thinking reasoning reasoning_effort",
        "what the model thinks is part of the text": "include_reasoning reasoning_format reasoning_parser",
        "--beginning TEXT is what the answer begins with": "continue_final_message",
        "write them into the text of --system": "tools functions",
        "write them into the prompt": "documents",
        "-p PROMPT is one message; draftree chat MODEL keeps a conversation": "messages",
        _SHORTEN: "truncation truncate truncate_prompt truncate_prompt_tokens max_input_length",
        _SPECIAL: "add_bos bos_token bos_token_id add_special_tokens sp",
        _PYTHON: "inputs_embeds position_ids input_ids logits_processor logits_processors",
        _FILE: "binary_file",
        _NOT_NEEDED: (
            "attention_mask ub ubatch_size min_tokens_to_keep renormalize_logits remove_invalid_values "
            "nowordwrap simple_io max_num_batched_tokens mlock no_mmap mmap no_warmup use_cache "
            "enable_prefix_caching enable_chunked_prefill swap_space block_size insecure override_tensor ot "
            "n_cpu_moe ncmoe cpu_moe cmoe defrag_thold dt no_context_shift context_shift prio poll cpu_mask "
            "check_tensors kv_unified kvu no_kv_offload nkvo no_repack cont_batching cb threads_http "
            "cache_reuse uvicorn_log_level watchdog_timeout metrics_port progress_bar endpoint "
            "percentile_metrics random_range_ratio delay check_integrity show_config cache_requests "
            "confirm_run_unsafe_code use_cache_requests weight_decay_all gradient_checkpointing "
            "ddp_find_unused_parameters api_server_count swa_full slots props"
        ),
        "text alone is read": "image limit_mm_per_prompt",
        _CONTEXT: "keep ctx_size_draft cd c ctx_size max_kv_size",
        _GAP: "suffix insert_suffix infill input_prefix input_suffix spm_infill",
        "the shell writes escapes: $'line\\nline'": "escape e",
        f"{_SEEDS}; {_BEAMS}": "best_of",
        _SEEDS: "n_completions num_return_sequences num_samples num_completions num_outputs num_generations",
        _MANY: "parallel np batch_size b max_num_seqs",
        _SAMPLING: (
            "samplers sampler_seq top_a top_n_sigma dynatemp_range mirostat_lr mirostat_ent xtc_threshold"
        ),
        "--stop TEXT takes special tokens by their text": "extra_eos_token",
        "--grammar FILE takes a Lark grammar": "grammar_file guided_grammar",
        "--json-schema, --regex or --grammar": "structured_outputs",
        _VALUES: "gen_kwargs generate_kwargs sampling_params",
        "give its values as options: --temperature, --top-p, …": (
            "generation_config generate_flags override_generation_config settings"
        ),
        "--stop TEXT ends a text": "stopping_criteria stop_regex stop_pattern stop_condition",
        _FEW: "allowed_token_ids allowed_tokens prefix_allowed_tokens_fn choice choices",
        _BIAS: "bad_words_ids bad_token_ids begin_suppress_tokens sequence_bias",
        "--max-new-tokens bounds the text": "exponential_decay_length_penalty",
        '--json-schema \'{"type": "object"}\' is any JSON object': "format",
        "--quantize int8": "quant q",
        _DRAFT: ("spec_draft_n_min draft_min draft_n_min speculative_num_draft_tokens"),
        "--policy eagle2 or --policy pct grows a tree": "speculative_eagle_topk",
        "--policy pct:leaf_threshold=0.1 leaves out what is unlikely": "draft_p_min p_min",
        "--drafter pld drafts from the prompt": ("prompt_lookup_min"),
        "draftree datastore build writes a corpus to look up": "lookup_cache_static",
        "--drafter suffix remembers what was written": "lookup_cache_dynamic",
        "--drafter and --policy: --drafter eagle3 --policy chain:length=5": "speculative_config sc",
        _DEVICE: "gpu_layers_draft ngld device_draft gpu_layers n_gpu_layers ngl num_gpu main_gpu mg devd",
        "--baseline runs plain decoding, too, and compares": "no_speculation no_draft no_drafter no_speculative",
        _TIMES: "v verbose perf timings show_timings timings_per_token stats show_stats print_stats",
        _OUTPUT: "quiet silent log_disable no_perf verbosity log_level log_file lv log_verbosity log_requests",
        "--json has the ids of all tokens": "verbose_prompt",
        _NO_PROMPT: "no_display_prompt",
        "the text is without the prompt": "echo return_full_text include_prompt",
        _COLOURS: "color co",
        "set NO_COLOR=1": "no_color",
        "the text is without special tokens; --json has all ids": (
            "special skip_special_tokens spaces_between_special_tokens"
        ),
        "--json has the text and all ids": "detokenize",
        "the stop text is not part of the text": "include_stop_str_in_output",
        "--json prints one object with all figures": (
            "return_dict_in_generate stream_options output_stats return_stats"
        ),
        "--json --logprobs N gives log-probabilities": "output_scores output_logits",
        "--stream prints the text as it is written": "streamer callback on_token streaming_callback",
        _PROGRESS: "progress show_progress use_tqdm logging_steps",
        "2>/dev/null drops progress": "disable_tqdm",
        "| cat prints the text in the end": "no_stream",
        _ONE_DEVICE: (
            "split_mode sm tensor_split ts tp pp dp data_parallel_size distributed_executor_backend workers nproc_per_node"
        ),
        "it is read from the model's folder": "override_kv config",
        "draftree writes texts; transformers gives embeddings": "pooling_mode",
        _LENGTH: "max_seq_len max_seq_length max_length max_total_tokens",
        "numactl binds a process to a node": "numa",
        "--attn-implementation sdpa": "fa",
        _CACHE: "cache_type_k ctk cache_type_v ctv kv_bits kv_group_size quantized_kv_start kv_cache_dtype",
        "caches are not stored; draftree chat and draftree serve keep them while they run": (
            "prompt_cache prompt_cache_file"
        ),
        _LOAD: "load_format",
        "give the path of the .gguf file as MODEL": "hf_file hff",
        "download the file and give its path as MODEL": "model_url mu",
        _TOKENIZER: (
            "tokenizer processor tokenizer_path tokenizer_revision tokenizer_id add_bos_token padding_side "
            "eos_token assistant_tokenizer tokenizer_mode tokenizer_name tokenizer_config use_fast"
        ),
        "--quantize int8 or --quantize int4": "quantization_config awq gptq",
        "give its values as options: --dtype, --device, --revision, …": "model_args engine_args",
        "the model is the first argument, or --target": "engine hf_path",
        _FOLDER: (
            "subfolder variant rope_scaling rope_theta rope_freq_base rope_freq_scale hf_overrides "
            "tie_word_embeddings rope_scale yarn_orig_ctx yarn_ext_factor yarn_attn_factor"
        ),
        "--revision NAME is of the model and its code": "code_revision",
        _SERVERLESS: "base_url api_base url",
        _ENDS: "keep_alive keepalive",
        _FEWSHOT: (
            "num_fewshot fewshot_as_multiturn predict_only include_path wandb_args hf_hub_log_args metadata"
        ),
        _TEXTS_SAVED: "log_samples write_out",
        _SAVED: "save_result",
        "--out names the file of the result": "result_dir",
        "--suite FILE gives prompts as long as yours are": "input_len random_input_len input_tokens pg",
        "bench writes one text at a time": "request_rate max_concurrency concurrency max_concurrent",
        _WARMS: "num_warmups warmup",
        "--adapter FOLDER merges a PEFT adapter as it is": "lora_scaled",
        "control vectors are not offered": "control_vector",
        "run `hf auth login`, or set HF_TOKEN": "hft",
        "a draft model has the tokenizer of the model": "spec_replace",
        "draftree generate MODEL -p PROMPT answers once": "quick",
        "draftree --help lists what can be typed": "completion_bash",
        _METRICS: "metrics enable_metrics",
        "a proxy, as caddy or nginx, adds https": "ssl_key_file ssl_keyfile ssl_certfile ssl_cert_file",
        "the page is at /, the API at /v1": "no_webui",
        "a proxy changes paths": "root_path",
        "a proxy sets CORS headers": "allowed_origins cors",
        "no tools are called; --json-schema forces a form": "enable_auto_tool_choice tool_call_parser",
        "start it again": "reload",
        "nohup, or a service of systemd, runs it in the background": "daemon d detach",
        "--suite FILE takes a file of prompts": "hf_split",
        "a drafter is trained whole": "lora_rank",
        "draftree push FOLDER OWNER/NAME uploads it": "push_to_hub hub_model_id",
        "the same command goes on after an interruption": "resume_from_checkpoint resume",
        "accelerate launch runs draftree train on several devices": "deepspeed",
        "draftree export FOLDER --format NAME": "to outtype",
        "--out names the folder": "mlx_path",
        "--drafter NAME; bench takes several": "drafters methods",
    }
)
"""Hints on how to replace options of other tools that are not accepted, by the name of the
option."""

_OTHERS = "load the model with transformers and give it to draftree.load; int8 and int4 are draftree's own"
QUANTIZE_HINTS: Mapping[str, str] = {
    "awq": _OTHERS,
    "gptq": _OTHERS,
    "fp8": _OTHERS,
    "nf4": _OTHERS,
    "bitsandbytes": _OTHERS,
    "q4_0": "give the path of a .gguf file as MODEL, or int4",
    "q4_k_m": "give the path of a .gguf file as MODEL, or int4",
    "none": "leave it out",
}
"""Hints on how to replace quantisation methods that are not accepted, by the name of the method."""
