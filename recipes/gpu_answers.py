"""Write a Llama-like target's answers on a GPU, some ten times as fast as the engine: for the data of a recipe alone.

The engine serves requests and keeps books for each sequence in each step. Here hundreds of
sequences share a step that is recorded as a CUDA graph, and the host looks at their tokens once in
`LOOK` steps. A sequence that has ended makes room for the next one. Greedy tokens are the likeliest
ones; others are drawn by the inverse of the cumulated distribution, from numbers that depend on the
seed and the prompt's number alone. Logits are rounded as the precision has it, so that near ties
may fall otherwise than in the engine; the distribution is the target's.

Shapes: B sequences, L prompt tokens, S slots of the cache, G key-value heads, D hidden size, W width
of a head, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from typing_extensions import override

from draftree.models.hf_runner import HFRunner
from draftree.models.one_pass_caches import PassThroughCache

LOOK = 8
"""Steps between two looks of the host at what was written."""
WIDTHS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1536, 2048)
"""Slots of the cache that a recorded step may read."""
NUCLEUS = 512
"""The likeliest tokens that a draw with `top_p` below 1 is made from."""


@dataclass(frozen=True)
class Question:
    """A prompt that waits for its answer.

    Attributes:
        number: with the seed it decides what is drawn.
        ids: the prompt.
        most: the most tokens of an answer.
        temperature: 0 for the likeliest tokens.
    """

    number: int
    ids: Sequence[int]
    most: int
    temperature: float = 0.0


class Layers:
    """A Llama's layers in few operations: those of `models/llama_gpu_layers.py`.

    Args:
        model: of transformers, on its device, with the modules that transformers gave it.
        slots: positions that are needed at most.

    Raises:
        SystemExit: the model is not like a Llama, or some of its modules are replaced.
    """

    def __init__(self, model: Any, slots: int) -> None:
        runner = HFRunner(model, few_operations=True)
        with torch.inference_mode():
            layers = runner.few_operations()
        if layers is None or runner.window is not None:
            raise SystemExit(f"{type(model).__name__} is not a plain Llama with stock modules")
        self.device, self.dtype, self.slots = model.device, model.dtype, slots
        self.count = int(runner.config.num_hidden_layers)
        self._run, self._kinds = layers, set(runner.attention_types)
        self._shape = runner.stored_shapes.shapes[0]
        self._head = model.get_output_embeddings()

    def _pass(
        self, ids: Tensor, places: Tensor, mask: Tensor, cache: Cache, entries: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [B, 1, V] after the first tokens of [B, L], and entries [B, L, D] of `hidden_states`."""
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        masks = dict.fromkeys(self._kinds, mask)
        return self._run(ids, places, masks, cache, keep=first, entries=entries)

    @torch.no_grad()
    def read(
        self, ids: Tensor, entries: Sequence[int], cache: Cache | None = None
    ) -> dict[int, Tensor]:
        """[B, L, D] entries of `hidden_states` of texts [B, L] that are padded at their ends: 0 … the number of layers.

        Args:
            ids: the texts.
            entries: the entries.
            cache: where keys and values go; nowhere by default.
        """
        places = torch.arange(ids.shape[1], device=self.device)
        mask = self._mask((places > places[:, None])[None])
        return self._pass(
            ids, places[None], mask, PassThroughCache() if cache is None else cache, entries
        )[1]

    def _mask(self, hidden: Tensor) -> Tensor:
        """The mask [B, 1, n, S] that is added to the scores, of what each token does not see, [B, n, S]."""
        nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        return nothing.masked_fill(hidden, torch.finfo(self.dtype).min)[:, None]


class Slots(PassThroughCache):
    """Puts the keys and values of a pass in their places.

    Args:
        memory: keys and values, [layers, B, S, G, W] each.
        at: the rows and the slots of the pass's tokens, which broadcast to [B, n].
        width: slots that the pass sees; by default its own tokens alone.
    """

    def __init__(
        self, memory: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor], width: int | None = None
    ) -> None:
        super().__init__()
        self._memory, self._at, self._width = memory, at, width

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = (stored[layer_idx] for stored in self._memory)
        keys[self._at] = key_states.transpose(1, 2)
        values[self._at] = value_states.transpose(1, 2)
        if self._width is None:
            return key_states, value_states
        return keys[:, : self._width].transpose(1, 2), values[:, : self._width].transpose(1, 2)


