"""What users of other tools try first: each guess works, or its message says what to write.

The guesses are written from the references of transformers, vLLM, the OpenAI API, ollama, llama.cpp, llama-cpp-python, mlx_lm
and lm_eval. Guesses on the command line are in `test_guesses_cli.py`.
"""

import asyncio
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import draftree
from draftree import Completion, Engine, load
from draftree.demo import demo_folder

QUESTION = "How many legs do 3 dogs have?"
SHORT: dict[str, Any] = {"max_new_tokens": 6}
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("demo", "edd", "chain:length=3")


@pytest.fixture(scope="module")
def plain() -> SimpleNamespace:
    """The demo as transformers loads it."""
    folder = demo_folder()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return SimpleNamespace(model=model, tokenizer=AutoTokenizer.from_pretrained(folder), folder=str(folder))


def text(found: Any) -> bool:
    return isinstance(found, Completion) and len(found.tokens) > 0


def several(n: int) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, list) and len(found) == n and all(map(text, found))


def tokens(found: Any) -> bool:
    return "".join(str(token) for token in found) != ""


def loaded(found: Any) -> bool:
    return isinstance(found, Engine)


def ids(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and found.dim() == 2


Guess = tuple[Callable[[Any], Any], "Callable[[Any], bool] | str"]
"""A call of an engine, and a test of what it returns or words of its error."""

CALLS: dict[str, Guess] = {
    # chat and complete
    "chat a text": (lambda e: e.chat(QUESTION, **SHORT), text),
    "chat with messages": (lambda e: e.chat(MESSAGES, **SHORT), text),
    "messages=": (lambda e: e.chat(messages=MESSAGES, **SHORT), text),
    "chat with a system text": (lambda e: e.chat(QUESTION, system="Be brief.", **SHORT), text),
    "chat with a batch (vLLM)": (lambda e: e.chat([MESSAGES, MESSAGES], **SHORT), several(2)),
    "chat with several texts": (lambda e: e.chat(["a", "b"], **SHORT), several(2)),
    "chat stream=True (OpenAI)": (lambda e: list(e.chat(MESSAGES, stream=True, **SHORT)), tokens),
    "complete several": (lambda e: e.complete(["a", "b"], **SHORT), several(2)),
    "complete ids": (lambda e: e.complete([5, 6, 7], **SHORT), text),
    "complete stream=True": (lambda e: list(e.complete("def main(", stream=True, **SHORT)), tokens),
    "stream": (lambda e: list(e.stream("def main(", **SHORT)), tokens),
    "acomplete": (lambda e: asyncio.run(e.acomplete("def main(", **SHORT)), text),
    "achat": (lambda e: asyncio.run(e.achat(QUESTION, **SHORT)), text),
    "conversation": (lambda e: e.conversation(system="Be brief.", **SHORT).say(QUESTION), text),
    "conversation.stream": (lambda e: list(e.conversation().stream(QUESTION, **SHORT)), tokens),
    "system_prompt=": (lambda e: e.chat(QUESTION, system_prompt="a"), "system="),
    "complete system=": (lambda e: e.complete("a", system="b"), "engine.chat(text, system"),
    "raw=": (lambda e: e.complete("a", raw=True), "engine.complete continues a text as it is"),
    "prompt=": (lambda e: e.complete(prompt="def main(", **SHORT), text),
    # length
    "max_tokens": (lambda e: e.complete("a", max_tokens=3), text),
    "max_completion_tokens": (lambda e: e.chat("a", max_completion_tokens=3), text),
    "max_output_tokens": (lambda e: e.chat("a", max_output_tokens=3), text),
    "n_predict": (lambda e: e.complete("a", n_predict=3), text),
    "num_predict": (lambda e: e.chat("a", num_predict=3), text),
    "max_gen_toks": (lambda e: e.complete("a", max_gen_toks=3), text),
    "min_tokens": (lambda e: e.complete("a", min_tokens=2, max_tokens=3), text),
    "max_length": (lambda e: e.complete("a", max_length=30), "max_new_tokens counts new tokens"),
    "min_length": (lambda e: e.complete("a", min_length=30), "min_new_tokens counts new tokens"),
    "num_ctx": (lambda e: e.chat("a", num_ctx=4096), "context is the model's own"),
    "both names": (lambda e: e.complete("a", max_tokens=3, max_new_tokens=4), "max_tokens and max_new_tokens are given"),
    # sampling
    "do_sample=True": (lambda e: e.complete("a", do_sample=True), "temperature=1.0 samples"),
    "do_sample=False": (lambda e: e.complete("a", do_sample=False, **SHORT), text),
    "do_sample and temperature": (lambda e: e.complete("a", do_sample=True, temperature=0.7, **SHORT), text),
    "temp": (lambda e: e.complete("a", temp=0.7, **SHORT), text),
    "temperature=None": (lambda e: e.complete("a", temperature=None, stop=None, seed=None, **SHORT), text),
    "typical": (lambda e: e.complete("a", typical=0.9, **SHORT), text),
    "mirostat": (lambda e: e.complete("a", mirostat=2), "temperature, top_k"),
    "xtc_probability": (lambda e: e.complete("a", xtc_probability=0.1), "temperature, top_k"),
    "num_beams": (lambda e: e.complete("a", num_beams=4), "beam search is not offered"),
    "use_beam_search": (lambda e: e.complete("a", use_beam_search=True), "beam search is not offered"),
    "best_of": (lambda e: e.complete("a", best_of=4), "n=N writes N texts"),
    "n": (lambda e: e.complete("a", n=2, temperature=1.0, **SHORT), several(2)),
    "num_return_sequences": (lambda e: e.complete("a", num_return_sequences=2, temperature=1.0, **SHORT), several(2)),
    "stream with n": (lambda e: e.stream("a", n=2), "n is 2, allowed is 1 here"),
    "sampling_params": (lambda e: e.chat("a", sampling_params=5), "temperature, top_p, max_new_tokens"),
    "options (ollama)": (lambda e: e.chat("a", options={"temperature": 1}), "temperature, top_p, max_new_tokens"),
    "generation_config": (lambda e: e.complete("a", generation_config=5), "engine.generate"),
    "repeat_penalty": (lambda e: e.complete("a", repeat_penalty=1.1), "repetition_penalty"),
    "repetition_penalty": (lambda e: e.complete("a", repetition_penalty=1.1, **SHORT), text),
    "dry_multiplier": (lambda e: e.complete("a", dry_multiplier=1.1), "repetition_penalty"),
    "penalty_alpha": (lambda e: e.complete("a", penalty_alpha=0.6), "contrastive search is not offered"),
    "logit_bias": (lambda e: e.complete("a", logit_bias={5: -3.0}, **SHORT), text),
    "suppress_tokens": (lambda e: e.complete("a", suppress_tokens=[5], **SHORT), text),
    "bad_words": (lambda e: e.complete("a", bad_words=["b"], **SHORT), text),
    "logits_processor": (lambda e: e.complete("a", logits_processor=[]), "engine.generate takes it"),
    # ends
    "stop": (lambda e: e.complete("a", stop=["\n"], **SHORT), text),
    "stop_strings": (lambda e: e.complete("a", stop_strings="\n", **SHORT), text),
    "until": (lambda e: e.complete("a", until=["\n"], **SHORT), text),
    "stop_token_ids": (lambda e: e.complete("a", stop_token_ids=[2]), "stop='TEXT'"),
    "eos_token_id": (lambda e: e.complete("a", eos_token_id=2), "stop='TEXT'"),
    "ignore_eos": (lambda e: e.complete("a", ignore_eos=True, **SHORT), text),
    "include_stop_str_in_output": (lambda e: e.complete("a", include_stop_str_in_output=True), "completion.stop"),
    "stopping_criteria": (lambda e: e.complete("a", stopping_criteria=[]), "engine.generate takes it"),
    # forms and outputs
    "response_format": (lambda e: e.chat("a", response_format={"type": "json_object"}), "json_schema="),
    "format (ollama)": (lambda e: e.chat("a", format="json"), "json_schema="),
    "guided_json": (lambda e: e.chat("a", guided_json={"enum": [1, 2]}, **SHORT), text),
    "guided_regex": (lambda e: e.chat("a", guided_regex="[ab]{2}", **SHORT), text),
    "guided_choice": (lambda e: e.chat("a", guided_choice=["yes", "no"]), "regex='yes|no'"),
    "structured_outputs": (lambda e: e.chat("a", structured_outputs=5), "json_schema="),
    "tools": (lambda e: e.chat("a", tools=[]), "chat template"),
    "logprobs": (lambda e: e.complete("a", logprobs=2, **SHORT), text),
    "top_logprobs": (lambda e: e.chat("a", top_logprobs=2, **SHORT), text),
    "prompt_logprobs": (lambda e: e.complete("a", prompt_logprobs=1), "logprobs=N"),
    "echo": (lambda e: e.complete("a", echo=True), "without the prompt"),
    "return_full_text": (lambda e: e.complete("a", return_full_text=False), "without the prompt"),
    "skip_special_tokens": (lambda e: e.complete("a", skip_special_tokens=True), "without special tokens"),
    "streamer=": (lambda e: e.complete("a", streamer=5), "engine.stream("),
    "use_tqdm": (lambda e: e.complete("a", use_tqdm=False), "no progress bar"),
    "batch_size": (lambda e: e.complete(["a"], batch_size=4), "a list of prompts is one batch"),
    "pad_token_id": (lambda e: e.complete("a", pad_token_id=0), "not needed"),
    "assistant_model of a call": (lambda e: e.complete("a", assistant_model=5), "draftree.load(…, drafter=…)"),
    "a misspelt option": (lambda e: e.complete("a", max_new_token=3), "did you mean 'max_new_tokens'"),
    "a misspelt alias": (lambda e: e.complete("a", max_tokns=3), "did you mean 'max_new_tokens'"),
    "an option that nothing is near": (lambda e: e.complete("a", frobnicate=3), "known are"),
    # attributes of results
    "str of a completion": (
        lambda e: str(e.complete("def main(", **SHORT)),
        lambda found: "Completion(" not in found and len(found) > 1,
    ),
    ".text": (lambda e: e.complete("def main(", **SHORT).text, bool),
    ".outputs[0].text (vLLM)": (lambda e: e.complete("a", **SHORT).outputs, "completion.text"),
    ".choices (OpenAI)": (lambda e: e.chat("a", **SHORT).choices, "completion.text"),
    ".content": (lambda e: e.chat("a", **SHORT).content, "completion.text"),
    ".response (ollama)": (lambda e: e.chat("a", **SHORT).response, "completion.text"),
    ".generated_text": (lambda e: e.chat("a", **SHORT).generated_text, "completion.text"),
    ".token_ids": (lambda e: e.chat("a", **SHORT).token_ids, "completion.tokens"),
    ".finish_reason": (lambda e: e.chat("a", **SHORT).finish_reason, "completion.ending"),
    ".usage": (lambda e: e.chat("a", **SHORT).usage, "completion.stats"),
    # other methods of an engine
    "engine(text)": (lambda e: e("a"), "engine.chat('text') answers"),
    "create_completion": (lambda e: e.create_completion("a"), "engine.complete('text')"),
    "create_chat_completion": (lambda e: e.create_chat_completion(MESSAGES), "engine.chat(messages)"),
    "stream_generate": (lambda e: e.stream_generate("a"), "engine.stream('text')"),
    "stream_chat": (lambda e: e.stream_chat("a"), "stream=True"),
    "invoke": (lambda e: e.invoke("a"), "engine.chat('text')"),
    "tokenize": (lambda e: e.tokenize("a"), "engine.tokenizer(text)"),
    "get_tokenizer": (lambda e: e.get_tokenizer(), "engine.tokenizer"),
    "engine.model": (lambda e: e.model, "engine.target"),
    "engine.compleet": (lambda e: e.compleet, "did you mean 'complete'"),
    "generate a text": (lambda e: e.generate("a"), "engine.chat('text') answers"),
    "generate several texts": (lambda e: e.generate(["a", "b"]), "engine.chat('text') answers"),
    "generate ids": (lambda e: e.generate(torch.tensor([[5, 6]]), max_new_tokens=3), ids),
    "generate do_sample": (lambda e: e.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=True, top_k=5), ids),
    "generate max_tokens": (lambda e: e.generate(torch.tensor([[5, 6]]), max_tokens=3), "max_new_tokens"),
    "generate num_beams": (lambda e: e.generate(torch.tensor([[5, 6]]), num_beams=3), "beam search is not offered"),
    "generate assistant_model": (lambda e: e.generate(torch.tensor([[5]]), assistant_model=5), "draftree.load(model, drafter"),
    # names of the module
    "LLM (vLLM)": (lambda e: draftree.LLM("demo"), "draftree.load(MODEL)"),
    "SamplingParams": (lambda e: draftree.SamplingParams(), "give its values as options"),
    "AutoModelForCausalLM": (lambda e: draftree.AutoModelForCausalLM, "draftree.load(MODEL)"),
    "pipeline": (lambda e: draftree.pipeline("text-generation"), "draftree.load(MODEL)"),
    "draftree.generate": (lambda e: draftree.generate("a"), "draftree.load(MODEL).chat('text')"),
    "from_pretrained": (lambda e: draftree.from_pretrained("demo"), "draftree.load(MODEL)"),
    "Engine.from_pretrained": (lambda e: e.from_pretrained("demo"), "draftree.load(MODEL)"),
}

