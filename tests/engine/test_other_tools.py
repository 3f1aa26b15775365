"""Words of other tools that work: each does what draftree's own words do, which stand beside it.

`e` is an engine, `c` a completion, `t` a token of a stream, `s` the figures of `c`, `plain` the
demo as transformers loads it.
"""

import asyncio
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer

import draftree
from draftree import Completion, Engine, load
from draftree.aliases import INSTEAD, READERS, SAME
from draftree.aliases.conversions import rewrite_load_arguments
from draftree.errors import DraftreeWarning, UserError
from draftree.integrations import other_tools
from draftree.metrics import Stats
from draftree.policies.chain import Chain
from draftree.text.completion import Reading, Token
from draftree.text.stop_strings import StopStrings
from draftree.weights import demo_folder

pytestmark = pytest.mark.usefixtures("one_demo")

MESSAGES = [{"role": "user", "content": "How many legs do 3 dogs have?"}]
CALLS = {
    # the methods of an engine
    "e('a', max_new_tokens=3)[0]['generated_text']": "e.complete('a', max_tokens=3).text",
    "e('a', max_tokens=3)['choices'][0]['text']": "e.complete('a', max_tokens=3).text",
    "e(['a', 'b'], max_tokens=3)[1][0]['generated_text']": "e.complete('b', max_tokens=3).text",
    "e(MESSAGES, max_tokens=3)": "e.chat(MESSAGES, max_tokens=3)",
    "e.generate('a', max_tokens=3, seed=5)": "e.complete('a', max_tokens=3, seed=5)",
    "e.generate('a', max_tokens=3)[0].outputs[0].text": "e.complete('a', max_tokens=3).text",
    "e.generate(['a', 'b'], max_tokens=3)": "[e.complete(p, max_tokens=3) for p in ('a', 'b')]",
    "[x.outputs[0].text for x in e.generate(['a', 'b'], draftree.SamplingParams(temperature=0.8, top_p=0.9, max_tokens=3))]": (
        "[e.complete(p, temperature=0.8, top_p=0.9, max_tokens=3).text for p in ('a', 'b')]"
    ),
    "e.generate(prompt='a', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.generate({'prompt': 'a'}, max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.generate(inputs='a', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.generate(MESSAGES, max_tokens=3)": "e.chat(MESSAGES, max_tokens=3)",
    "e.generate(e.tokenizer('a b', return_tensors='pt'), max_new_tokens=3)[0, 2:]": "e.complete('a b', max_tokens=3).tokens",
    "e.generate(IDS, max_tokens=3)": "e.generate(IDS, max_new_tokens=3)",
    "e.generate(IDS, stop=['.'], max_tokens=9)": "e.generate(IDS, stop_strings=['.'], max_new_tokens=9)",
    "e.generate(IDS, n=2, do_sample=True, max_tokens=3, seed=1)": (
        "e.generate(IDS, num_return_sequences=2, do_sample=True, max_new_tokens=3, seed=1)"
    ),
    "e.generate('a', draftree.SamplingParams(max_tokens=3))": "e.complete('a', max_tokens=3)",
    "e.complete('a', {'temperature': 0.5, 'max_tokens': 3})": "e.complete('a', temperature=0.5, max_tokens=3)",
    "e.complete('a', draftree.Options(max_new_tokens=9), max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.chat('a', GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.5))": (
        "e.chat('a', max_tokens=3, temperature=0.5)"
    ),
    "e.complete('a', generation_config=GenerationConfig(max_new_tokens=3, temperature=0.5))": "e.complete('a', max_tokens=3)",
    "e.completion('a', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.create_completion('a', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.completions.create(model='demo', prompt='a', max_tokens=3).choices[0].text": "e.complete('a', max_tokens=3).text",
    "e.generate_batch(['a', 'b'], max_tokens=3)": "e.complete(['a', 'b'], max_tokens=3)",
    "e.chat_completion(MESSAGES, max_tokens=3)": "e.chat(MESSAGES, max_tokens=3)",
    "e.create_chat_completion(messages=MESSAGES, max_tokens=3)['choices'][0]['message']['content']": (
        "e.chat(MESSAGES, max_tokens=3).text"
    ),
    "e.chat.completions.create(model='demo', messages=MESSAGES, max_tokens=3).choices[0].message.content": (
        "e.chat(MESSAGES, max_tokens=3).text"
    ),
    "e.responses.create(model='demo', input='a', instructions='b', max_output_tokens=3).output_text": (
        "e.chat('a', system='b', max_tokens=3).text"
    ),
    "e.invoke('a', max_tokens=3).content": "e.chat('a', max_tokens=3).text",
    "e.batch(['a', 'b'], max_tokens=3)": "e.chat(['a', 'b'], max_tokens=3)",
    "''.join(t.text for t in e.stream_generate('a', max_tokens=3))": "e.complete('a', max_tokens=3).text",
    "[x.choices[0].delta.content for x in e.stream_chat(MESSAGES, max_tokens=3)]": (
        "[t.text for t in e.chat(MESSAGES, stream=True, max_tokens=3)]"
    ),
    "[x['choices'][0]['text'] for x in e('a', stream=True, max_tokens=3)]": "[t.text for t in e.stream('a', max_tokens=3)]",
    "asyncio.run(e.generate_async('a', max_tokens=3))": "e.complete('a', max_tokens=3)",
    "asyncio.run(e.ainvoke('a', max_tokens=3))": "e.chat('a', max_tokens=3)",
    "e.conversation(system_prompt='b').ask('a', max_tokens=3)": "e.conversation(system='b').say('a', max_tokens=3)",
    "e.start_chat().send_message('a', max_tokens=3)": "e.conversation().say('a', max_tokens=3)",
    "e.conversation().history": "e.conversation().messages",
    "e.conversation().model is e": "True",
    # options of a call
    "e.complete('a', do_sample=True, max_tokens=3)": "e.complete('a', temperature=1.0, max_tokens=3)",
    "e.complete('a', do_sample=False, temperature=0.7, max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.complete('a', greedy=True, max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.complete('a', greedy=False, max_tokens=3)": "e.complete('a', temperature=1.0, max_tokens=3)",
    "e.complete('a', num_completions=2, temperature=1, max_tokens=3)": "e.complete('a', n=2, temperature=1, max_tokens=3)",
    "e.complete('a', random_state=4, temperature=1, max_tokens=3)": "e.complete('a', seed=4, temperature=1, max_tokens=3)",
    "e.complete('a', sampling_seed=4, temperature=1, max_tokens=3)": "e.complete('a', seed=4, temperature=1, max_tokens=3)",
    "e.complete('a', bad_words_ids=[[16], [69]], max_tokens=3)": "e.complete('a', suppress=[16, 69], max_tokens=3)",
    "e.complete('a', present_penalty=1.5, max_tokens=9)": "e.complete('a', presence_penalty=1.5, max_tokens=9)",
    "e.complete('a', prefill='b', max_tokens=3)": "e.complete('a', beginning='b', max_tokens=3)",
    "e.complete('a', n_probs=2, max_tokens=3).logprobs": "e.complete('a', logprobs=2, max_tokens=3).logprobs",
    "e.complete('a', top_n_tokens=2, max_tokens=3).logprobs": "e.complete('a', logprobs=2, max_tokens=3).logprobs",
    "e.complete('a', return_logprob=True, max_tokens=3).logprobs": "e.complete('a', logprobs=0, max_tokens=3).logprobs",
    "e.complete('a', n_probs=0, max_tokens=3).logprobs": "[]",
    "e.complete('a', eos_token=' $', max_tokens=9)": "e.complete('a', stop=' $', max_tokens=9)",
    "str(e.chat('a', choices=['yes', 'no.'])) in ('yes', 'no.')": "True",
    "e.chat('a', system_message='b', max_tokens=3)": "e.chat('a', system='b', max_tokens=3)",
    "e.chat('a', enable_thinking=False, reasoning_effort='low', max_tokens=3)": "e.chat('a', max_tokens=3)",
    "e.chat(['a', 'b'], chat_template_kwargs={'x': 1}, max_tokens=3)": "e.chat(['a', 'b'], max_tokens=3)",
    "e.complete('a b', max_length=5).tokens": "e.complete('a b', max_tokens=3).tokens",
    "e.complete('a b', max_length=5, max_new_tokens=4).tokens": "e.complete('a b', max_tokens=4).tokens",
    "e('a b', max_length=5, num_return_sequences=2)[1]['generated_text']": "e.complete('a b', max_tokens=3).text",
    "e('a b', max_tokens=3, echo=True)['choices'][0]['text']": "'a b' + e.complete('a b', max_tokens=3).text",
    "e(['a', 'b'], max_tokens=3, return_full_text=True)[1][0]['generated_text']": "'b' + e.complete('b', max_tokens=3).text",
    "e.complete('a', echo=False, max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.complete('a', sampler=draftree.make_sampler(temp=0.5), max_tokens=3)": "e.complete('a', temperature=0.5, max_tokens=3)",
    "e.complete('a', stop=' $', include_stop_str_in_output=True, max_tokens=9)": "with_stop(e)",
    "e.complete('a', model='demo', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "e.chat(MESSAGES, model='demo', max_tokens=3)": "e.chat(MESSAGES, max_tokens=3)",
    "e.chat('b', history=[*MESSAGES, {'role': 'assistant', 'content': 'a'}], system='s', max_tokens=3)": (
        "e.chat([*MESSAGES, {'role': 'assistant', 'content': 'a'}, {'role': 'user', 'content': 'b'}], system='s', max_tokens=3)"
    ),
    # results
    "c.outputs[0].text": "c.text",
    "c.choices[-1].message.content": "c.text",
    "c['text']": "c.text",
    "c[0]": "c",
    "c[-1]": "c",
    "list(c)": "[c]",
    "c.response": "c.text",
    "c.generated_text": "c.text",
    "c.token_ids": "c.tokens",
    "c.output_text": "c.text",
    "c.strip()": "c.text.strip()",
    "c.startswith(', and')": "True",
    "'she' in c": "True",
    "'nobody' in c": "False",
    "'a' + c": "'a' + c.text",
    "c + '!'": "c.text + '!'",
    "c.finish_reason": "'length'",
    "e.complete('a', stop='she', max_tokens=9).finish_reason": "'stop'",
    "c.finished": "True",
    "e.complete('a', stop=' $', max_tokens=9).stop_reason": "' $'",
    "c.num_tokens": "6",
    "c.prompt_tokens": "1",
    "c.prompt_token_ids": "[69]",
    "c.prompt": "'a'",
    "c.full_text": "'a' + c.text",
    "c.message.role": "'assistant'",
    "c.model_dump()['text']": "c.text",
    "json.loads(c.model_dump_json())['stats']['new_tokens']": "6",
    "e.complete('a', logprobs=2, max_tokens=3).token_logprobs": (
        "[x.logprob for x in e.complete('a', logprobs=2, max_tokens=3).logprobs]"
    ),
    "t.choices[0].delta.role": "'assistant'",
    "[x.prompt for x in e.generate(['a', 'a b'], max_tokens=3)]": "['a', 'a b']",
    "[x.prompt_token_ids for x in e.complete(['a', 'a b'], max_tokens=3)]": "[e.tokenizer.encode(p) for p in ('a', 'a b')]",
    "c.usage.total_tokens": "7",
    "c.usage['completion_tokens']": "6",
    "c.eval_count": "6",
    "c.text_tokens": "c.pieces",
    "c.tokens_per_second": "c.stats.tokens_per_second",
    "c.generation_tps": "c.stats.tokens_per_second",
    "c.tau": "c.stats.acceptance_length",
    "c['meta_info']['completion_tokens']": "6",
    "c.metrics is c.stats": "True",
    "c.acceptance_rate": "sum(x.accepted for x in s.steps) / sum(x.nodes for x in s.steps)",
    "s.acceptance_rate == c.acceptance_rate": "True",
    "s.tau": "s.acceptance_length",
    "s.time": "s.seconds",
    "s.num_accepted_tokens": "sum(x.accepted for x in s.steps)",
    "s.num_draft_tokens": "sum(x.nodes for x in s.steps)",
    "s.passes": "len(s.steps)",
    "s.to_dict()": "s.as_json()",
    "e.complete('a', logprobs=0, max_tokens=3).cumulative_logprob": (
        "sum(x.logprob for x in e.complete('a', logprobs=0, max_tokens=3).logprobs)"
    ),
    "t.content": "t.text",
    "t['response']": "t.text",
    "t.choices[0].delta.content": "t.text",
    "t.token_id": "t.id",
    "t.token_ids": "[t.id]",
    "t.finish_reason": "None",
    "t.done": "False",
    "[x.finish_reason for x in e.stream('a', max_tokens=2)]": "[None, 'length']",
    "[x.from_draft for x in e.stream('a', max_tokens=9)]": "[x.origin == 'drafted' for x in e.stream('a', max_tokens=9)]",
    "'' + t": "t.text",
    # attributes of an engine
    "e.model is e.target.decoder.model": "True",
    "e.config is e.target.decoder.model.config": "True",
    "e.get_tokenizer() is e.tokenizer": "True",
    "e.generation_config is e.target.decoder.model.generation_config": "True",
    "e.get_default_sampling_params() is e.generation_config": "True",
    "e.num_parameters()": "e.target.decoder.model.num_parameters()",
    "e.vocab_size": "e.target.decoder.vocab",
    "e.n_vocab()": "e.target.decoder.vocab",
    "e.max_model_len": "e.target.decoder.context",
    "e.n_ctx()": "e.target.decoder.context",
    "e.device": "e.target.decoder.device",
    "e.dtype": "e.target.decoder.dtype",
    "e.name_or_path": "e.target.name",
    "e.eos_token_id": "e.tokenizer.eos_token_id",
    "e.token_bos()": "e.tokenizer.bos_token_id",
    "e.encode('a b')": "e.tokenizer.encode('a b')",
    "e.count_tokens('a b')": "2",
    "e.detokenize([16])": "e.tokenizer.decode([16])",
    "e.batch_decode([[16]])": "e.tokenizer.batch_decode([[16]])",
    "e.apply_chat_template(MESSAGES)['input_ids']": "e.tokenizer.apply_chat_template(MESSAGES)['input_ids']",
    "e.eval() is e": "True",
    "e.to('cpu') is e": "True",
    "e.warmup()": "None",
    "[*e] == [e, e.tokenizer]": "True",
    # loading
    "load('demo', 'pld', num_speculative_tokens=5).policy": "Chain(length=5)",
    "load('demo', 'pld', num_draft_tokens=4).policy": "Chain(length=4)",
    "load('demo', speculative_config={'method': 'ngram', 'num_speculative_tokens': 3, 'prompt_lookup_max': 4})": (
        "load('demo', 'pld:ngram=4', 'chain:length=3')"
    ),
    "load('demo', speculative_config={'model': 'demo', 'num_speculative_tokens': 3}).drafter.description": (
        "load('demo', 'lm:model=demo').drafter.description"
    ),
    "load('demo', speculative_config={'method': 'eagle3'})": "load('demo', 'eagle3')",
    "load('demo', method='eagle3')": "load('demo', 'eagle3')",
    "load('demo', speculative_algorithm='EAGLE3', speculative_num_steps=3)": "load('demo', 'eagle3', 'chain:length=3')",
    "load('demo', prompt_lookup_num_tokens=7)": "load('demo', 'pld:length=7', 'chain:length=7')",
    "load('demo', 'pld', model_kwargs={'torch_dtype': 'bfloat16'}).dtype": "torch.bfloat16",
    "load('demo', 'pld', enforce_eager=True)": "load('demo', 'pld', compile=False)",
    "draftree.speculate('pld', num_assistant_tokens=5)._opened(plain, None).policy": "Chain(length=5)",
    # names of the module
    "draftree.LLM('demo')": "load('demo')",
    "draftree.LLM(model='demo')": "load('demo')",
    "draftree.Llama(model_path='demo')": "load('demo')",
    "draftree.Engine('demo')": "load('demo')",
    "draftree.Engine(model_path='demo').generate('a', {'max_new_tokens': 3})['text']": "e.complete('a', max_tokens=3).text",
    "draftree.SpeculativeDecoder(target_model='demo', draft_model='pld')": "load('demo', 'pld')",
    "draftree.Engine.from_pretrained('demo')": "load('demo')",
    "draftree.AutoModelForCausalLM.from_pretrained('demo')": "load('demo')",
    "draftree.from_pretrained('demo', device_map='auto')": "load('demo', device_map='auto')",
    "draftree.pipeline('text-generation', model='demo')": "load('demo')",
    "draftree.pipeline('text-generation', 'demo')": "load('demo')",
    "draftree.pipeline('demo')": "load('demo')",
    "draftree.SamplingParams(temperature=0.5, max_tokens=8)": "draftree.Options(temperature=0.5, max_new_tokens=8)",
    "draftree.generate(e, tok, prompt='a', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "draftree.generate(e, tok, 'a', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "draftree.generate(model='demo', prompt='a', options={'num_predict': 3})": "e.complete('a', max_tokens=3)",
    "draftree.generate(plain, tok, 'a', max_tokens=3)": "e.complete('a', max_tokens=3)",
    "[x.text for x in draftree.stream_generate(e, tok, 'a', max_tokens=3)]": "[x.text for x in e.stream('a', max_tokens=3)]",
    "draftree.chat(model='demo', messages=MESSAGES, options={'num_predict': 3})['message']['content']": (
        "e.chat(MESSAGES, max_tokens=3).text"
    ),
    "draftree.batch_generate(e, tok, ['a', 'b'], max_tokens=3)": "e.complete(['a', 'b'], max_tokens=3)",
    # the hook
    "plain.generate(IDS, max_new_tokens=5, custom_generate=draftree.generate)": "e.generate(IDS, max_new_tokens=5)",
    "plain.generate(IDS, max_new_tokens=5, custom_generate=load(plain, 'pld').generate)": "e.generate(IDS, max_new_tokens=5)",
    "plain.generate(IDS, max_new_tokens=5, custom_generate=load(plain, 'pld'))": "e.generate(IDS, max_new_tokens=5)",
}
NOTED = {
    # words that change no text: they are left out with a note
    "e.complete('a', pad_token_id=0, max_tokens=3)": "prompts of a list are padded internally",
    "e.complete('a', num_ctx=4096, max_tokens=3)": "the context is the model's own",
    "e.complete('a', use_tqdm=True, max_tokens=3)": "no progress bar is shown",
    "e.complete('a', verbose=True, max_tokens=3)": "completion.stats holds the figures",
    "draftree.generate(e, tok, prompt='a', max_tokens=3, verbose=True)": "completion.stats holds the figures",
    "e.complete('a', user='me', max_tokens=3)": "a server's requests",
    "e.complete('a', kv_bits=4, max_tokens=3)": "a cache of its own",
    "e.complete('a', options={'keep_alive': '5m'}, max_tokens=3)": "lives as long as its object",
    "load('demo', 'pld', gpu_memory_utilization=0.9)": "memory is taken as it is needed",
    "load('demo', 'pld', max_model_len=4096)": "the context is the model's own",
    "load('demo', 'pld', n_ctx=4096)": "the context is the model's own",
    "load('demo', 'pld', max_num_seqs=8)": "set_limits(max_sequences=…",
    "load('demo', 'pld', n_batch=512)": "it is not needed",
    "load('demo', 'pld', disable_radix_cache=True)": "it is not needed",
    "load('demo', 'pld', log_level='error')": "completion.stats",
}


def with_stop(e: Engine) -> tuple[str, list[int]]:
    """Return a text with the stop text that ended it, and its tokens."""
    found = e.complete("a", stop=" $", max_new_tokens=9)
    return f"{found.text} $", found.tokens


NAMES = {
    "json": json,
    "with_stop": with_stop,
    "TextStreamer": TextStreamer,
    "asyncio": asyncio,
    "draftree": draftree,
    "load": load,
    "torch": torch,
    "Chain": Chain,
    "GenerationConfig": GenerationConfig,
    "MESSAGES": MESSAGES,
}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the expressions of the tables name."""
    e = load("demo", "edd", "chain:length=3")
    c = e.complete("a", max_new_tokens=6)
    folder = demo_folder()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tok = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[5, 6]])
    t = next(e.stream("a", max_new_tokens=6))
    return {"e": e, "c": c, "t": t, "s": c.stats, "plain": plain, "tok": tok, "IDS": ids, **NAMES}


def value(of: Any) -> Any:
    """Return what can be compared: texts without their figures, engines by their parts."""
    if isinstance(of, Completion):
        return of.text, of.tokens
    if isinstance(of, Engine):
        return of.target.name, of.drafter.description, of.policy
    if isinstance(of, torch.Tensor):
        return of.tolist()
    return [value(part) for part in of] if isinstance(of, list) else of


@pytest.fixture(scope="module")
def ours(names: dict[str, Any]) -> Callable[[str], Any]:
    """Evaluate our form of a call, once for all words that mean the same."""
    return cache(lambda call: value(eval(call, names)))


@pytest.mark.parametrize("word", CALLS)
def test_a_word_of_another_tool_does_what_ours_does(
    names: dict[str, Any], ours: Callable[[str], Any], word: str
) -> None:
    assert value(eval(word, names)) == ours(CALLS[word])


@pytest.mark.parametrize("word", NOTED)
def test_a_word_that_changes_no_text_is_left_out_with_a_note(
    names: dict[str, Any], word: str
) -> None:
    with pytest.warns(DraftreeWarning, match="is not used: ") as found:
        done = eval(word, names)
    assert isinstance(done, Engine | Completion)
    assert NOTED[word] in str(found[0].message)


def test_a_streamer_is_given_the_text_of_a_prompt(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = names["e"].generate("a b", streamer=TextStreamer(names["tok"]), max_tokens=5)
    assert capsys.readouterr().out.strip() == f"a b{found.text}".strip()


def test_threads_of_load_are_torchs() -> None:
    before = torch.get_num_threads()
    try:
        load("demo", "pld", n_threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_bits_of_other_tools_are_a_way_to_quantize() -> None:
    for given, told in (
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_4bit": True}, "int4"),
        ({"bits": 4}, "int4"),
    ):
        assert rewrite_load_arguments(given) == {"quantize": told}
    assert rewrite_load_arguments({"bits": 3}) == {"bits": 3}


def test_an_id_ends_a_text(names: dict[str, Any]) -> None:
    e, c = names["e"], names["c"]
    for option in (
        {"stop_token_ids": [c.tokens[3]]},
        {"eos_token_id": c.tokens[3]},
        {"stop_ids": [c.tokens[3]]},
    ):
        found = e.complete("a", max_tokens=6, **option)
        assert (found.tokens, found.ending) == (c.tokens[:4], "eos")
        assert e.complete("a", max_tokens=6, ignore_eos=True, **option).tokens == c.tokens[:4]
    assert len(e.complete("a", max_tokens=6, min_tokens=6, stop_ids=[c.tokens[3]]).tokens) == 6


def test_an_id_that_ends_a_text_does_not_replace_eos(names: dict[str, Any]) -> None:
    e, ids = names["e"], names["IDS"]
    written = e.generate(ids, max_new_tokens=6)[0, 2:].tolist()
    config = e.target.decoder.model.generation_config
    before, config.eos_token_id = config.eos_token_id, written[2]
    try:
        for option in ("stop_token_ids", "stop_ids"):
            assert e.generate(ids, max_new_tokens=6, **{option: [written[4]]}).shape[1] == 5
            assert e.generate(ids, max_new_tokens=6, **{option: [written[1]]}).shape[1] == 4
        assert e.generate(ids, max_new_tokens=6, eos_token_id=written[4]).shape[1] == 7
    finally:
        config.eos_token_id = before
    for stop in ("", [], ()):
        assert e.generate(ids, max_new_tokens=6, stop=stop)[0, 2:].tolist() == written


def test_options_of_the_returned_text_are_the_same_for_asyncio(names: dict[str, Any]) -> None:
    e = names["e"]
    wanted = e.complete("a", max_tokens=4, echo=True)
    assert wanted.text == "a" + e.complete("a", max_tokens=4).text
    assert asyncio.run(e.acomplete("a", max_tokens=4, echo=True)).text == wanted.text


def test_a_text_with_its_prompt_has_the_space_between_them() -> None:
    words = {5: " France", 6: " is", 7: " Paris", 8: "."}

    class Strips:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(words[i] for i in ids).removeprefix(" ")

    for first, text, whole in ((7, "Paris", "France is Paris"), (8, ".", "France is.")):
        reading = Reading(None, StopStrings(), [5, 6])
        reading._tokenizer = Strips()  # type: ignore[assignment]
        reading.tokens = [Token(first, text, "bonus", ending="eos")]
        found = reading.completion(Stats())
        assert (found.text, found.full_text) == (text, whole)


def test_a_message_and_values_of_a_template_may_be_wrong(names: dict[str, Any]) -> None:
    e, message = names["e"], {"role": "user", "content": "b"}
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]
    wanted = e.chat([*history, message], max_tokens=3).tokens
    assert e.chat(message, history=history, max_tokens=3).tokens == wanted
    with pytest.raises(UserError, match="chat_template_kwargs is 'x', allowed is an object"):
        e.chat("a", chat_template_kwargs="x")


def test_a_template_is_given_its_values(names: dict[str, Any]) -> None:
    e = load(
        "demo", "pld", "chain:length=2", tokenizer=AutoTokenizer.from_pretrained(demo_folder())
    )
    e.tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if enable_thinking %} aloud{% endif %}{{ more }}"
    )
    told = e.chat("a b", enable_thinking=True, chat_template_kwargs={"more": " c"}, max_tokens=3)
    assert told.tokens == e.complete("a b aloud c", max_tokens=3).tokens
    assert told.prompt_ids == e.tokenizer.encode("a b aloud c")


def test_a_block_drops_the_caches(names: dict[str, Any]) -> None:
    with load("demo", "pld", "chain:length=2") as e:
        e.complete("a", max_tokens=3)
        assert e.held is not None
    assert e.held is None
    e.complete("a", max_tokens=3)
    e.close()
    assert e.held is None


def test_another_models_engine_is_no_hook(names: dict[str, Any]) -> None:
    with pytest.raises(draftree.UserError, match="another model"):
        names["plain"].generate(names["IDS"], max_new_tokens=3, custom_generate=names["e"].generate)


def test_one_model_is_kept_between_calls_by_its_name() -> None:
    assert other_tools._cached_engine("demo") is other_tools._cached_engine("demo")


@pytest.mark.parametrize(
    "call",
    [
        "draftree.generate('a')",
        "draftree.pipeline('text-classification', model='demo')",
        "e.chat('a', system='b', system_prompt='c')",
        "e(IDS)",
        "c[1]",
        "e.complete('a b', max_length=2)",
        "e.stream('a', echo=True)",
        "e.to('cuda')",
        "e.complete('a', streamer=5)",
        "e.complete(['a', 'b'], streamer=TextStreamer(tok))",
        "e.chat('a', model='other')",
        "c.top_logprobs",
        "load('demo', 'pld', n_threads=0)",
        "c[:2]",
        "e[0]",
        "load('demo', 'pld', 'pct', num_draft_tokens=3)",
        "load('demo', speculative_config={'method': 'ngram', 'num_speculative_tokens': 'x'})",
        "e.complete('a', do_sample=True, temperature=0)",
        "e.complete('a', 'b')",
        "e.generate(IDS, max_tokens=3, max_new_tokens=4)",
    ],
)
def test_options_without_meaning_are_refused(names: dict[str, Any], call: str) -> None:
    with pytest.raises((draftree.UserError, IndexError, AttributeError)):
        eval(call, names)


def test_a_word_is_accepted_or_explained_and_not_both() -> None:
    for kind, readers in READERS.items():
        assert not readers.keys() & INSTEAD[kind].keys()
    assert not SAME["name in draftree"].keys() & INSTEAD["name in draftree"].keys()


def test_words_of_other_tools_are_in_no_listing(names: dict[str, Any]) -> None:
    for of, kind in (
        (names["e"], "Engine"),
        (names["c"], "Completion"),
        (names["t"], "Token"),
        (names["s"], "Stats"),
    ):
        listed = {name for name in dir(of) if not name.startswith("_")}
        assert not listed & next(table for name, table in READERS.items() if kind in name).keys()
    assert not set(dir(draftree)) & SAME["name in draftree"].keys()
