"""`draftree train static`: the best tree of fixed shape for a drafter, from its measured acceptance by rank and depth.

A static tree's node is a path of ranks (`policies.static`). Under the product model, a[d, r] being the chance that the
target's token at depth d is the drafter's candidate of rank r where all before it were candidates too, a node is accepted
with the product of a along its path, and the tree is expected to give τ = 1 + Σ of these products tokens a step
(Medusa, section 2.3.3; Sequoia, section 3.1, whose a does not depend on depth).

a is taken where decoding with the very tree would have its roots. Over all tokens of a text alike it is too high: a step
passes over easy tokens many at a time and stops behind the hard ones, so that hard places are roots more often.

Shapes: M roots, D depths, K ranks, R texts, N nodes at most.
"""

import heapq
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from draftree.costs import Costs
from draftree.data import rows
from draftree.data.prompts import encode
from draftree.drafters.base import Drafter
from draftree.errors import UnknownName, UserError
from draftree.evaluation import driven
from draftree.evaluation.driven import Block, Text, replay, spread
from draftree.models.target import Target
from draftree.registry import parse
from draftree.rows import MAX_NODES
from draftree.stats import Work
from draftree.tree import Bools, Floats, Ints

Ranks = tuple[int, ...]
Paths = tuple[Ranks, ...]
"""A tree: the ranks along the path to each of its nodes, every path's beginning among them."""
NAME = "static"
MOST = 128
"""Nodes that are tried at most where the number is chosen."""
ROUNDS = 6
"""Trees that are tried at most until a tree is the best one for the roots that it leads to."""
BATCH = 16
"""Texts that are answered, and driven along, at a time."""
WINDOW = 512
"""Tokens of a plain text, of which the first quarter is the prompt."""
MISSED, UNKNOWN = -1, -2
"""In place of a rank: the target's token was not among the candidates; what it is cannot be told from the text."""
SIZES = (8, 16, 32, 63, 128)
"""Nodes for which the best tree's expected acceptance is told beside that of the chosen tree."""


@dataclass(frozen=True)
class Settings:
    """The knobs of `train static`.

    Attributes:
        search: how the tree is found; both are optimal under the product model.
        nodes: of the tree, its root not counted; the number that the cost model predicts to be fastest by default.
        depth: of the tree, at most.
        width: how many ranks are looked at.
        tokens: longest answer.
        prompts: how many of the data's are answered, spread evenly; or how many texts are read.
        answers: whether the target answers the data's prompts; else their texts are read as they are.
    """

    search: Literal["greedy", "sequoia"] = "sequoia"
    nodes: int | None = None
    depth: int = 8
    width: int = 10
    tokens: int = 64
    prompts: int = 200
    answers: bool = True

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("width", 1), ("tokens", 2), ("prompts", 1)):
            if getattr(self, name) < least:
                raise UserError(f"static: {name} is {getattr(self, name)}, allowed is a whole number of at least {least}")
        full = min(MAX_NODES, sum(self.width**d for d in range(1, self.depth + 1)))  # no step verifies more
        if self.nodes is not None and not 1 <= self.nodes <= full:
            told = f"allowed are auto and 1 … {full}, with depth {self.depth} and width {self.width}"
            raise UserError(f"static: nodes is {self.nodes}, {told}")

    @classmethod
    def parsed(cls, items: Sequence[str]) -> Self:
        """From key=value items.

        Raises:
            UserError: a key or a value is not one that is known.
        """
        hints, values = typing.get_type_hints(cls), dict[str, Any]()
        for item in items:
            key, equals, text = item.partition("=")
            if not equals:
                raise UserError(f"'{item}' is not key=value; keys of '{NAME}': {', '.join(f.name for f in fields(cls))}")
            if key not in hints:
                raise UnknownName(f"key of '{NAME}'", key, hints)
            if (key, text) == ("nodes", "auto"):
                text = "none"
            values[key] = parse(text, hints[key], f"{NAME}:{key}")
        return cls(**values)


# Acceptance by rank and depth.


