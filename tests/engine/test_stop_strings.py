"""The text of tokens as they come, and stop texts."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, StopStringCriteria

from draftree.data.prompts import encode
from draftree.text.stop_strings import Decoded, StopStrings, StopTexts, TextPieces, decode_tokens
from draftree.weights import demo_folder
from folders import byte_tokenizer

BYTES, DEMO = byte_tokenizer(), AutoTokenizer.from_pretrained(demo_folder())
WORDS = ["▁", "▁a", "▁st", "op", "▁stop", "s", "t", "o", "p", "▁the", "x", "<s>", "<e>"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens with spaces in front, of which a text's first one loses its own."""
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="x"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.add_special_tokens(["<s>", "<e>"])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<e>")


TOKENIZERS = {"bytes": (BYTES, 260), "words": (word_tokenizer(), len(WORDS))}
SPECIAL = {"bytes": [0, 1, 2, 3], "words": [11, 12]}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_tokens_one_by_one_give_the_text_of_all(name: str, data: st.DataObject) -> None:
    tokenizer, vocab = TOKENIZERS[name]
    specials = st.sampled_from(SPECIAL[name])
    ids = data.draw(st.lists(st.one_of(st.integers(0, vocab - 1), specials), max_size=30))
    decoded, sure = Decoded(tokenizer), ""
    for i, token in enumerate(ids):
        decoded.add(token)
        assert decoded.text == decode_tokens(tokenizer, ids[: i + 1])
        assert decoded.text[: decoded.sure].startswith(sure), "what was sure stays"
        sure = decoded.text[: decoded.sure]


@given(text=st.text(min_size=1, max_size=20))
def test_a_whole_text_is_sure_at_its_end(text: str) -> None:
    # Decoding omits special tokens, which Hypothesis finds in the sources.
    assume(not any(token in text for token in BYTES.get_added_vocab()))
    decoded = Decoded(BYTES)
    for token in encode(BYTES, text):
        decoded.add(token)
    assert decoded.text == text
    assert decoded.sure == len(text) or text.endswith("\ufffd")


@given(text=st.text("aé日😀 ", min_size=1, max_size=12))
def test_characters_in_byte_tokens_side_by_side(text: str) -> None:
    # While one is incomplete, such a decoder knows none of those right before it either.
    raw = Tokenizer(models.WordLevel({f"<0x{b:02X}>": b for b in range(256)}, unk_token="<0x00>"))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    decoded, shown = Decoded(PreTrainedTokenizerFast(tokenizer_object=raw)), ""
    for token in text.encode():
        decoded.add(token)
        assert decoded.text[: decoded.sure].startswith(shown), "what was sure stays"
        shown = decoded.text[: decoded.sure]
    assert decoded.text == shown == text


def test_a_decoder_that_rewrites_what_it_wrote_is_followed() -> None:
    class Rewriting:
        """Joins letters, each of which but the last is in lower case."""

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(i).lower() for i in ids[:-1]) + "".join(chr(i) for i in ids[-1:])

    decoded = Decoded(Rewriting())  # type: ignore[arg-type]
    for i in range(5):
        decoded.add(ord("A") + i)
        assert decoded.text == "ABCDE"[: i + 1].swapcase()[:-1] + "ABCDE"[i]


@pytest.mark.parametrize(
    ("texts", "text", "expected"),
    [
        (("stop",), "no st op", None),
        (("stop",), "a stop and a stop", (2, "stop")),
        (
            ("abc", "b"),
            "xabc",
            (2, "b"),
        ),  # "b" is complete first, however many characters a token has
        (("bc", "abc"), "xabc", (1, "abc")),  # of two that end at one place the longer
        (("é", "\n\n"), "a\nb\n\ncé", (3, "\n\n")),
        ((), "abc", None),
    ],
)
def test_the_stop_text_that_is_complete_first_is_found(
    texts: tuple[str, ...], text: str, expected: object
) -> None:
    assert StopStrings(texts).find(text) == expected


@pytest.mark.parametrize(
    ("texts", "text", "held"),
    [
        (("stop",), "a sto", 3),
        (("stop",), "a sto ", 0),
        (("aab",), "aaa", 2),
        (("x", "ab"), "a", 1),
        (("ab",), "", 0),
        ((), "a", 0),
    ],
)
def test_possible_beginnings_of_a_stop_string_are_held_back(
    texts: tuple[str, ...], text: str, held: int
) -> None:
    assert StopStrings(texts).num_held_back(text) == held


