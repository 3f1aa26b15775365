"""Fake targets and drafters with known behaviour.

Shapes: R rows, N nodes, F frontier nodes, K candidates, V vocabulary, C context, S slots, n tokens
a row in one pass.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from draftree.drafters.base import Drafter, select_slots
from draftree.drafters.retrieval.text_drafter import NO_TEXT, Texts, extend_texts, truncate_texts
from draftree.models.causal_lm import CausalLM
from draftree.models.graph_capture import Capture, EagerCapture, OutputTensors
from draftree.models.kv_cache import SlotCache
from draftree.sampling.draft_sampling import Drawing, draw_candidates
from draftree.sampling.keyed_noise import RandomSource
from draftree.target.device_tree import Choose, Layers, Nodes
from draftree.target.kernel_choice import choose_kernels
from draftree.target.load_options import Loading
from draftree.target.target import HiddenStates, HiddenStateSpec, Probes, Target
from draftree.tree import AcceptResult, Candidates, Draw, Ints, Tree, mask_nan

CPU = torch.device("cpu")


def tiny_target(
    context: int = 40,
    seed: int = 1,
    capture: Capture = EagerCapture(),
    compiled: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Target:
    """Return a Llama with random weights, 4 layers and a vocabulary of 61 tokens.

    The differences between its logits are large enough that ties do not occur.

    Args:
        context: number of positions.
        seed: seed of the weights.
        capture: object that runs the passes over draft trees, either eagerly or recorded.
        compiled: whether the layers run native kernels; otherwise they run torch with float64
            weights.
        device: device of the model.
        dtype: dtype of the weights of compiled layers.
    """
    width = 32 if compiled else 8
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=4 * width,
        intermediate_size=64 if compiled else 48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2 if compiled else 0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config).requires_grad_(False)
    if not compiled:
        return Target(CausalLM(model.double().to(device), capture=capture), "tiny")
    decoder = CausalLM(model.to(device, dtype), capture=capture)
    choose_kernels(decoder, Loading(compile=True))
    return Target(decoder, "tiny")


class PassRecorder:
    """Record passes and repeat them on the CPU, with the restrictions of CUDA graphs.

    A repeated pass runs the recorded work. Values that the host has computed since then have no
    effect.

    Attributes:
        recorded: number of recorded passes.
        launched: number of repeated passes.
    """

    def __init__(self) -> None:
        self.recorded = self.launched = 0

    def __call__(
        self, work: Callable[[], OutputTensors]
    ) -> tuple[Callable[[], None], OutputTensors]:
        """Record work; return a function that repeats it, and its results; see `RecordFunction`."""
        lying = work()
        self.recorded += 1

        def replay() -> None:
            self.launched += 1
            for to, made in zip(lying, work(), strict=True):
                to.copy_(made)

        return replay, lying


@final
class TableModel(PreTrainedModel):
    """Give p(next | last two tokens) from a table, as a transformers model with a cache.

    Its only layer stores the id and the position of each token, and finds the preceding token
    through the attention mask. A token gets NaN as logits if it does not see exactly one token at
    each position up to its own. So a wrong mask, position or cache slot is always noticed.

    Args:
        table: [V + 1, V, V] probability of each token (last axis) after the token before the last
            (first axis) and the last token (second axis). Row V is for a last token without a token
            before it.
        context: number of positions C.
    """

    config_class = LlamaConfig

    def __init__(self, table: Tensor, context: int) -> None:
        vocab = table.shape[-1]
        super().__init__(
            LlamaConfig(vocab_size=vocab, num_hidden_layers=1, max_position_embeddings=context)
        )
        self.lm_head = nn.Linear(table[..., 0].numel(), vocab, bias=False, dtype=torch.float64)
        self.lm_head.weight.data = table.double().reshape(-1, vocab).log().T.contiguous()

    @override
    def get_output_embeddings(self) -> nn.Linear:
        head: nn.Linear = self.lm_head
        return head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: Cache,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutputWithPast:
        """Return the logits [R, n, V], or [R, kept, V] of the tokens in `logits_to_keep`."""
        vocab, context = self.config.vocab_size, self.config.max_position_embeddings
        stored = torch.stack((input_ids, position_ids), dim=-1)[:, None].to(self.dtype)
        keys, _ = past_key_values.update(stored, stored, 0)
        tokens, places = keys[:, 0, :, 0], keys[:, 0, :, 1]
        sees = (attention_mask[:, 0] == 0).to(self.dtype)  # [R, n, S]
        count = sees @ nn.functional.one_hot(places.long().clamp(max=context), context + 1).to(
            self.dtype
        )  # [R, n, C + 1]
        path = torch.arange(context + 1) <= position_ids[..., None]
        before = ((sees * (places[:, None] == position_ids[..., None] - 1)) @ tokens[..., None])[
            ..., 0
        ].long()
        before = torch.where(position_ids == 0, vocab, before.clamp(0, vocab - 1))
        logits = self.lm_head.weight.T[before * vocab + input_ids]
        logits = torch.where((count == path).all(-1, keepdim=True), logits, torch.nan)
        return CausalLMOutputWithPast(
            logits=logits[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else logits
        )


def table_target(table: Tensor, context: int = 16) -> Target:
    """Return a target all of whose distributions are known; see `TableModel`.

    Args:
        table: [V + 1, V, V] probabilities, see `TableModel`.
        context: number of positions.
    """
    return Target(CausalLM(TableModel(table, context)), "table")


def random_table(vocab: int, seed: int) -> Tensor:
    """Return a table [V + 1, V, V] of random distributions.

    In one of the distributions a token has probability 0.
    """
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(vocab + 1, vocab, vocab)))
    logits[0, 0, -1] = -torch.inf
    return torch.softmax(1.5 * logits, dim=-1)


@final
class TableDrafter(Drafter[None]):
    """Draft from a table of distributions.

    Args:
        q: [V, V] probability of each token (second axis) after the last token (first axis).
        chance: source of random draws, so that a test can enumerate all outcomes; by default the
            request's noise.
    """

    def __init__(self, q: Tensor, chance: RandomSource | None = None) -> None:
        self._log_q, self._chance = q.double().log(), chance

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: None = None,
        rows: Ints | None = None,
    ) -> None:
        return None

    @override
    def expand(
        self, state: None, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, None]:
        log_q = self._log_q[torch.from_numpy(tree.tokens[frontier])]
        if self._chance is None or not drawing.kind.is_sampled:
            return draw_candidates(
                log_q, k, drawing, tree.row[frontier], tree.depth[frontier]
            ), None
        q = mask_nan(drawing.log_q(log_q, tree.row[frontier]))
        return self._branch(
            self._chance, q, min(k, log_q.shape[1]), drawing.kind, tree, frontier
        ), None

    def _branch(
        self, chance: RandomSource, log_q: Tensor, k: int, kind: Draw, tree: Tree, frontier: Ints
    ) -> Candidates:
        nowhere = np.argmin(log_q.numpy(), axis=1)
        tokens = np.tile(nowhere[:, None], k)
        for i, node in enumerate(frontier):
            left = log_q[i].exp()
            for j in range(k):
                if (
                    left.sum() > 0
                ):  # else nothing is left to be drawn, and a token of probability 0 is no candidate
                    tokens[i, j] = chance.categorical(
                        left / left.sum(), int(tree.row[node]), int(tree.depth[node])
                    )
                if kind is Draw.WITHOUT_REPLACEMENT:
                    left[tokens[i, j]] = 0
        return Candidates(tokens, np.take_along_axis(log_q.numpy(), tokens, axis=1), log_q, kind)

    @override
    def commit(
        self, state: None, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> None:
        return None

    @override
    def truncate(self, state: None, lengths: Ints, rows: Ints | None = None) -> None:
        return None


class Scripted(Drafter[Texts]):
    """Base class of fake drafters that know the text the target generates.

    The right token after a node is the token that plain decoding generates there. A subclass
    defines `place`, which puts the right token at an index among the node's candidates, or leaves
    it out.

    Args:
        plans: for each sequence, its prompt and the tokens that plain decoding generates after it.
        vocab: V, the size of the vocabulary.
    """

    def __init__(self, plans: Sequence[Sequence[int]], vocab: int) -> None:
        self._plans, self._vocab = [np.array(p, np.int64) for p in plans], vocab

    @abstractmethod
    def place(self, row: int, position: int) -> int | None:
        """Return the index of the right token among the siblings at a position, from 0.

        None leaves the right token out.
        """

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: Texts | None = None,
        rows: Ints | None = None,
    ) -> Texts:
        return tuple(prompts)

    @override
    def expand(
        self, state: Texts, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, Texts]:
        logits = torch.full((len(frontier), self._vocab), -torch.inf, dtype=torch.float64)
        for i, node in enumerate(frontier):
            row = int(tree.row[node])
            order = torch.from_numpy(
                self._order(row, np.append(state[row], tree.tokens[tree.path(int(node))]))
            )
            logits[i, order] = -torch.arange(len(order), dtype=torch.float64)
        return draw_candidates(logits, k, drawing, tree.row[frontier], tree.depth[frontier]), state

    def right(self, row: int, text: Ints) -> int | None:
        """Return the token that plain decoding generates after a text.

        Return None if the text differs from all plans, or its plan has ended.
        """
        n = len(text)
        plans = (
            *self._plans[row : row + 1],
            *self._plans,
        )  # of rows that come and go none is known by its number
        return next(
            (int(plan[n]) for plan in plans if n < len(plan) and np.array_equal(plan[:n], text)),
            None,
        )

    def _order(self, row: int, text: Ints) -> Ints:
        """Return the tokens to propose after a text, the likeliest first."""
        others: Ints = (text[-1] + 1 + np.arange(self._vocab)) % self._vocab
        right = self.right(row, text)
        if right is None:
            return others
        others, place = others[others != right], self.place(row, len(text))
        return (
            others if place is None else np.concatenate((others[:place], [right], others[place:]))
        )

    @override
    def commit(
        self, state: Texts, tree: Tree, verdict: AcceptResult, hidden_states: HiddenStates
    ) -> Texts:
        return extend_texts(state, tree, verdict)

    @override
    def truncate(self, state: Texts, lengths: Ints, rows: Ints | None = None) -> Texts:
        return truncate_texts(state, lengths, rows)

    @override
    def select(self, state: Texts, rows: Ints, cache: SlotCache) -> Texts:
        return select_slots(state, rows, NO_TEXT)


@final
class Always(Scripted):
    """Place the right token first."""

    @override
    def place(self, row: int, position: int) -> int | None:
        return 0


@final
class Never(Scripted):
    """Never propose the right token."""

    @override
    def place(self, row: int, position: int) -> int | None:
        return None


@final
class Sometimes(Scripted):
    """Place the right token first, second or third, or leave it out, at random.

    The choice is seeded by sequence and position.
    """

    @override
    def place(self, row: int, position: int) -> int | None:
        places: tuple[int | None, ...] = (0, 0, 1, 2, None)
        return places[np.random.default_rng([8, row, position]).integers(len(places))]


@final
class Coached(Drafter[tuple[Any, Texts]]):
    """Wrap a drafter, and let a script put the right token among its candidates.

    A drafter with random weights is almost never right, so the code for accepted paths would almost
    never run. The tree then has nodes that the wrapped drafter did not propose, as in a fusion of
    drafters.

    Args:
        drafter: drafter that is wrapped; its state follows all accepted tokens.
        script: script that knows the right token and its index among the siblings.
    """

    remembers = True

    def __init__(self, drafter: Drafter[Any], script: Scripted) -> None:
        self._drafter, self._script = drafter, script
        self.expands_paths = drafter.expands_paths
        self.sends_probes = drafter.sends_probes
        self.ahead = drafter.ahead

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        return self._drafter.needs

    @override
    def start(
        self,
        prompts: Sequence[Ints],
        roots: Ints,
        hidden_states: HiddenStates,
        state: tuple[Any, Texts] | None = None,
        rows: Ints | None = None,
    ) -> tuple[Any, Texts]:
        inner = None if state is None else state[0]
        return self._drafter.start(prompts, roots, hidden_states, inner, rows), self._script.start(
            prompts, roots, hidden_states
        )

    @override
    def passes(self, state: tuple[Any, Texts], tree: Tree, frontier: Ints) -> int:
        return self._drafter.passes(state[0], tree, frontier)

    @override
    def expand(
        self, state: tuple[Any, Texts], tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, tuple[Any, Texts]]:
        candidates, inner = self._drafter.expand(state[0], tree, frontier, k, drawing)
        if not candidates.draw.is_sampled:  # a sampled draw must stay what was sampled
            candidates = self._coach(candidates, state[1], tree, frontier)
        return candidates, (inner, state[1])

    @override
    def layers(self, state: tuple[Any, Texts], roots: Tree, depth: Ints) -> "CoachedLayers | None":
        inner = self._drafter.layers(state[0], roots, depth)
        return None if inner is None else CoachedLayers(inner, self._script, state[1])

    def _coach(
        self, candidates: Candidates, texts: Texts, tree: Tree, frontier: Ints
    ) -> Candidates:
        tokens, log_q = candidates.tokens.copy(), candidates.log_q.copy()
        for i, node in enumerate(frontier):
            row = int(tree.row[node])
            text = np.append(texts[row], tree.tokens[tree.path(int(node))])
            right, place = self._script.right(row, text), self._script.place(row, len(text))
            if (
                right is not None
                and place is not None
                and place < tokens.shape[1]
                and right not in tokens[i]
            ):
                tokens[i, place], log_q[i, place] = right, max(log_q[i, place], np.log(0.3))
        return replace(candidates, tokens=tokens, log_q=log_q)

    @override
    def commit(
        self,
        state: tuple[Any, Texts],
        tree: Tree,
        verdict: AcceptResult,
        hidden_states: HiddenStates,
    ) -> tuple[Any, Texts]:
        return self._drafter.commit(state[0], tree, verdict, hidden_states), self._script.commit(
            state[1], tree, verdict, hidden_states
        )

    @override
    def truncate(
        self, state: tuple[Any, Texts], lengths: Ints, rows: Ints | None = None
    ) -> tuple[Any, Texts]:
        return self._drafter.truncate(state[0], lengths, rows), self._script.truncate(
            state[1], lengths, rows
        )

    @override
    def select(
        self, state: tuple[Any, Texts], rows: Ints, cache: SlotCache
    ) -> tuple[Any, Texts] | None:
        inner = self._drafter.select(state[0], rows, cache)
        return None if inner is None else (inner, select_slots(state[1], rows, NO_TEXT))

    @override
    def carry(self, state: tuple[Any, Texts]) -> tuple[Any, Texts]:
        return self._drafter.carry(state[0]), ()

    @override
    def probes(self, state: tuple[Any, Texts]) -> Probes | None:
        return self._drafter.probes(state[0])


@final
class CoachedLayers(Layers):
    """Wrap a drafter's layers, and move the right token's logit to the rank that a script gives.

    If the script gives no rank, the logits stay as they are. See `Coached`.

    Args:
        layers: layers of the drafter.
        script: script that knows the right token and its index among the siblings.
        texts: tokens of the sequences so far.
    """

    def __init__(self, layers: Layers, script: Scripted, texts: Texts) -> None:
        self._layers = layers
        self._script = script
        self._texts = texts
        self.device, self.begin = layers.device, layers.begin
        self.deepest, self.each_node = layers.deepest, layers.each_node

    @override
    def first(self, nodes: Nodes, choose: Choose) -> Nodes:
        return self._layers.first(nodes, self._coach(choose))

    @override
    def below(self, nodes: Nodes, count: int, choose: Choose) -> Nodes:
        return self._layers.below(nodes, count, self._coach(choose))

    def _coach(self, choose: Choose) -> Choose:
        """Return a `Choose` that changes the logits before choosing.

        It is a new object at each call, so that passes are recorded again.
        """

        def choose_coached(logits: Tensor, nodes: Nodes, ids: Tensor | None) -> Nodes:
            logits, frontier = logits.clone(), nodes.fed[:, -logits.shape[1] :]
            for row, place in np.ndindex(*frontier.shape):
                text = np.append(
                    self._texts[row],
                    nodes.tokens[row, nodes.seen[row, frontier[row, place]]].cpu().numpy(),
                )
                right, rank = self._script.right(row, text), self._script.place(row, len(text))
                columns = np.arange(logits.shape[2]) if ids is None else ids.cpu().numpy()
                if right is not None and rank is not None and right in columns:
                    others = logits[row, place].sort(descending=True).values
                    above = others[rank - 1] if rank else others[0] + 1
                    logits[row, place, int(np.flatnonzero(columns == right)[0])] = (
                        above + others[rank]
                    ) / 2
            return choose(logits, nodes, ids)

        return choose_coached

    @override
    def state(self, fed: Sequence[Ints]) -> tuple[Any, Texts]:
        return self._layers.state(fed), self._texts
