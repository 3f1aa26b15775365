"""`draftree train static`: the best tree of fixed shape for a drafter, from its measured acceptance by rank and depth.

A static tree's node is a path of ranks (`policies.static`). Under the product model, a[d, r] being
the chance that the target's token at depth d is the drafter's candidate of rank r where all before
it were candidates too, a node is accepted with the product of a along its path, and the tree is
expected to give τ = 1 + Σ of these products tokens a step (Medusa, section 2.3.3; Sequoia, section
3.1, whose a does not depend on depth).

a is measured at the roots that decoding with the tree itself would have. Measured over all tokens
of a text it is too high: a step accepts many easy tokens at once and stops after the hard ones, so
that hard positions are roots more often.

Shapes: M roots, D depths, K ranks, R texts, N nodes at most.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from typing_extensions import override

from draftree.costs.cost_table import CostTable
from draftree.costs.step_costs import Costs
from draftree.data import readers
from draftree.data.prompts import encode
from draftree.drafters.base import Drafter
from draftree.errors import UserError
from draftree.evaluation import teacher_forcing
from draftree.evaluation.result_rows import save
from draftree.evaluation.target_trace import TokenText
from draftree.evaluation.teacher_forcing import ReplayStep, greedy_answers, replay, take_evenly
from draftree.measure_costs import reliable_costs
from draftree.target.target import Target
from draftree.training.base import Fitted, items
from draftree.tree import MAX_NODES, Bools, Floats, Ints
from draftree.tuning._static_tree_search import RankTree, Shape, fastest_tree, make_search
from draftree.tuning.base import Tuning
from draftree.utils.progress_callback import Tell
from draftree.utils.validated_dataclass import check_fields, knob, parse_options

ROUNDS = 6
"""Largest number of trees that are tried in `converge`."""
BATCH = 16
"""Number of texts that are generated, or read by the drafter, at a time."""
WINDOW = 512
"""Number of tokens that are read of a plain text; the first quarter of them is the prompt."""
MISSED, UNKNOWN = -1, -2
"""Values in place of a rank.

`MISSED` means that the target's token was not among the candidates, and `UNKNOWN` that the text
does not determine it.
"""
SHOWN = 6
"""Number of ranks that are columns of the printed table of acceptance."""
LISTED_SIZES = (8, 16, 32, 63, 128)
"""Numbers of nodes for which the result also lists the best tree's acceptance length τ."""


@dataclass(frozen=True)
class Settings:
    """The options of `train static`.

    Attributes:
        search: the algorithm that finds the tree; both are optimal under the product model.
        nodes: number of nodes of the tree, without the root; `auto` for the number that the cost
            model predicts to be fastest.
        depth: D, the largest depth of the tree.
        width: K, the number of ranks that are considered.
        tokens: largest number of tokens of an answer.
        prompts: number of prompts that the target answers, spread evenly over the data; or number
            of texts that are read.
        answers: whether the target generates answers to the prompts of the data. Otherwise the
            texts of the data are read unchanged.
    """

    search: Literal["greedy", "sequoia"] = "sequoia"
    nodes: int | Literal["auto"] = "auto"
    depth: int = knob(8, least=1)
    width: int = knob(10, least=1)
    tokens: int = knob(64, least=2)
    prompts: int = knob(200, least=1)
    answers: bool = True

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        check_fields(self, "static: ")
        full = min(
            MAX_NODES, sum(self.width**d for d in range(1, self.depth + 1))
        )  # no step verifies more
        if self.nodes != "auto" and not 1 <= self.nodes <= full:
            told = f"auto or 1 … {full}, with depth {self.depth} and width {self.width}"
            raise UserError(f"static: nodes is {self.nodes}, allowed is {told}")


# Acceptance by rank and depth.