@dataclass(frozen=True)
class Acceptance:
    """Which of a drafter's candidates were the target's tokens.

    Attributes:
        ranks: [M, D] of the target's token at each depth below each root, `MISSED` or `UNKNOWN`.
        width: K.
    """

    ranks: Ints
    width: int

    @property
    def reached(self) -> Bools:
        """[M, D] whether a tree could have come so far, and it is known what the target says there."""
        before = np.concatenate((np.ones((len(self.ranks), 1), np.bool_), self.ranks[:, :-1] >= 0), axis=1)
        reached: Bools = np.logical_and.accumulate(before, axis=1) & (self.ranks != UNKNOWN)
        return reached

    @property
    def places(self) -> Ints:
        """[D] how many places each depth's rates are taken over."""
        places: Ints = self.reached.sum(axis=0)
        return places

    @property
    def table(self) -> Floats:
        """[D, K] a: how often the target's token was of each rank, where all before it were candidates."""
        hits = (self.ranks[..., None] == np.arange(self.width)) & self.reached[..., None]
        rates: Floats = hits.sum(axis=0) / np.maximum(self.places, 1)[:, None]
        return rates


@dataclass(frozen=True)
class Driven:
    """Ranks below every token of some texts.

    Attributes:
        texts: of each text [tokens, D] the ranks below each of its roots in order, see `Acceptance`.
        width: K.
    """

    texts: Sequence[Ints]
    width: int

    @property
    def everywhere(self) -> Acceptance:
        """With all tokens as roots."""
        return Acceptance(np.concatenate(self.texts), self.width)

    def decoded(self, paths: Paths) -> tuple[Acceptance, float]:
        """Decodes along the texts with a tree: the acceptance at the roots this leads to, and τ, tokens by steps."""
        nodes, roots, tokens = set(paths), [], 0
        for text in self.texts:
            at, lines = 0, text.tolist()
            while at < len(lines):
                line = tuple(lines[at])
                length = 1 + next((d for d in range(len(line)) if line[: d + 1] not in nodes), len(line))
                roots.append(line)
                tokens += min(length, len(lines) - at)
                at += length
        return Acceptance(np.array(roots, np.int64), self.width), tokens / len(roots)


def drive(target: Target, drafter: Drafter[Any], texts: Sequence[Text], depth: int, width: int) -> Driven:
    """Looks up the target's greedy choices along texts among a drafter's candidates.

    Below every token the text's next ones are drafted as a chain, so that the drafter sees what it sees in decoding where
    they were accepted. One of them is committed then.

    Args:
        target: verifies every chain, as in decoding.
        drafter: is asked for `width` candidates after every token of it.
        texts: all in one batch.
        depth: D.
        width: K.

    Returns:
        The ranks below all tokens of the answers but the last. Below one that is not the target's choice nothing is known.

    Raises:
        NotANumber: the target's logits are not finite.
    """
    found: list[list[Ints]] = [[] for _ in texts]
    for block in replay(target, drafter, texts, width, depth, step=1):
        for row, line in zip(block.tree.row[: block.tree.roots].tolist(), _compared(block, depth), strict=True):
            found[row].append(line)
    return Driven([np.stack(lines) for lines in found], width)


def _compared(block: Block, depths: int) -> Ints:
    """[live rows, D] the ranks of the target's choices."""
    live, chosen = block.tree.row[: block.tree.roots], block.logits.argmax(-1).cpu().numpy()
    found, follows = np.full((len(live), depths), UNKNOWN), np.ones(len(live), np.bool_)
    for depth, (nodes, candidates) in enumerate(block.asked):
        chain, choice = np.searchsorted(live, block.tree.row[nodes]), chosen[nodes]
        hit = (candidates.tokens == choice[:, None]) & np.isfinite(candidates.log_q)
        rank = np.where(hit.any(axis=1), hit.argmax(axis=1), MISSED)
        found[chain, depth] = np.where(follows[chain], rank, UNKNOWN)
        follows[chain] &= choice == block.following(nodes)
    return found


# The search.


def expected(paths: Paths, table: Floats) -> float:
    """τ under the product model: 1 + Σ over nodes of Π a[d, r] along their paths."""
    return 1.0 + sum(float(np.prod([table[d, r] for d, r in enumerate(path)])) for path in paths)


def greedy(table: Floats, nodes: int) -> Paths:
    """Medusa's search (section 2.3.3): again and again the node with the largest product is added.

    Args:
        table: [D, K] a.
        nodes: N.

    Returns:
        At most N paths, in the order they were added, so that the first n are the tree of n nodes. Of equal products the
        shorter path comes first, then the lower ranks. What is never accepted is left out.
    """
    found: list[Ranks] = []
    heap: list[tuple[float, int, Ranks]] = []

    def offer(path: Ranks, product: float) -> None:
        if len(path) < len(table):
            for rank, a in enumerate(table[len(path)].tolist()):
                if product * a > 0:
                    heapq.heappush(heap, (-product * a, len(path) + 1, (*path, rank)))

    offer((), 1.0)
    while heap and len(found) < nodes:
        product, _, path = heapq.heappop(heap)
        found.append(path)
        offer(path, -product)
    return tuple(found)


