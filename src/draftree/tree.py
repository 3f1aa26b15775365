"""Draft trees of a batch: nodes, candidates, node limits and accept results.

Shapes: R rows (sequences), N nodes of all rows, F frontier nodes, K candidates, V vocabulary, E
rows of full draft distributions. Tree arithmetic is on the host (numpy): trees have tens of nodes,
and policies decide in Python which of them to expand. Trees whose shape is known beforehand may
grow on a GPU, and are copied to the host later (`policies/_device_growth.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftree.kernels.entropy import entropies
from draftree.kernels.tree_ops import kept, paths, shallow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
MAX_NODES = 512
"""Largest number of drafted nodes of a sequence in one step, whatever the policy."""
ENTROPY_TOP = 1000
"""M, the likeliest tokens of a distribution that its entropy is taken over (C2T, section 4.1: M =
1,000)."""


class Draw(Enum):
    """The ways to draw candidates from the draft distribution q."""

    POINT = "point"
    """A deterministic function of the prefix (top-k, retrieval)."""
    WITH_REPLACEMENT = "with-replacement"
    """Independent samples of q (SpecInfer)."""
    WITHOUT_REPLACEMENT = "without-replacement"
    """Samples of q that exclude the earlier siblings (EAGLE-1)."""
    COUPLED = "coupled"
    """The likeliest tokens by q combined with the noise of the target's own draw.

    If q = p, the first one is the token that the target will choose.
    """

    @property
    def sampled(self) -> bool:
        """Return whether candidates are draws of their own.

        An acceptor compares such candidates with their q.
        """
        return self in (Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT)


def absent(log_q: Tensor) -> Tensor:
    """Return log q [F, V] with −∞ in place of NaN, so that such tokens count as missing."""
    return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


@dataclass(frozen=True)
class Drafted:
    """A draft vocabulary within the target's.

    Attributes:
        ids: [V′] the target's ids, in ascending order.
        vocab: V, the size of the target's vocabulary.
    """

    ids: Tensor
    vocab: int

    def whole(self, logits: Tensor) -> Tensor:
        """Return […, V] of logits or log probabilities […, V′]; −∞ for tokens outside."""
        return logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf).index_copy(
            -1, self.ids, logits
        )

    @cached_property
    def numbers(self) -> Ints:
        """Return [V′] the ids on the host."""
        numbers: Ints = self.ids.cpu().numpy()
        return numbers

    @cached_property
    def places(self) -> Ints:
        """Return [V] the column of each token; −1 where it cannot be drafted."""
        found = np.full(self.vocab, -1)
        found[self.numbers] = np.arange(len(self.numbers))
        return found

    def columns(self, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens [M] can be drafted, as columns [m], and their logits.

        The logits [m, V′] are the corresponding ones of `logits` [M, V′].
        """
        column = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        there = self.ids[column] == tokens
        return column[there], logits[there]