class Writer(Layers):
    """Writes answers in batches.

    Args:
        model: a Llama of transformers, on its device.
        rows: B, sequences written at a time.
        slots: S, the longest prompt with its answer.
        ends: ids that end an answer; it keeps them.
        seed: of what is drawn.
        top_p: mass of the likeliest tokens that are drawn from.
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        slots: int,
        ends: Sequence[int],
        seed: int = 0,
        top_p: float = 1.0,
    ) -> None:
        super().__init__(model, slots)
        self.rows = rows
        self.ends = np.array(sorted(ends))
        self.seed = seed
        self.top_p = top_p
        made: dict[str, Any] = {"device": self.device}
        shape = (self.count, rows, slots, self._shape.heads, self._shape.key)
        self._memory = (
            torch.zeros(shape, dtype=self.dtype, **made),
            torch.zeros(shape, dtype=self.dtype, **made),
        )
        self._tokens, self._at, self._begin = (
            torch.zeros(rows, dtype=torch.long, **made) for _ in range(3)
        )
        self._warmth = torch.zeros(rows, **made)
        self._draws = torch.zeros(rows, slots, **made)
        self._seen, self._all = (
            torch.zeros(LOOK, rows, dtype=torch.long, **made),
            torch.arange(rows, **made),
        )
        self._recorded: dict[int, Callable[[], None]] = {}
        self._pool: Any = None

    @torch.inference_mode()
    def write(
        self, questions: Sequence[Question], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Question, list[int]]]:
        """Gives each question with its answer's ids, as soon as it has ended; after `stop` no further one begins.

        Args:
            questions: best in the order of their lengths, so that steps read no more of the cache
                than they need.
            stop: is asked at each look.
        """
        waiting, asked = deque(questions), dict[int, Question]()
        written, count = (
            np.zeros((self.rows, self.slots + LOOK), np.int64),
            np.zeros(self.rows, np.int64),
        )
        prompt, most = np.zeros(self.rows, np.int64), np.zeros(self.rows, np.int64)
        while waiting or asked:
            if stop():
                waiting.clear()
            free = [row for row in range(self.rows) if row not in asked]
            if waiting and (len(free) >= max(self.rows // 8, 1) or not asked):
                begun = {row: waiting.popleft() for row in free[: len(waiting)]}
                asked |= begun
                looked = np.array(list(begun))
                prompt[looked] = [len(q.ids) for q in begun.values()]
                most[looked] = [min(q.most, self.slots - len(q.ids)) for q in begun.values()]
                written[looked, 0], count[looked] = self._begin_rows(begun), 1
                new = written[looked, :1]
            elif not asked:
                return
            else:
                looked = np.array(list(asked))
                new = self._steps(int((prompt + count)[looked].max()) + LOOK)[:, looked].T
                written[looked[:, None], count[looked, None] + np.arange(LOOK)] = new
                count[looked] += LOOK
            ended = np.isin(new, self.ends)
            for i in np.flatnonzero(ended.any(1) | (count[looked] >= most[looked])).tolist():
                row = int(looked[i])
                length = (
                    count[row] - new.shape[1] + int(ended[i].argmax()) + 1
                    if ended[i].any()
                    else count[row]
                )
                yield asked.pop(row), written[row, : min(length, most[row])].tolist()

    def forget(self) -> None:
        """Drop recorded steps, after a change of `top_p`, and their memory."""
        self._recorded.clear()
        if self._pool:
            self._pool = None  # no recording is left that holds it

    def _begin_rows(self, begun: dict[int, Question]) -> list[int]:
        """Reads prompts into rows; returns the first token of each answer."""
        rows, firsts = list(begun), []
        for at in range(0, len(rows), 128):  # bounds the memory of a pass
            part = rows[at : at + 128]
            asked = [begun[row] for row in part]
            lengths = torch.tensor([len(q.ids) for q in asked])
            ids = torch.zeros(len(part), int(lengths.max()), dtype=torch.long)
            for i, q in enumerate(asked):
                ids[i, : len(q.ids)] = torch.tensor(q.ids)
            draws = np.zeros((len(part), self.slots), np.float32)
            for i, q in enumerate(asked):
                draws[i, : q.most] = np.random.default_rng([self.seed, q.number]).random(
                    q.most, np.float32
                )
            where, last = torch.tensor(part, device=self.device), (lengths - 1).to(self.device)
            self._at[where], self._begin[where] = last, last
            self._warmth[where] = torch.tensor([q.temperature for q in asked], device=self.device)
            self._draws[where] = torch.from_numpy(draws).to(self.device)
            states = self._prefill(ids.to(self.device), where)
            ends = states[torch.arange(len(part), device=self.device), last]
            chosen = self._choose(self._head(ends), where)
            self._tokens[where], self._at[where] = chosen, last + 1
            firsts += chosen.tolist()
        return firsts

    def _prefill(self, ids: Tensor, where: Tensor) -> Tensor:
        """[B, L, D] the outputs of a pass over prompts [B, L], whose keys and values go to rows `where`."""
        places = torch.arange(ids.shape[1], device=self.device)
        cache = Slots(self._memory, (where[:, None], places[None]))
        return self.read(ids, (self.count,), cache)[self.count]

    def _steps(self, width: int) -> np.ndarray:
        """`LOOK` steps of all rows, which read so many slots; [steps, B] the tokens."""
        width = min(next((w for w in WIDTHS if w >= width), self.slots), self.slots)
        if width not in self._recorded:
            self._recorded[width] = self._record(width)
        for i in range(LOOK):
            self._recorded[width]()
            self._seen[i].copy_(self._tokens)
        seen: np.ndarray = self._seen.cpu().numpy()
        return seen

    def _record(self, width: int) -> Callable[[], None]:
        """A step as a function without arguments, on a GPU a recorded one."""
        if self.device.type != "cuda" or self._pool is False:
            return lambda: self._step(width)
        kept = [t.clone() for t in (self._tokens, self._at)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(width)
            self._tokens.copy_(kept[0])
            self._at.copy_(kept[1])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            self._pool = (
                self._pool or torch.cuda.graph_pool_handle()
            )  # steps run one after the other: they may share memory
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(width)
        except RuntimeError as error:
            print(f"steps are not recorded: {error}", flush=True)
            torch.cuda.synchronize()
            self._pool = False
            return self._record(width)
        finally:
            self._tokens.copy_(kept[0])
            self._at.copy_(kept[1])
        return graph.replay

    def _step(self, width: int) -> None:
        """Feeds each row its last token, and puts the next one in its place."""
        at = self._at
        hidden = torch.arange(width, device=self.device) > at[:, None]
        cache = Slots(self._memory, (self._all[:, None], at[:, None]), width)
        mask = self._mask(hidden[:, None])
        logits, _ = self._pass(self._tokens[:, None], at[:, None], mask, cache, ())
        self._tokens.copy_(self._choose(logits[:, 0], self._all))
        self._at.copy_((at + 1).clamp(max=self.slots - 1))

    def _choose(self, logits: Tensor, where: Tensor) -> Tensor:
        """[B] the next tokens of rows, by logits [B, V]."""
        logits = logits.float()
        warmth = self._warmth[where, None]
        p = torch.softmax(logits / warmth.clamp(min=1e-3), dim=-1)
        drawn = self._draws[
            where, (self._at[where] - self._begin[where]).clamp(max=self.slots - 1)
        ][:, None]
        if self.top_p < 1:
            p, order = p.topk(min(NUCLEUS, p.shape[-1]), dim=-1)
            p = p.masked_fill(p.cumsum(-1) - p >= self.top_p, 0)
        total = p.cumsum(-1)
        at = (total <= drawn * total[:, -1:]).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)
        tokens = at if self.top_p == 1 else order.gather(1, at)
        return torch.where(warmth[:, 0] > 0, tokens[:, 0], logits.argmax(-1))
