"""Options of other tools' generation calls that draftree ignores or does not have."""

from collections.abc import Mapping
from typing import Any

from draftree.aliases.hint_tables import by_word, values_by_word

SMALL_MODEL = "give the loaded model itself, its folder or hub id, or lm:model=FOLDER"
POLICY_BOUNDS = (
    "the policy bounds the draft: policy='chain:length=5', or let the default policy choose"
)
CONTEXT_HINT = "the context is the model's own, and the cache grows as it is used"
THREADS = "set OMP_NUM_THREADS, or call torch.set_num_threads(N)"
_GENERATE = "engine.generate(ids, …) takes it, as transformers' generate does"
_LIST = "give its values as options: temperature, top_p, max_new_tokens, …"
_JSON = 'json_schema=… takes a schema; json_schema=\'{"type": "object"}\' is any JSON object'
_TEMPLATE = (
    "engine.complete(engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, …)) "
    "passes anything to the chat template"
)
_ONE_REQUEST = "it belongs to a server's requests; a call of an engine needs none"
_LOAD_DRAFTER = f"draftree.load(…, drafter=…): {SMALL_MODEL}"

_PADDED = "it is not needed: the prompts of a list are padded internally"
_BAR = "no progress bar is shown; engine.stream gives tokens as they come"
_FIGURES = "completion.stats holds the figures"
_LIVES = "the engine lives as long as its object"
_ONE_PROCESS = "an engine runs on one process"
_NOT_NEEDED = "it is not needed"
_OWN_CACHE = "draftree has a cache of its own, which a next call with the same beginning uses"
OPTION_IGNORED = (
    _PADDED,
    _BAR,
    _FIGURES,
    _LIVES,
    _ONE_PROCESS,
    _NOT_NEEDED,
    _ONE_REQUEST,
    _OWN_CACHE,
    CONTEXT_HINT,
)
"""Hints for options that are ignored with a note, because the generated text is the same without
them."""