@dataclass(frozen=True)
class Acceptance:
    """The ranks of the target's tokens among a drafter's candidates.

    Attributes:
        ranks: [M, D] the rank of the target's token at each depth below each root, or `MISSED` or
            `UNKNOWN`.
        width: K, the number of candidates.
    """

    ranks: Ints
    width: int

    @property
    def reachable(self) -> Bools:
        """Return [M, D] whether a tree could have reached each depth below each root.

        The target's choice at that depth must also be known.
        """
        before = np.concatenate(
            (np.ones((len(self.ranks), 1), np.bool_), self.ranks[:, :-1] >= 0), axis=1
        )
        reached: Bools = np.logical_and.accumulate(before, axis=1) & (self.ranks != UNKNOWN)
        return reached

    @property
    def places(self) -> Ints:
        """Return [D] the number of positions from which the rates of each depth are computed."""
        places: Ints = self.reachable.sum(axis=0)
        return places

    @property
    def table(self) -> Floats:
        """Return a [D, K], the rate at which the target's token had each rank, for each depth.

        A root counts at a depth if the tokens at all smaller depths were candidates.
        """
        hits = (self.ranks[..., None] == np.arange(self.width)) & self.reachable[..., None]
        rates: Floats = hits.sum(axis=0) / np.maximum(self.places, 1)[:, None]
        return rates


@dataclass(frozen=True)
class RankedTexts:
    """The ranks below every token of some texts.

    Attributes:
        texts: for each text, the ranks [tokens, D] below each of its tokens, see `Acceptance`.
        width: K, the number of candidates.
    """

    texts: Sequence[Ints]
    width: int

    @property
    def everywhere(self) -> Acceptance:
        """Return the ranks below all tokens of the texts; each token is one root."""
        return Acceptance(np.concatenate(self.texts), self.width)

    def simulate_decoding(self, paths: RankTree) -> tuple[Acceptance, float]:
        """Simulate decoding of the texts with a tree.

        Returns:
            The acceptance at the roots to which decoding leads, and the acceptance length τ, which
                is the
            number of tokens divided by the number of steps.
        """
        nodes = set(paths)
        roots = []
        tokens = 0
        for text in self.texts:
            at, lines = 0, text.tolist()
            while at < len(lines):
                line = tuple(lines[at])
                length = 1 + next(
                    (d for d in range(len(line)) if line[: d + 1] not in nodes), len(line)
                )
                roots.append(line)
                tokens += min(length, len(lines) - at)
                at += length
        return Acceptance(np.array(roots, np.int64), self.width), tokens / len(roots)


def rank_texts(
    target: Target, drafter: Drafter[Any], texts: Sequence[TokenText], depth: int, width: int
) -> RankedTexts:
    """Find the ranks of the target's greedy choices among a drafter's candidates, along texts.

    Below every token, the next tokens of the text are drafted as a chain. The drafter then reads
    the same tokens as in decoding if they had been accepted. One of them is committed before the
    next chain.

    Args:
        target: verifies every chain, as in decoding.
        drafter: proposes `width` candidates after every token of a chain.
        texts: the texts, which run in one batch.
        depth: D, the length of a chain.
        width: K, the number of candidates.

    Returns:
        The ranks below all tokens of the answers except the last. They are unknown below tokens
        that are not the target's choice.

    Raises:
        NotANumber: the target's logits are not finite.
    """
    found: list[list[Ints]] = [[] for _ in texts]
    for block in replay(target, drafter, texts, width, depth, step=1):
        for row, line in zip(
            block.tree.row[: block.tree.roots].tolist(),
            _ranks_of_choices(block, depth),
            strict=True,
        ):
            found[row].append(line)
    return RankedTexts([np.stack(lines) for lines in found], width)


def _ranks_of_choices(block: ReplayStep, depths: int) -> Ints:
    """Return the ranks of the target's greedy choices among the drafter's candidates.

    A rank is `MISSED` if the choice is not among the candidates. It is `UNKNOWN` after the end of a
    chain, and after a token of the chain that is not the target's choice.

    Args:
        block: a step of a replay.
        depths: D, the number of depths.

    Returns:
        [unfinished texts, D] for each chain, the rank of the choice at each depth below the root.
    """
    live, chosen = block.tree.row[: block.tree.roots], block.logits.argmax(-1).cpu().numpy()
    found, follows = np.full((len(live), depths), UNKNOWN), np.ones(len(live), np.bool_)
    for depth, (nodes, candidates) in enumerate(block.asked):
        chain, choice = np.searchsorted(live, block.tree.row[nodes]), chosen[nodes]
        hit = (candidates.tokens == choice[:, None]) & np.isfinite(candidates.log_q)
        rank = np.where(hit.any(axis=1), hit.argmax(axis=1), MISSED)
        found[chain, depth] = np.where(follows[chain], rank, UNKNOWN)
        follows[chain] &= choice == block.following(nodes)
    return found