@given(
    text=st.text("abcé", max_size=25),
    texts=st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3),
)
def test_pieces_are_the_text_before_the_stop_text(text: str, texts: list[str]) -> None:
    """Piece by piece as a text is written, ended by the criterion: nothing is shown that is cut away later."""
    stops = StopStrings.of(BYTES, texts)
    pieces = TextPieces(BYTES, stops)
    ends = StopTexts(BYTES, stops, 1)
    shown = ""
    ids = encode(BYTES, text)
    for i, token in enumerate(ids):
        shown += pieces.add(token)
        if ends(torch.tensor([[9, *ids[: i + 1]]])):
            break
    found = stops.find(text)
    assert shown + pieces.rest() == (text if found is None else text[: found[0]])
    assert pieces.stop == (None if found is None else found[1])
    assert pieces.rest() == ""


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    pieces = TextPieces(BYTES, StopStrings(("END",)))
    told = [pieces.add(token) for token in encode(BYTES, "aéE EN!END")]
    assert told == ["a", "", "é", "", "E ", "", "", "EN!", "", "", ""]
    assert (pieces.rest(), pieces.stop) == ("", "END")
    cut = TextPieces(BYTES)
    assert [cut.add(token) for token in encode(BYTES, "xé")[:2]] == ["x", ""]
    assert cut.rest() == "\ufffd", "a character that was never finished"


def test_a_special_token_stops_by_its_id() -> None:
    stops = StopStrings.of(BYTES, ["<|user|>", "user"])
    assert (stops.texts, stops.ids) == (("user",), {2: "<|user|>"})
    ends, text = StopTexts(BYTES, stops, 0), encode(BYTES, "ab")
    assert not ends(torch.tensor([text]))
    assert ends(torch.tensor([[*text, 2]]))
    pieces = TextPieces(BYTES, stops)
    assert ("".join(map(pieces.add, [*text, 2])), pieces.stop) == ("ab", "<|user|>")


def test_stop_strings_in_the_prompt_stop_nothing() -> None:
    prompt, rest = encode(BYTES, "stop sto"), encode(BYTES, "p")
    ends = StopTexts(BYTES, StopStrings(("stop",)), len(prompt))
    assert not ends(torch.tensor([[*prompt, *rest]]))
    assert StopStringCriteria(BYTES, ["stop"])(torch.tensor([[*prompt, *rest]]), None).item(), (
        "transformers counts it"
    )


def test_the_criterion_is_a_function_of_the_ids() -> None:
    ends = StopTexts(BYTES, StopStrings(("ab",)), 0)
    asked = ["a", "ab", "xa", "abx", "b", "xxab", "a", "ac", "acab"]
    assert [ends(torch.tensor([encode(BYTES, text)])) for text in asked] == [
        "ab" in text for text in asked
    ]


@given(
    words=st.lists(
        st.sampled_from(
            [" apple", "apple", " app", "les", "s", " the", "the", "re", "\n", " ", "é", "a"]
        ),
        max_size=9,
    ),
    texts=st.lists(
        st.sampled_from(["apples", "ple", "e\n", " t", "\n\n", "éa", "s th", "er"]),
        min_size=1,
        max_size=2,
    ),
)
def test_transformers_criterion_says_the_same_of_longer_tokens(
    words: list[str], texts: list[str]
) -> None:
    """In its words: tokens may run over either end of a stop text."""
    ids = [token for word in words for token in DEMO(word, add_special_tokens=False)["input_ids"]]
    theirs, ours = StopStringCriteria(DEMO, texts), StopTexts(DEMO, StopStrings.of(DEMO, texts), 0)
    for n in range(1, len(ids) + 1):
        shown = torch.tensor([ids[:n]])
        assert bool(theirs(shown, None)) == ours(shown), DEMO.decode(ids[:n])
        if ours(shown):
            return


@given(
    text=st.text("abcdé ", max_size=20),
    texts=st.lists(st.text("abcdé ", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_transformers_criterion_says_the_same_of_bytes(text: str, texts: list[str]) -> None:
    ids = encode(BYTES, text)
    theirs, ours = (
        StopStringCriteria(BYTES, texts),
        StopTexts(BYTES, StopStrings.of(BYTES, texts), 0),
    )
    for n in range(1, len(ids) + 1):
        shown = torch.tensor([ids[:n]])
        assert bool(theirs(shown, None)) == ours(shown), (text, texts, n)
        if ours(shown):
            return
