"""Engines whose drafts are known beforehand, and what plain decoding writes."""

from collections.abc import Sequence
from typing import Any

from draftree.data.prompts import encode
from draftree.engine import Engine, generate_plain
from draftree.policies.base import Policy
from draftree.policies.chain import Chain
from draftree.policies.vct import VCT
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.fakes import Always, Scripted, Sometimes
from draftree.text.options import Options

PROMPT = "abcab"
LENGTH = 24


def asked(target: Target, prompt: Any = PROMPT, number: int = 0, **options: Any) -> Request:
    """Return the request that stands for the options of a completion."""
    known = Options(**{"max_new_tokens": LENGTH, "ignore_eos": True, **options})
    return known.request(
        target, encode(target.tokenizer, prompt) if isinstance(prompt, str) else prompt, number
    )


def plainly(target: Target, prompt: Any = PROMPT, **options: Any) -> list[int]:
    """Return the tokens that plain decoding writes after a prompt."""
    return generate_plain(target, [asked(target, prompt, **options)]).tokens[0]


def whole(target: Target, prompt: Any = PROMPT, **options: Any) -> list[int]:
    """Return the prompt's tokens and what plain decoding writes after them."""
    request = asked(target, prompt, **options)
    return [*request.prompt, *generate_plain(target, [request]).tokens[0]]


def knowing(
    target: Target,
    texts: Sequence[Sequence[int]],
    policy: Policy | None = None,
    script: type[Scripted] = Always,
) -> Engine:
    """Return an engine whose drafter knows whole texts, so that long paths are accepted."""
    return Engine(target, script(texts, target.decoder.vocab), policy or Chain(5))


def both(target: Target, texts: Sequence[Sequence[int]]) -> tuple[Engine, Engine]:
    """Return two engines: drafts that are always right in chains, and sometimes right in trees."""
    return knowing(target, texts), knowing(target, texts, VCT(3), Sometimes)
