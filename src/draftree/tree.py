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
from draftree.kernels.node_table import NodeTable, keep_nodes, paths, shallow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
MAX_NODES = 512
"""Largest number of drafted nodes of one sequence in one step, under any policy."""
ENTROPY_TOP = 1000
"""M, the number of most likely tokens over which an entropy is computed.

C2T, section 4.1: M = 1,000.
"""


class Draw(Enum):
    """The ways in which candidates are drawn from the draft distribution q."""

    POINT = "point"
    """The candidates are a deterministic function of the prefix (top-k, retrieval)."""
    WITH_REPLACEMENT = "with-replacement"
    """The candidates are independent samples of q (SpecInfer)."""
    WITHOUT_REPLACEMENT = "without-replacement"
    """Each candidate is a sample of q without the earlier siblings (EAGLE-1)."""
    COUPLED = "coupled"
    """The candidates have the largest log q plus noise, with the noise of the target's own draw.

    If q = p, the first candidate is the token that the target will choose.
    """

    @property
    def is_sampled(self) -> bool:
        """Return whether candidates are random samples, whose q an acceptor must know."""
        return self in (Draw.WITH_REPLACEMENT, Draw.WITHOUT_REPLACEMENT)


def mask_nan(log_q: Tensor) -> Tensor:
    """Return log q [F, V] with NaN replaced by −∞, so that such tokens count as missing."""
    return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf)