@dataclass(frozen=True)
class Candidates:
    """A drafter's proposals after each frontier node.

    Attributes:
        tokens: [F, K] token ids; their order is draw order.
        log_q: [F, K] natural log of q(token | path); −∞ where there are fewer than K.
        logs: [F, V] the whole log q, or None for a drafter without one (retrieval); of a draft
            vocabulary [F, V′]. With `log_sums`, logits of a model.
        draw: how the tokens were drawn.
        source: which drafter proposed them, see `Tree.source`.
        sources: [F, K] of each, where they are of several drafters, fused.
        finite: whether what the drafter computed was numbers; after nodes where it was not, nothing
            is found.
        unconditioned: [F, V] log q as it was before it was conditioned on the target's noise, for
            coupled draws.
        confidence: [F] how probably a child is accepted, by a head of the drafter's that says so.
        drafted: the draft vocabulary that `logs` are of.
        log_sums: [F] float32 the log-sum-exp of logits, where `logs` are logits: most policies never
            read the whole log q. NaN where logits are not finite.
    """

    tokens: Ints
    log_q: Floats
    logs: Tensor | None = None
    draw: Draw = Draw.POINT
    source: int = 0
    sources: Ints | None = None
    finite: bool = True
    unconditioned: Tensor | None = None
    confidence: Floats | None = None
    drafted: Drafted | None = None
    log_sums: NDArray[np.float32] | None = None

    @cached_property
    def log_probs(self) -> Tensor | None:
        """Return [F, V] the whole log q, if there is one; −∞ for tokens that cannot be drafted."""
        whole = self.drafted_log_probs
        return whole if whole is None or self.drafted is None else self.drafted.whole(whole)

    @cached_property
    def drafted_log_probs(self) -> Tensor | None:
        """Return [F, V′] log q of the tokens that can be drafted, if there is one."""
        if self.logs is None or self.log_sums is None:
            return self.logs
        whole = self.logs.float() - torch.from_numpy(self.log_sums)[:, None]
        return absent(whole) if np.isnan(self.log_sums).any() else whole

    def log_of(self, tokens: Ints) -> Floats:
        """Return log q [F, K] of given tokens after each node; needs a drafter with a whole q."""
        assert self.logs is not None
        at = tokens if self.drafted is None else self.drafted.places[tokens]
        index = torch.from_numpy(np.maximum(at, 0)).to(self.logs.device)
        found = self.logs.gather(-1, index).cpu()
        if self.log_sums is not None:
            found = absent(found.float() - torch.from_numpy(self.log_sums)[:, None])
        return np.where(at < 0, -np.inf, found.double().numpy())

    @property
    def raw(self) -> "Candidates":
        """Return the same tokens with log q as it was before conditioning on the target's noise."""
        if self.unconditioned is None:
            return self
        own = replace(self, logs=self.unconditioned, unconditioned=None)
        return replace(own, log_q=np.where(self.log_q > -np.inf, own.log_of(self.tokens), -np.inf))

    @property
    def origin(self) -> Ints:
        """Return [F, K] the drafter of each, see `Tree.source`."""
        return np.full(self.tokens.shape, self.source) if self.sources is None else self.sources

    def last(self, nodes: int) -> "Candidates":
        """Return the candidates of the last `nodes` frontier nodes."""
        return self if nodes == len(self.tokens) else self._each(lambda column: column[-nodes:])

    def shared(self, which: Ints) -> "Candidates":
        """Return candidates for nodes that share lists: list `which[i]` for node i of [F]."""

        def spread(column: Any) -> Any:
            if isinstance(
                column, Tensor
            ):  # one list for all costs no memory, and layered policies request it so
                return (
                    column.expand(len(which), -1)
                    if len(column) == 1
                    else column[torch.from_numpy(which).to(column.device)]
                )
            return column[which]

        return self._each(spread)

    def _each(self, change: Callable[[Any], Any]) -> "Candidates":
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self,
            **{
                name: change(c) for name, c in columns.items() if isinstance(c, np.ndarray | Tensor)
            },
        )

    def entropy(self, top: int = ENTROPY_TOP) -> Floats:
        """Return the entropy [F] of q in nats over its `top` likeliest tokens.

        It is 0 without a distribution (C2T, section 4.1, eq. 3).
        """
        likeliest = self.drafted_log_probs
        if likeliest is None:
            return np.zeros(len(self.tokens))
        if likeliest.is_cpu:
            return entropies(likeliest.detach().float().contiguous().numpy(), top)
        if top < likeliest.shape[-1]:
            likeliest = likeliest.topk(top, dim=-1, sorted=False).values
        return np.asarray(
            torch.special.entr(likeliest.exp()).cpu().sum(-1, dtype=torch.float64).numpy()
        )


@dataclass(frozen=True)
class Below:
    """Candidates of all layers below some nodes of a tree.

    Attributes:
        nodes: [F] the parents, by their numbers in the tree that all candidates are appended to,
            node after node.
        rows: [F] the sequences of these nodes.
        candidates: [F, K].
        alone: whether the drafter has no other candidates, so that no model pass was saved.
    """

    nodes: Ints
    rows: Ints
    candidates: Candidates
    alone: bool = True