LOADS: dict[str, Guess] = {
    "load(model)": (lambda p: load(p.model), loaded),
    "load(model, tokenizer)": (lambda p: load(p.model, p.tokenizer), lambda e: e.tokenizer is not None),
    "load(model, tokenizer=)": (lambda p: load(p.model, tokenizer=p.tokenizer), loaded),
    "load(model=)": (lambda p: load(model=p.folder), lambda e: e.target.name == "demo"),
    "pretrained_model_name_or_path=": (lambda p: load(pretrained_model_name_or_path="demo"), loaded),
    "assistant_model=": (lambda p: load(p.model, assistant_model=p.model), lambda e: e.drafter.described.startswith("lm")),
    "draft_model= a folder": (lambda p: load(p.model, draft_model=p.folder), lambda e: e.drafter.described.startswith("lm")),
    "speculative_model=": (lambda p: load("demo", speculative_model="ngram"), loaded),
    "drafter= a loaded model": (lambda p: load(p.model, drafter=p.model), lambda e: e.drafter.described.startswith("lm")),
    "drafter= a folder": (lambda p: load(p.model, drafter=p.folder), lambda e: e.drafter.described.startswith("lm")),
    "drafter= an open drafter": (lambda p: load(p.model, drafter=load(p.model, "pld").drafter), loaded),
    "drafter= an engine": (lambda p: load(p.model, drafter=load("demo", "pld")), loaded),
    "drafter='ngram'": (lambda p: load("demo", "ngram"), lambda e: "PLD" in repr(e)),
    "drafter='prompt_lookup'": (lambda p: load("demo", "prompt_lookup"), lambda e: "PLD" in repr(e)),
    "drafter='eagle-3'": (lambda p: load("demo", "eagle-3"), lambda e: "EAGLE3" in repr(e)),
    "drafter='EAGLE3'": (lambda p: load("demo", "EAGLE3"), lambda e: "EAGLE3" in repr(e)),
    "drafter='deepseek_mtp'": (lambda p: load("demo", "deepseek_mtp"), lambda e: "MTP" in repr(e)),
    "drafter='Medusa'": (lambda p: load("demo", "Medusa"), loaded),
    "drafter='suffix_decoding'": (lambda p: load("demo", "suffix_decoding"), loaded),
    "drafter='draft_model'": (lambda p: load("demo", "draft_model"), "give the loaded model itself"),
    "drafter='eagle2'": (lambda p: load("demo", "eagle2"), "policy 'eagle2'"),
    "drafter='mlp_speculator'": (lambda p: load("demo", "mlp_speculator"), "'medusa' and 'hydra'"),
    "drafter='none'": (lambda p: load("demo", "none"), "engine.plain"),
    "drafter='published'": (lambda p: load("demo", "published"), "none is known for target 'demo'"),
    "drafter='./nowhere'": (lambda p: load("demo", "./nowhere"), "no folder or file './nowhere'"),
    "policy='greedy'": (lambda p: load("demo", policy="greedy"), "acceptor='greedy'"),
    "policy='tree'": (lambda p: load("demo", policy="tree"), "pct, yield and eagle2"),
    "num_speculative_tokens=": (lambda p: load("demo", "pld", num_speculative_tokens=5), "policy='chain:length=5'"),
    "speculative_config= (vLLM)": (lambda p: load("demo", speculative_config={"method": "ngram"}), "drafter=…"),
    "torch_dtype=": (lambda p: load("demo", torch_dtype="float32"), loaded),
    "dtype='auto'": (lambda p: load("demo", dtype="auto"), loaded),
    "dtype='bf16'": (lambda p: load("demo", dtype="bf16"), lambda e: e.target.decoder.dtype is torch.bfloat16),
    "dtype='int8'": (lambda p: load("demo", dtype="int8"), "quantize='int8'"),
    "device_map='auto'": (lambda p: load("demo", device_map="auto"), loaded),
    "load_in_8bit=": (lambda p: load("demo", load_in_8bit=True), "quantize='int8'"),
    "load_in_4bit=": (lambda p: load("demo", load_in_4bit=True), "quantize='int4'"),
    "quantization= (vLLM)": (lambda p: load("demo", quantization="awq"), "quantize='int8'"),
    "tensor_parallel_size=": (lambda p: load("demo", tensor_parallel_size=2), "one device"),
    "gpu_memory_utilization=": (lambda p: load("demo", gpu_memory_utilization=0.9), "memory is taken as it is needed"),
    "max_model_len=": (lambda p: load("demo", max_model_len=4096), "context is the model's own"),
    "n_ctx= (llama-cpp-python)": (lambda p: load("demo", n_ctx=4096), "context is the model's own"),
    "n_gpu_layers=": (lambda p: load("demo", n_gpu_layers=-1), "device='cuda'"),
    "n_threads=": (lambda p: load("demo", n_threads=8), "OMP_NUM_THREADS"),
    "cache_dir=": (lambda p: load("demo", cache_dir="x"), "HF_HOME"),
    "token=": (lambda p: load("demo", token="x"), "hf auth login"),
    "local_files_only=": (lambda p: load("demo", local_files_only=True), "HF_HUB_OFFLINE=1"),
    "enforce_eager=": (lambda p: load("demo", enforce_eager=True), "compile=False"),
    "adapter_path= (mlx_lm)": (lambda p: load("demo", adapter_path="./nowhere"), "nowhere"),
    "temperature= of load": (lambda p: load("demo", temperature=0.7), "option of each call"),
    "attn_implementation=": (lambda p: load("demo", attn_implementation="flash_attention_2"), "sdpa or eager"),
    "a path that does not exist": (lambda p: load("./nowhere"), "no folder or file './nowhere'"),
    "a model that the hub is not asked for": (lambda p: load("nosuch"), "there is no folder 'nosuch' here"),
}


