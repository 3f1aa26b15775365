"""What users of other tools try first: each guess works, or its message says what to write.

The guesses are written from the references of transformers, vLLM, the OpenAI API, ollama,
llama.cpp, llama-cpp-python, mlx_lm and lm_eval. Guesses on the command line are in
`test_aliases_cli.py`.
"""

import asyncio
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from test_other_tools import CALLS as ACCEPTED
from test_other_tools import NOTED
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    TextStreamer,
)

import draftree
from draftree import Completion, Engine, load
from draftree.aliases import OPTION, nearest
from draftree.weights import demo_folder
from more_guesses import MORE

pytestmark = pytest.mark.usefixtures("one_demo")

QUESTION = "How many legs do 3 dogs have?"
SHORT: dict[str, Any] = {"max_new_tokens": 6}
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("demo", "edd", "chain:length=3")


@pytest.fixture(scope="module")
def written(engine: Engine) -> SimpleNamespace:
    """A completion and a token."""
    return SimpleNamespace(
        completion=engine.complete("a", **SHORT), token=next(engine.stream("a", **SHORT))
    )


@pytest.fixture(scope="module")
def plain() -> SimpleNamespace:
    """The demo as transformers loads it."""
    folder = demo_folder()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    return SimpleNamespace(
        model=model, tokenizer=AutoTokenizer.from_pretrained(folder), folder=str(folder)
    )


def text(found: Any) -> bool:
    return isinstance(found, Completion) and len(found.tokens) > 0


def several(n: int) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, list) and len(found) == n and all(map(text, found))


def starts(beginning: str) -> Callable[[Any], bool]:
    return lambda found: text(found) and found.text.lstrip().startswith(beginning)


def tokens(found: Any) -> bool:
    return "".join(str(token) for token in found) != ""


def loaded(found: Any) -> bool:
    return isinstance(found, Engine)