@dataclass(frozen=True)
class Tree:
    """Hold draft trees, one for each live row, topologically ordered and immutable.

    The first nodes are the roots (one for each row that is still generated); `parents[i] < i`
    everywhere else. While drafting, nodes are only appended to a tree, so that node numbers stay
    valid. Only `select` renumbers, and `number` keeps the earlier numbers.

    Attributes:
        tokens: [N] token ids.
        parents: [N] the parent's node number, −1 for a root.
        depth: [N] distance from the root.
        row: [N] the sequence of each node.
        log_q: [N] log q(token | path), 0 for a root.
        score: [N] what the policy ranks by; for most, the node's log value (the sum of log q along
            its path).
        source: [N] the drafter that proposed the node, −1 for a root and 0 for a single drafter.
            For fused drafters, source + 1 has a bit for each that proposed it: of two, 0 is the
            first, 1 the second, 2 both.
        entropy: [N] of the distribution a node was drawn from, in nats, where the policy requests
            it; else 0.
        number: [N] the node's number during drafting; drafters key their caches by it.
        q_row: [N] the row of `q` a node was drawn from, −1 where there is none.
        draw: how the nodes were drawn.
        q: [E, V] draft distributions of sampled draws, else None.
        whole: the tree that this one was first selected from, for learning from nodes that were
            drafted and not verified.
        notes: what the policy needs again together with the accept result.
    """

    tokens: Ints
    parents: Ints
    depth: Ints
    row: Ints
    log_q: Floats
    score: Floats
    source: Ints
    entropy: Floats
    number: Ints
    q_row: Ints
    draw: Draw = Draw.POINT
    q: Tensor | None = None
    whole: "Tree | None" = None
    notes: Any = None

    @classmethod
    def planted(cls, rows: Ints, tokens: Ints) -> "Tree":
        """Return bare roots: `tokens[i]` is the last token chosen in sequence `rows[i]`."""
        n = len(rows)
        minus = np.full(n, -1)
        zero = np.zeros(n, np.int64)
        nothing = np.zeros(n)
        return cls(tokens, minus, zero, rows, nothing, nothing, minus, nothing, np.arange(n), minus)

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.tokens)

    @cached_property
    def roots(self) -> int:
        """Return the number of roots; they are nodes 0 … roots − 1."""
        return int(np.count_nonzero(self.parents < 0))

    @property
    def drafted(self) -> int:
        """Return the number of nodes that are not roots (γ summed over rows)."""
        return len(self) - self.roots

    def append(
        self,
        parents: Ints,
        tokens: Ints,
        log_q: Floats,
        score: Floats,
        candidates: Candidates,
        q_row: Ints | None = None,
        q: Tensor | None = None,
        entropy: Floats | None = None,
        source: Ints | None = None,
    ) -> "Tree":
        """Return the tree with further nodes after the present ones, in the order given.

        Args:
            parents: [M] node numbers of this tree.
            tokens: [M] token ids.
            log_q: [M] log q(token | path of the parent).
            score: [M] the policy's ranking.
            candidates: where they come from (draw, source).
            q_row: [M] for sampled draws, the row of `q` each was drawn from.
            q: [E, V] all draft distributions so far, for sampled draws.
            entropy: [M] of the distribution each was drawn from.
            source: [M] which drafter proposed each, where it was not the same for all.
        """
        n, m = len(self), len(parents)
        return Tree(  # `replace` takes as long as all the rest
            tokens=np.concatenate((self.tokens, tokens)),
            parents=np.concatenate((self.parents, parents)),
            depth=np.concatenate((self.depth, self.depth[parents] + 1)),
            row=np.concatenate((self.row, self.row[parents])),
            log_q=np.concatenate((self.log_q, log_q)),
            score=np.concatenate((self.score, score)),
            source=np.concatenate(
                (self.source, np.full(m, candidates.source) if source is None else source)
            ),
            entropy=np.concatenate((self.entropy, np.zeros(m) if entropy is None else entropy)),
            number=np.concatenate((self.number, np.arange(n, n + m))),
            q_row=np.concatenate((self.q_row, np.full(m, -1) if q_row is None else q_row)),
            draw=candidates.draw,
            q=q,
        )

    def select(self, keep: Bools) -> "Tree":
        """Return the tree of the nodes marked in `keep` [N].

        Every root, and the parent of every kept node, must be among them.
        """
        whole, real, connected = kept(
            self.tokens,
            self.parents,
            self.depth,
            self.row,
            self.log_q,
            self.score,
            self.source,
            self.entropy,
            self.number,
            self.q_row,
            keep,
        )
        assert connected, "a kept node lost its parent"
        tokens, parents, depth, row, source, number, q_row = whole
        log_q, score, entropy = real
        return Tree(
            tokens,
            parents,
            depth,
            row,
            log_q,
            score,
            source,
            entropy,
            number,
            q_row,
            self.draw,
            self.q,
            self.whole or self,
            self.notes,
        )

    @cached_property
    def ancestors(self) -> Bools:
        """Return [N, N] True where node j is node i or one of its ancestors."""
        return paths(self.parents)

    def children(self, node: int) -> Ints:
        """Return the numbers of a node's children in sibling order, which is draw order."""
        return np.flatnonzero(self.parents == node)

    def path(self, node: int) -> Ints:
        """Return the node numbers from the root to `node`, both included."""
        return np.flatnonzero(self.ancestors[node])

    def of_row(self, row: int) -> Ints:
        """Return the node numbers of one sequence, the root first."""
        return np.flatnonzero(self.row == row)


