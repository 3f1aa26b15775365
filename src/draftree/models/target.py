"""The target: prefill, verify a forest in one pass, commit what was accepted.

Shapes: R rows, N nodes, P probe rows, D hidden size, V vocabulary, T tokens of all rows.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftree.aliases import DTYPE, accepted
from draftree.boundary.files import understood
from draftree.boundary.garbage import seldom
from draftree.boundary.machine import has_float64, to_device
from draftree.boundary.phases import in_phase
from draftree.errors import DraftreeWarning, UnknownName, UserError, first_line, shown
from draftree.kernels.largest import likeliest
from draftree.kernels.verification import packed, path_slots
from draftree.models.architectures import refuse_unsupported
from draftree.models.cache import SlotCache
from draftree.models.capture import usual_capture
from draftree.models.decoder import Decoder, pretrained
from draftree.models.exactness import HALF, LOG, Word, bfloat16_is_fast, decided
from draftree.models.forward_batch import ForwardBatch
from draftree.models.four_bits import round_to_four_bits
from draftree.models.grouped_attention import use_grouped_attention
from draftree.models.hub import located
from draftree.models.kernel_choice import choose_kernels
from draftree.models.loaded import merged, rounding
from draftree.models.runner import ModelOutput, Outputs
from draftree.models.sources import ALLOWED, DTYPES, SMOLLM2, Loading, Source, hint, known, known_as, location
from draftree.models.spread import check_weights
from draftree.models.templates import names, read_template, with_default_system
from draftree.tree import Bools, Ints, Tree, Verdict

LAST = -1
"""`hidden_states[-1]`, after the last norm: what the LM head reads."""
CHUNK = 1024
"""Prompt tokens in one pass: bounds the mask's memory at 1,024 × context."""
ENDING, WORTH = 16, 64
"""The last tokens of a prompt that are read by themselves where states are kept, and the length from which on they are."""


@dataclass(frozen=True)
class Needs:
    """The internals of the target that a drafter reads.

    Attributes:
        hidden: entries of transformers' `hidden_states`, negative ones counted from the end.
        kv: layers whose keys and values are read from the target's cache.
        top: how many of the likeliest tokens after every verified node are read; 0 for none.
    """

    hidden: tuple[int, ...] = ()
    kv: tuple[int, ...] = ()
    top: int = 0


@dataclass(frozen=True)
class Taps:
    """The target's internals for tokens it was fed, packed over rows.

    Attributes:
        hidden: for each layer needed, [T, D].
        rows: [T] the sequence each token belongs to.
        positions: [T] its position there.
        tokens: [T] its id.
        cache: the target's cache, for drafters that read its keys and values.
        probe_logits: [P, V] after each probe row, where the drafter sent any.
        top: [N, K] the likeliest tokens after every node of the verified tree, those that were not accepted among them, by
            falling logit; None where the drafter needs none, or nothing was verified.
    """

    hidden: dict[int, Tensor]
    rows: Ints
    positions: Ints
    tokens: Ints
    cache: SlotCache
    probe_logits: Tensor | None = None
    top: Tensor | None = None

    def take(self, index: Ints) -> Self:
        """Return the taps of some of the tokens; what was asked of probes and of the whole tree stays as it is."""
        if np.array_equal(index, np.arange(len(index))):  # the first ones, as of a chain that is accepted: none is copied
            hidden = {layer: h[: len(index)] for layer, h in self.hidden.items()}
        else:
            at = to_device(index, self.cache.device)
            hidden = {layer: h.index_select(0, at) for layer, h in self.hidden.items()}
        columns = (self.rows[index], self.positions[index], self.tokens[index])
        return type(self)(hidden, *columns, self.cache, self.probe_logits, self.top)

    def of_rows(self, tree: Tree, rows: Sequence[int]) -> Self:
        """Return the taps with `top` as of a verified tree that has some rows alone."""
        if self.top is None:
            return self
        nodes = to_device(np.flatnonzero(np.isin(tree.row, rows)), self.top.device)
        return replace(self, top=self.top.index_select(0, nodes))

    def before(self, lengths: Ints) -> Self:
        """Those of the tokens that stand before `lengths[r]` in their rows."""
        return self.take(np.flatnonzero(self.positions < lengths[self.rows]))

    def select(self, rows: Ints, cache: SlotCache) -> Self:
        """Return the taps of selected rows: [R'] the old row of each new one, −1 for none; `cache` holds the new rows."""
        index = [np.flatnonzero(self.rows == row) for row in rows.tolist()]
        taken = self.take(np.concatenate(index))
        owner = np.repeat(np.arange(len(rows)), [len(each) for each in index])
        return replace(taken, rows=owner, cache=cache)

    @classmethod
    def joined(cls, several: Sequence[Self]) -> Self:
        """Return the taps of several steps, at least one, in their order."""
        last = several[-1]
        if len(several) == 1:
            return last
        hidden = {layer: torch.cat([taps.hidden[layer] for taps in several]) for layer in last.hidden}
        rows, positions, tokens = (
            np.concatenate([getattr(t, name) for t in several]) for name in ("rows", "positions", "tokens")
        )
        return cls(hidden, rows, positions, tokens, last.cache)


