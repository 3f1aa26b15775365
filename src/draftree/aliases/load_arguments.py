"""Model-loading arguments of other tools, and their names of drafters, policies and dtypes."""

from collections.abc import Mapping
from typing import Any

from draftree.aliases.generation_options import CONTEXT_HINT, POLICY_BOUNDS, SMALL_MODEL, THREADS
from draftree.aliases.hint_tables import by_word, values_by_word

_CALL = "an option of each call: engine.chat(…), engine.complete(…)"
_ONE_DEVICE = "draftree runs on one device; `draftree export` writes drafters for vLLM"
_TOKENIZER = "load the tokenizer with transformers and give it as tokenizer=…"
_TRANSFORMERS = "load the model with transformers and give it: draftree.load(model, tokenizer)"
_SPECULATION = "drafter='eagle3' and policy='chain:length=5' are arguments by themselves"

_NOT_NEEDED = "it is not needed"
_FIGURES = "each call has figures of its own: completion.stats"
_MEMORY = "memory is taken as it is needed"
_LIMITS = "a list of prompts is a batch; engine.set_limits(max_sequences=…, max_batch_tokens=…) bounds what runs at a time"
_REUSE = "a call with the same beginning uses the cache of the last one"
LOADING_IGNORED = (_NOT_NEEDED, _FIGURES, _MEMORY, _LIMITS, _REUSE, CONTEXT_HINT)
"""Hints for arguments that are ignored with a note, because the generated text is the same without
them."""
LOADING_HINTS: Mapping[str, str] = by_word(
    {
        "quantize='int8'": "int8 use_int8",
        "draftree reads and writes text alone": "limit_mm_per_prompt clip_model_path mmproj",
        "draftree gives no embeddings": "embedding pooling_type pooler_config convert",
        "quantize='int4'": "int4 bnb_4bit_compute_dtype",
        "quantize='int8' or quantize='int4'": "bits q_bits quant w_bit",
        "quantize='int8' or quantize='int4', or load the model with transformers and give it": (
            "quantization_config"
        ),
        "set HF_HOME, or give the folder of a model": "cache_dir download_dir local_dir hf_home",
        "run `hf auth login`, or set HF_TOKEN": "token use_auth_token hf_token api_key",
        "give the path of the .gguf file as the target": (
            "filename file_name hf_file model_file weight_name gguf gguf_file additional_files"
        ),
        "set HF_HUB_OFFLINE=1": "local_files_only offline",
        "models run here, without a server: draftree.load(MODEL)": (
            "base_url host api_base url port timeout"
        ),
        _NOT_NEEDED: (
            "low_cpu_mem_usage use_safetensors n_batch n_ubatch use_mmap use_mlock lazy "
            "load_format force_download resume_download proxies mirror logits_all swap_space "
            "disable_log_stats disable_log_requests enable_chunked_prefill block_size task runner "
            "tokenizer_mode skip_tokenizer_init keep_alive library framework numa vocab_only "
            "pipeline_class offload_folder offload_state_dict offload_buffers "
            "ignore_mismatched_sizes async_scheduling "
            "scheduling_policy disable_custom_all_reduce max_seq_len_to_capture "
            "disable_radix_cache schedule_policy chunked_prefill_size cuda_graph_max_bs "
            "grammar_backend guided_decoding_backend structured_outputs_config enable_metrics swa_full op_offload "
            "no_perf max_logprobs model_impl moe_backend kv_transfer_config enable_prompt_embeds served_model_name "
            "worker_cls stream_interval nnodes node_rank sampling_backend pad_token_id "
            "use_v2_block_manager enable_sleep_mode backend parallelize "
            "strict is_decoder"
        ),
        "an engine alone is returned": "output_loading_info return_config return_tokenizer",
        _LIMITS: (
            "max_num_seqs n_seq_max max_running_requests max_num_batched_tokens batch_size max_batch_size"
        ),
        "give what it holds as options: draftree.load(MODEL, dtype='bfloat16')": "model_kwargs model_init_kwargs",
        _FIGURES: "verbose log_level",
        _REUSE: ("enable_prefix_caching prefix_caching cache_prompt"),
        "keys and values have the dtype of the weights": (
            "kv_cache_dtype cache_type_k cache_type_v type_k type_v kv_bits cache_implementation"
        ),
        _TOKENIZER: (
            "assistant_tokenizer use_fast tokenizer_config tokenizer_name tokenizer_path tokenizer_revision "
            "tokenizer_id processor add_bos_token padding_side eos_token"
        ),
        f"{_TOKENIZER}, with its chat_template": "chat_format chat_template chat_handler",
        _TRANSFORMERS: (
            "config subfolder variant code_revision hf_overrides rope_scaling rope_theta "
            "rope_freq_base rope_freq_scale generation_config state_dict "
            "kv_overrides yarn_ext_factor yarn_attn_factor yarn_orig_ctx model_config "
            "weights_only use_cache tie_word_embeddings autogptq"
        ),
        "quantize='int8', or load the model with transformers and give it": "awq gptq",
        "device_map='auto' or device='cuda:0': layers that do not fit go to other devices, to the host's memory or to disk": (
            "max_memory cpu_offload_gb offload offload_kqv tensor_split split_mode"
        ),
        _ONE_DEVICE: (
            "tensor_parallel_size pipeline_parallel_size data_parallel_size tp_size tp pp_size "
            "dp_size tp_plan speculative_draft_tensor_parallel_size distributed_executor_backend "
            "num_gpus world_size enable_expert_parallel"
        ),
        _MEMORY: (
            "gpu_memory_utilization mem_fraction_static num_gpu_blocks_override max_cache_size"
        ),
        CONTEXT_HINT: (
            "max_model_len n_ctx num_ctx ctx_size context_length max_seq_len max_seq_length max_position_embeddings max_length"
        ),
        "compile=False": "enforce_eager disable_cuda_graph",
        "compile=True": "compilation_config",
        "device='cuda' or device='cpu'": (
            "n_gpu_layers num_gpu ngl gpu_layers main_gpu use_gpu gpu use_cuda"
        ),
        THREADS: "n_threads num_thread threads num_threads n_threads_batch cpu_threads",
        "attn_implementation='sdpa'": (
            "flash_attn use_flash_attention_2 use_flash_attn flash_attention attention_backend attn_backend use_sdpa"
        ),
        "adapter=FOLDER merges a PEFT adapter": (
            "enable_lora lora_modules lora_adapters max_lora_rank loras lora_base lora_scale"
        ),
        _SPECULATION: ("speculative_config speculative speculation"),
        "drafter='eagle3', or a draft head's folder or hub id": ("eagle"),
        POLICY_BOUNDS: (
            "num_speculative_tokens num_draft_tokens num_assistant_tokens draft_max draft_tokens "
            "num_pred_tokens speculative_num_steps speculative_eagle_topk "
            "speculative_token_map speculative_accept_threshold_single speculative_num_draft_tokens "
            "gamma total_token num_steps max_draft_len draft_length "
            "depth tree_depth max_depth"
        ),
        "drafter='pld' drafts from the prompt": (
            "prompt_lookup_num_tokens ngram_prompt_lookup_max ngram_prompt_lookup_min "
            "prompt_lookup_max prompt_lookup_min prompt_lookup ngram ngram_size max_ngram_size "
            "max_lookup_size lookup_size"
        ),
        (
            "a small model as drafter is loaded as the target is; load it with transformers to load it otherwise"
        ): (
            "speculative_draft_model_quantization speculative_model_quantization draft_dtype "
            "draft_device draft_quantization draft_model_kwargs assistant_kwargs"
        ),
        "drafter='NAME', as drafter='eagle3'": "strategy",
        "policy='NAME', as policy='eagle2'": "tree tree_type tree_choices topk",
        "acceptor='NAME'; by default the text is the target's own": (
            "acceptance sampler posterior_threshold"
        ),
        "give them as arguments: load(MODEL, dtype=…)": "model_args engine_args kwargs options",
        _CALL: (
            "temperature seed max_tokens max_new_tokens top_p top_k stop n stream num_predict "
            "n_predict do_sample repetition_penalty min_p sampling_params logprobs ignore_eos "
            "override_generation_config random_seed"
        ),
        "a Completion is text as it was written; json_schema=… of a call forces a form": (
            "tool_call_parser reasoning_parser enable_auto_tool_choice think_end_token"
        ),
        "an argument of engine.generate; for token in engine.stream(…) reads a text as it comes": (
            "streamer"
        ),
        "an argument of engine.chat and engine.conversation": "system system_prompt",
        "draftree.load(MODEL).chat('text') answers": "prompt messages inputs text",
    }
)
LOADING_NEUTRAL: Mapping[str, tuple[Any, ...]] = values_by_word(
    (
        (False,),
        "load_in_8bit load_in_4bit local_files_only use_auth_token enable_lora "
        "use_flash_attention_2 verbose force_download enforce_eager stream do_sample "
        "flash_attn",
    ),
    (
        (True,),
        "low_cpu_mem_usage use_safetensors use_fast enable_prefix_caching disable_log_stats use_cache "
        "use_mmap speculative speculation",
    ),
    ((1,), "tensor_parallel_size pipeline_parallel_size data_parallel_size tp_size tp num_gpus"),
    ((0,), "seed"),
    (("",), "subfolder"),
    (("auto",), "kv_cache_dtype load_format tokenizer_mode"),
    (("auto", "generate", "text-generation"), "task"),
    (({},), "config model_kwargs"),
)
"""Values of other tools' arguments with which the argument has no effect, by the name of the
argument. None is such a value for all arguments."""

