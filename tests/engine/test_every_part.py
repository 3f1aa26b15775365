"""What holds for the options of every drafter, policy and acceptor: their ranges, and how specs set them."""

import math
import re
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from draftree import registry
from draftree.errors import UserError, format_value
from draftree.utils.validated_dataclass import Range

PARTS = [(kind, name) for kind in registry.KINDS for name in registry.names(kind)]
COMMON = "dtype=float64|float32|bfloat16|float16 draft_vocab>=0 init=target|scratch"
"""Options that trained drafters share, where a part's own line does not say otherwise."""
BLOCKS = "layers>=1 block>=2 features>=1 mask>=0 gamma>=0 anchors>=1"
ALLOWED = {
    "aded": "n[2,4] top>=1 window>=1 increment>0 cap>0 memory>=1",
    "dflash": f"{BLOCKS} loss=ce|kl",
    "dspark": f"{BLOCKS} rank>=1 markov=vanilla|gated|rnn",
    "eagle": "feature_weight>=0 token_weight>=0 noise>=0 steps>=1 top_k>=0 top_weight>=0",
    "eagle3": "steps>=1 decay(0,1] head_rank>=0 head_candidates>=1",
    "edd": "hidden_layer=-3|auto loss=kl|ce min_block>=1 phase=2|random head_rank>=0 "
    "head_candidates>=1",
    "glide": "layers>=1 hidden>=0 block>=1 loss=ce|kl kv_layer=-2|auto variant=paper|official "
    "init=target|scratch|shared phase=2|random",
    "hydra": "heads>=1 layers>=1 arch=prefix-mlp|mlp loss=kl|ce",
    "jetspec": BLOCKS,
    "lookahead": "ngram>=3 window>=1 guesses>=1",
    "medusa": "heads>=1 layers>=1 decay(0,1] distil[0,1]",
    "mtp": "loss=kl|ce steps>=1 layers>=0 first=normed|raw fed=raw|normed",
    "peagle": "layers>=1 drafts>=1 mask>=0 keep(0,1] least(0,1]",
    "pld": "ngram>=1 length>=1 match=latest|earliest|all confidence(0,1]",
    "rest": "shortest>=1 continuation>=1 nodes>=1 matches>=1",
    "suffix": "longest[1,65536] length>=1 factor>=1 least[0,1] memory[24,2147483647] places>=1",
    "token_recycling": "successors[1,1024]",
    "vdm": "loss=kl|ce",
    "accumlogp": "budget>=2 width>=1 depth>=1",
    "adaptive": "length>=1",
    "adaserve": "budget>=1 owed>=1 most>=0 depth>=1 width>=1",
    "beam": "width>=1 depth>=1",
    "c2t": "beta[0,1] width>=1 layer_top>=1 depth>=1 raw=none|P|H|P+H",
    "cape": "length>=1 max_nodes>=1 sets>=0",
    "chain": "length>=1",
    "ddtree": "nodes>=1 depth>=1",
    "dyjoint": "threshold[0,1] length>=1",
    "dymax": "threshold[0,1] length>=1",
    "eagle2": "nodes>=1 depth>=1 width>=1 expand_by=value|confidence rank_by=value|confidence",
    "mcts": "iterations>=1 c1>=0 c2>0 length>=2 continuations>=1 width>=1 "
    "reward=paper|official|likelihood unvisited=zero|first search=mcts|greedy nodes>=1",
    "opttree": "nodes>=1 threshold>=0 max_depth>=1",
    "pct": "width>=1 max_depth>=0 leaf_threshold[0,1] ratio>=0 own[0,1]",
    "talon": "nodes>=1 width>=1 mu(0,1] depth>=1",
    "trie": "nodes>=1",
    "vct": "width>=1 depth>=1 layer_top>=1",
    "yield": "width>=1 depth>=1 probe[0,1]",
    "typical": "epsilon(0,1] delta>0",
}
"""By part: ranges of numbers, and words among which an option chooses (or some values of a rule)."""


def values(kind: str, name: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return for each option the values at its bounds that are allowed, and some that are not."""
    hints = get_type_hints(registry.part(kind, name))
    found = {}
    for entry in f"{COMMON} {ALLOWED.get(name, '')}".split():
        option, sign, bounds = re.fullmatch(r"(\w+)(>=|>|=|\(|\[)(.*)", entry).groups()  # type: ignore[union-attr]
        if option not in hints:
            continue
        if sign == "=":
            words = [int(w) if w.lstrip("-").isdigit() else w for w in bounds.split("|")]
            found[option] = words, ["no such word", 1.5]
            continue
        whole = int in (hints[option], *get_args(hints[option]))
        number, step = (int, 1) if whole else (float, 0.01)
        low, *high = map(number, bounds.rstrip("])").split(","))
        allowed, refused = (low, low - step) if sign in (">=", "[") else (low + step, low)
        found[option] = (
            [allowed, *high],
            [refused, *(h + step for h in high), *[1.5] * whole, math.nan, math.inf, True],
        )
    return found


def optional(hint: Any) -> bool:
    """Return whether an option may be none."""
    return NoneType in get_args(hint)


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_values_beyond_an_options_range_are_refused(kind: str, name: str) -> None:
    part = registry.part(kind, name)
    for option, (allowed, refused) in values(kind, name).items():
        for value in refused:
            told = f"^{name}: {option} is {re.escape(format_value(value))}, allowed is [^;]*$"
            with pytest.raises(UserError, match=told):
                part(**{option: value})
        for value in allowed:
            assert getattr(part(**{option: value}), option) == value


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_a_spec_sets_each_option(kind: str, name: str) -> None:
    part = registry.part(kind, name)
    hints = get_type_hints(part)
    assert registry.build(kind, name) == part()
    for option, (allowed, _) in values(kind, name).items():
        for value in (*allowed, *([None] if optional(hints[option]) else [])):
            spec = f"{name}:{option}={str(value).lower() if value is None else value}"
            wanted = None if str(value) == "none" and optional(hints[option]) else value
            assert registry.build(kind, spec) == part(**{option: wanted}), spec
    for option in (f.name for f in fields(part) if f.compare and hints[f.name] is bool):
        for text, value in (("true", True), ("false", False)):
            assert registry.build(kind, f"{name}:{option}={text}") == part(**{option: value})
        with pytest.raises(UserError, match=f"^{name}: {option} is 'maybe', allowed is true or"):
            registry.build(kind, f"{name}:{option}=maybe")


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_every_option_with_a_range_is_in_the_table(kind: str, name: str) -> None:
    part = registry.part(kind, name)
    hints = get_type_hints(part)
    bounded = {
        f.name
        for f in fields(part)
        if f.metadata.get("range", Range()) != Range()
        or any(get_origin(h) is Literal for h in (hints[f.name], *get_args(hints[f.name])))
    }
    assert bounded - values(kind, name).keys() == set()
    assert all(f.default is not MISSING for f in fields(part) if f.compare), "each has a default"
