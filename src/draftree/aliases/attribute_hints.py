"""Hints for attributes that users of other tools expect on draftree's objects."""

from collections.abc import Mapping

from draftree.aliases.hint_tables import LM_EVALUATION, by_word

_MODEL = "engine.target.decoder.model is transformers' model"
_LOAD = "engine = draftree.load(MODEL) loads a model; engine.chat('text') answers, engine.complete('text') continues a text"
_STATS = "completion.stats has it: completion.stats.tokens_per_second, .acceptance_length, .seconds"

ENGINE_HINTS: Mapping[str, str] = by_word(
    {
        "engine.complete('text') continues a text": ("generate_until"),
        "engine.chat(messages) answers messages, engine.chat('text') a question": "messages_create",
        "engine.chat('text') answers": ("pipe pipeline forward call"),
        "engine.stream('text') yields tokens": ("generate_step iter generator streaming"),
        "engine.complete([…]) and engine.chat([…]) take a list of prompts, which is one batch": (
            "map "
        ),
        "engine.conversation() keeps its messages": ("session history messages conversations"),
        "beam search is not offered": "beam_search",
        "engine.chat(messages, json_schema=…)": "beta parse",
        "draftree.load(MODEL) makes an engine of one model; `draftree serve MODEL` lists it": "models list_models",
        "options belong to each call: engine.chat('text', temperature=0.7)": "with_options bind with_config configure",
        "an engine reads and writes text alone": "images audio files moderations batches videos",
        "a call with the same beginning uses the cache of the last one": "set_cache save_state load_state",
        "draftree.load(MODEL) loads other weights": "update_weights_from_disk load_weights reload update_weights",
        "an engine runs in this process": (
            "wake_up collective_rpc release_memory_occupation resume_memory_occupation get_server_info rank world_size"
        ),
        "`draftree generate MODEL -p 'PROMPT' --profile` shows where the time goes": "start_profile stop_profile",
        "engine.target.decoder.model(ids).logits": "sample apply_model scores",
        "a list of prompts is one batch: engine.complete([…])": "batch_size rollout",
        _MODEL: "llm_engine _model",
        f"{_MODEL}, which has forward, logits and parameters": ("logits eval_tokens embed_tokens"),
        "engine.target.decoder.model.config": "metadata model_params n_embd",
        "engine.target.decoder.model.generation_config": ("default_sampling_params max_gen_toks"),
        "engine.target.decoder.vocab": "vocab",
        "engine.target.decoder.context": ("max_length context"),
        "engine.tokenizer": "tokenizer_name chat_format chat_handler token_nl",
        "engine.tokenizer(text)": "tokenize",
        "engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)": (
            "render format_prompt"
        ),
        "draftree.load(MODEL, tokenizer=…)": "set_tokenizer",
        "engine.eos, engine.tokenizer.eos_token_id": "eos_token_ids",
        "draftree.load(…, device=…)": "cpu",
        "draftree.load(…, device='cuda')": "cuda",
        "draftree.load(…, dtype=…)": "half float bfloat16",
        "draftree.load(…, quantize='int8')": "quantize",
        "draftree.load(…, compile=True)": "compile",
        "draftree.load(…, adapter=FOLDER) merges a PEFT adapter": (
            "load_lora load_adapter add_lora set_adapter load_lora_adapter"
        ),
        "draftree.load(MODEL, drafter=…) makes an engine with another drafter": (
            "set_drafter draft_model assistant_model assistant set_draft_model speculator set_assistant draft"
        ),
        "draftree.load(MODEL, policy=…) makes an engine with another policy": "set_policy",
        "`draftree train DRAFTER --target MODEL` trains drafters": "train fit finetune",
        "draftree.load(MODEL)": "from_pretrained load load_model open from_model create_engine",
        "an engine changes no weights; engine.target.decoder.model.save_pretrained(FOLDER) saves the model": (
            "save save_pretrained export"
        ),
        "`draftree push FOLDER OWNER/NAME` uploads a drafter; the target is engine.target.decoder.model": "push_to_hub",
        "each Completion has its own: completion.acceptance_rate": "acceptance_rate accept_rate draft_acceptance_rate",
        "each Completion has its own: completion.stats": (
            "stats acceptance_stats get_stats metrics get_metrics speedup "
            "tokens_per_second acceptance_length timings tau accept_length last_completion last_stats performance figures"
        ),
        "`draftree bench MODEL` measures": "benchmark bench profile measure",
        "`draftree generate MODEL -p 'PROMPT' --baseline` compares with plain decoding": (
            "compare baseline without_drafting vanilla"
        ),
        "`draftree generate MODEL -p 'PROMPT' --trees` shows trees": (
            "tree trees print_tree show_tree draft_tree"
        ),
        "engine.forget() drops the caches of the last call": ("cache kv_cache"),
        "del engine frees it; there is nothing to close": (
            "unload sleep exit terminate stop_engine free delete"
        ),
        "nothing needs warming up": "prefill preload",
        "engine.submit('text') joins the running batch, and engine.step() writes": (
            "add_request schedule enqueue"
        ),
        "engine.cancel(handle) ends a submitted request": "abort abort_request stop",
        "engine.step() returns what was written; handle.finished says whether a text has ended": (
            "has_unfinished_requests has_unfinished is_done"
        ),
        "seed=N of each call": "set_seed seed manual_seed",
        "an engine gives no embeddings": (
            "embed embeddings create_embedding get_embeddings classify rerank reward pooling_type"
        ),
        "engine.complete(…, logprobs=0) has the log-probabilities of what it writes": (
            "score async_score loglikelihood logprobs perplexity nll"
        ),
        f"{LM_EVALUATION} runs its tasks": "loglikelihood_rolling evaluate simple_evaluate",
        "models are downloaded when they are first used": "pull download",
        "draftree.load(…, costs=…)": "set_costs",
        "engine.complete(…, max_new_tokens=…): options belong to each call": (
            "options params sampling_params set_options defaults"
        ),
    }
)