OPTION_HINTS: Mapping[str, str] = by_word(
    {
        "temperature=1.0 samples, temperature=0 (the default) is greedy": (
            "do_sample sample sampling greedy"
        ),
        "max_new_tokens counts new tokens, max_length those of the prompt, too": "max_seq_len max_total_tokens",
        "min_new_tokens counts new tokens, without the prompt": "min_length",
        "max_time=SECONDS ends a text": "t_max_predict_ms deadline",
        "beam search is not offered": (
            "num_beams num_beam_groups use_beam_search beam_width beam_size length_penalty "
            "early_stopping diversity_penalty constraints force_words_ids"
        ),
        "n=N writes N texts; beam search is not offered": "best_of",
        "give its values as options (temperature, top_p, …), or call engine.generate": (
            "generation_config"
        ),
        _LIST: (
            "sampling_params gen_kwargs generate_kwargs generation_kwargs model_kwargs options "
            "extra_body parameters params decoding_config kwargs settings default_options"
        ),
        "for token in engine.stream(…): print(token, end='')": (
            "callback on_token prompt_progress_callback streaming_callback stream_options"
        ),
        "for token in engine.stream(…): print(token, end=''); engine.generate(ids, …) takes a streamer": (
            "streamer"
        ),
        "the text is without the prompt; write prompt + completion.text": (
            "echo return_full_text include_prompt"
        ),
        "the text is without special tokens; the `tokens` of a Completion are all ids": (
            "skip_special_tokens spaces_between_special_tokens detokenize "
            "clean_up_tokenization_spaces special ignore_special_tokens "
            "return_tokens_as_token_ids no_stop_trim"
        ),
        "a Completion has both, text and tokens": (
            "return_tensors return_text return_type return_token_ids"
        ),
        "the stop text is in completion.stop; write completion.text + completion.stop": (
            "include_stop_str_in_output"
        ),
        "engine.generate(ids, …) takes it; a Completion has text, tokens, logprobs and stats": (
            "return_dict_in_generate"
        ),
        "engine.generate(ids, …) takes it; logprobs=N gives the log-probabilities of a Completion": (
            "output_scores output_logits"
        ),
        "logprobs=N gives those of the new tokens; those of the prompt are not offered": (
            "prompt_logprobs decoder_input_details logprob_start_len token_ids_logprob"
        ),
        "logprobs=N gives the log-probabilities of each token and of the N likeliest": (
            "return_logprob logits_all post_sampling_probs details return_logprobs"
        ),
        "passes over trees have other states than plain decoding's": (
            "output_hidden_states output_attentions return_hidden_states output_router_logits"
        ),
        "stop_ids=[ID] ends a text at a token, stop='TEXT' at a text; ignore_eos=True writes on": "eos",
        "stopping criteria of transformers: engine.generate(ids, …) takes them; stop='TEXT' ends a text": (
            "stopping_criteria"
        ),
        "stop=TEXT ends a text; engine.generate(ids, …) takes stopping_criteria for anything else": (
            "stop_regex stop_pattern stop_condition"
        ),
        _PADDED: ("pad_token_id pad_token padding padding_side"),
        "it is not needed: the prompts of a list are padded internally; engine.generate(ids, …) takes one": (
            "attention_mask"
        ),
        "the tokenizer adds them; engine.complete(ids) takes ids as they are": (
            "bos_token_id bos_token add_special_tokens add_bos"
        ),
        "cut the ids before: engine.complete(ids[-N:])": (
            "truncation truncate truncate_prompt_tokens truncate_prompt max_input_length"
        ),
        "repetition_penalty, which counts the whole prompt and answer, not the last 64 tokens": (
            "repeat_penalty"
        ),
        "repetition_penalty counts the whole prompt and answer": (
            "repeat_last_n repetition_context_size last_n_tokens_size penalty_last_n "
            "encoder_repetition_penalty encoder_no_repeat_ngram_size frequency_context_size "
            "presence_context_size penalize_nl penalize_newline repetition_detection"
        ),
        "repetition_penalty, frequency_penalty, presence_penalty or no_repeat_ngram_size": (
            "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
        ),
        "temperature, top_k, top_p, min_p and typical_p choose tokens": (
            "mirostat mirostat_mode mirostat_tau mirostat_eta tfs_z tfs xtc_probability "
            "xtc_threshold top_n_sigma top_a top_h epsilon_cutoff eta_cutoff dynatemp_range "
            "dynatemp_exponent min_keep min_tokens_to_keep samplers sampler_seq smoothing_factor"
        ),
        "contrastive search is not offered": "penalty_alpha",
        "it needs a second pass for every token, which is not offered": (
            "guidance_scale negative_prompt cfg_scale"
        ),
        "DoLa is not offered": "dola_layers",
        "watermarks are not offered": "watermark watermarking_config",
        f"a bias or a ban: logit_bias={{ID: 5.0}}, suppress=[ID], bad_words=['TEXT']; {_GENERATE}": (
            "sequence_bias bad_words_ids begin_suppress_tokens exponential_decay_length_penalty bad_token_ids"
        ),
        "regex='yes|no' or grammar=… allows few texts; engine.generate(ids, …) takes prefix_allowed_tokens_fn": (
            "allowed_token_ids prefix_allowed_tokens_fn allowed_tokens choices choice"
        ),
        "beginning='TEXT' is what the text begins with": (
            "forced_bos_token_id forced_decoder_ids prefix"
        ),
        "max_new_tokens ends a text": "forced_eos_token_id",
        "regex='yes|no' allows a choice of texts": "guided_choice",
        _JSON: "response_format format json_mode json json_object schema_format",
        "grammar=Grammar.lark(…) takes a Lark grammar": "guided_grammar ebnf structural_tag gbnf",
        "json_schema=…, regex=… or grammar=…": (
            "guided_decoding structured_outputs guided_decoding_backend guided_whitespace_pattern"
        ),
        "engine.generate(ids, …) takes logits_processor=…": "logits_processors custom_logit_processor",
        _GENERATE: (
            "logits_processor renormalize_logits remove_invalid_values inputs_embeds position_ids"
        ),
        "max_new_tokens bounds the answer; its length is the model's choice": "verbosity",
        "an engine writes with one model, in this process": "prediction web_search_options background truncation_strategy",
        "json_schema=… forces the form of a call": "tool_choice function_call parallel_tool_calls",
        f"put them into the messages, or {_TEMPLATE}": "tools functions documents",
        f"set engine.tokenizer.chat_template, or {_TEMPLATE}": (
            "chat_template chat_format prompt_template template"
        ),
        _TEMPLATE: (
            "thinking think reasoning continue_final_message chat_template_content_format include_reasoning thinking_budget"
        ),
        f"chat always adds it; complete continues the text as it is; {_TEMPLATE}": (
            "add_generation_prompt"
        ),
        "a list of prompts is one batch": (
            "batch_size eval_batch_size max_batch_size max_num_seqs num_workers"
        ),
        _BAR: ("use_tqdm progress show_progress"),
        _FIGURES: ("verbose timings_per_token timings output_stats return_stats"),
        _LIVES: "keep_alive",
        CONTEXT_HINT: "num_keep shift num_ctx n_ctx max_model_len n_keep ctx_size context_length",
        "draftree has a cache of its own: give the whole text": "past_key_values",
        _OWN_CACHE: (
            "use_cache cache_implementation prompt_cache cache_prompt "
            "cache_config max_kv_size kv_bits kv_group_size quantized_kv_start cache "
            "prompt_cache_key cache_salt id_slot prefill_step_size"
        ),
        POLICY_BOUNDS: (
            "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
            "num_speculative_tokens num_draft_tokens draft_tokens num_pred_tokens draft_max "
            "draft_min draft_p_min speculative_n_max n_max max_draft draft_len gamma "
            "assistant_lookbehind target_lookbehind"
        ),
        "draftree.load(…, drafter='pld') drafts from the prompt": (
            "prompt_lookup_num_tokens prompt_lookup_max prompt_lookup_min max_matching_ngram_size prompt_lookup"
        ),
        _LOAD_DRAFTER: (
            "assistant_model draft_model assistant draft speculative_model speculative_config assistant_tokenizer"
        ),
        "draftree has drafters of its own: draftree.load(…, drafter=…)": (
            "assistant_early_exit use_mtp custom_generate speculation"
        ),
        "draftree.load(…, drafter=…)": "drafter",
        "draftree.load(…, policy=…)": "policy tree_policy tree",
        "draftree.load(…, acceptor=…)": "acceptor",
        "draftree.load(MODEL)": "model model_name model_id engine",
        "draftree.load(…, tokenizer=…)": "tokenizer processor",
        "draftree.load(…, adapter=FOLDER) merges a PEFT adapter": (
            "lora_request adapter adapter_name adapter_id lora lora_path"
        ),
        "draftree.load(…, quantize=…)": "quantize quantization",
        "draftree.load(…, attn_implementation=…)": "attn_implementation",
        "draftree.load(…, exactness=…)": "exactness",
        "draftree.load(…, kernels=…)": "kernels",
        "draftree.load(…, costs=…)": "costs",
        "draftree.load(…, device=…)": "device num_gpu main_gpu gpu",
        "draftree.load(…, dtype=…)": "dtype torch_dtype",
        f"threads: {THREADS}": "num_thread n_threads threads",
        "messages=[{'role': 'user', 'content': '…'}]": "role",
        "engine.conversation() keeps its messages": (
            "history chat_history context session session_id conversation conversation_id"
        ),
        "engine.complete continues a text as it is; engine.chat applies the chat template": (
            "raw instruct apply_chat_template"
        ),
        "engine.chat(text, system=…) takes a system message; complete continues a text as it is": (
            "system"
        ),
        "engine.chat(text, system=…)": (
            "system_prompt system_message instruction instructions system_instruction developer"
        ),
        "text before and after a gap is not taken; complete continues a text": (
            "suffix insert_suffix infill input_prefix input_suffix"
        ),
        "draftree reads and writes text alone": (
            "images image audio videos multi_modal_data mm_processor_kwargs modalities"
        ),
        "set the seed of each call: seed=N": ("rng generator np_rng torch_generator"),
        _ONE_REQUEST: (
            "rid user store metadata service_tier priority request_id safety_identifier extra_headers extra_query"
        ),
        "draftree.load(…, compile=…)": "compile_config compile disable_compile",
        _ONE_PROCESS: "synced_gpus",
        _NOT_NEEDED: "num_batch low_vram f16_kv flat_logprobs skip_reading_prefix_cache low_memory skip_clone",
        "options of each call choose tokens: temperature, top_p, …": "sampler use_model_defaults",
        "each call has its whole text: engine.conversation() keeps its messages": "previous_response_id",
        "an engine has no options of this kind": "extra_args custom_params output_kind tokenization_kwargs prompt_format",
    }
)
"""Hints on how to replace options of other tools' generation calls that are not accepted, by the
name of the option."""

