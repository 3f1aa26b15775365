"""Chat templates beside a model: shipped ones are the authors' own, files are read, a missing one is told of."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from draftree.data.prompts import encode, question
from draftree.engine import load
from draftree.errors import UserError
from draftree.target.chat_templates import read_template, template_names, variables_of
from draftree.target.load_options import Loading
from draftree.target.target import tokenizer_of

TURNS = [*question("Hi"), {"role": "assistant", "content": "Yes"}, *question("Why?")]
SYSTEM = {"role": "system", "content": "S"}
RENDERED = {
    "vicuna": "<|bos|>S USER: Hi ASSISTANT: Yes<|eos|> USER: Why? ASSISTANT:",
    "llama-2": "<|bos|>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST] Yes <|eos|><|bos|>[INST] Why? [/INST]",
    "alpaca": "<|bos|>S\n\n### Instruction:\nHi\n\n### Response:\nYes<|eos|>\n\n### Instruction:\nWhy?\n\n### Response:\n",
}
"""What FastChat's conversations `vicuna_v1.1` and `llama-2`, and Alpaca's prompt, make of the
turns."""
OWN = {
    "vicuna": "A chat between a curious user",
    "llama-2": "<<SYS>>\nYou are a helpful, respectful",
    "alpaca": "Below is an",
}


def rendered(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("name", RENDERED)
def test_a_shipped_template_is_the_authors(name: str) -> None:
    tokenizer = tokenizer_of("demo", Loading(chat_template=name))
    assert rendered(tokenizer, [SYSTEM, *TURNS]) == RENDERED[name]
    assert OWN[name] in rendered(tokenizer, TURNS)
    assert set(template_names()) == set(RENDERED)


@pytest.mark.parametrize("text", ["S", "it's {{ 'a' }} \\n\nnew — line", 'say "hi"'])
def test_a_system_message_begins_every_chat_that_has_none(text: str) -> None:
    plain = tokenizer_of("demo")
    told = tokenizer_of("demo", Loading(system=text))
    wanted = rendered(plain, [{"role": "system", "content": text}, *TURNS])
    assert rendered(told, TURNS) == wanted
    assert (
        rendered(told, [SYSTEM, *TURNS]) == rendered(plain, [SYSTEM, *TURNS]) != wanted
        or text == "S"
    )


def test_a_file_is_read_and_what_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert (
        rendered(tokenizer_of("demo", Loading(chat_template=str(file))), TURNS) == "<Hi><Yes><Why?>"
    )
    for broken, told in (("{% for %}", "line 1"), ("no chat", "does not read 'messages'")):
        file.write_text(broken)
        with pytest.raises(UserError, match=f"chat template '{file}' cannot be read: .*{told}"):
            read_template(str(file))
    with pytest.raises(UserError, match=r"chat template.*'vicunna'.*vicuna"):
        read_template("vicunna")


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("{% for m in messages %}{{ m['tools'] }}{% endfor %}", False),  # Phi-4-mini's
        ("{# tools #}{{ 'tools' }}", False),
        ("{% if x is defined %}{% set tools = x %}{% endif %}{{ tools }}", True),  # Llama 3's
        ("{%- generation -%}{{ tools }}{% endgeneration %}", True),
    ],
)
def test_variables_of_a_template(text: str, reads: bool) -> None:
    assert ("tools" in variables_of(text)) == reads


def test_without_a_template_it_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of("demo")
    tokenizer.chat_template = None
    with caplog.at_level(logging.WARNING):
        assert encode(tokenizer, question("Hi")) == encode(tokenizer, "Hi")
        encode(tokenizer, question("Why?"))
    assert [
        r.message.partition(":")[0] for r in caplog.records if "chat template" in r.message
    ] != []
    assert len([r for r in caplog.records if "no chat template" in r.message]) == 1
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=r"system is given for target .*no chat template; allowed with it is .*vicuna",
    ):
        tokenizer_of(str(tmp_path), Loading(system="S"))


def test_every_command_takes_them(draftree: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = draftree(
        "generate", "Hi", "--chat-template", "vicuna", "--system", "S", "-n", "4", "--json"
    )
    chat = RENDERED["vicuna"].replace("Hi ASSISTANT: Yes<|eos|> USER: Why?", "Hi")
    ids = tokenizer_of("demo")(chat, add_special_tokens=False)["input_ids"]
    assert status == 0
    assert json.loads(out)["token_ids"] == load("demo").complete(ids, max_new_tokens=4).tokens
    for command in (
        "bench",
        "replay",
        "tune",
        "serve",
        "chat",
        "doctor",
        "train",
        "advise",
    ):
        helped = draftree(command, "--help")[1]
        assert "--chat-template" in helped, command
        assert "--system" in helped, command