MODULE_HINTS: Mapping[str, str] = by_word(
    {
        _LOAD: (
            "OpenAI AsyncOpenAI Client AsyncClient "
            "AzureOpenAI Runtime sgl LLMEngine AsyncLLMEngine AsyncLLM EngineArgs "
            "AsyncEngineArgs Pipeline TextGenerationPipeline InferenceClient model "
            "MedusaModel init from_hub "
            "SpecModel HFModel HFLM DraftModel AutoDraftModel open create "
            ""
        ),
        (
            "draftree.speculate(…) makes transformers' generate speculate: model.generate(…, "
            "custom_generate=draftree.speculate)"
        ): (
            "    speculative speculative_generate "
            "speculative_decoding speculative_decode assisted_generate patch wrap accelerate "
            "enable hook   SpeculativeConfig   patch_model "
            "monkey_patch apply decode custom_generate Hook   optimize"
        ),
        "draftree.load(MODEL, drafter='pld') drafts from the prompt": (
            "LlamaPromptLookupDecoding PromptLookupCandidateGenerator"
        ),
        "draftree.load(MODEL, drafter=SMALL_MODEL)": (
            "AssistedCandidateGenerator AutoModelForSpeculativeDecoding speculative_generate_step"
        ),
        "draftree.load(MODEL, adapter=FOLDER) merges a PEFT adapter": "LoRARequest PeftModel LoraConfig",
        "a prompt is a text, or ids: engine.complete('text')": "TextPrompt TokensPrompt PromptInputs",
        "an engine gives no embeddings": "PoolingParams embed embeddings",
        "a call with the same beginning uses the cache of the last one": (
            "LlamaRAMCache LlamaDiskCache make_prompt_cache load_prompt_cache save_prompt_cache cache_prompt DynamicCache"
        ),
        "run `hf auth login`": "login HfApi whoami",
        "`draftree push FOLDER OWNER/NAME --dry-run` writes it": "ModelCard",
        "draftree.UserError is what a mistake raises": "ResponseError OpenAIError APIError BadRequestError",
        "draftree has no web search": "web_search web_fetch",
        "`draftree --help` lists the commands": (
            "push report tune replay env advise datastore cli llama_cpp"
        ),
        "give its values as options: engine.chat('text', temperature=0.7, max_new_tokens=100)": (
            "Sampler LogitsProcessor   BeamSearchParams LogitsProcessorList make_logits_processors sample_utils"
        ),
        "json_schema=…, regex=… or grammar=… of engine.chat('text', …)": (
            "StructuredOutputsParams GuidedDecodingParams LlamaGrammar ResponseFormat JSONSchema"
        ),
        "draftree.load(MODEL).chat('text') answers": (
            "ask run answer ChatCompletion ChatOpenAI responses gen function"
        ),
        "draftree.load(MODEL).complete('text') continues a text": ("completions"),
        "draftree.load(MODEL).stream('text') yields tokens": (
            "generate_step stream_chat TextStreamer"
        ),
        "draftree.load(MODEL).conversation() keeps its messages": (
            "Chat ChatSession Session Message Messages start_chat"
        ),
        "draftree.load(MODEL).tokenizer, or AutoTokenizer of transformers": (
            "AutoTokenizer Tokenizer tokenizer get_tokenizer encode LlamaTokenizer load_tokenizer"
        ),
        "seed=N of each call": "set_seed manual_seed seed",
        "`draftree serve MODEL` is an OpenAI-compatible server": (
            "serve server api Server AsyncServer launch_server ServerArgs"
        ),
        "`draftree list` lists them; draftree.load(MODEL, drafter='NAME') takes one": (
            "list_drafters get_drafter available_drafters Drafter Drafters drafter list_methods "
            "DRAFTERS methods Method list list_policies POLICIES Policy Policies get_policy "
            "Acceptor Acceptors list_models models list_acceptors EAGLE EAGLE3"
        ),
        "`draftree bench MODEL` measures": (
            "benchmark bench Benchmark measure evaluate compare speedup profile"
        ),
        f"{LM_EVALUATION} runs its tasks": "simple_evaluate lm_eval",
        "`draftree train DRAFTER --target MODEL` trains drafters": (
            "train Trainer TrainingArguments finetune fit train_drafter"
        ),
        "`draftree doctor` checks a drafter": "check verify test doctor validate",
        "`draftree export` writes drafters for other engines": "export save convert",
        "draftree.__version__": "version VERSION",
        "a Completion is what engine.chat('text') returns": (
            "RequestOutput CompletionOutput GenerationResponse Response Output Result"
        ),
        "draftree.load(MODEL, quantize='int8')": "quantize BitsAndBytesConfig",
        "models are downloaded when they are first used; `hf download ID` fetches one ahead": (
            "pull download snapshot_download hf_hub_download"
        ),
        "draftree.load('demo') is the demo": "demo",
        "logging.getLogger('draftree') of Python, and warnings.filterwarnings": (
            "logging set_verbosity logger"
        ),
    }
)