OPTION_NEUTRAL: Mapping[str, tuple[Any, ...]] = values_by_word(
    (
        (False,),
        "echo return_full_text include_prompt early_stopping use_beam_search "
        "include_stop_str_in_output output_hidden_states output_attentions "
        "return_dict_in_generate output_scores output_logits synced_gpus low_memory watermark "
        "return_logprob details use_mtp token_healing spaces_between_special_tokens json_mode "
        "verbose use_tqdm logits_all return_tensors truncation padding renormalize_logits "
        "remove_invalid_values tree progress show_progress",
    ),
    (
        (True,),
        "skip_special_tokens detokenize use_cache return_text cache_prompt add_special_tokens add_generation_prompt",
    ),
    (
        (1,),
        "num_beams num_return_sequences num_completions num_samples batch_size num_beam_groups best_of guidance_scale "
        "repeat_penalty tfs_z tfs encoder_repetition_penalty",
    ),
    ((1.0, 0.0), "length_penalty"),
    (
        (0,),
        "diversity_penalty penalty_alpha mirostat mirostat_mode xtc_probability "
        "dry_multiplier epsilon_cutoff eta_cutoff dynatemp_range encoder_no_repeat_ngram_size "
        "top_n_tokens n_probs",
    ),
    (
        ([], ()),
        "tools functions images stopping_criteria logits_processor logits_processors documents stop_token_ids history",
    ),
    (("auto",), "tool_choice service_tier"),
    (
        ({},),
        "extra_body chat_template_kwargs options gen_kwargs metadata stream_options sampling_params",
    ),
    (("text", {"type": "text"}), "response_format"),
    (("",), "format suffix system_prompt"),
)
"""Values of other tools' options with which the option has no effect, by the name of the option.
None is such a value for all options."""
