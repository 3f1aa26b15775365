"""Records of the steps of one text: verified trees, accepted tokens and figures."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftree.request import Emitted, Origin
from draftree.viewer.token_text import Spellings

NodeKind = Literal["root", "accepted", "rejected", "bonus"]
SIGNS: dict[NodeKind, str] = {"root": "", "accepted": "✓ ", "rejected": "", "bonus": "⇒ "}
"""Signs that are shown before a token, so that its kind is visible without colours."""


@dataclass(frozen=True)
class Node:
    """Store one token of a step's draft tree for display.

    Attributes:
        token: token id.
        text: readable text of the token, on one line.
        parent: index of the parent among the step's nodes, −1 for the root.
        depth: distance from the root in tokens.
        q: probability that the drafter gives to the token after its path; 1 for the root.
        value: value by which the policy ranks nodes, as a probability; for most policies the
            product of q along the path.
        entropy: entropy in nats of the distribution from which the token was drawn; None if the
            policy did not request it.
        rank: number among its siblings in the order of drafting, from 1; 0 for the root and the
            bonus token, which were not drafted.
        accepted: whether the target accepted the token; false for the root, which was generated
            before.
    """

    token: int
    text: str
    parent: int
    depth: int
    q: float
    value: float
    entropy: float | None
    rank: int
    accepted: bool

    @property
    def kind(self) -> NodeKind:
        """Return the kind of the node; `bonus` is the target's token after the accepted path."""
        if self.rank:
            return "accepted" if self.accepted else "rejected"
        return "root" if self.parent < 0 else "bonus"


@dataclass(frozen=True)
class Step:
    """Store the verification of one draft tree, or the prefill, for display.

    Attributes:
        number: number of the step; 0 for the prefill.
        tokens: new tokens of the text, without those cut at its end.
        origins: origin of each new token.
        pieces: text that each new token adds. A token that ends within a character adds nothing
            until the character is complete.
        nodes: nodes of the verified tree, beginning with the root, with parents before children.
        bonus: id and text of the token that the target chose; None if the text ends before it.
    """

    number: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    pieces: tuple[str, ...]
    nodes: tuple[Node, ...]
    bonus: tuple[int, str] | None

    @property
    def accepted(self) -> int:
        """Return the number of accepted draft nodes, including those cut at the end of the text."""
        return sum(n.accepted for n in self.nodes)

    @property
    def depth(self) -> int:
        """Return the depth of the tree."""
        return max(n.depth for n in self.nodes)

    @property
    def head(self) -> str:
        """Return one line with the step's number, tokens, nodes and depth."""
        if self.number == 0:
            return "the prompt's forward · 1 token"
        cut = (
            f" · the text ends after {len(self.tokens)} of them"
            if len(self.tokens) <= self.accepted
            else ""
        )
        nodes = len(self.nodes) - 1
        return (
            f"step {self.number} · {self.accepted + 1} token{'s' * (self.accepted > 0)} · "
            f"{nodes} node{'s' * (nodes != 1)}, depth {self.depth}{cut}"
        )

    @property
    def items(self) -> list[Node]:
        """Return the nodes in their order, followed by the bonus token.

        The bonus token is the last child of the last accepted node.
        """
        if self.bonus is None:
            return list(self.nodes)
        last = max((i for i, n in enumerate(self.nodes) if n.accepted), default=0)
        return [
            *self.nodes,
            Node(*self.bonus, last, self.nodes[last].depth + 1, 1.0, 1.0, None, 0, False),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the step as a dictionary of plain values, for other programs."""
        bonus = (
            None if self.bonus is None else dict(zip(("token", "text"), self.bonus, strict=True))
        )
        return {
            "step": self.number,
            "tokens": list(self.tokens),
            "origins": list(self.origins),
            "accepted": self.accepted,
            "bonus": bonus,
            "nodes": [asdict(n) for n in self.nodes],
        }


class Watch:
    """Record the steps of a text while it is generated.

    Args:
        tokenizer: tokenizer of the target.
        draw: function that is called with each step as soon as it is recorded.

    Attributes:
        steps: recorded steps so far, beginning with the prefill.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, draw: Callable[[Step], None] | None = None
    ) -> None:
        self.steps: list[Step] = []
        self._spellings, self._draw = Spellings(tokenizer), draw
        self._decoder = codecs.getincrementaldecoder("utf-8")(
            "replace"
        )  # characters are spread over tokens

    def __call__(self, events: list[Emitted]) -> None:
        """Record the events of the first sequence of a batch."""
        for event in (e for e in events if e.row == 0):
            self.note(event)

    def note(self, event: Emitted) -> Step:
        """Record an event of any sequence, and return it as a step."""
        self.steps.append(self._step(event))
        if self._draw is not None:
            self._draw(self.steps[-1])
        return self.steps[-1]

    def _step(self, event: Emitted) -> Step:
        whole = len(event.tokens) > len(event.path)
        bonus = (event.tokens[-1], self._spellings.text(event.tokens[-1])) if whole else None
        pieces = tuple(self._piece(t) for t in event.tokens)
        return Step(
            len(self.steps),
            tuple(event.tokens),
            tuple(event.origins),
            pieces,
            self._nodes(event),
            bonus,
        )

    def _piece(self, token: int) -> str:
        special = token in self._spellings.special
        return (
            self._spellings.text(token)
            if special
            else self._decoder.decode(self._spellings.data(token))
        )

    def _nodes(self, event: Emitted) -> tuple[Node, ...]:
        tree, mine = event.tree, event.tree.of_row(event.row)
        place, accepted = {int(n): i for i, n in enumerate(mine)}, set(event.path.tolist())
        q, value = np.exp(tree.log_q), np.exp(np.minimum(tree.score, 0.0))
        children, found = dict[int, int](), list[Node]()
        for n in mine.tolist():
            parent = place.get(int(tree.parents[n]), -1)
            children[parent] = rank = children.get(parent, 0) + (parent >= 0)
            entropy = float(tree.entropy[n]) or None
            about = int(tree.depth[n]), float(q[n]), float(value[n]), entropy, rank, n in accepted
            found.append(
                Node(int(tree.tokens[n]), self._spellings.text(int(tree.tokens[n])), parent, *about)
            )
        return tuple(found)


def children(items: Sequence[Node]) -> list[list[int]]:
    """Return the indices of each node's children, in the order of drafting."""
    found: list[list[int]] = [[] for _ in items]
    for i, item in enumerate(items):
        if item.parent >= 0:
            found[item.parent].append(i)
    return found


def totals(steps: Sequence[Step]) -> str:
    """Return one line with the acceptance length τ, nodes and depth per step, steps and tokens."""
    verified = [s for s in steps if s.number]
    written = sum(len(s.tokens) for s in steps)
    tokens = f"{written} token{'s' * (written > 1)}"
    if not verified:
        return f"{tokens}, no step"
    count = f"{len(verified)} step{'s' * (len(verified) > 1)}"
    return (
        f"τ {fmean(s.accepted + 1 for s in verified):.2f} · {tokens} in {count} and the prompt's forward · "
        f"{fmean(len(s.nodes) - 1 for s in verified):.1f} nodes, depth {fmean(s.depth for s in verified):.1f} a step"
    )


def describe_run(about: Mapping[str, str]) -> str:
    """Return one line with all entries of `about` except the prompt."""
    return " · ".join(f"{name} {what}" for name, what in about.items() if name != "prompt")