@dataclass(frozen=True)
class Forests:
    """The dynamic programme of Sequoia (section 3.1), with acceptances that depend on depth.

    Let V(δ, n) be the most accepted tokens that at most n nodes below an accepted node of depth δ can be expected to give,
    and B(δ, k, n) the same where only the ranks below k may be that node's children. The child of rank k − 1 has a subtree
    of m nodes, itself included, or is left out (m = 0):

        B(δ, 0, n) = 0
        B(δ, k, n) = max( B(δ, k−1, n),  max_{1 ≤ m ≤ n} a[δ+1, k−1] · (1 + V(δ+1, m−1)) + B(δ, k−1, n−m) )
        V(δ, n)    = B(δ, K, n) for δ < D,  V(D, n) = 0

    and τ = 1 + V(0, n). Sequoia's state is size, height and branches of a subtree; here the depth of its root takes the
    place of its height, as a depends on it and D − δ is the height that is left. O(D·K·N²), each (δ, k) at once.

    Attributes:
        values: [N + 1] V(0, n).
        sizes: [D, K + 1, N + 1] the m that attains B(δ, k, n), the smallest of several.
    """

    values: Floats
    sizes: Ints

    @classmethod
    def planned(cls, table: Floats, nodes: int) -> Self:
        """Solves it for a table [D, K] and all sizes up to N."""
        depths, width = table.shape
        sizes = np.zeros((depths, width + 1, nodes + 1), np.int64)
        left = np.arange(nodes + 1)[:, None] - np.arange(1, nodes + 1)  # [n, m − 1]
        values = np.zeros(nodes + 1)
        for depth in reversed(range(depths)):
            below, values = values[:-1], np.zeros(nodes + 1)
            for k, a in enumerate(table[depth].tolist(), 1):
                gains = np.where(left >= 0, a * (1 + below) + values[left], -np.inf)
                best = gains.argmax(axis=1)
                gain = gains[np.arange(nodes + 1), best]
                taken = gain > values
                sizes[depth, k], values = np.where(taken, best + 1, 0), np.where(taken, gain, values)
        return cls(values, sizes)

    def tree(self, nodes: int) -> Paths:
        """The best tree of at most so many nodes; what is never accepted is left out."""
        return tuple(sorted(self._below((), nodes), key=lambda path: (len(path), path)))

    def _below(self, path: Ranks, nodes: int) -> Iterator[Ranks]:
        if len(path) == len(self.sizes):
            return
        for rank in reversed(range(self.sizes.shape[1] - 1)):
            if size := int(self.sizes[len(path), rank + 1, nodes]):
                nodes -= size
                yield (*path, rank)
                yield from self._below((*path, rank), size - 1)


def searched(search: str, table: Floats, most: int) -> Callable[[int], Paths]:
    """From a number of nodes up to `most` to the best tree."""
    if search == "sequoia":
        return Forests.planned(table, most).tree
    order = greedy(table, most)
    return lambda nodes: order[:nodes]


# The size.


@dataclass(frozen=True)
class Plan:
    """A tree and what is expected of it.

    Attributes:
        paths: its nodes.
        tau: tokens a step under the product model.
        speedup: predicted over plain decoding, at one row: τ · sₜ(1) / (Σ_layers sₐ(nodes with children) + sₜ(1 + n) + commit).
    """

    paths: Paths
    tau: float
    speedup: float

    @classmethod
    def of(cls, paths: Paths, table: Floats, costs: Costs) -> Self:
        """What is expected of some paths."""
        tau = expected(paths, table)
        return cls(paths, tau, tau * costs.target_seconds(1) / seconds(paths, costs))

    @property
    def depth(self) -> int:
        """Of its deepest node."""
        return max(map(len, self.paths), default=0)


def seconds(paths: Paths, costs: Costs) -> float:
    """What one step with a tree costs: a draft step for every layer that has children below it, pass and commit."""
    layers = Counter(map(len, {path[:-1] for path in paths}))
    return costs.step(Work(tuple(layers[d] for d in sorted(layers)), 1 + len(paths), 1, costs.context))