_DEFAULT_DRAFTER = "leave the drafter out for the default one"
_NO_DRAFTER = "every engine has a drafter; `draftree generate --baseline`, or engine.plain(requests), decodes without it"
DRAFTER_HINTS: Mapping[str, str] = by_word(
    {
        "eagle2 is a policy: drafter 'eagle', policy 'eagle2'": "eagle2",
        SMALL_MODEL: (
            "draft_model assistant assistant_model assisted small_model assisted_generation vanilla standalone simple draft"
        ),
        "that layout is not read; 'medusa' and 'hydra' have heads for further tokens": (
            "mlp_speculator recurrent_drafter redrafter"
        ),
        "drafts by some of the target's own layers are not offered; 'pld' and 'suffix' need no training": (
            "self_speculative layerskip layer_skip self_speculation early_exit self kangaroo swift draft_verify"
        ),
        _NO_DRAFTER: "none off plain no disabled baseline false",
        _DEFAULT_DRAFTER: "auto default best",
        "pct is a policy: policy='pct'": "pct",
        "yield is a policy: policy='yield'": "yield",
        "trees are grown by a policy: policy='NAME'": (
            "tree static sequoia opttree opt_tree specinfer"
        ),
        "greedy is an acceptor: acceptor='greedy'": "greedy",
        "arctic's drafts come from 'suffix', or from its own heads, which are not read": (
            "arctic arctic_lstm arctic_inference"
        ),
        "any trained drafter works with the policy 'eagle2'; 'eagle' and 'eagle3' are its heads": (
            "hass griffin"
        ),
    }
)
POLICY_HINTS: Mapping[str, str] = by_word(
    {
        "pct, yield and eagle2 grow trees": (
            "tree dynamic dynamic_tree adaptive tree_attention draft_tree heuristic"
        ),
        "leave the policy out for the default one": "auto default best optimal none",
        "greedy is an acceptor: acceptor='greedy'": "greedy",
        "eagle and eagle3 are drafters: drafter='eagle3'; the policy is 'eagle2'": "eagle eagle3",
        "ngram is a drafter: drafter='pld'": "ngram pld",
        "suffix is a drafter: drafter='suffix'": "suffix",
        "medusa is a drafter: drafter='medusa'": "medusa",
        "type draftree train static --method sequoia, and use policy 'static'": "sequoia",
        "policy='chain:length=N' drafts N tokens": "constant fixed num_tokens",
    }
)
ACCEPTOR_HINTS: Mapping[str, str] = by_word(
    {
        "acceptor='typical', which is lossy": "typical_acceptance_sampler entropy",
        "leave the acceptor out: the default keeps the target's text": (
            "exact auto default lossless strict none exact_match standard"
        ),
        "temperature is an option of each call": "temperature sampling",
        "acceptor='rejection' is speculative sampling": (
            "speculative_sampling speculative leviathan"
        ),
    }
)
DTYPE_HINTS: Mapping[str, str] = by_word(
    {
        "leave it out for the checkpoint's own": "auto",
        "quantize='int8'": "int8 8bit q8",
        "quantize='int4'": "int4 4bit nf4 fp4",
        "a .gguf file as target, or quantize='int4'": "q4_0 q4_k_m q4_k q5_k_m q8_0 q6_k",
        "quantize='int8', or load the model with transformers and give it": (
            "fp8 float8 float8_e4m3fn awq gptq"
        ),
    }
)