@dataclass(frozen=True)
class Probes:
    """Extra rows that ride along in a verification and leave nothing in the cache.

    Attributes:
        tokens: [P] ids.
        row: [P] the sequence each belongs to.
        positions: [P] its position.
        visible: [P, P] which probes each one sees, itself included; all see their row's committed tokens and root.
    """

    tokens: Ints
    row: Ints
    positions: Ints
    visible: Bools


@dataclass(frozen=True)
class Verified:
    """The result of one pass over a forest.

    Attributes:
        packed: [M, V] logits in the order of the pass.
        taps: of all nodes.
        told: [N] the token of each node's largest logit, −1 where that is no finite number, and the token that is drawn
            there, −1 where none is; None where nobody looked yet.
        at: [N] where each node's logits are among the packed ones; None where they are in the nodes' order.
    """

    packed: Tensor
    taps: Taps
    told: tuple[Sequence[int], Sequence[int]] | None = None
    at: Ints | None = None

    @cached_property
    def logits(self) -> Tensor:
        """[N, V] after every node; a copy where the pass had another order."""
        return self.packed if self.at is None else self.packed[to_device(self.at, self.packed.device)]


class Target:
    """The model whose output is wanted.

    Args:
        decoder: the stock model.
        name: what to call it in results.
        tokenizer: its own; by default the one that is found where its name says.
        loading: how it was loaded.
    """

    def __init__(
        self,
        decoder: Decoder,
        name: str = "target",
        tokenizer: PreTrainedTokenizerBase | None = None,
        loading: Loading = Loading(),
    ) -> None:
        self.decoder, self.name, self.loading = decoder, name, loading
        if tokenizer is not None:
            self.tokenizer = tokenizer

    def __repr__(self) -> str:
        """Return its name, class, dtype and device."""
        decoder = self.decoder
        return f"<target {self.name}, {type(decoder.model).__name__}, {decoder.dtype} on {decoder.device}>"

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        exactness: Word = None,
    ) -> Self:
        """Return a model that was loaded before, as it is and where it is.

        It is put into evaluation mode, with a warning where it was not: with dropout, no two passes would agree.

        Args:
            model: a causal language model.
            tokenizer: its own; by default the one of the folder or hub id that the model was loaded from.
            exactness: with `bits`, passes of this target keep a token's bits in any company; outside them the model computes
                as it did before.

        Raises:
            UserError: the architecture is refused, the model has no weights, or bits are asked for and cannot be kept.
        """
        loading = Loading(exactness=exactness)
        check_weights(model, loading)
        warn_of_training(model)
        name = name_of(model)
        decoder = Decoder(model, capture=usual_capture(model, None))
        stable, _ = decided(decoder, name, exactness, free=False)
        if stable is not None:
            stable.use(decoder)
        decoder.check_capture()
        return cls(decoder, name, tokenizer, loading)

    @classmethod
    @seldom()
    def load(
        cls, name: str, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None, **how: Any
    ) -> Self:
        """Load `demo`, `smollm2`, a folder, a GGUF file (dequantised), or a hub id.

        Args:
            name: what to load.
            dtype: of the weights, or its name; the checkpoint's own by default, but float32 on a CPU for half-precision ones,
                where it has no instructions for bfloat16 or bits cannot be kept.
            device: a torch device; a GPU where there is one by default.
            how: the other attributes of `Loading`: revision, trust_remote_code, device_map, attn_implementation, adapter,
                quantize, exactness, kernels, compile.

        Raises:
            UserError: nothing can be loaded there, the architecture is refused, or the device cannot be used.
        """
        loading = Loading.of({"dtype": dtype, "device": device, **how})
        place, dtype = usable(device), named(dtype)
        if dtype is torch.float64 and not has_float64(place):
            raise UserError(f"dtype is float64 and device '{place.type}', which lacks it: allowed there is float32 or float16")
        with understood(f"cannot load target '{name}' (allowed: {ALLOWED}{hint(name)})"):
            path = located(location(name), loading.revision)
            config = AutoConfig.from_pretrained(path, **loading.found_by)
            kind = _class(config)
            if kind is not None or not loading.trust_remote_code:
                refuse_unsupported(config, kind)
            chosen = dtype is None and place.type == "cpu" and _may_be_bfloat16(name, config, loading)
            stored = getattr(config, "dtype", None) or torch.float32
            usual = torch.float32 if place.type == "cpu" and stored in HALF else stored
            four = loading.quantize == "int4"
            dtype = dtype or (torch.bfloat16 if chosen or four else usual)
            told = loading.weights_by | rounding(config, loading, place)
            model, info = pretrained(path, config, dtype, **told)
            if missing := sorted(map(str, info["missing_keys"])):  # transformers would go on with random weights
                raise UserError(f"target '{name}' lacks {len(missing)} tensors: {', '.join(missing[:4])}")
            check_weights(model, loading)
            if place.type == "cuda" and loading.attn_implementation is None:
                use_grouped_attention(model)
            model = merged(model if "device_map" in told else model.to(place), loading).requires_grad_(False)
            if four:
                round_to_four_bits(model)
            decoder = Decoder(model, capture=usual_capture(model, loading.compile))
            _ = decoder.shapes  # from a pass over one token: much in a config shows there alone
            compiled = choose_kernels(decoder, loading)
            if loading.compile and not compiled and place.type == "cpu":
                kinds = "layers of the Llama kind, in bfloat16 or float32"
                raise UserError(f"compile is true for a {type(model).__name__}, allowed on a CPU is it for {kinds}")
        free = loading.attn_implementation is None
        stable, exactness = decided(decoder, name, loading.exactness, free, anyway=chosen or four or compiled)
        if chosen and stable is None:
            return cls.load(name, torch.float32, device, **how)
        if chosen:
            LOG.info("computed in bfloat16, for which this processor has instructions, bit for bit; --dtype says otherwise")
        if stable is not None:
            stable.use(decoder)
        decoder.check_capture()
        return cls(decoder, name, loading=replace(loading, exactness=exactness))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer.

        Raises:
            UserError: its folder has none that can be read.
        """
        return tokenizer_of(self.name, self.loading)

    @cached_property
    def tokenizer_or_none(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer; None where it has none that can be read."""
        try:
            return self.tokenizer
        except UserError:
            return None

    @property
    def eos(self) -> frozenset[int]:
        """The ids that end a text, by its generation config."""
        generation = self.decoder.model.generation_config
        ids = None if generation is None else generation.eos_token_id
        return frozenset() if ids is None else frozenset(ids if isinstance(ids, list) else [ids])

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """Return an empty cache for `rows` sequences."""
        return self.decoder.new_cache(rows, slots)

    def depth_room(self, position: int) -> int:
        """Return the depth that a tree below a root at `position` may have: it ends with the context and at a change of rope.

        Where rotary frequencies change with the length of the text, a node beyond the change would be rotated
        otherwise than plain decoding rotates it.
        """
        room = self.decoder.context - 1 - position
        if (boundary := self.decoder.rope_boundary) is not None:
            kind, length = boundary
            if position < length:
                room = min(room, length - 1 - position)
            elif kind == "dynamic":  # every further token has frequencies of its own
                room = 0
        return max(room, 0)

    def refuse_needs(self, needs: Needs) -> None:
        """Refuse a drafter that reads keys and values which lie on another device than its own.

        Raises:
            UserError: it names the layer and its device.
        """
        for layer in needs.kv:
            if (device := self.decoder.shapes[layer].device) is not None:
                told = f"the drafter reads keys and values of layer {layer}, which device_map puts on {device}"
                raise UserError(f"{told}, allowed is {self.decoder.device}, where its embedding is")

    @property
    def reuses_prefixes(self) -> bool:
        """True where keys computed for one text serve another with the same beginning."""
        return self.decoder.rope_boundary is None

    @torch.inference_mode()
    @in_phase("prompt")
    def prefill(
        self, cache: SlotCache, prompts: Sequence[Ints], needs: Needs, rows: Ints | None = None, more: int = 0
    ) -> Verified:
        """Feed what the cache does not hold of some rows' prompts, and commit it.

        Args:
            cache: its committed tokens must be a proper beginning of each prompt.
            prompts: [B] token ids, at least one each.
            needs: what to tap.
            rows: [B] the rows that they are for, in rising order; all by default. The others are left as they are.
            more: tokens by which the texts are longer than the prompts, where rotary frequencies depend on that.

        Returns:
            Logits [B, V] after each prompt, and the taps of the tokens fed, row by row.
        """
        if rows is None or len(rows) == cache.rows:
            return self._prefilled(cache, prompts, needs, more)
        part = cache.taken(rows)
        read = self._prefilled(part, prompts, needs, more)
        cache.put(rows, part)
        return replace(read, taps=replace(read.taps, rows=rows[read.taps.rows], cache=cache))

    def _prefilled(self, cache: SlotCache, prompts: Sequence[Ints], needs: Needs, more: int) -> Verified:
        reach = np.array([len(p) + more for p in prompts], np.int64)
        logits: list[Tensor | None] = [None] * len(prompts)
        taps: list[list[Taps]] = [[] for _ in prompts]
        for part in _parts(cache, prompts):
            batch = ForwardBatch.chains(part, cache.lengths.copy(), self.decoder.device)
            batch = replace(batch, reach=reach)
            read = np.flatnonzero(batch.counts)
            wanted = Outputs(needs.hidden, batch.firsts[read + 1] - 1)
            out = self.decoder.forward(batch, cache, wanted)
            for r, ids in enumerate(part):
                if len(ids):
                    logits[r] = out.logits[np.searchsorted(read, r)]
                    place = cache.lengths[r] + np.arange(len(ids))
                    hidden = {layer: h[batch.of(r)] for layer, h in out.hidden.items()}
                    taps[r].append(Taps(hidden, np.full(len(ids), r), place, ids, cache))
                    cache.keep(r, place)
        parts = [t for row in taps for t in row]
        hidden = {layer: torch.cat([t.hidden[layer] for t in parts]) for layer in needs.hidden}
        rows, positions, tokens = (np.concatenate([getattr(t, f) for t in parts]) for f in ("rows", "positions", "tokens"))
        stacked = torch.stack([row for row in logits if row is not None])
        return Verified(stacked, Taps(hidden, rows, positions, tokens, cache))

    def read_anew(self, cache: SlotCache, texts: Sequence[Ints], rows: Ints) -> None:
        """Read texts anew that are about to grow beyond the length where `longrope` changes its frequencies.

        Their keys were rotated by the frequencies of short texts; transformers' `generate` reads such a text anew, too.

        Args:
            cache: holds the committed tokens.
            texts: [R] these tokens.
            rows: the rows whose texts go on.
        """
        if (boundary := self.decoder.rope_boundary) is None or boundary[0] != "longrope":
            return
        lengths = cache.lengths.copy()
        late = rows[lengths[rows] == boundary[1]]
        if late.size:
            lengths[late] = 0
            cache.truncate(lengths)
            self.prefill(cache, [texts[row] for row in late.tolist()], Needs(), late, more=1)

    @torch.inference_mode()
    @in_phase("verify")
    def verify(self, cache: SlotCache, tree: Tree, needs: Needs, probes: Probes | None = None) -> Verified:
        """One pass over root and nodes of every row, and over the probes.

        Tokens lie in scratch slots behind each row's committed ones, in node order; `commit` needs them there.
        """
        if probes is not None:
            return self._verified_with(cache, tree, needs, probes)
        place, ids, positions, counts, seen = packed(tree.row, tree.tokens, tree.depth, tree.parents, cache.lengths)
        batch = ForwardBatch.forest(ids, positions, counts, cache.lengths.copy(), seen, self.decoder.device)
        out = self.decoder.forward(batch, cache, Outputs(needs.hidden))
        taps = Taps({}, tree.row, positions[place], tree.tokens, cache)
        return _in_order(out, taps, needs, None if np.array_equal(place, np.arange(len(place))) else place)

    def _verified_with(self, cache: SlotCache, tree: Tree, needs: Needs, probes: Probes) -> Verified:
        """Run the pass of `verify` with probes."""
        last = np.array([n + self.depth_room(n) for n in cache.lengths.tolist()])[probes.row]
        last = np.minimum(last, self.decoder.context - 1)  # a text that is full has no root, but may still have probes
        row, tokens = np.concatenate((tree.row, probes.row)), np.concatenate((tree.tokens, probes.tokens))
        # Probes only guess: beyond a change of rope, or the context, they would disturb what must be exact.
        positions = np.concatenate((cache.lengths[tree.row] + tree.depth, np.minimum(probes.positions, last)))
        seen, n = _seen(tree, probes), len(tree)
        rows = [np.flatnonzero(row == r) for r in range(cache.rows)]
        places = [positions[i] for i in rows]
        visible, ids = [seen[np.ix_(i, i)] for i in rows], [tokens[i] for i in rows]
        batch = ForwardBatch.packed(ids, places, cache.lengths.copy(), visible, places, self.decoder.device)
        out = self.decoder.forward(batch, cache, Outputs(needs.hidden))
        at = np.argsort(np.concatenate(rows))
        probe_logits = out.logits.index_select(0, to_device(at[n:], out.logits.device))
        verified = _in_order(out, Taps({}, tree.row, positions[:n], tree.tokens, cache), needs, at[:n])
        return replace(verified, taps=replace(verified.taps, probe_logits=probe_logits))

    @torch.inference_mode()
    @in_phase("commit")
    def commit(self, cache: SlotCache, tree: Tree, verdict: Verdict) -> None:
        """Move root and accepted nodes behind the committed tokens and forget the rest."""
        cache.keep_all(*path_slots(tree.row, verdict.nodes, cache.lengths))