@dataclass(frozen=True)
class Verdict:
    """The accept result: the path accepted below each root, and the bonus token after it.

    Attributes:
        paths: for each root the accepted drafted nodes in order, without the root.
        bonus: [roots] the token that the target chooses after each path.
        lossy: whether the acceptance rule may change the output distribution.
    """

    paths: tuple[Ints, ...]
    bonus: Ints
    lossy: bool = False

    @cached_property
    def nodes(self) -> Ints:
        """Return [A] the nodes that are committed: each root, and those accepted below it."""
        found = list[int]()
        for root, path in enumerate(self.paths):
            found.append(root)
            found += path.tolist()
        return np.array(found, np.int64)

    def kept(self, root: int) -> Ints:
        """Return the nodes that are committed: the root and those accepted below it."""
        return np.append(root, self.paths[root])


@dataclass(frozen=True)
class Room:
    """The budget of a step's trees.

    Attributes:
        depth: [R] the largest depth of a node of each sequence (new tokens left, end of the
            context, change of rope).
        nodes: largest number of drafted nodes of a sequence.
    """

    depth: Ints
    nodes: int

    def expandable(self, tree: Tree, nodes: Ints, deepest: float = np.inf) -> Ints:
        """Return the nodes that may have children; `deepest` is a further bound of depth."""
        return shallow(nodes, tree.depth, tree.row, self.depth, float(deepest))


def of_rows(tree: Tree, verdict: Verdict, rows: list[int]) -> tuple[Tree, Verdict]:
    """Return a verified tree with the given sequences only, and its accept result."""
    nodes, place = np.flatnonzero(np.isin(tree.row, rows)), np.full(len(tree) + 1, -1)
    place[nodes] = np.arange(len(nodes))
    columns = {f.name: getattr(tree, f.name) for f in fields(tree)}
    mine: dict[str, Any] = {
        name: column[nodes] for name, column in columns.items() if isinstance(column, np.ndarray)
    }
    mine["parents"] = place[mine["parents"]]  # that of a root is −1, and so is the last place
    roots = [root for root in range(tree.roots) if tree.row[root] in rows]
    paths = tuple(place[verdict.paths[root]] for root in roots)
    return replace(tree, **mine), replace(verdict, paths=paths, bonus=verdict.bonus[roots])