@dataclass(frozen=True)
class DraftVocab:
    """The tokens that a drafter with a reduced vocabulary can propose.

    Attributes:
        ids: [V′] the target's ids of these tokens, in ascending order.
        vocab: V, the size of the target's vocabulary.
    """

    ids: Tensor
    vocab: int

    def whole(self, logits: Tensor) -> Tensor:
        """Expand logits or log-probabilities […, V′] to […, V].

        Tokens that cannot be drafted get −∞.
        """
        return logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf).index_copy(
            -1, self.ids, logits
        )

    @cached_property
    def numbers(self) -> Ints:
        """Return `ids` [V′] as a numpy array on the host."""
        numbers: Ints = self.ids.cpu().numpy()
        return numbers

    @cached_property
    def places(self) -> Ints:
        """Return [V] the column of each target token in V′, −1 if the token cannot be drafted."""
        found = np.full(self.vocab, -1)
        found[self.numbers] = np.arange(len(self.numbers))
        return found

    def columns(self, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Drop the tokens [M] that cannot be drafted; return the columns and logits of the others.

        Args:
            tokens: [M] target token ids.
            logits: [M, V′] one row of draft logits for each token.

        Returns:
            The columns [m] of the m tokens that remain, and their rows of logits [m, V′].
        """
        column = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        there = self.ids[column] == tokens
        return column[there], logits[there]


@dataclass(frozen=True)
class Candidates:
    """The tokens that a drafter proposes after each frontier node.

    Attributes:
        tokens: [F, K] token ids, in the order in which they were drawn.
        log_q: [F, K] natural logarithm of q(token | path). It is −∞ in unused places, after a node
            with fewer than K candidates.
        logs: [F, V] log q of all tokens, or [F, V′] for a draft vocabulary. None for a drafter that
            computes no distribution (retrieval). If `log_sums` is given, `logs` are logits.
        draw: how the tokens were drawn.
        source: the number of the drafter that proposed them; see `Tree.source`.
        sources: [F, K] the number of the drafter of each token, if several drafters are fused.
        finite: False if the drafter computed values that are not finite. There are no candidates
            after the nodes concerned.
        unconditioned: [F, V] for coupled draws, log q before it was conditioned on the target's
            noise.
        confidence: [F] the probability that a child is accepted, predicted by a confidence head of
            the drafter.
        drafted: the draft vocabulary of `logs`; None if `logs` cover the target's vocabulary.
        log_sums: [F] float32, the log-sum-exp of each row of logits in `logs`; NaN for logits that
            are not finite. The logarithms are normalised only when read, because most policies
            never read them.
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
    drafted: DraftVocab | None = None
    log_sums: NDArray[np.float32] | None = None

    @cached_property
    def log_probs(self) -> Tensor | None:
        """Return [F, V] log q of all tokens, −∞ for those that cannot be drafted.

        Return None for a drafter without a distribution.
        """
        whole = self.drafted_log_probs
        return whole if whole is None or self.drafted is None else self.drafted.whole(whole)

    @cached_property
    def drafted_log_probs(self) -> Tensor | None:
        """Return [F, V′] log q of the tokens that can be drafted.

        Return None for a drafter without a distribution.
        """
        if self.logs is None or self.log_sums is None:
            return self.logs
        whole = self.logs.float() - torch.from_numpy(self.log_sums)[:, None]
        return mask_nan(whole) if np.isnan(self.log_sums).any() else whole

    def log_of(self, tokens: Ints) -> Floats:
        """Return log q [F, K] of the given tokens [F, K]; `logs` must be present."""
        assert self.logs is not None
        at = tokens if self.drafted is None else self.drafted.places[tokens]
        index = torch.from_numpy(np.maximum(at, 0)).to(self.logs.device)
        found = self.logs.gather(-1, index).cpu()
        if self.log_sums is not None:
            found = mask_nan(found.float() - torch.from_numpy(self.log_sums)[:, None])
        return np.where(at < 0, -np.inf, found.double().numpy())

    @property
    def raw(self) -> "Candidates":
        """Return the same tokens with their log q before conditioning on the target's noise."""
        if self.unconditioned is None:
            return self
        own = replace(self, logs=self.unconditioned, unconditioned=None)
        return replace(own, log_q=np.where(self.log_q > -np.inf, own.log_of(self.tokens), -np.inf))

    @property
    def origin(self) -> Ints:
        """Return [F, K] the number of the drafter of each token; see `Tree.source`."""
        return np.full(self.tokens.shape, self.source) if self.sources is None else self.sources

    def last(self, nodes: int) -> "Candidates":
        """Return the candidates of the last `nodes` frontier nodes."""
        return self if nodes == len(self.tokens) else self._each(lambda column: column[-nodes:])

    def share_lists(self, which: Ints) -> "Candidates":
        """Return candidates [F] for nodes that share lists: node i gets list number `which[i]`."""

        def expand_column(column: Any) -> Any:
            if isinstance(
                column, Tensor
            ):  # one list for all costs no memory, and layered policies request it so
                return (
                    column.expand(len(which), -1)
                    if len(column) == 1
                    else column[torch.from_numpy(which).to(column.device)]
                )
            return column[which]

        return self._each(expand_column)

    def _each(self, change: Callable[[Any], Any]) -> "Candidates":
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self,
            **{
                name: change(c) for name, c in columns.items() if isinstance(c, np.ndarray | Tensor)
            },
        )

    def entropy(self, top: int = ENTROPY_TOP) -> Floats:
        """Return the entropy [F] of q in nats over its `top` most likely tokens.

        It is 0 for a drafter without a distribution (C2T, section 4.1, eq. 3).
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
class SubtreeCandidates:
    """The candidates of all layers below certain nodes of a tree, found without a model pass.

    Attributes:
        nodes: [F] the parents, node after node. Their numbers count the candidates of this object
            as appended to the tree.
        rows: [F] the sequence of each parent.
        candidates: [F, K] the candidates after each parent.
        alone: whether the drafter has no other candidates, so that no model pass was saved.
    """

    nodes: Ints
    rows: Ints
    candidates: Candidates
    alone: bool = True


@dataclass(frozen=True)
class Tree:
    """The draft trees of all running sequences in one immutable, topologically sorted table.

    Drafting only appends nodes, so that node numbers stay valid. Only `select` renumbers the nodes,
    and the column `number` keeps their earlier numbers. Each column of `nodes` can be read as an
    attribute of the tree.

    Attributes:
        nodes: the columns of the N nodes.
        draw: how the nodes were drawn.
        q: [E, V] the draft distributions of sampled draws; None for other draws.
        whole: the tree before its first `select`. Policies learn from its nodes that were drafted
            but not verified.
        notes: data that the policy reads again when it gets the accept result.
    """

    nodes: NodeTable
    draw: Draw = Draw.POINT
    q: Tensor | None = None
    whole: "Tree | None" = None
    notes: Any = None

    @classmethod
    def from_roots(cls, rows: Ints, tokens: Ints) -> "Tree":
        """Return trees of roots only; root i is token `tokens[i]` of sequence `rows[i]`."""
        n = len(rows)
        minus = np.full(n, -1)
        zero = np.zeros(n, np.int64)
        nothing = np.zeros(n)
        numbers = np.arange(n)
        return cls(
            NodeTable(tokens, minus, zero, rows, nothing, nothing, minus, nothing, numbers, minus)
        )

    @property
    def tokens(self) -> Ints:
        """Return [N] token ids."""
        return self.nodes.tokens

    @property
    def parents(self) -> Ints:
        """Return [N] the node number of the parent of each node, −1 for a root."""
        return self.nodes.parents

    @property
    def depth(self) -> Ints:
        """Return [N] the distance of each node from its root."""
        return self.nodes.depth

    @property
    def row(self) -> Ints:
        """Return [N] the slot of each node's sequence."""
        return self.nodes.row

    @property
    def log_q(self) -> Floats:
        """Return [N] log q(token | path), 0 for a root."""
        return self.nodes.log_q

    @property
    def score(self) -> Floats:
        """Return [N] the value by which the policy ranks each node."""
        return self.nodes.score

    @property
    def source(self) -> Ints:
        """Return [N] the number of the drafter that proposed each node."""
        return self.nodes.source

    @property
    def entropy(self) -> Floats:
        """Return [N] the entropy of the distribution that each node was drawn from."""
        return self.nodes.entropy

    @property
    def number(self) -> Ints:
        """Return [N] the number of each node during drafting."""
        return self.nodes.number

    @property
    def q_row(self) -> Ints:
        """Return [N] the row of `q` that each node was drawn from, −1 for none."""
        return self.nodes.q_row

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.tokens)

    @cached_property
    def roots(self) -> int:
        """Return the number of roots; they are nodes 0 … roots − 1."""
        return int(np.count_nonzero(self.parents < 0))

    @property
    def drafted(self) -> int:
        """Return the number of nodes that are not roots (γ summed over the sequences)."""
        return len(self) - self.roots

    def append(
        self,
        parents: Ints,
        tokens: Ints,
        log_q: Floats,
        score: Floats,
        candidates: Candidates,
        drawn_from: Ints | None = None,
        entropy: Floats | None = None,
    ) -> "Tree":
        """Return the tree with further nodes appended in the given order.

        Args:
            parents: [M] node numbers in this tree.
            tokens: [M] token ids.
            log_q: [M] log q(token | path of the parent).
            score: [M] the values by which the policy ranks the nodes.
            candidates: the candidates that the nodes were taken from; `draw` and `source` are read.
            drawn_from: [M] for sampled draws, the row of `candidates` that each node was drawn
                from. Their distributions are then stored.
            entropy: [M] entropy in nats of the distribution that each node was drawn from.
        """
        n, m = len(self), len(parents)
        q, q_row = self.q, np.full(m, -1)
        if drawn_from is not None:
            q, first = self.q_after(candidates)
            q_row = first + drawn_from
        added = NodeTable(
            tokens,
            parents,
            self.depth[parents] + 1,
            self.row[parents],
            log_q,
            score,
            np.full(m, candidates.source),
            np.zeros(m) if entropy is None else entropy,
            np.arange(n, n + m),
            q_row,
        )
        nodes = NodeTable._make(map(np.concatenate, zip(self.nodes, added, strict=True)))
        return Tree(nodes, candidates.draw, q)

    def q_after(self, candidates: Candidates) -> tuple[Tensor | None, int]:
        """Return the draft distributions after candidates were appended, and the first new row.

        Only the distributions of sampled draws are stored, because an acceptor needs the whole q
        that each child was drawn from. For other draws the row is −1.
        """
        if not candidates.draw.is_sampled:
            return self.q, -1
        assert candidates.log_probs is not None
        q = candidates.log_probs.exp()
        return (q, 0) if self.q is None else (torch.cat((self.q, q)), len(self.q))

    def select(self, keep: Bools) -> "Tree":
        """Return the tree of the nodes marked in `keep` [N].

        `keep` must include every root and the parent of every kept node.
        """
        nodes, connected = keep_nodes(self.nodes, keep)
        assert connected, "a kept node lost its parent"
        return Tree(nodes, self.draw, self.q, self.whole or self, self.notes)

    @cached_property
    def ancestors(self) -> Bools:
        """Return [N, N] whether node j (column) is node i (row) or one of its ancestors."""
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
class AcceptResult:
    """The accept result: the accepted path below each root, and the bonus token after it.

    Attributes:
        paths: for each root, the accepted drafted nodes in order, without the root.
        bonus: [roots] the token that the target chooses after each path.
        lossy: whether the acceptance rule may change the output distribution.
    """

    paths: tuple[Ints, ...]
    bonus: Ints
    lossy: bool = False

    @cached_property
    def nodes(self) -> Ints:
        """Return [A] the nodes that are committed: each root and the accepted nodes below it."""
        found = list[int]()
        for root, path in enumerate(self.paths):
            found.append(root)
            found += path.tolist()
        return np.array(found, np.int64)

    @cached_property
    def _nodes_by_root(self) -> list[Ints]:
        return [np.concatenate(((root,), path)) for root, path in enumerate(self.paths)]

    def committed_nodes(self, root: int) -> Ints:
        """Return the committed nodes of one tree: the root and the accepted nodes below it."""
        return self._nodes_by_root[root]


