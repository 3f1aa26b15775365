"""Grammars: the mask after a text against brute force, in any order of asking; JSON of the demo; mistakes."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from byte_vocabulary import byte_vocabulary
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.registry import build
from draftree.request import Request
from draftree.sampling import grammar
from draftree.sampling.grammar import Constrained, Grammar, Spaces, Vocabulary
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing import TableDrafter, table_target

TOKENS = [b"a", b"b", b"c", b"ab", b"", b"bc", b"a", b"aba", b"aa"]
EOS = 7
"""Its bytes are letters, which must not make them text."""
PATTERNS = [
    "a(b|c)*a?",
    "(ab|c){1,3}",
    "abc?",
    "(a|bb)+c",
    "",
    "[ab]{2}",
    "c*",
    "(aa)*b?",
    "abab?c",
    "a|aa|aab|bca",
]
"""Every beginning of a match can be completed by at most 4 letters."""
COMPLETIONS = ["".join(letters) for n in range(5) for letters in product("abc", repeat=n)]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "caterpillar"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": [1, None, True]}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Target:
    return Target.load("demo")


def vocabulary(
    tokens: Sequence[bytes] = TOKENS, eos: Sequence[int] = (EOS,), vocab: int | None = None
) -> Vocabulary:
    return byte_vocabulary(tokens, eos, vocab)


def span(processor: Constrained, ids: Sequence[int], most: int) -> list[int]:
    """The tokens that must come after a text, up to the first choice, an EOS, or `most` of them."""
    found = list[int]()
    while len(found) < most and (token := processor.forced_token([*ids, *found])) is not None:
        found.append(token)
    return found


def constrained(pattern: str, canonical: bool = False, start: int = 0, **given: Any) -> Constrained:
    return Constrained(Grammar.regex(pattern, canonical=canonical), vocabulary(**given), start)


def allowed(processor: Constrained, ids: Sequence[int]) -> list[int]:
    return [int(t) for t in np.flatnonzero(processor.allowed_tokens(ids))]


def left(processor: Constrained, ids: Sequence[int], vocab: int = len(TOKENS)) -> list[int]:
    """What a call on finite scores leaves."""
    scores = processor(torch.tensor([list(ids)], dtype=torch.long), torch.zeros(1, vocab))
    return torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


@cache
def can_match(pattern: str, text: str) -> bool:
    return any(re.fullmatch(pattern, text + more) for more in COMPLETIONS)


def reference(pattern: str, ids: Sequence[int]) -> list[int]:
    """The tokens that keep some completion possible, EOS where the text matches; by trying all completions."""
    if EOS in ids or any(not TOKENS[t] for t in ids):
        return []
    text = b"".join(TOKENS[t] for t in ids).decode()
    words = [
        i for i, t in enumerate(TOKENS) if t and i != EOS and can_match(pattern, text + t.decode())
    ]
    return sorted(words + [EOS] * (re.fullmatch(pattern, text) is not None))


def texts(pattern: str, longest: int) -> Iterator[tuple[int, ...]]:
    """All token strings that can be completed, and each of their one-token mistakes."""
    level: list[tuple[int, ...]] = [()]
    for _ in range(longest + 1):
        yield from level
        level = [(*ids, t) for ids in level if reference(pattern, ids) for t in range(len(TOKENS))]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_mask_equals_brute_force(pattern: str) -> None:
    processor, count = constrained(pattern), 0
    for ids in texts(pattern, 4 if pattern in ("a(b|c)*a?", "(a|bb)+c", "c*") else 5):
        expected = reference(pattern, ids)
        assert allowed(processor, ids) == expected, ids
        assert processor.forced_token(ids) == (expected[0] if len(expected) == 1 else None)
        count += 1
    assert count >= 5


@pytest.mark.parametrize("pattern", PATTERNS)
def test_canonical_spelling_allows_part_of_it_and_is_never_stuck(pattern: str) -> None:
    processor, fewer = constrained(pattern, canonical=True), 0
    for ids in texts(pattern, 3):
        some, every = allowed(processor, ids), reference(pattern, ids)
        assert set(some) <= set(every)
        assert bool(some) == bool(every), ids
        fewer += len(some) < len(every)
    if pattern == "abab?c":
        assert fewer > 0
        assert span(processor, [], 3) == [
            3
        ]  # not `a`, `b`; behind it the tokenizer could go on with `a` or `ab`


def test_canonical_spelling_of_single_bytes_is_the_only_one() -> None:
    single, both = [b"a", b"b", b"c", b""], (False, True)
    for pattern in PATTERNS:
        free, canonical = (constrained(pattern, canonical=c, tokens=single, eos=(3,)) for c in both)
        for ids in product(range(4), repeat=4):
            assert allowed(free, ids) == allowed(canonical, ids)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    st.booleans(),
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, len(TOKENS)), max_size=6), min_size=2, max_size=12),
)
def test_order_of_asking_does_not_matter(
    pattern: str, canonical: bool, kept: int, asked: list[list[int]]
) -> None:
    vocab = len(TOKENS) + 3  # ids that no token has are asked for as well
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "MAX_CACHED_NODES", kept)
        wanders = constrained(pattern, canonical, vocab=vocab)
        for ids in [*asked, *reversed(asked)]:
            fresh = constrained(pattern, canonical, vocab=vocab)
            assert allowed(wanders, ids) == allowed(fresh, ids)
            assert wanders.forced_token(ids) == fresh.forced_token(ids)


@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize("spaces", ["line", "none", "any"])
def test_walks_back_and_forth_over_json(
    demo: Target, monkeypatch: pytest.MonkeyPatch, canonical: bool, spaces: Spaces
) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_NODES", 1)
    made, tokens = (
        Grammar.json_schema(SCHEMA, spaces, canonical),
        Vocabulary.of(demo.tokenizer, 4096, demo.eos),
    )
    wanders = Constrained(made, tokens, 0)
    generator = np.random.default_rng(3)
    ids = list[int]()
    for _ in range(150):
        if generator.random() < 0.3:
            del ids[generator.integers(len(ids) + 1) :]
        may = allowed(wanders, ids)
        assert may == allowed(Constrained(made, tokens, 0), ids)
        ids.append(int(generator.choice(may)) if may else 5)  # also behind an EOS


def test_span_is_forced_token_by_token(demo: Target) -> None:
    processor = Constrained(
        Grammar.json_schema(SCHEMA, spaces="none"), Vocabulary.of(demo.tokenizer, 4096, demo.eos), 2
    )
    prompt, said = (
        [9, 9],
        demo.tokenizer.encode('{"name":"ab","kind":"do', add_special_tokens=False),
    )
    forced = span(processor, [*prompt, *said], 50)
    assert demo.tokenizer.decode(said + forced).startswith('{"name":"ab","kind":"dog","age')
    for i, token in enumerate(forced):
        assert allowed(processor, [*prompt, *said, *forced[:i]]) == [token]
    assert len(allowed(processor, [*prompt, *said, *forced])) > 1
    assert span(processor, [*prompt, *said], 2) == forced[:2]


def test_span_ends_with_eos() -> None:
    assert span(constrained("cab"), [2], 9) == []  # `a` or `ab`
    assert span(constrained("cab"), [2, 0], 9) == [1, EOS]


@pytest.mark.parametrize("seed", [None, 0, pytest.param(1, marks=pytest.mark.long)])
def test_plain_decoding_writes_json_that_fits(demo: Target, seed: int | None) -> None:
    model: Any = demo.decoder.model
    tokens = Vocabulary.of(demo.tokenizer, model.config.vocab_size, demo.eos)
    for prompt in ("Describe a pet as JSON:", "def f(x):", "1 2 3"):
        ids = torch.tensor([demo.tokenizer.encode(prompt)])
        steps = LogitsProcessorList(
            [Constrained(Grammar.json_schema(SCHEMA, spaces="none"), tokens, ids.shape[1])]
        )
        torch.manual_seed(seed or 0)
        chosen: dict[str, Any] = (
            {"do_sample": False}
            if seed is None
            else {"do_sample": True, "temperature": 1.5, "top_k": 0}
        )
        written = model.generate(ids, logits_processor=steps, max_new_tokens=80, **chosen)[
            0, ids.shape[1] :
        ].tolist()
        assert written[-1] in demo.eos
        value = json.loads(demo.tokenizer.decode(written[:-1]))
        assert list(value) == ["name", "kind", "age", "tags"]
        assert len(value["name"]) <= 6
        assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        assert value["age"] in range(121)
        assert len(value["tags"]) <= 2
        assert all(t in (1, None, True) for t in value["tags"])


def test_call_masks_a_copy_behind_the_start() -> None:
    processor, scores = (
        constrained("abc?", start=3),
        torch.randn(1, len(TOKENS), dtype=torch.float64),
    )
    before = scores.clone()
    after = processor(torch.tensor([[4, EOS, 2, 3]]), scores)
    assert torch.equal(scores, before)
    assert after.dtype == scores.dtype
    assert torch.equal(torch.isfinite(after[0]).nonzero()[:, 0], torch.tensor([2, EOS]))
    assert torch.equal(after[0, [2, EOS]], before[0, [2, EOS]])


def test_every_eos_ends_and_nothing_follows() -> None:
    processor = constrained("ab", eos=(EOS, 2, 4))  # one writes a letter of its own, one nothing
    assert allowed(processor, [3]) == [2, 4, EOS]
    assert processor.forced_token([3]) is None
    for end in (2, 4, EOS):
        for ids in ([3, end], [3, end, 3], [end], [end, 3]):
            assert allowed(processor, ids) == []
            assert processor.forced_token(ids) is None
            assert left(processor, ids) == [2, 4, EOS]
        assert allowed(processor, [0]) == [1]  # as before


def test_outside_nothing_is_drafted_and_p_is_defined() -> None:
    processor = constrained("ab")
    for ids in ([1], [3, 0], [3, 3, 3], [4], [0, 0, 1]):
        assert allowed(processor, ids) == []
        assert processor.forced_token(ids) is None
        assert left(processor, ids) == [EOS]


def test_vocabulary_without_the_bytes_is_told_where_they_are_needed() -> None:
    processor = constrained("a(y|z)|ab")  # no token writes y or z, and `ab` goes on
    assert allowed(processor, []) == [0, 3, 6]
    assert allowed(processor, [0]) == [1]
    stuck = constrained("a(y|z)|bc")
    assert allowed(stuck, []) == [0, 1, 5, 6]
    assert allowed(stuck, [0]) == []
    assert stuck.forced_token([0]) is None
    with pytest.raises(
        UserError, match="no token of the vocabulary writes what would have to come"
    ):
        left(stuck, [0])
    assert allowed(stuck, [1]) == [2]  # the parser's error is not the next text's
    canonical = constrained("aby[ab]*", canonical=True)
    assert span(canonical, [], 9) == [3]
    assert allowed(canonical, [3]) == []
    with pytest.raises(
        UserError, match=r"regex 'y' cannot be used: at the beginning, no token of the vocabulary"
    ):
        constrained("y")


@pytest.mark.parametrize("acceptor", ["match", "rejection", "multiround", "block"])
def test_a_draft_that_no_token_goes_on_from_is_dropped(acceptor: str) -> None:
    table, q = torch.full((len(TOKENS),), 1e-9), torch.full((len(TOKENS),), 1e-3)
    table[[1, EOS]], q[0] = (
        torch.tensor([0.6, 0.4]),
        1.0,
    )  # the target writes b, b, … and the drafter would rather have a
    target = table_target((table / table.sum()).repeat(len(TOKENS) + 1, len(TOKENS), 1))
    drafter = TableDrafter((q / q.sum()).repeat(len(TOKENS), 1))
    processor = constrained("b(a(y|z)|b*)", start=1)
    assert 0 in allowed(processor, [3, 1])
    assert allowed(processor, [3, 1, 0]) == []
    engine = Engine(target, drafter, build("policy", "chain:length=3"), build("acceptor", acceptor))
    request = Request(
        [3],
        6,
        frozenset({EOS}),
        processors=(processor,),
        guides=(processor,),
        forced=processor.forced_token,
    )
    for seed in range(8):
        assert set(engine.write([request], Sampling(1.0, seed=seed)).tokens[0]) <= {1, EOS}


def test_parser_that_gives_up_says_so_and_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_NODES", 1)
    rules = range(3000)  # the parser's limit is 2,000 at once
    text = f'start: "b"? | "a" ({" | ".join(f"r{i}" for i in rules)})?\n' + "\n".join(
        f'r{i}: "a" "{i}"' for i in rules
    )
    processor = Constrained(Grammar.lark(text), vocabulary(), 0)
    for _ in range(2):
        assert allowed(processor, [0]) == []
        with pytest.raises(
            UserError, match=r"cannot be followed after 1 ids: .* max is 2000"
        ) as error:
            left(processor, [0])
        assert "\n" not in str(error.value)
        assert allowed(processor, [1]) == [EOS]


def test_cache_keeps_the_texts_asked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_NODES", 3)
    processor = constrained("c*")
    for n in range(9):
        processor.allowed_tokens([2] * n)
    computed = processor._node.cache_info().misses
    for n in (8, 7, 6, 5, 7):
        processor.forced_token([2] * n)
    assert processor._node.cache_info().misses - computed == 1, (
        "the last three, and of these the ones asked for last"
    )


def test_more_logits_than_tokens_and_fewer(demo: Target) -> None:
    larger = constrained("abc?", vocab=70)
    assert larger.allowed_tokens([]).shape == (70,)
    assert allowed(larger, []) == reference("abc?", [])
    assert left(larger, [], 70) == reference("abc?", [])
    assert allowed(larger, [69]) == []
    assert left(larger, [69], 70) == [EOS]
    made = Grammar.regex("[a-z]+", canonical=False)
    whole, padded, cut = (
        Constrained(made, Vocabulary.of(demo.tokenizer, v, demo.eos), 0) for v in (4096, 5000, 500)
    )
    assert padded.allowed_tokens([])[:4096].tolist() == whole.allowed_tokens([]).tolist()
    assert not padded.allowed_tokens([])[4096:].any()
    assert cut.allowed_tokens([]).tolist() == whole.allowed_tokens([])[:500].tolist()
    assert whole.allowed_tokens([])[500:].any()


def test_special_tokens_are_no_text(demo: Target) -> None:
    tokenizer, anything = demo.tokenizer, Grammar.regex(r"(?s:.)*")
    processor = Constrained(anything, Vocabulary.of(tokenizer, 4096, demo.eos), 0)
    for ids in ([], tokenizer.encode("text", add_special_tokens=False)):
        assert set(range(5)) - set(allowed(processor, ids)) == set(range(5)) - demo.eos
    named = Constrained(
        Grammar.lark('start: "a" <|user|> "b"'), Vocabulary.of(tokenizer, 4096, demo.eos), 0
    )
    a, user, b = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "<|user|>", "b"))
    assert span(named, [], 9) == [a, user, b, 2]


def byte_fallback(fallback: bool = True) -> PreTrainedTokenizerFast:
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256 * fallback)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
    ]
    known, merges = {p: i for i, p in enumerate(pieces)}, [("a", "b"), ("▁", "a")]
    inner = Tokenizer(BPE(known, merges, byte_fallback=fallback, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def test_byte_fallback_tokens_are_their_bytes() -> None:
    tokens = Vocabulary.of(byte_fallback(), 263, [1])
    processor = Constrained(Grammar.regex(" ?abé", canonical=False), tokens, 0)
    byte = lambda i: i + 2
    space = 258
    a = 259
    b = 260
    ab = 261
    space_a = 262
    assert allowed(processor, []) == [byte(0x20), byte(0x61), space, a, ab, space_a]
    assert allowed(processor, [space_a]) == [byte(0x62), b]
    assert allowed(processor, [ab]) == [byte(0xC3)]
    assert span(processor, [ab], 9) == [byte(0xC3), byte(0xA9), 1]


@pytest.mark.parametrize("canonical", [True, False])
def test_unspellable_text_is_not_the_unknown_token(canonical: bool) -> None:
    tokens, a = Vocabulary.of(byte_fallback(fallback=False), 7, [1]), 3
    stuck = Constrained(Grammar.regex("aa?é", canonical), tokens, 0)
    assert allowed(stuck, []) == [a]
    assert allowed(stuck, [a, a]) == []
    with pytest.raises(
        UserError, match="no token of the vocabulary writes what would have to come"
    ):
        left(stuck, [a, a], 7)


def test_vocabulary_is_made_once(demo: Target) -> None:
    first = Vocabulary.of(demo.tokenizer, 4096, [2])
    assert Vocabulary.of(demo.tokenizer, 4096, [2]) is first
    assert Vocabulary.of(demo.tokenizer, 4096, [2, 0]).eos == {0, 2}


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: Grammar.regex("a("), r"regex 'a\(' cannot be used: unclosed group"),
    (
        lambda: Grammar.regex("(?=a)b"),
        "look-around, including look-ahead and look-behind, is not supported",
    ),
    (lambda: Grammar.lark("start: foo"), 'unknown name: "foo"'),
    (lambda: Grammar.lark("begin: /a/"), "no start rule found"),
    (lambda: Grammar.lark(""), "lark '' cannot be used: Empty grammar"),
    (lambda: Grammar.json_schema("{"), "JSON schema '{' cannot be used: it is not JSON"),
    (
        lambda: Grammar.json_schema({"enum": {1}}),
        "it is not JSON: Object of type set is not JSON serializable",
    ),
    (
        lambda: Grammar.json_schema("[]"),
        r"JSON schema '\[\]' cannot be used: allowed is an object, true or false",
    ),
    (lambda: Grammar.json_schema({"type": "nope"}), "cannot be used: Invalid type: nope"),
    (
        lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}),
        r'Unimplemented keys: \["uniqueItems"\]',
    ),
    (lambda: Grammar.json_schema({"type": "string", "pattern": "("}), "unclosed group"),
    (lambda: Grammar.json_schema({"x-guidance": 5}, spaces="none"), "invalid type: integer `5`"),
    (lambda: Grammar.json_schema("false", spaces="none"), "Unsatisfiable schema"),
    (
        lambda: Constrained(Grammar.lark("start: <|tool|>"), vocabulary(), 0),
        'unknown special token: "<|tool|>"',
    ),
    (
        lambda: Vocabulary.of(byte_fallback(), 300, [3, 300]),
        r"EOS ids are \[3, 300\], allowed are 0 … 299",
    ),
    (
        lambda: Vocabulary.of(byte_fallback(), 300, []),
        "no EOS id is known, a grammar needs at least one",
    ),
    (
        lambda: Vocabulary.of(byte_fallback(), 300, [270]),
        r"EOS ids are \[270\], a grammar needs one among .* 263 tokens",
    ),
    (lambda: Vocabulary.of(object(), 4, [1]), "a grammar needs a fast tokenizer, got object"),  # type: ignore[arg-type]
    (
        lambda: left(constrained("a"), [], 5),
        r"scores \(1, 5\), a grammar follows one text with scores \(1, 9\)",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), BAD)
def test_mistakes_are_told_in_one_line(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        mistake()
    assert "\n" not in str(error.value)


def test_grammars_compare_by_what_they_say() -> None:
    assert Grammar.regex("ab") == Grammar.regex("ab")
    assert (
        len(
            {Grammar.regex("ab"), Grammar.regex("ab", canonical=False), Grammar.lark("start: /ab/")}
        )
        == 3
    )
    assert Grammar.json_schema(SCHEMA) == Grammar.json_schema(json.dumps(SCHEMA))
    assert "x-guidance" not in SCHEMA


def test_tokens_without_an_alternative_are_told_from_drafted_ones(demo: Target) -> None:
    engine = Engine(demo, build("drafter", "suffix").open(demo), build("policy", "chain:length=4"))
    grammar, prompt = Grammar.json_schema(SCHEMA, spaces="none"), [5, 6, 7]
    processor = Constrained(grammar, Vocabulary.of(demo.tokenizer, 4096, demo.eos), len(prompt))
    request = Request(
        prompt,
        40,
        demo.eos,
        processors=(processor,),
        guides=(processor,),
        forced=processor.forced_token,
    )
    handle = engine.submit(request)
    found = handle.result()
    single = [
        len(allowed(processor, [*prompt, *found.tokens[:i]])) == 1 for i in range(len(found.tokens))
    ]
    assert "forced" in found.origins
    assert all(
        origin in ("prefill", "bonus") or one == (origin == "forced")
        for origin, one in zip(found.origins, single, strict=True)
    )
    assert "forced" not in engine.submit(Request(prompt, 40)).result().origins


def test_json_is_laid_out_as_it_is_asked_for(demo: Target) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": [2, 3]}},
        "required": ["a", "b"],
    }
    schema["additionalProperties"] = False
    written = {
        "line": '{"a": 1, "b": [2, 3]}',
        "none": '{"a":1,"b":[2,3]}',
        "any": '{ "a" :1,\n"b": [2,3] }',
    }
    vocabulary = Vocabulary.of(demo.tokenizer, 4096, demo.eos)
    for spaces, text in written.items():
        processor = Constrained(Grammar.json_schema(schema, spaces, canonical=False), vocabulary, 0)
        fits = {
            other: _derives(processor, demo.tokenizer(shown, add_special_tokens=False)["input_ids"])
            for other, shown in written.items()
        }
        assert fits[spaces], text
        assert sum(fits.values()) == (3 if spaces == "any" else 1)
    with pytest.raises(
        UserError,
        match="unknown white space of JSON 'lines': known are any, line, none; did you mean 'line'",
    ):
        Grammar.json_schema(schema, "lines")  # type: ignore[arg-type]


def _derives(processor: Constrained, ids: list[int]) -> bool:
    return all(processor.allowed_tokens(ids[:i])[token] for i, token in enumerate(ids))