def ids(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and found.dim() == 2


class Person(BaseModel):
    name: str


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
    "min_length": (lambda e: e.complete("a", min_length=30), "min_new_tokens counts new tokens"),
    "both names": (
        lambda e: e.complete("a", max_tokens=3, max_new_tokens=4),
        "max_tokens and max_new_tokens are given",
    ),
    # sampling
    "do_sample=False": (lambda e: e.complete("a", do_sample=False, **SHORT), text),
    "do_sample and temperature": (
        lambda e: e.complete("a", do_sample=True, temperature=0.7, **SHORT),
        text,
    ),
    "temp": (lambda e: e.complete("a", temp=0.7, **SHORT), text),
    "temperature=None": (
        lambda e: e.complete("a", temperature=None, stop=None, seed=None, **SHORT),
        text,
    ),
    "typical": (lambda e: e.complete("a", typical=0.9, **SHORT), text),
    "mirostat": (lambda e: e.complete("a", mirostat=2), "temperature, top_k"),
    "xtc_probability": (lambda e: e.complete("a", xtc_probability=0.1), "temperature, top_k"),
    "num_beams": (lambda e: e.complete("a", num_beams=4), "beam search is not offered"),
    "use_beam_search": (
        lambda e: e.complete("a", use_beam_search=True),
        "beam search is not offered",
    ),
    "best_of": (lambda e: e.complete("a", best_of=4), "n=N writes N texts"),
    "n": (lambda e: e.complete("a", n=2, temperature=1.0, **SHORT), several(2)),
    "num_return_sequences": (
        lambda e: e.complete("a", num_return_sequences=2, temperature=1.0, **SHORT),
        several(2),
    ),
    "stream with n": (lambda e: e.stream("a", n=2), "n is 2, allowed is 1 here"),
    "sampling_params": (
        lambda e: e.chat("a", sampling_params=5),
        "temperature, top_p, max_new_tokens",
    ),
    "options (ollama)": (lambda e: e.chat("a", options={"temperature": 1, "num_predict": 3}), text),
    "generation_config": (lambda e: e.complete("a", generation_config=5), "engine.generate"),
    "repeat_penalty": (lambda e: e.complete("a", repeat_penalty=1.1), "repetition_penalty"),
    "repetition_penalty": (lambda e: e.complete("a", repetition_penalty=1.1, **SHORT), text),
    "dry_multiplier": (lambda e: e.complete("a", dry_multiplier=1.1), "repetition_penalty"),
    "penalty_alpha": (
        lambda e: e.complete("a", penalty_alpha=0.6),
        "contrastive search is not offered",
    ),
    "logit_bias": (lambda e: e.complete("a", logit_bias={5: -3.0}, **SHORT), text),
    "suppress_tokens": (lambda e: e.complete("a", suppress_tokens=[5], **SHORT), text),
    "bad_words": (lambda e: e.complete("a", bad_words=["b"], **SHORT), text),
    # ends
    "stop": (lambda e: e.complete("a", stop=["\n"], **SHORT), text),
    "stop_strings": (lambda e: e.complete("a", stop_strings="\n", **SHORT), text),
    "until": (lambda e: e.complete("a", until=["\n"], **SHORT), text),
    "ignore_eos": (lambda e: e.complete("a", ignore_eos=True, **SHORT), text),
    # forms and outputs
    "response_format": (
        lambda e: e.chat("a", response_format={"type": "json_object"}, **SHORT),
        starts("{"),
    ),
    "format (ollama)": (lambda e: e.chat("a", format="json", **SHORT), starts("{")),
    "guided_json": (lambda e: e.chat("a", guided_json={"enum": [1, 2]}, **SHORT), text),
    "guided_regex": (lambda e: e.chat("a", guided_regex="[ab]{2}", **SHORT), text),
    "guided_choice": (
        lambda e: e.chat("a", guided_choice=["yes", "no."]),
        lambda found: str(found) in ("yes", "no."),
    ),
    "structured_outputs": (lambda e: e.chat("a", structured_outputs=5), "json_schema="),
    "tools": (lambda e: e.chat("a", tools=[len]), "apply_chat_template(messages"),
    "logprobs": (lambda e: e.complete("a", logprobs=2, **SHORT), text),
    "top_logprobs": (lambda e: e.chat("a", top_logprobs=2, **SHORT), text),
    "prompt_logprobs": (lambda e: e.complete("a", prompt_logprobs=1), "logprobs=N"),
    "skip_special_tokens": (
        lambda e: e.complete("a", skip_special_tokens=False),
        "without special tokens",
    ),
    "batch_size": (lambda e: e.complete(["a"], batch_size=4), "a list of prompts is one batch"),
    "assistant_model of a call": (
        lambda e: e.complete("a", assistant_model=5),
        "draftree.load(…, drafter=…)",
    ),
    "a misspelt option": (
        lambda e: e.complete("a", max_new_token=3),
        "did you mean 'max_new_tokens'",
    ),
    "a misspelt alias": (lambda e: e.complete("a", max_tokns=3), "did you mean 'max_new_tokens'"),
    "an option that nothing is near": (lambda e: e.complete("a", frobnicate=3), "known are"),
    # attributes of results
    "str of a completion": (
        lambda e: str(e.complete("def main(", **SHORT)),
        lambda found: "Completion(" not in found and len(found) > 1,
    ),
    ".text": (lambda e: e.complete("def main(", **SHORT).text, bool),
    # other methods of an engine
    "tokenize": (lambda e: e.tokenize("a"), "engine.tokenizer(text)"),
    "engine.compleet": (lambda e: e.compleet, "did you mean 'complete'"),
    "generate ids": (lambda e: e.generate(torch.tensor([[5, 6]]), max_new_tokens=3), ids),
    "generate do_sample": (
        lambda e: e.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=True, top_k=5),
        ids,
    ),
    "generate num_beams": (
        lambda e: e.generate(torch.tensor([[5, 6]]), num_beams=3),
        "beam search is not offered",
    ),
    "generate assistant_model": (
        lambda e: e.generate(torch.tensor([[5]]), assistant_model=5),
        "draftree.load(model, drafter",
    ),
    # names of the module
    "pipeline": (lambda e: draftree.pipeline("text-generation"), "draftree.load(MODEL)"),
    "draftree.generate": (lambda e: draftree.generate("a"), "draftree.load(MODEL).chat('text')"),
    "Engine.from_pretrained": (lambda e: e.from_pretrained("demo"), "draftree.load(MODEL)"),
}