def fastest(search: str, table: Floats, costs: Costs, most: int = MOST) -> Plan:
    """The tree with the most expected tokens per second, of all depths and sizes; of equal ones the shallowest and smallest.

    Raises:
        UserError: nothing was ever accepted.
    """
    plans = []
    for depth in range(1, len(table) + 1):
        tree = searched(search, table[:depth], most)
        plans += [Plan.of(paths, table, costs) for n in range(1, most + 1) if (paths := tree(n))]
    return max(plans, key=lambda plan: plan.speedup, default=None) or _nothing()


def settled(driven: Driven, choose: Callable[[Floats], Plan], costs: Costs) -> tuple[Plan, Acceptance, float]:
    """The best of the trees found one after the other, each for the roots that decoding with the one before it leads to.

    Args:
        driven: the texts.
        choose: a tree for a table [D, K].
        costs: that the trees are compared by.

    Returns:
        The tree, with what is expected of it at its own roots; the acceptance there; τ of decoding along the texts.
    """
    seen, tried = driven.everywhere, dict[Paths, tuple[Plan, Acceptance, float]]()
    for _ in range(ROUNDS):
        paths = choose(seen.table).paths if seen.table.any() else ()
        if not paths or paths in tried:
            break
        seen, tau = driven.decoded(paths)
        tried[paths] = Plan.of(paths, seen.table, costs), seen, tau
    return max(tried.values(), key=lambda found: found[2] * found[0].speedup / found[0].tau)


def _nothing() -> typing.NoReturn:
    raise UserError("static: none of the drafter's candidates was the target's token: it does not fit this target or data")


def written(settings: Settings, driven: Driven, costs: Costs) -> dict[str, Any]:
    """What goes into the file: the tree, and what it was made from.

    Raises:
        UserError: nothing was ever accepted.
    """
    search, nodes = settings.search, settings.nodes
    if nodes is None:
        choose = lambda table: fastest(search, table, costs)
    else:
        choose = lambda table: Plan.of(searched(search, table, nodes)(nodes), table, costs)
    if not driven.everywhere.table.any():
        _nothing()
    plan, seen, tau = settled(driven, choose, costs)
    grow = searched(search, seen.table, max(SIZES))
    sizes = [Plan.of(paths, driven.decoded(paths)[0].table, costs) for paths in map(grow, SIZES)]  # each at its own roots
    return {
        "paths": [list(path) for path in sorted(plan.paths, key=lambda path: (len(path), path))],
        "tau": plan.tau, "decoded_tau": tau, "nodes": len(plan.paths), "depth": plan.depth,
        "speedup": plan.speedup, "settings": asdict(settings) | {"nodes": nodes or "auto"},
        "sizes": [{"nodes": len(p.paths), "depth": p.depth, "tau": p.tau, "speedup": p.speedup} for p in sizes],
        "places": seen.places.tolist(), "acceptance": np.round(seen.table, 6).tolist(), "costs": asdict(costs),
    }  # fmt: skip


def prompts_of(files: Sequence[Path], target: Target, settings: Settings) -> list[list[int]]:
    """Some of the data's prompts that leave room for an answer, spread evenly.

    Raises:
        UserError: there is none.
    """
    read = [row for path in files for row in rows.rows(path)]
    room = target.decoder.context - settings.tokens
    found = [ids for row, where in spread(read, settings.prompts) if 0 < len(ids := _prompt(row, where, target)) <= room]
    if not found:
        names = ", ".join(map(str, files))
        raise UserError(f"no prompt in {names} fits the target's context with {settings.tokens} new tokens")
    return sorted(found, key=len)  # rows of one batch are of one length


def _prompt(row: rows.Row, where: str, target: Target) -> list[int]:
    """The chat up to its last response, the prompt of a completion, or the beginning of a text; may be empty."""
    chat = rows.messages(row, where)
    if chat is not None:
        responses = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        before = chat if not chat or chat[-1]["role"] != "assistant" else chat[: responses[-1]]
        return encode(target.tokenizer, before) if before else []
    if rows.completes(row):
        return encode(target.tokenizer, str(row["prompt"]))
    ids = encode(target.tokenizer, str(row["text"]))[:WINDOW]
    return ids[: (len(ids) + 3) // 4]


def texts_of(files: Sequence[Path], target: Target, settings: Settings) -> list[Text]:
    found = [text for path in files for text in driven.read(target, path, settings.prompts, settings.tokens)]
    return sorted(spread(found, settings.prompts), key=lambda text: len(text.tokens))