RESULT_HINTS: Mapping[str, str] = by_word(
    {
        "completion.text": ("decode output_ids_text"),
        "completion.tokens": ("generated_tokens input_ids"),
        "completion.tokens; engine.generate returns sequences": "sequences",
        "len(completion.tokens)": ("length"),
        "completion.ending": ("reason status eos"),
        _STATS: (
            "total_duration eval_duration mean_accepted_tokens steps trees tree from_draft load_duration prompt_eval_duration "
        ),
        "`draftree generate --baseline` compares with plain decoding": "speedup baseline",
        "engine.complete(…, logprobs=0) fills completion.logprobs": ("scores logits"),
        "completion.prompt and completion.prompt_ids hold the prompt; its time is not kept": (
            "context num_cached_tokens encoder_prompt prompt_logprobs  prompt_tps"
        ),
        "engine.target.name": "model model_name",
        "`draftree generate` prints the most memory that was used": "peak_memory",
        "a Completion has no number": "id request_id created index object system_fingerprint lora_request",
        "no tools are called; completion.text is what was written": (
            "tool_calls function_call reasoning_content reasoning thinking"
        ),
        "`for token in engine.stream('text')` reads a text as it comes": (
            "iter_tokens stream on_token"
        ),
    }
)

TOKEN_HINTS: Mapping[str, str] = by_word(
    {
        "token.text": ("token generated_text outputs"),
        "token.id": "index",
        "token.ending": "stop reason",
        "token.origin is 'drafted' for an accepted draft": ("source"),
        "engine.complete(…) has the figures: completion.stats": (
            "generation_tps stats tokens_per_second generation_tokens usage eval_count eval_duration "
            "peak_memory total_duration prompt_tps prompt_tokens timings metrics"
        ),
        "logprobs=0 of the call fills token.logprob": "logprobs prob probability score",
        "token.id; special tokens have no text": "special is_special",
    }
)

CONVERSATION_HINTS: Mapping[str, str] = by_word(
    {
        "conversation.say('text') answers": ("message user __call__"),
        "conversation.messages is a list: conversation.messages.append({'role': …, 'content': …})": (
            "append add_message add add_user_message"
        ),
        "engine.conversation() begins anew": "reset clear restart new",
        "del conversation.messages[-2:] takes the last turn back": (
            "undo rewind pop regenerate retry"
        ),
        "engine.conversation(system=…), conversation.messages[0]": (
            "system system_prompt set_system set_system_prompt"
        ),
        "json.dump(conversation.messages, file)": "save load export to_json",
    }
)

STATS_HINTS: Mapping[str, str] = by_word(
    {
        "stats.acceptance_length, accepted + 1 for each pass": ("mean_accepted"),
        "stats.seconds": ("eval_duration total_duration"),
        "`draftree generate --baseline` compares with plain decoding": "speedup baseline",
        "stats.new_tokens": "tokens",
        "[step.accepted for step in stats.steps]": "num_accepted_tokens_per_pos",
        "len(stats.steps)": "forward_passes",
        "stats.as_json()": "json to_json",
    }
)