LOADS: dict[str, Guess] = {
    "load(model)": (lambda p: load(p.model), loaded),
    "load(model, tokenizer)": (
        lambda p: load(p.model, p.tokenizer),
        lambda e: e.tokenizer is not None,
    ),
    "load(model, tokenizer=)": (lambda p: load(p.model, tokenizer=p.tokenizer), loaded),
    "load(model=)": (lambda p: load(model=p.folder), lambda e: e.target.name == "demo"),
    "pretrained_model_name_or_path=": (
        lambda p: load(pretrained_model_name_or_path="demo"),
        loaded,
    ),
    "assistant_model=": (
        lambda p: load(p.model, assistant_model=p.model),
        lambda e: e.drafter.description.startswith("lm"),
    ),
    "draft_model= a folder": (
        lambda p: load(p.model, draft_model=p.folder),
        lambda e: e.drafter.description.startswith("lm"),
    ),
    "speculative_model=": (lambda p: load("demo", speculative_model="ngram"), loaded),
    "drafter= a loaded model": (
        lambda p: load(p.model, drafter=p.model),
        lambda e: e.drafter.description.startswith("lm"),
    ),
    "drafter= a folder": (
        lambda p: load(p.model, drafter=p.folder),
        lambda e: e.drafter.description.startswith("lm"),
    ),
    "drafter= an open drafter": (
        lambda p: load(p.model, drafter=load(p.model, "pld").drafter),
        loaded,
    ),
    "drafter= an engine": (lambda p: load(p.model, drafter=load("demo", "pld")), loaded),
    "drafter='ngram'": (lambda p: load("demo", "ngram"), lambda e: "PLD" in repr(e)),
    "drafter='prompt_lookup'": (
        lambda p: load("demo", "prompt_lookup"),
        lambda e: "PLD" in repr(e),
    ),
    "drafter='eagle-3'": (lambda p: load("demo", "eagle-3"), lambda e: "EAGLE3" in repr(e)),
    "drafter='EAGLE3'": (lambda p: load("demo", "EAGLE3"), lambda e: "EAGLE3" in repr(e)),
    "drafter='deepseek_mtp'": (lambda p: load("demo", "deepseek_mtp"), lambda e: "MTP" in repr(e)),
    "drafter='Medusa'": (lambda p: load("demo", "Medusa"), loaded),
    "drafter='suffix_decoding'": (lambda p: load("demo", "suffix_decoding"), loaded),
    "drafter='draft_model'": (
        lambda p: load("demo", "draft_model"),
        "give the loaded model itself",
    ),
    "drafter='eagle2'": (lambda p: load("demo", "eagle2"), "policy 'eagle2'"),
    "drafter='mlp_speculator'": (lambda p: load("demo", "mlp_speculator"), "'medusa' and 'hydra'"),
    "drafter='none'": (lambda p: load("demo", "none"), "engine.plain"),
    "drafter='published'": (lambda p: load("demo", "published"), "none is known for target 'demo'"),
    "drafter='./nowhere'": (lambda p: load("demo", "./nowhere"), "no folder or file './nowhere'"),
    "policy='greedy'": (lambda p: load("demo", policy="greedy"), "acceptor='greedy'"),
    "policy='tree'": (lambda p: load("demo", policy="tree"), "pct, yield and eagle2"),
    "torch_dtype=": (lambda p: load("demo", torch_dtype="float32"), loaded),
    "dtype='auto'": (lambda p: load("demo", dtype="auto"), loaded),
    "dtype='bf16'": (
        lambda p: load("demo", dtype="bf16"),
        lambda e: e.target.decoder.dtype is torch.bfloat16,
    ),
    "dtype='int8'": (lambda p: load("demo", dtype="int8"), "quantize='int8'"),
    "device_map='auto'": (lambda p: load("demo", device_map="auto"), loaded),
    "quantization= (vLLM)": (
        lambda p: load("demo", quantization="awq"),
        "allowed is none or int8 or int4",
    ),
    "tensor_parallel_size=": (lambda p: load("demo", tensor_parallel_size=2), "one device"),
    "n_gpu_layers=": (lambda p: load("demo", n_gpu_layers=-1), "device='cuda'"),
    "cache_dir=": (lambda p: load("demo", cache_dir="x"), "HF_HOME"),
    "token=": (lambda p: load("demo", token="x"), "hf auth login"),
    "local_files_only=": (lambda p: load("demo", local_files_only=True), "HF_HUB_OFFLINE=1"),
    "adapter_path= (mlx_lm)": (lambda p: load("demo", adapter_path="./nowhere"), "nowhere"),
    "temperature= of load": (lambda p: load("demo", temperature=0.7), "option of each call"),
    "attn_implementation=": (
        lambda p: load("demo", attn_implementation="flash_attention_2"),
        "sdpa or eager",
    ),
    "a path that does not exist": (lambda p: load("./nowhere"), "no folder or file './nowhere'"),
    "a model that the hub is not asked for": (
        lambda p: load("nosuch"),
        "there is no folder 'nosuch' here",
    ),
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


WITHIN: dict[str, str] = {
    # what another tool writes, and a part of the message that says what to write instead
    "e.complete('a', max_seq_len=5)": "max_new_tokens",
    "e.complete('a', diversity_penalty=0.5)": "beam search is not offered",
    "e.complete('a', mirostat_mode=2)": "min_p and typical_p",
    "e.complete('a', epsilon_cutoff=0.1)": "min_p and typical_p",
    "e.complete('a', guidance_scale=1.5)": "a second pass",
    "e.complete('a', bos_token_id=0)": "the tokenizer adds them",
    "e.complete('a', truncation=True)": "engine.complete(ids[-N:])",
    "e.complete('a', output_hidden_states=True)": "other states than plain decoding's",
    "e.complete('a', allowed_token_ids=[5])": "prefix_allowed_tokens_fn",
    "e.complete('a', prefix='b')": "beginning='TEXT'",
    "e.chat('a', history=['b'])": "engine.conversation()",
    "e.chat('a', images=['b'])": "text alone",
    "e.complete('a', suffix='b')": "complete continues a text",
    "e.complete('a', past_key_values=5)": "a cache of its own",
    "e.complete('a', num_draft_tokens=4)": "policy='chain:length=4'",
    "e.complete('a', prompt_lookup_max=4)": "drafter='pld'",
    "e.complete('a', speculative_config={'method': 'ngram'})": "draftree.load(…, drafter='pld')",
    "e.complete('a', lora_request=5)": "adapter=FOLDER",
    "e.complete('a', tokenizer=5)": "draftree.load(…, tokenizer=…)",
    "e.complete('a', num_thread=4)": "OMP_NUM_THREADS",
    "e.complete('a', stream_options={'include_usage': True})": "engine.stream",
    "e.complete('a', 4)": "options by their names",
    "e.chat('a', 'be brief')": "options by their names",
    "e.complete()": "no prompt is given",
    "e.complete('a', prompt='b')": "a prompt and prompt are given",
    "e.complete('a', top_k=-2)": "top_k is -2",
    "e.complete('a', max_new_tokens='10')": "max_new_tokens is '10', allowed is a whole number",
    "e.complete('a', template='b')": "engine.tokenizer.chat_template",
    # generate
    "e.generate('a', assistant_model='demo')": "draftree.load(…, drafter='lm:model=demo')",
    "e.generate('a', output_scores=True)": "engine.generate(ids, …) takes it",
    "e.generate(IDS, assistant_model='demo')": "drafter='lm:model=demo'",
    "e.complete('a', speculative_config={'model': 'demo', 'num_speculative_tokens': 3})": (
        "drafter='lm:model=demo', policy='chain:length=3'"
    ),
    "e.complete('a', num_beams=4, assistant_model='demo', xyz=1, tempreture=1)": (
        "unknown option 'assistant_model': draftree.load(…, drafter='lm:model=demo'); unknown option 'xyz': known are"
    ),
    "e.complete('a', xyz=1, tempreture=1)": "unknown option 'tempreture': did you mean 'temperature'?",
    "e.generate([[5, 6]])": "torch.tensor(ids)",
    "e.generate([5, 6])": "torch.tensor([ids])",
    "e.generate(IDS[0])": "ids[None]",
    "e.generate(IDS.float())": "ids.long()",
    "e.generate(IDS, json_schema={})": "engine.complete takes json_schema",
    "e.generate(IDS, max_new_tokens='4')": "max_new_tokens is '4', allowed is a whole number",
    "e.generate(IDS, drafter='pld')": "draftree.load(…, drafter=…)",
    "e.generate(IDS, sampling_params=5)": "give its values as options",
    # attributes of an engine
    "e.add_request('1', 'a')": "engine.submit('text')",
    "e.beam_search('a')": "beam search is not offered",
    "e.embed('a')": "no embeddings",
    "e.loglikelihood('a')": "logprobs=0",
    "e.half()": "draftree.load(…, dtype=…)",
    "e.compile()": "draftree.load(…, compile=True)",
    "e.set_drafter('pld')": "draftree.load(MODEL, drafter=…)",
    "e.save_pretrained('a')": "engine.target.decoder.model.save_pretrained(FOLDER)",
    "e.acceptance_rate": "completion.acceptance_rate",
    "e.compare('a')": "--baseline",
    "e.print_tree()": "--trees",
    "e.set_seed(1)": "seed=N of each call",
    # results
    "c.cumulative_logprob": "engine.complete(…, logprobs=0)",
    "c.stats.speedup": "--baseline",
    "e.conversation().reset()": "engine.conversation() begins anew",
    # load and names of the module
    "load('text-generation', model='demo')": "the target is given twice",
    "load('demo', 'pld', draft_model='pld')": "the drafter is given twice",
    "e.beam_search(['hi'], None)": "beam search is not offered",
    "e.complete('hi', sequence_bias={(5,): -10.0})": "logit_bias",
    "e.complete('hi', assistant_early_exit=4)": "drafter=…",
    "load('demo', kv_cache_dtype='fp8')": "the dtype of the weights",
    "load('demo', tokenizer_revision='a')": "tokenizer=…",
    "load('demo', subfolder='a')": "with transformers",
    "load('demo', use_flash_attention_2=True)": "attn_implementation='sdpa'",
    "load('demo', base_url='a')": "without a server",
    "load('demo', 'self-speculative')": "'pld' and 'suffix' need no training",
    "load('demo', 'eagle', 'eagle')": "drafter='eagle3'",
    "load('demo', policy='optimal')": "leave the policy out",
    "load('demo', acceptor='lossless')": "leave the acceptor out",
    "draftree.EngineArgs": "draftree.load(MODEL)",
    "draftree.AutoTokenizer": "tokenizer",
    "draftree.set_seed(1)": "seed=N",
    "draftree.list_drafters()": "`draftree list`",
    "draftree.version": "draftree.__version__",
    # the kinds of an outsider's twenty
    "draftree.pipeline('text-generation')": "model=MODEL",
    "e.conversation()[0]": "conversation.messages",
    # the kinds of the last forty
    "load(repo_id='demo', filename='x.gguf')": "the path of the .gguf file",
    "load('demo', speculative_draft_model_quantization='x')": "loaded as the target is",
    "load('demo', max_lookup_size=3)": "drafter='pld'",
    "e.complete('a', stop_regex='a+')": "stopping_criteria",
    "e.complete('a', logits_bias={5: 1.0})": "did you mean 'logit_bias'",
    "e.acceptance_stats()": "completion.stats",
    "draftree.Sampler": "give its values as options",
    "draftree.serve('demo')": "`draftree serve MODEL`",
}

WORKS: tuple[str, ...] = (
    "e.chat(prompt='a', max_tokens=3)",
    "e.chat(text='a', max_tokens=3)",
    "e.chat(message='a', max_tokens=3)",
    "e.complete(text='a', max_tokens=3)",
    "e.complete(messages=MESSAGES, max_tokens=3)",
    "e.complete(prompt_token_ids=[5, 6], max_tokens=3)",
    "e.complete(e.tokenizer('a b'), max_tokens=3)",
    "e.complete(e.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True), max_tokens=3)",
    "e.complete('a', max_tokens=3, num_beams=1, use_cache=True, early_stopping=False)",
    "e.complete('a', max_tokens=3, tools=None, assistant_model=None, response_format=None)",
    "e.complete('a', max_tokens=3, return_full_text=False, skip_special_tokens=True, use_tqdm=False)",
    "e.complete('a', max_tokens=3, top_k=-1, repeat_penalty=1.0, mirostat=0)",
    "e.complete('a', max_tokens=3, logprobs=True, top_logprobs=2)",
    "e.complete('a', max_tokens=3, logprobs=False)",
    "e.complete('a', sampling_params={'temperature': 0.5, 'max_tokens': 3})",
    "e.complete('a', extra_body={'min_p': 0.1}, max_tokens=3)",
    "e.chat('a', format={'type': 'object'}, max_tokens=3)",
    "e.complete('a', no_repeat_ngrams=2, max_tokens=3)",
    "e.chat('a', structured_outputs={'choice': ['yes', 'no']})",
    "e.chat('a', guided_decoding={'regex': '[ab]'})",
    "e.chat('a', stop_words=['b'], schema=None, max_tokens=3)",
    "e.conversation().say(message='a', max_tokens=3)",
    "e.complete({'prompt': 'a'}, max_tokens=3)",
    "e.complete([{'prompt': 'a'}, {'prompt_token_ids': [5]}], max_tokens=3)[1]",
    "e.chat('a', response_format=Person, max_tokens=3)",
    "e.complete('a', grammar={'type': 'regex', 'value': '[ab]'})",
    "e.complete('a', structured_outputs={'json_object': True}, max_tokens=3)",
)


@pytest.mark.parametrize("call", WITHIN | MORE)
def test_the_message_of_a_guess_says_what_to_write(
    engine: Engine, written: SimpleNamespace, call: str
) -> None:
    c, t = written.completion, written.token
    names = {
        "e": engine,
        "c": c,
        "t": t,
        "s": c.stats,
        "tok": engine.tokenizer,
        "IDS": torch.tensor([[5, 6]]),
    }
    with pytest.raises((draftree.UserError, AttributeError)) as found:
        eval(call, {**globals(), **names})
    assert (WITHIN | MORE)[call] in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("call", WORKS)
def test_a_guess_works(engine: Engine, call: str) -> None:
    assert text(eval(call, {**globals(), "e": engine}))


def test_other_tools_forms_mean_the_same(engine: Engine) -> None:
    plain = engine.complete("a b", max_new_tokens=3)
    assert engine.complete(engine.tokenizer("a b"), max_tokens=3).tokens == plain.tokens
    assert engine.complete("a b", max_tokens=3, logprobs=True, top_logprobs=2).logprobs[0].top[1:]
    assert not engine.complete("a b", max_tokens=3, logprobs=True).logprobs[0].top
    assert str(engine.chat("a", guided_choice=["y.s", "n+"])) in ("y.s", "n+")
    schema = {
        "type": "object",
        "required": ["x"],
        "properties": {"x": {"enum": [7]}},
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert engine.chat("a", response_format=form).text.replace(" ", "") == '{"x":7}'
    assert engine.generate(torch.tensor([[5, 6]]), GenerationConfig(max_new_tokens=2)).shape == (
        1,
        4,
    )


def test_a_bias_of_digits_is_of_an_id_as_in_openais_api(engine: Engine) -> None:
    forced = engine.complete("a", logit_bias={"7": 1000.0}, **SHORT)
    assert set(forced.tokens) == {7}
    assert forced.tokens == engine.complete("a", logit_bias={7: 1000.0}, **SHORT).tokens


def test_ids_that_a_tokenizer_padded_are_refused(engine: Engine) -> None:
    padded = BatchEncoding({"input_ids": [[0, 5], [5, 6]], "attention_mask": [[0, 1], [1, 1]]})
    with pytest.raises(draftree.UserError, match="ids are padded"):
        engine.complete(padded)


def test_a_suggestion_is_a_misspelling_or_nothing() -> None:
    options = ("temperature", "stop", "seed", "json_schema", "complete", "learned", "top_k")
    near = {
        "tempreture": "temperature",
        "stpo": "stop",
        "sed": "seed",
        "topk": "top_k",
        "compleet": "complete",
    }
    assert {word: nearest(OPTION, word, options) for word in near} == near
    assert [
        nearest(OPTION, word, options)
        for word in ("template", "store", "strip", "compile", "compare", "clear")
    ] == [None] * 6


def test_a_drafter_by_the_name_of_a_target_is_a_language_model() -> None:
    assert load("demo", "demo").drafter.description.startswith("lm")
    assert load("demo", draft_model="demo").drafter.description.startswith("lm")
    assert load("demo", draft_model_name="demo").drafter.description.startswith("lm")
    assert "PLD" in repr(load("demo", "[ngram]"))
    assert "EAGLE3" in repr(load("demo", "eagle3_one_model"))


def test_python_adds_no_suggestion_to_a_hint(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the interpreter prints an error that nobody catches."""
    with pytest.raises(AttributeError) as raised:
        engine.compleet  # noqa: B018
    sys.__excepthook__(raised.type, raised.value, raised.tb)
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("unknown attribute of an Engine 'compleet': did you mean 'complete'?")
    )


@pytest.mark.parametrize("name", CALLS)
def test_a_guess_of_a_call(engine: Engine, name: str) -> None:
    check(CALLS[name], engine)


@pytest.mark.parametrize("name", LOADS)
def test_a_guess_of_load(plain: SimpleNamespace, name: str) -> None:
    check(LOADS[name], plain)


def test_there_are_enough_guesses() -> None:
    assert sum(map(len, (CALLS, LOADS, WITHIN, WORKS, MORE, ACCEPTED, NOTED))) >= 500


def test_the_hook_prints_through_a_streamer(
    plain: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = plain.tokenizer("def main(", return_tensors="pt", return_token_type_ids=False)
    plain.model.generate(
        **inputs,
        max_new_tokens=12,
        streamer=TextStreamer(plain.tokenizer),
        custom_generate=draftree.speculate("pld"),
    )
    assert capsys.readouterr().out.startswith("def main(")


def test_complete_recommends_chat_once_for_a_question() -> None:
    fresh = load("demo", "pld", "chain")
    with pytest.warns(
        draftree.errors.DraftreeWarning, match=r"looks like a question, .*chat\(\) puts it into"
    ):
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
    assert (
        "".join(map(str, engine.stream("def main(", **SHORT)))
        == engine.complete("def main(", **SHORT).text
    )


def test_a_notebook_shows_the_text_coloured_by_origin(engine: Engine) -> None:
    found = engine.complete("def main(", max_new_tokens=40)
    html = found._repr_html_()
    assert html.count("<span") >= 2
    assert "tokens/s" in html
    assert "tokens per pass (τ)" in html
    assert (
        "<b>"
        not in Completion(
            "<b>", [5], ["drafted"], [], "length", None, found.stats, ["<b>"]
        )._repr_html_()
    )


def test_completion_in_editors_shows_the_public_names() -> None:
    assert dir(draftree) == sorted([*draftree.__all__, "__version__"])
    assert {"chat", "complete", "conversation", "stream", "generate"} <= set(dir(Engine))


@pytest.mark.parametrize("name", ["OpenAI", "assisted_generate", "AutoTokenizer", "generate_step"])
def test_an_import_of_another_tools_name_says_what_to_write(name: str) -> None:
    with pytest.raises(ImportError, match=r"draftree\.(load|speculate)"):
        exec(f"from draftree import {name}")
    assert not hasattr(draftree, name)