# The tree.


def converge(
    driven: RankedTexts, choose: Callable[[Floats], Shape], costs: Costs
) -> tuple[Shape, Acceptance, float]:
    """Return the best of several trees, each chosen by the acceptance that the last one led to.

    Acceptance is measured at the roots to which decoding with a tree leads.

    Args:
        driven: the ranks along the texts.
        choose: returns a tree for a table [D, K] of acceptance.
        costs: the costs by which trees are compared.

    Returns:
        The tree with its expected τ and speed-up at its own roots; the acceptance at these roots;
        and the τ of simulated decoding of the texts.
    """
    seen, tried = driven.everywhere, dict[RankTree, tuple[Shape, Acceptance, float]]()
    for _ in range(ROUNDS):
        paths = choose(seen.table).paths if seen.table.any() else ()
        if not paths or paths in tried:
            break
        seen, tau = driven.simulate_decoding(paths)
        tried[paths] = Shape.of(paths, seen.table, costs), seen, tau
    return max(tried.values(), key=lambda found: found[2] * found[0].speedup / found[0].tau)


def tree_file(settings: Settings, driven: RankedTexts, costs: Costs) -> dict[str, Any]:
    """Return the content of the result file: the tree, and all values that it was made from.

    Raises:
        UserError: no candidate was ever accepted.
    """
    search, nodes = settings.search, settings.nodes
    if nodes == "auto":
        choose = lambda table: fastest_tree(search, table, costs)
    else:
        choose = lambda table: Shape.of(make_search(search, table, nodes)(nodes), table, costs)
    if not driven.everywhere.table.any():
        raise UserError(
            "static: none of the drafter's candidates was the target's token: it does not fit this target or data"
        )
    shape, seen, tau = converge(driven, choose, costs)
    grow = make_search(search, seen.table, max(LISTED_SIZES))
    sizes = [
        Shape.of(paths, driven.simulate_decoding(paths)[0].table, costs)
        for paths in map(grow, LISTED_SIZES)
    ]  # each at its own roots
    return {
        "paths": [list(path) for path in sorted(shape.paths, key=lambda path: (len(path), path))],
        "tau": shape.tau,
        "decoded_tau": tau,
        "nodes": len(shape.paths),
        "depth": shape.depth,
        "speedup": shape.speedup,
        "settings": asdict(settings),
        "sizes": [
            {"nodes": len(p.paths), "depth": p.depth, "tau": p.tau, "speedup": p.speedup}
            for p in sizes
        ],
        "places": seen.places.tolist(),
        "acceptance": np.round(seen.table, 6).tolist(),
        "costs": asdict(costs),
    }


def prompts_of(files: Sequence[Path], target: Target, settings: Settings) -> list[list[int]]:
    """Return prompts, spread evenly over the data, after which the context has room for an answer.

    Raises:
        UserError: there are none.
    """
    read = [row for path in files for row in readers.read_rows(path)]
    room = target.decoder.context - settings.tokens
    found = [
        ids
        for row, where in take_evenly(read, settings.prompts)
        if 0 < len(ids := _prompt(row, where, target)) <= room
    ]
    if not found:
        names = ", ".join(map(str, files))
        raise UserError(
            f"no prompt in {names} fits the target's context with {settings.tokens} new tokens"
        )
    return sorted(found, key=len)  # sequences of a batch should have similar lengths