def _parts(cache: SlotCache, prompts: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Yield what a cache does not hold of prompts, in parts [R] that are read one after the other.

    Where there are states, a prompt's last tokens are a part of their own: a chat's next prompt often goes another way from
    there on, as the text that opens an answer is rendered otherwise, and the same prompt once more is read from there.
    """
    rest = [p[n:] for p, n in zip(prompts, cache.lengths.tolist(), strict=True)]
    own = cache.states is not None
    cuts = [len(r) - ENDING if own and len(r) > WORTH else 0 for r in rest]
    cache.mark()
    for several in ([r[:c] for r, c in zip(rest, cuts, strict=True)], [r[c:] for r, c in zip(rest, cuts, strict=True)]):
        for at in range(0, max(map(len, several)), CHUNK):
            yield [r[at : at + CHUNK] for r in several]
        cache.mark()


def _in_order(out: ModelOutput, taps: Taps, needs: Needs, at: Ints | None) -> Verified:
    """Return a pass over a forest with what is tapped in the order of its nodes.

    Args:
        out: of the pass.
        taps: of the nodes, without what the model made of them.
        needs: what to tap.
        at: [N] the place of each node in the pass; None where it has the nodes' order.
    """
    hidden, top = dict(out.hidden), likeliest_tokens(out.logits, needs.top) if needs.top else None
    if at is not None:
        index = to_device(at, out.logits.device)
        hidden = {layer: h.index_select(0, index) for layer, h in hidden.items()}
        top = None if top is None else top.index_select(0, to_device(at, top.device))
    return Verified(out.logits, replace(taps, hidden=hidden, top=top), at=at)


def likeliest_tokens(logits: Tensor, k: int) -> Tensor:
    """[N, K] the tokens of the k largest of logits [N, V], falling, on the same device.

    On a CPU the lower id of equals comes first; on another device their order is open.
    """
    k = min(k, logits.shape[-1])
    if not logits.is_cpu:
        return logits.topk(k, dim=-1).indices
    whole = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return torch.from_numpy(likeliest(whole.contiguous().numpy(), k)[0])


class Packing:
    """Gathers [R, n, …] of a padded pass to [N, …] in node order."""

    def __init__(self, row: Ints, rows: list[Ints], device: torch.device) -> None:
        self._single, self._n = len(rows) == 1, len(row)
        if not self._single:
            column = np.empty(len(row), np.int64)
            for nodes in rows:
                column[nodes] = np.arange(len(nodes))
            self._row, self._column = to_device(row, device), to_device(column, device)

    def __call__(self, padded: Tensor) -> Tensor:
        """Return the nodes [N, …] of padded ones [R, n, …]."""
        return padded[0, : self._n] if self._single else padded[self._row, self._column]


def _seen(tree: Tree, probes: Probes) -> Bools:
    """[N + P, N + P]: whether node or probe i sees node or probe j of its row; of the nodes, probes see the root alone."""
    n, size = len(tree), len(tree) + len(probes.tokens)
    seen = np.zeros((size, size), np.bool_)
    seen[:n, :n], seen[n:, n:] = tree.ancestors, probes.visible
    seen[n:, : tree.roots] = probes.row[:, None] == tree.row[: tree.roots]
    return seen


def _may_be_bfloat16(name: str, config: PreTrainedConfig, loading: Loading) -> bool:
    """Return True where a CPU's target is bfloat16 unasked: stored so, left as it is, and computed fast, and bit for bit."""
    # SmolLM2's own checkpoint is; the file in its package was quantised from it.
    stored = getattr(config, "dtype", None) is torch.bfloat16 or known(name) == SMOLLM2
    left = loading.exactness != "ties" and not (loading.attn_implementation or loading.adapter or loading.quantize)
    whole = loading.device_map is None and getattr(config, "quantization_config", None) is None
    return stored and left and whole and bfloat16_is_fast()


def _class(config: PreTrainedConfig) -> Any:
    """Return transformers' causal language model for a config, None where it has none."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return classes.get(type(config), None)


def named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype that may be given by its name; None for None and for `auto`.

    Raises:
        UnknownName: there is no such dtype, or nothing can be computed in it.
    """
    if dtype is None or dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else shown(dtype)
    name = accepted(DTYPE, name, DTYPES)
    if name not in DTYPES:
        raise UnknownName(DTYPE, name, DTYPES)
    found: torch.dtype = getattr(torch, name)
    return found


LONGEST_REASON = 80
"""Characters of torch's own words in a message."""


def usable(device: str | torch.device | None) -> torch.device:
    """Return a device that torch can compute on here; a GPU where there is one by default.

    Raises:
        UserError: it cannot, or there is no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(device).partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {shown(device)}, but there is no CUDA here: device='cpu'")
    allowed = "allowed is one that torch can use here (cpu, cuda, …)"
    try:
        found = torch.empty(0, device=device).device
    except Exception as error:  # which error it is differs from backend to backend
        why = first_line(error)  # some backends list all that torch knows
        raise UserError(f"device is {shown(device)}, {allowed}{f': {why}' if len(why) < LONGEST_REASON else ''}") from error
    if found.type == "meta":
        raise UserError(f"device is {shown(device)}, {allowed}: it holds no values")
    return found


def name_of(model: PreTrainedModel) -> str:
    """Return the name a model was loaded by: `demo`, a folder or a hub id.

    One that is none of them for a model made in memory.
    """
    return known_as(str(model.name_or_path or "")) or f"{type(model).__name__} in memory"


def warn_of_training(model: PreTrainedModel) -> bool:
    """Warns of a model in training mode; returns whether it is."""
    if training := any(module.training for module in model.modules()):
        told = "is in training mode and is put into evaluation mode, as with dropout no two passes would agree"
        warnings.warn(f"the {type(model).__name__} {told}", DraftreeWarning, stacklevel=4)
    return training


def tokenizer_of(target: str, source: Source = Source()) -> PreTrainedTokenizerBase:
    """Return a target's tokenizer, without its weights.

    Raises:
        UserError: it has none that can be read.
    """
    allowed = f"allowed: {ALLOWED}; load(…, tokenizer=…) takes one"
    with understood(f"target '{target}' has no tokenizer that can be read ({allowed})"):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            located(location(target), source.revision), **source.found_by
        )
        found("a")
    if source.chat_template is not None:
        found.chat_template = read_template(source.chat_template)
    if source.system is not None:
        if not isinstance(found.chat_template, str):
            told = f"allowed with it is a chat template: --chat-template FILE, or {', '.join(names())}"
            raise UserError(f"system is given for target '{target}', whose tokenizer has no chat template; {told}")
        found.chat_template = with_default_system(found.chat_template, source.system)
    return found
