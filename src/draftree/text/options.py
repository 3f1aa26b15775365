"""The options of a completion, and their conversion to a request."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from transformers import (
    LogitsProcessor,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from typing_extensions import override

from draftree.aliases import OPTION
from draftree.aliases.conversions import rewrite_options
from draftree.errors import UserError
from draftree.request import Criterion, Request
from draftree.sampling.grammar import Constrained, Grammar, Vocabulary
from draftree.sampling.logits_processors import ForcedBeginning, FrequencyPenalty, PresencePenalty
from draftree.sampling.param_fields import Choice
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.text.option_fields import Parameters
from draftree.text.stop_strings import StopStrings, StopTexts
from draftree.utils.validated_dataclass import knob, optional, translate_names

Forced = Callable[[Sequence[int]], int | None]


@dataclass(frozen=True)
class Options(Parameters):
    """Hold the options of a completion; the defaults mean plain greedy decoding.

    Attributes:
        max_new_tokens: largest number of new tokens.
        temperature: 0 for greedy decoding, otherwise the divisor of the logits.
        top_k: number of likeliest tokens that are kept; 0 keeps all.
        top_p: least total probability of the likeliest tokens that are kept; 1 keeps all.
        min_p: least probability of a kept token, relative to that of the likeliest token; 0 keeps
            all.
        typical_p: least total probability of the most typical tokens that are kept; 1 keeps all.
        seed: seed of all random draws.
        repetition_penalty: divisor of positive logits, and factor of negative logits, of tokens
            that occur in prompt or response; 1 leaves them unchanged.
        frequency_penalty: number that is subtracted from a token's logit for each of its
            occurrences in the response.
        presence_penalty: number that is subtracted from the logit of each token that occurs in the
            response.
        no_repeat_ngram_size: size of n-grams of tokens that must not occur twice in prompt and
            response; 0 allows all.
        logit_bias: numbers that are added to the logits of tokens. A token is given by its id or by
            a text that is one token. A text of digits is an id, as in OpenAI's API.
        suppress: ids that are never generated.
        bad_words: texts that are never generated, as the tokenizer encodes them at the start of a
            text and after a space.
        min_new_tokens: least number of new tokens before a token may end the text.
        stop: texts that end the response at their first occurrence, also across tokens, and are not
            part of its text. A text that is a special token is found by its id.
        json_schema: JSON schema of the response, as text or as an object.
        regex: regular expression that the whole response must match.
        grammar: any other grammar for the whole response.
        beginning: start of the response, as text or as ids.
        max_time: seconds from the request after which the generation stops.
        logprobs: number of likeliest tokens whose log-probabilities are returned in addition to
            each token's own; None returns none.
        ignore_eos: whether EOS does not end the text.
        stop_ids: ids that end the response like EOS; `ignore_eos` does not affect them.
        n: number of texts for each prompt. The first is the text of `n=1`; with a temperature
            above 0 the others are further samples of the same seed.
        max_length: largest number of tokens of prompt and response together, instead of
            `max_new_tokens`.

    Raises:
        UserError: a value is out of its range, or values exclude each other.
    """

    n: int = knob(1, least=1)
    max_length: int | None = knob(None, least=1)
    grammar: Grammar | None = knob(
        None,
        rule=(
            "a Grammar: Grammar.lark(TEXT) takes a Lark grammar, and no GBNF",
            optional(lambda value: isinstance(value, Grammar)),
        ),
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is None:
            self._check_least(self.max_new_tokens, "max_new_tokens")
        if len(given := self._constraints) > 1:
            raise UserError(
                f"{' and '.join(given)} are given, allowed is one of json_schema, regex, grammar"
            )
        if given and self.ignore_eos:
            raise UserError(
                f"ignore_eos is given with {given[0]}, but a constrained response ends with EOS"
            )
        self.constraint  # noqa: B018 - made once, so that a mistake in it is reported now

    @classmethod
    def of(cls, base: Self | None, given: Mapping[str, Any]) -> Self:
        """Return options by name; options that are not named keep the value of a base.

        Names and values of other tools with the same meaning are accepted (`draftree.aliases`).
        None stands for a default.

        Raises:
            UnknownName: there is no such option.
            UserError: an option is given under two names.
        """
        defaults = {f.name: f.default for f in fields(cls)}
        asked = translate_names(OPTION, rewrite_options(given), defaults)
        asked = {name: defaults[name] if value is None else value for name, value in asked.items()}
        if "max_new_tokens" in asked:  # as in transformers, it wins if both are given
            asked["max_length"] = None
        return cls(**asked) if base is None else replace(base, **asked)

    @property
    def sampling(self) -> Sampling:
        """Return the sampling settings."""
        return Sampling(**{f.name: getattr(self, f.name) for f in fields(Choice)})

    @property
    def _constraints(self) -> list[str]:
        return [
            name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None
        ]

    @cached_property
    def constraint(self) -> Grammar | None:
        """Return the grammar of the response from whichever option sets it, or None."""
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema)
        return self.grammar if self.regex is None else Grammar.regex(self.regex)

    def stops(self, tokenizer: PreTrainedTokenizerBase) -> StopStrings:
        """Return the stop texts and stop tokens for a tokenizer."""
        return StopStrings.of(tokenizer, _texts(self.stop))

    def request(self, target: Target, prompt: Sequence[int], number: int = 0) -> Request:
        """Return the request for a prompt, and start the time limit of `max_time`.

        Args:
            target: the target.
            prompt: ids of the prompt.
            number: the number of the request, which determines the noise together with the seed.

        Raises:
            UserError: a token does not exist, or a text must be encoded and the target has no
                tokenizer.
        """
        steps = tuple(self._processors(target, len(prompt)))
        rules: list[Forced] = [
            s.forced_token for s in steps if isinstance(s, ForcedBeginning | Constrained)
        ]
        return Request(
            prompt,
            self._most(len(prompt)),
            self._ends(target),
            number,
            steps,
            guides=steps,  # all of them are functions of the text alone
            forced=_first_forced(rules) if rules else None,
            criteria=tuple(self._criteria(target, len(prompt))),
            logprobs=self.logprobs,
            sampling=self.sampling,
        )

    def _most(self, prompt: int) -> int:
        """Return the largest number of new tokens after a prompt of `prompt` tokens."""
        if self.max_length is None:
            return self.max_new_tokens
        if self.max_length <= prompt:
            raise UserError(
                f"max_length is {self.max_length}, and the prompt has {prompt} tokens: allowed is more than that"
            )
        most = self.max_length - prompt
        self._check_least(most, "max_length less the prompt")
        return most

    def _check_least(self, most: int, name: str) -> None:
        """Check that `min_new_tokens` is at most the largest number of new tokens."""
        if self.min_new_tokens > most:
            raise UserError(
                f"min_new_tokens is {self.min_new_tokens}, allowed is at most {name}, {most}"
            )

    def _processors(self, target: Target, start: int) -> Iterator[LogitsProcessor]:
        """Yield the logits processors in transformers' order.

        A caller's own processors have the same place as in transformers, and the grammar comes
        last.
        """
        vocab, device = target.decoder.vocab, str(target.decoder.device)
        eos = sorted(self._ends(target))
        if self.logit_bias:
            biases = {_token(target, key): float(bias) for key, bias in self.logit_bias.items()}
            yield SequenceBiasLogitsProcessor(
                [[[_check_token_id("logit_bias", i, vocab)], bias] for i, bias in biases.items()]
            )
        if self.repetition_penalty != 1:
            yield RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))
        if self.no_repeat_ngram_size:
            yield NoRepeatNGramLogitsProcessor(int(self.no_repeat_ngram_size))
        if banned := [
            ids
            for ids in _spellings(target, _texts(self.bad_words))
            if ids not in [[e] for e in eos]
        ]:
            yield NoBadWordsLogitsProcessor(banned, eos or None)
        if self.min_new_tokens and eos:
            yield MinNewTokensLengthLogitsProcessor(start, int(self.min_new_tokens), eos, device)
        if len(self.suppress):
            yield SuppressTokensLogitsProcessor(
                [_check_token_id("suppress", int(i), vocab) for i in self.suppress], device
            )
        if self.frequency_penalty:
            yield FrequencyPenalty(float(self.frequency_penalty), start)
        if self.presence_penalty:
            yield PresencePenalty(float(self.presence_penalty), start)
        if len(self.beginning):
            ids = (
                _ids(target, self.beginning)
                if isinstance(self.beginning, str)
                else list(self.beginning)
            )
            yield ForcedBeginning([_check_token_id("beginning", int(i), vocab) for i in ids], start)
        if self.constraint is not None:
            yield Constrained(
                self.constraint, Vocabulary.of(target.tokenizer, vocab, target.eos), start
            )

    def _ends(self, target: Target) -> frozenset[int]:
        """Return the ids that end a text."""
        return frozenset(self.stop_ids) | (frozenset() if self.ignore_eos else target.eos)

    def _criteria(self, target: Target, start: int) -> Iterator[Criterion]:
        if self.stop:
            yield StopTexts(target.tokenizer, self.stops(target.tokenizer), start)
        if self.max_time is not None:
            yield MaxTimeCriteria(float(self.max_time))


def _first_forced(rules: Sequence[Forced]) -> Forced:
    """Combine rules for forced tokens into one rule that returns the first forced token."""
    return lambda ids: next((token for rule in rules if (token := rule(ids)) is not None), None)


def _texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return texts as a tuple; a single text becomes a tuple of one, and an empty one of none."""
    return ((given,) if given else ()) if isinstance(given, str) else tuple(given)


def _ids(target: Target, text: str) -> list[int]:
    """Return the token ids of a text without special tokens."""
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def _token(target: Target, key: int | str) -> int:
    """Return the id of a token that is given by id or by text."""
    if not isinstance(key, str) or (key.isascii() and key.isdigit()):
        return int(key)
    ids = _ids(target, key)
    if len(ids) != 1:
        raise UserError(
            f"logit_bias names {key!r}, which is {len(ids)} tokens {ids}; allowed is a text of one, or an id"
        )
    return ids[0]


def _check_token_id(option: str, token: int, vocab: int) -> int:
    if token >= vocab:
        raise UserError(f"{option} names token id {token}, allowed are 0 … {vocab - 1}")
    return token


def _spellings(target: Target, words: Sequence[str]) -> list[list[int]]:
    """Return the ids of each word, both at the start of a text and after a space."""
    spellings = [_ids(target, spelled) for word in words for spelled in (word, f" {word}")]
    vocab = target.decoder.vocab  # a tokenizer may have more tokens
    return [
        ids
        for i, ids in enumerate(spellings)
        if ids and max(ids) < vocab and ids not in spellings[:i]
    ]