def check(guess: Guess, given: Any) -> None:
    call, expected = guess
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if callable(expected):
            assert expected(call(given))
            return
        with pytest.raises((draftree.UserError, AttributeError)) as found:
            call(given)
    assert expected in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_guess_of_a_call(engine: Engine, name: str) -> None:
    check(CALLS[name], engine)


@pytest.mark.parametrize("name", LOADS)
def test_a_guess_of_load(plain: SimpleNamespace, name: str) -> None:
    check(LOADS[name], plain)


def test_there_are_enough_guesses() -> None:
    assert len(CALLS) + len(LOADS) >= 120


def test_the_hook_prints_through_a_streamer(plain: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = plain.tokenizer("def main(", return_tensors="pt", return_token_type_ids=False)
    plain.model.generate(
        **inputs, max_new_tokens=12, streamer=TextStreamer(plain.tokenizer), custom_generate=draftree.speculate("pld")
    )
    assert capsys.readouterr().out.startswith("def main(")


def test_complete_recommends_chat_once_for_a_question() -> None:
    fresh = load("demo", "pld", "chain")
    with pytest.warns(draftree.errors.DraftreeWarning, match=r"looks like a question, .*chat\(\) puts it into"):
        fresh.complete(QUESTION, **SHORT)
    fresh.complete(QUESTION, **SHORT)  # a second warning would be an error
    with pytest.warns(draftree.errors.DraftreeWarning, match="the completion is empty"):
        load("demo", "pld", "chain").complete("a", suppress=[*range(3, 4096)], **SHORT)


def test_objects_have_short_representations(engine: Engine) -> None:
    found = engine.chat(QUESTION, **SHORT)
    assert str(found) == found.text
    for shown in (found, found.stats, engine, engine.drafter, engine.policy, engine.acceptor):
        assert "\n" not in repr(shown)
        assert len(repr(shown)) < 250
    assert f"{found.stats.acceptance_length:.2f} tokens per pass (τ)" in repr(found)
    assert "".join(map(str, engine.stream("def main(", **SHORT))) == engine.complete("def main(", **SHORT).text


def test_a_notebook_shows_the_text_coloured_by_origin(engine: Engine) -> None:
    found = engine.complete("def main(", max_new_tokens=40)
    html = found._repr_html_()
    assert html.count("<span") >= 2
    assert "tokens/s" in html
    assert "tokens per pass (τ)" in html
    assert "<b>" not in Completion("<b>", [5], ["drafted"], [], "length", None, found.stats, ["<b>"])._repr_html_()


def test_completion_in_editors_shows_the_public_names() -> None:
    assert dir(draftree) == sorted([*draftree.__all__, "__version__"])
    assert {"chat", "complete", "conversation", "stream", "generate"} <= set(dir(Engine))


@pytest.mark.parametrize("name", ["LLM", "pipeline", "generate", "AutoModelForCausalLM", "stream_generate"])
def test_an_import_of_another_tools_name_says_what_to_write(name: str) -> None:
    with pytest.raises(ImportError, match=r"draftree\.load"):
        exec(f"from draftree import {name}")
    assert not hasattr(draftree, name)