def _prompt(row: readers.Row, where: str, target: Target) -> list[int]:
    """Return the prompt in a row of the data as token ids; it may be empty.

    It is a chat up to its last response, the prompt of a completion, or the beginning of a text.
    """
    chat = readers.messages(row, where)
    if chat is not None:
        responses = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        before = chat if not chat or chat[-1]["role"] != "assistant" else chat[: responses[-1]]
        return encode(target.tokenizer, before) if before else []
    if readers.is_completion_row(row):
        return encode(target.tokenizer, str(row["prompt"]))
    ids = encode(target.tokenizer, str(row["text"]))[:WINDOW]
    return ids[: (len(ids) + 3) // 4]


def format_result(said: dict[str, Any]) -> Fitted:
    """Return the result as figures, text and tables."""
    rates = [
        {
            "depth": str(d),
            "places": str(n),
            **{f"rank {r}": f"{a:.3f}" for r, a in enumerate(rates[:SHOWN])},
        }
        for d, (n, rates) in enumerate(zip(said["places"], said["acceptance"], strict=True), 1)
    ]
    sizes = [
        {
            "nodes": str(s["nodes"]),
            "expected τ": f"{s['tau']:.2f}",
            "predicted speed-up": f"{s['speedup']:.2f}",
        }
        for s in said["sizes"]
    ]
    told = (
        f"expected τ {said['tau']:.2f} (decoding along the data {said['decoded_tau']:.2f}), "
        f"{said['nodes']} nodes, depth {said['depth']}, predicted speed-up {said['speedup']:.2f}"
    )
    tables = {
        f"acceptance of {said['drafter']} by rank and depth": rates,
        "trees with the largest expected τ, by size": sizes,
    }
    return Fitted(
        said, [told + ("" if said["speedup"] > 1 else ": plain decoding is faster")], tables
    )


@dataclass(frozen=True)
class StaticTreeSearch(Tuning):
    """Finds the best tree of fixed shape for a drafter, and writes it as `static:paths=FILE` reads it.

    Attributes:
        drafter: the spec of the drafter for which the tree is searched.
        settings: the options of the search.
        costs: the costs by which trees are compared; measured by default.
    """

    options: ClassVar[frozenset[str]] = frozenset({"drafter", "costs"})
    resumes: ClassVar[bool] = False

    drafter: str
    settings: Settings = field(default_factory=Settings)
    costs: CostTable | None = None

    @classmethod
    @override
    def of(cls, spec: str, knobs: Sequence[str], options: Mapping[str, Any]) -> Self:
        costs = options.get("costs")
        settings = Settings(**parse_options(items(spec, knobs), Settings, "'static'"))
        return cls(options["drafter"], settings, None if costs is None else CostTable.load(costs))

    @override
    def check(self, out: Path) -> None:
        if out.exists():
            raise UserError(f"'{out}' exists, allowed is a new file")

    @override
    def tune(
        self, target: Target, drafter: Drafter[Any], data: Sequence[Path], out: Path, tell: Tell
    ) -> Fitted:
        texts = self._texts(target, data, tell)
        ranks = list[Ints]()
        for i in range(0, len(texts), BATCH):
            tell(i, "running the drafter on", len(texts))
            ranks += rank_texts(
                target, drafter, texts[i : i + BATCH], self.settings.depth, self.settings.width
            ).texts
        tell(len(texts), "measuring the cost of a step", len(texts))
        context = round(float(np.mean([(t.start + len(t.tokens)) / 2 for t in texts])))
        costs = (self.costs or reliable_costs(target, drafter)).at(context, 1)
        tell(len(texts), "searching", len(texts))
        about = {"target": target.name, "drafter": self.drafter, "data": list(map(str, data))}
        said = tree_file(self.settings, RankedTexts(ranks, self.settings.width), costs) | about
        save(said, out)
        return format_result(said)

    def _texts(self, target: Target, data: Sequence[Path], tell: Tell) -> list[TokenText]:
        """Return the texts along which the drafter is measured.

        They are the target's answers, or the texts of the data unchanged.
        """
        count = self.settings.prompts
        tokens = self.settings.tokens
        texts = list[TokenText]()
        if not self.settings.answers:
            texts += (
                text
                for path in data
                for text in teacher_forcing.read_texts(target, path, count, tokens)
            )
            return sorted(take_evenly(texts, count), key=lambda text: len(text.tokens))
        prompts = prompts_of(data, target, self.settings)
        for i in range(0, len(prompts), BATCH):
            tell(i, "answering", len(prompts))
            texts += greedy_answers(target, prompts[i : i + BATCH], tokens)
        if not texts:
            raise UserError(
                "the target answers every prompt with fewer than 2 tokens; answers=false reads the data as it is"
            )
        return texts