@dataclass(frozen=True)
class TreeBudget:
    """The largest size of a step's trees.

    Attributes:
        depth: [R] the largest depth of a node in each sequence. It depends on the new tokens left,
            the end of the context, and a change of the rotary embedding.
        nodes: largest number of drafted nodes of one sequence.
    """

    depth: Ints
    nodes: int

    def expandable(self, tree: Tree, nodes: Ints, deepest: float = np.inf) -> Ints:
        """Return the node numbers, among the given ones, of the nodes that may have children.

        `deepest` is a further bound on the depth of nodes.
        """
        return shallow(nodes, tree.depth, tree.row, self.depth, float(deepest))


def of_rows(tree: Tree, verdict: AcceptResult, rows: list[int]) -> tuple[Tree, AcceptResult]:
    """Return the part of a verified tree and its accept result that belongs to some sequences.

    `rows` are the slots of these sequences.
    """
    nodes, place = np.flatnonzero(np.isin(tree.row, rows)), np.full(len(tree) + 1, -1)
    place[nodes] = np.arange(len(nodes))
    mine = NodeTable._make(column[nodes] for column in tree.nodes)
    # The parent of a root is −1, and so is the last element of `place`.
    mine = mine._replace(parents=place[mine.parents])
    roots = [root for root in range(tree.roots) if tree.row[root] in rows]
    paths = tuple(place[verdict.paths[root]] for root in roots)
    return replace(tree, nodes=mine), replace(verdict, paths=paths, bonus=verdict.bonus[roots])


def no_candidates(nodes: int, k: int) -> Candidates:
    """Return the candidates of nodes that have none."""
    return Candidates(np.zeros((nodes, k), np.int64), np.full((nodes, k), -np.inf))
