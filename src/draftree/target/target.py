"""The target: prefill prompts, verify draft trees in one pass, commit accepted tokens.

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

from draftree.aliases import DTYPE, canonical_name
from draftree.errors import DraftreeWarning, UnknownName, UserError, first_line, format_value
from draftree.kernels.cache_slots import path_slots
from draftree.kernels.pass_layout import pack_trees
from draftree.kernels.topk import likeliest
from draftree.models.architecture_checks import refuse_unsupported
from draftree.models.causal_lm import CausalLM
from draftree.models.forward_batch import Chunk, ForwardBatch
from draftree.models.kv_cache import SlotCache
from draftree.models.model_runner import ModelOutput, Outputs
from draftree.target.batch_invariance_choice import (
    HALF,
    LOG,
    Word,
    resolve_exactness,
)
from draftree.target.chat_templates import read_template, template_names, with_default_system
from draftree.target.hub import locate_model
from draftree.target.kernel_choice import (
    choose_kernels,
    computes_bfloat16_fast,
    select_capture,
    use_grouped_attention,
)
from draftree.target.load_options import DTYPES, Loading, Source
from draftree.target.load_weights import (
    check_weights,
    loading_arguments,
    merge_adapter,
    round_to_four_bits,
)
from draftree.target.model_construction import load_pretrained
from draftree.target.target_names import (
    ALLOWED,
    SMOLLM2,
    hint,
    location,
    shipped_name,
    short_target_name,
)
from draftree.tree import AcceptResult, Bools, Ints, Tree
from draftree.utils.files import as_user_error
from draftree.utils.gc_pause import pause_gc
from draftree.utils.hardware import has_float64, to_device
from draftree.utils.profiler import in_phase

LAST = -1
"""Index of the hidden states after the final norm, which the LM head reads."""
CHUNK = 1024
"""Largest number of prompt tokens per pass; it limits the mask's memory to 1,024 × context."""
FINAL_TOKENS, MIN_SNAPSHOT_TOKENS = 16, 64
"""Number of final prompt tokens that are read in a pass of their own.

This applies only to models with recurrent states and prompts of more than `MIN_SNAPSHOT_TOKENS` tokens. A
snapshot of the states then exists before these tokens.
"""


@dataclass(frozen=True)
class HiddenStateSpec:
    """The internals of the target that a drafter reads.

    Attributes:
        hidden: indices into transformers' `hidden_states`; negative ones count from the end.
        kv: layers whose keys and values are read from the target's cache.
        top: the number of likeliest tokens that are read after every verified node; 0 for none.
    """

    hidden: tuple[int, ...] = ()
    kv: tuple[int, ...] = ()
    top: int = 0


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states and other internals of the target, for the T tokens of a pass.

    Attributes:
        hidden: hidden states [T, D] for each layer that the drafter needs.
        rows: [T] the sequence of each token.
        positions: [T] the position of each token in its sequence.
        tokens: [T] the token ids.
        cache: the target's cache, for drafters that read its keys and values.
        probe_logits: [P, V] logits after each probe; None if the drafter sent no probes.
        top: [N, K] the likeliest tokens after every node of the verified tree, rejected nodes
            included, by falling logit; None if the drafter needs none or nothing was verified.
    """

    hidden: dict[int, Tensor]
    rows: Ints
    positions: Ints
    tokens: Ints
    cache: SlotCache
    probe_logits: Tensor | None = None
    top: Tensor | None = None

    def take(self, index: Ints) -> Self:
        """Return the hidden states and other internals of the tokens at the given indices.

        `probe_logits` and `top` stay unchanged.
        """
        if np.array_equal(
            index, np.arange(len(index))
        ):  # the first tokens, as in an accepted chain, need no copy
            hidden = {layer: h[: len(index)] for layer, h in self.hidden.items()}
        else:
            at = to_device(index, self.cache.device)
            hidden = {layer: h.index_select(0, at) for layer, h in self.hidden.items()}
        columns = (self.rows[index], self.positions[index], self.tokens[index])
        return type(self)(hidden, *columns, self.cache, self.probe_logits, self.top)

    def of_rows(self, tree: Tree, rows: Sequence[int]) -> Self:
        """Return a copy whose `top` has only the nodes of some sequences of a verified tree."""
        if self.top is None:
            return self
        nodes = to_device(np.flatnonzero(np.isin(tree.row, rows)), self.top.device)
        return replace(self, top=self.top.index_select(0, nodes))

    def before(self, lengths: Ints) -> Self:
        """Return the internals of tokens whose position is below `lengths[r]` in sequence r."""
        return self.take(np.flatnonzero(self.positions < lengths[self.rows]))

    def select(self, rows: Ints, cache: SlotCache) -> Self:
        """Return the internals of selected sequences, renumbered.

        Args:
            rows: [R'] the old index of each new sequence, −1 for none.
            cache: the target's cache, which contains the new sequences.
        """
        index = [np.flatnonzero(self.rows == row) for row in rows.tolist()]
        taken = self.take(np.concatenate(index))
        owner = np.repeat(np.arange(len(rows)), [len(each) for each in index])
        return replace(taken, rows=owner, cache=cache)

    @classmethod
    def concatenate(cls, several: Sequence[Self]) -> Self:
        """Concatenate the internals of one or more steps in their order."""
        last = several[-1]
        if len(several) == 1:
            return last
        hidden = {
            layer: torch.cat([hidden_states.hidden[layer] for hidden_states in several])
            for layer in last.hidden
        }
        rows, positions, tokens = (
            np.concatenate([getattr(t, name) for t in several])
            for name in ("rows", "positions", "tokens")
        )
        tops = [t.top for t in several if t.top is not None]
        top = torch.cat(tops) if len(tops) == len(several) else None
        return cls(hidden, rows, positions, tokens, last.cache, top=top)


@dataclass(frozen=True)
class Probes:
    """Extra tokens that are computed in a verification pass and are never committed.

    Attributes:
        tokens: [P] ids.
        row: [P] the sequence of each probe.
        positions: [P] the position of each probe.
        visible: [P, P] whether probe i sees probe j; each sees itself. All see the committed tokens
            and the root of their sequence.
    """

    tokens: Ints
    row: Ints
    positions: Ints
    visible: Bools


@dataclass(frozen=True)
class Read:
    """Hold the results of a pass for the prompt chunks in it.

    Attributes:
        hidden_states: internals of the chunks' tokens, chunk by chunk.
        logits: [E, V] logits after each chunk that ends its prompt.
    """

    hidden_states: HiddenStates
    logits: Tensor


@dataclass(frozen=True)
class VerificationResult:
    """The result of one forward pass over draft trees.

    Attributes:
        packed: [M, V] logits in the order of the pass.
        hidden_states: internals of all nodes.
        told: two lists [N]: the token of each node's largest logit (−1 if it is not finite), and
            the token that is sampled after each node (−1 if none is). None if they were not
            computed yet.
        at: [N] the index of each node's logits in `packed`; None if they are in the order of the
            nodes.
        read: the results for prompt chunks; None if there were none.
    """

    packed: Tensor
    hidden_states: HiddenStates
    told: tuple[Sequence[int], Sequence[int]] | None = None
    at: Ints | None = None
    read: Read | None = None

    @cached_property
    def logits(self) -> Tensor:
        """Return logits [N, V] after every node; a copy if the pass had another order."""
        return (
            self.packed if self.at is None else self.packed[to_device(self.at, self.packed.device)]
        )


class Target:
    """Load and run the model whose output is generated.

    Args:
        decoder: the model with its runner.
        name: the target's name in results.
        tokenizer: its tokenizer; by default it is loaded by the target's name.
        loading: the options with which it was loaded.
    """

    def __init__(
        self,
        decoder: CausalLM,
        name: str = "target",
        tokenizer: PreTrainedTokenizerBase | None = None,
        loading: Loading = Loading(),
    ) -> None:
        self.decoder = decoder
        self.name = name
        self.loading = loading
        if tokenizer is not None:
            self.tokenizer = tokenizer

    def __repr__(self) -> str:
        """Return the target's name, class, dtype and device."""
        decoder = self.decoder
        return f"<target {self.name}, {type(decoder.model).__name__}, {decoder.dtype} on {decoder.device}>"

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        exactness: Word = None,
    ) -> Self:
        """Wrap a model that is already loaded, without moving or converting it.

        The model is put into evaluation mode, with a warning if it was in training mode: with
        dropout, no two passes would agree.

        Args:
            model: a causal language model.
            tokenizer: its tokenizer; by default that of the folder or hub id from which the model
                was loaded.
            exactness: `bits` makes this target's passes batch invariant; other passes of the model
                compute as before.

        Raises:
            UserError: the architecture is refused, the model has no weights, or `bits` is requested
                but not possible.
        """
        loading = Loading(exactness=exactness)
        check_weights(model, loading)
        warn_of_training(model)
        name = name_of(model)
        decoder = CausalLM(model, capture=select_capture(model, None))
        stable, _ = resolve_exactness(decoder, name, exactness, free=False)
        if stable is not None:
            stable.use(decoder)
        decoder.check_capture()
        return cls(decoder, name, tokenizer, loading)

    @classmethod
    @pause_gc()
    def load(
        cls,
        name: str,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        **how: Any,
    ) -> Self:
        """Load `demo`, `smollm2`, a folder, a GGUF file (dequantised), or a hub id.

        Args:
            name: the name, path or hub id of the target.
            dtype: the dtype of the weights, or its name; that of the checkpoint by default. On a
                CPU, half-precision checkpoints default to float32, except those in bfloat16 that
                are computed quickly (`computes_bfloat16_fast`) and batch invariantly.
            device: a torch device; a GPU by default if one is available.
            how: the other options, which are attributes of `Loading`: revision, trust_remote_code,
                device_map, attn_implementation, adapter, quantize, exactness, kernels, compile.

        Raises:
            UserError: the name does not stand for a model, the architecture is refused, or the
                device cannot be used.
        """
        loading = Loading.of({"dtype": dtype, "device": device, **how})
        place, dtype = resolve_device(device), parse_dtype(dtype)
        if dtype is torch.float64 and not has_float64(place):
            raise UserError(
                f"dtype is float64 and device '{place.type}', which lacks it: allowed there is float32 or float16"
            )
        with as_user_error(f"cannot load target '{name}' (allowed: {ALLOWED}{hint(name)})"):
            path = locate_model(location(name), loading.revision)
            config = AutoConfig.from_pretrained(path, **loading.config_kwargs)
            kind = _class(config)
            if kind is not None or not loading.trust_remote_code:
                refuse_unsupported(config, kind)
            chosen = (
                dtype is None and place.type == "cpu" and _may_be_bfloat16(name, config, loading)
            )
            stored = getattr(config, "dtype", None) or torch.float32
            usual = torch.float32 if place.type == "cpu" and stored in HALF else stored
            four = loading.quantize == "int4"
            dtype = dtype or (torch.bfloat16 if chosen or four else usual)
            told = loading.weight_kwargs | loading_arguments(config, loading, place)
            model, info = load_pretrained(path, config, dtype, **told)
            if missing := sorted(
                map(str, info["missing_keys"])
            ):  # transformers would use random weights
                raise UserError(
                    f"target '{name}' lacks {len(missing)} tensors: {', '.join(missing[:4])}"
                )
            check_weights(model, loading)
            if place.type == "cuda" and loading.attn_implementation is None:
                use_grouped_attention(model)
            model = merge_adapter(
                model if "device_map" in told else model.to(place), loading
            ).requires_grad_(False)
            if four:
                round_to_four_bits(model)
            decoder = CausalLM(model, capture=select_capture(model, loading.compile))
            _ = decoder.shapes  # a pass over one token reveals many faults of a config
            compiled = choose_kernels(decoder, loading)
            if chosen and not computes_bfloat16_fast(compiled):
                del model, decoder
                return cls.load(name, torch.float32, device, **how)
            if loading.compile and not compiled and place.type == "cpu":
                kinds = "layers of the Llama kind, in bfloat16 or float32"
                raise UserError(
                    f"compile is true for a {type(model).__name__}, allowed on a CPU only for {kinds}"
                )
        free = loading.attn_implementation is None
        stable, exactness = resolve_exactness(
            decoder, name, loading.exactness, free, anyway=chosen or four or compiled
        )
        if chosen and stable is None:
            return cls.load(name, torch.float32, device, **how)
        if chosen:
            LOG.info(
                "computed in bfloat16, like the checkpoint, bit for bit; --dtype says otherwise"
            )
        if stable is not None:
            stable.use(decoder)
        decoder.check_capture()
        return cls(decoder, name, loading=replace(loading, exactness=exactness))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's tokenizer.

        Raises:
            UserError: its folder has no tokenizer that can be read.
        """
        return tokenizer_of(self.name, self.loading)

    @cached_property
    def tokenizer_or_none(self) -> PreTrainedTokenizerBase | None:
        """Return the target's tokenizer, or None if it has no readable one."""
        try:
            return self.tokenizer
        except UserError:
            return None

    @property
    def eos(self) -> frozenset[int]:
        """Return the ids of the tokens that end a text, from the model's generation config."""
        generation = self.decoder.model.generation_config
        ids = None if generation is None else generation.eos_token_id
        return frozenset() if ids is None else frozenset(ids if isinstance(ids, list) else [ids])

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """Return an empty cache for `rows` sequences with room for `slots` tokens each."""
        return self.decoder.new_cache(rows, slots)

    def depth_room(self, position: int) -> int:
        """Return the largest allowed depth of a tree whose root is at `position`.

        It is limited by the context. It is also limited by the length at which rotary frequencies
        change: plain decoding would rotate a node beyond that length in another way.
        """
        room = self.decoder.context - 1 - position
        if (boundary := self.decoder.rope_boundary) is not None:
            kind, length = boundary
            if position < length:
                room = min(room, length - 1 - position)
            elif kind == "dynamic":  # every further token has frequencies of its own
                room = 0
        return max(room, 0)

    def refuse_needs(self, needs: HiddenStateSpec) -> None:
        """Refuse a drafter that reads keys and values which are not on the drafter's device.

        Raises:
            UserError: the message names the layer and its device.
        """
        for layer in needs.kv:
            if (device := self.decoder.shapes[layer].device) is not None:
                told = f"the drafter reads keys and values of layer {layer}, which device_map puts on {device}"
                raise UserError(f"{told}, allowed is {self.decoder.device}, where its embedding is")

    @property
    def reuses_prefixes(self) -> bool:
        """Return whether keys of a text can be reused for another text with the same beginning."""
        return self.decoder.rope_boundary is None

    @torch.inference_mode()
    @in_phase("prompt")
    def prefill(
        self,
        cache: SlotCache,
        prompts: Sequence[Ints],
        needs: HiddenStateSpec,
        rows: Ints | None = None,
        more: int = 0,
    ) -> VerificationResult:
        """Run the model on the prompt tokens that the cache does not contain yet, and commit them.

        Args:
            cache: the cache; its committed tokens must be a proper prefix of each prompt.
            prompts: [B] the ids of each prompt; at least one id each.
            needs: the internals to return.
            rows: [B] the sequences of the prompts, in ascending order; all by default. The others
                are left unchanged.
            more: number of tokens by which the texts are longer than the prompts, for rotary
                frequencies that depend on the length.

        Returns:
            Logits [B, V] after each prompt, and internals of the tokens that were fed, sequence by
                sequence.
        """
        if rows is None or len(rows) == cache.rows:
            return self._prefill(cache, prompts, needs, more)
        part = cache.copy_sequences(rows)
        read = self._prefill(part, prompts, needs, more)
        cache.replace_sequences(rows, part)
        return replace(
            read,
            hidden_states=replace(
                read.hidden_states, rows=rows[read.hidden_states.rows], cache=cache
            ),
        )

    def _prefill(
        self, cache: SlotCache, prompts: Sequence[Ints], needs: HiddenStateSpec, more: int
    ) -> VerificationResult:
        reach = np.array([len(p) + more for p in prompts], np.int64)
        logits: list[Tensor | None] = [None] * len(prompts)
        hidden_states: list[list[HiddenStates]] = [[] for _ in prompts]
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
                    hidden_states[r].append(
                        HiddenStates(hidden, np.full(len(ids), r), place, ids, cache)
                    )
                    cache.keep(r, place)
        parts = [t for row in hidden_states for t in row]
        hidden = {layer: torch.cat([t.hidden[layer] for t in parts]) for layer in needs.hidden}
        rows, positions, tokens = (
            np.concatenate([getattr(t, f) for t in parts]) for f in ("rows", "positions", "tokens")
        )
        stacked = torch.stack([row for row in logits if row is not None])
        return VerificationResult(stacked, HiddenStates(hidden, rows, positions, tokens, cache))

    def read_anew(self, cache: SlotCache, texts: Sequence[Ints], rows: Ints) -> None:
        """Prefill texts again that are about to exceed the length at which `longrope` changes.

        Their keys were rotated by the frequencies of short texts. transformers' `generate` also
        computes such a text again.

        Args:
            cache: contains the committed tokens.
            texts: [R] the committed tokens of each sequence.
            rows: the sequences that continue.
        """
        if (boundary := self.decoder.rope_boundary) is None or boundary[0] != "longrope":
            return
        lengths = cache.lengths.copy()
        late = rows[lengths[rows] == boundary[1]]
        if late.size:
            lengths[late] = 0
            cache.truncate(lengths)
            self.prefill(
                cache, [texts[row] for row in late.tolist()], HiddenStateSpec(), late, more=1
            )

    @property
    def reads_beside(self) -> bool:
        """Return whether one pass can read prompt chunks and verify trees of other sequences.

        This is impossible with recurrent states, which need the text in order, and with recorded
        passes, which have few sizes. It is also impossible if rotary frequencies change with the
        length, because each part of a prompt needs the frequencies of the whole prompt.
        """
        recorded = self.decoder.capture.ladder.few
        return not (recorded or self.decoder.stored_shapes.states) and self.reuses_prefixes

    @property
    def packs(self) -> bool:
        """Return whether passes compute no padding."""
        return self.decoder.runner.packs

    @torch.inference_mode()
    @in_phase("prompt")
    def read(self, cache: SlotCache, needs: HiddenStateSpec, chunks: Sequence[Chunk]) -> Read:
        """Run a pass over prompt chunks, at most one of each sequence, and commit them."""
        nothing = [np.zeros(0, np.int64)] * cache.rows
        batch = ForwardBatch.chains(nothing, cache.lengths.copy(), self.decoder.device)
        _, read = self._run_pass(batch, cache, needs, chunks)
        assert read is not None, "there are chunks"
        self._keep_read(cache, chunks)
        return read

    def _keep_read(self, cache: SlotCache, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            cache.keep(chunk.sequence, cache.lengths[chunk.sequence] + np.arange(len(chunk.tokens)))

    def _run_pass(
        self, batch: ForwardBatch, cache: SlotCache, needs: HiddenStateSpec, chunks: Sequence[Chunk]
    ) -> tuple[ModelOutput, Read | None]:
        """Run a pass, and return its results for the batch and for the prompt chunks."""
        if not chunks:
            return self.decoder.forward(batch, cache, Outputs(needs.hidden)), None
        whole, own = batch.beside(chunks)
        ends = [whole.firsts[chunk.sequence + 1] - 1 for chunk in chunks if chunk.ends]
        wanted = np.concatenate((own, np.array(ends, np.int64)))
        out = self.decoder.forward(whole, cache, Outputs(needs.hidden, wanted))
        mine = to_device(own, self.decoder.device)
        places = [np.arange(*whole.firsts[chunk.sequence :][:2]) for chunk in chunks]
        theirs = to_device(np.concatenate(places), self.decoder.device)
        rows = np.repeat(
            [chunk.sequence for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        ids = np.concatenate([chunk.tokens for chunk in chunks])
        hidden = {layer: h.index_select(0, theirs) for layer, h in out.hidden.items()}
        read = Read(
            HiddenStates(hidden, rows, whole.positions[np.concatenate(places)], ids, cache),
            out.logits[len(own) :],
        )
        kept = {layer: h.index_select(0, mine) for layer, h in out.hidden.items()}
        return ModelOutput(out.logits[: len(own)], kept), read

    @torch.inference_mode()
    @in_phase("verify")
    def verify(
        self,
        cache: SlotCache,
        tree: Tree,
        needs: HiddenStateSpec,
        probes: Probes | None = None,
        chunks: Sequence[Chunk] = (),
    ) -> VerificationResult:
        """Run one pass over the draft trees of all sequences, probes, and prompt chunks.

        Chunks belong to other sequences and are committed at once. Tree nodes are written to the
        scratch slots after each sequence's committed tokens, in node order, as `commit` expects.
        """
        if probes is not None:
            return self._verify_with(cache, tree, needs, probes, chunks)
        place, ids, positions, counts, seen = pack_trees(
            tree.row, tree.tokens, tree.depth, tree.parents, cache.lengths
        )
        batch = ForwardBatch.forest(
            ids, positions, counts, cache.lengths.copy(), seen, self.decoder.device
        )
        out, read = self._run_pass(batch, cache, needs, chunks)
        hidden_states = HiddenStates({}, tree.row, positions[place], tree.tokens, cache)
        verified = _in_order(
            out,
            hidden_states,
            needs,
            None if np.array_equal(place, np.arange(len(place))) else place,
        )
        self._keep_read(cache, chunks)
        return replace(verified, read=read)

    def _verify_with(
        self,
        cache: SlotCache,
        tree: Tree,
        needs: HiddenStateSpec,
        probes: Probes,
        chunks: Sequence[Chunk],
    ) -> VerificationResult:
        """Run the pass of `verify` over draft trees, probes and prompt chunks."""
        last = np.array([n + self.depth_room(n) for n in cache.lengths.tolist()])[probes.row]
        last = np.minimum(
            last, self.decoder.context - 1
        )  # a full text has no root, but may have probes
        row, tokens = (
            np.concatenate((tree.row, probes.row)),
            np.concatenate((tree.tokens, probes.tokens)),
        )
        # Probes only guess: beyond a change of rope, or the context, they would disturb what must
        # be exact.
        positions = np.concatenate(
            (cache.lengths[tree.row] + tree.depth, np.minimum(probes.positions, last))
        )
        seen, n = _visibility(tree, probes), len(tree)
        rows = [np.flatnonzero(row == r) for r in range(cache.rows)]
        places = [positions[i] for i in rows]
        visible, ids = [seen[np.ix_(i, i)] for i in rows], [tokens[i] for i in rows]
        batch = ForwardBatch.from_sequences(
            ids, places, cache.lengths.copy(), visible, places, self.decoder.device
        )
        out, read = self._run_pass(batch, cache, needs, chunks)
        at = np.argsort(np.concatenate(rows))
        probe_logits = out.logits.index_select(0, to_device(at[n:], out.logits.device))
        verified = _in_order(
            out, HiddenStates({}, tree.row, positions[:n], tree.tokens, cache), needs, at[:n]
        )
        self._keep_read(cache, chunks)
        return replace(
            verified,
            hidden_states=replace(verified.hidden_states, probe_logits=probe_logits),
            read=read,
        )

    @torch.inference_mode()
    @in_phase("commit")
    def commit(self, cache: SlotCache, tree: Tree, verdict: AcceptResult) -> None:
        """Commit root and accepted nodes, and discard the others."""
        cache.commit_tokens(*path_slots(tree.row, verdict.nodes, cache.lengths))


def _parts(cache: SlotCache, prompts: Sequence[Ints]) -> Iterator[list[Ints]]:
    """Yield the prompt tokens that a cache does not contain, in parts that are read in turn.

    Each part has the tokens of all R sequences. For models with recurrent states, the last tokens
    of a prompt are a part of their own. The next prompt of a chat often differs from there on,
    because the text that opens an answer is rendered in another way. A repeated prompt is also read
    again from there.
    """
    rest = [p[n:] for p, n in zip(prompts, cache.lengths.tolist(), strict=True)]
    own = cache.states is not None
    cuts = [len(r) - FINAL_TOKENS if own and len(r) > MIN_SNAPSHOT_TOKENS else 0 for r in rest]
    cache.mark()
    for several in (
        [r[:c] for r, c in zip(rest, cuts, strict=True)],
        [r[c:] for r, c in zip(rest, cuts, strict=True)],
    ):
        for at in range(0, max(map(len, several)), CHUNK):
            yield [r[at : at + CHUNK] for r in several]
        cache.mark()


def _in_order(
    out: ModelOutput, hidden_states: HiddenStates, needs: HiddenStateSpec, at: Ints | None
) -> VerificationResult:
    """Return the result of a pass over draft trees, with internals in the order of the nodes.

    Hidden states and the likeliest tokens are taken from the output of the pass, and put into the
    order of the nodes. The logits stay in the order of the pass.

    Args:
        out: the output of the pass.
        hidden_states: the internals in the order of the nodes. Its fields `hidden` and `top` are
            replaced.
        needs: the internals that the drafter reads; `needs.top` determines whether likeliest tokens
            are returned, and how many.
        at: [N] the index of each node in the pass; None if the orders are equal.
    """
    hidden, top = dict(out.hidden), likeliest_tokens(out.logits, needs.top) if needs.top else None
    if at is not None:
        index = to_device(at, out.logits.device)
        hidden = {layer: h.index_select(0, index) for layer, h in hidden.items()}
        top = None if top is None else top.index_select(0, to_device(at, top.device))
    return VerificationResult(out.logits, replace(hidden_states, hidden=hidden, top=top), at=at)


def likeliest_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the k likeliest tokens [N, K] of logits [N, V], by falling logit.

    The result is on the device of the logits. On a CPU the lower id wins ties. On other devices the
    order of equal logits is undefined.
    """
    k = min(k, logits.shape[-1])
    if not logits.is_cpu:
        return logits.topk(k, dim=-1).indices
    whole = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return torch.from_numpy(likeliest(whole.contiguous().numpy(), k)[0])


class Packing:
    """Convert padded values [R, n, …] of a pass to [N, …] in node order."""

    def __init__(self, row: Ints, rows: list[Ints], device: torch.device) -> None:
        self._single, self._n = len(rows) == 1, len(row)
        if not self._single:
            column = np.empty(len(row), np.int64)
            for nodes in rows:
                column[nodes] = np.arange(len(nodes))
            self._row, self._column = to_device(row, device), to_device(column, device)

    def __call__(self, padded: Tensor) -> Tensor:
        """Return values [N, …] in node order from padded ones [R, n, …]."""
        return padded[0, : self._n] if self._single else padded[self._row, self._column]


def _visibility(tree: Tree, probes: Probes) -> Bools:
    """Return the visibility matrix [N + P, N + P] of nodes and probes.

    Entry (i, j) is True if i sees j; both then belong to the same sequence. Probes see only the
    root among the nodes.
    """
    n, size = len(tree), len(tree) + len(probes.tokens)
    seen = np.zeros((size, size), np.bool_)
    seen[:n, :n], seen[n:, n:] = tree.ancestors, probes.visible
    seen[n:, : tree.roots] = probes.row[:, None] == tree.row[: tree.roots]
    return seen


def _may_be_bfloat16(name: str, config: PreTrainedConfig, loading: Loading) -> bool:
    """Return whether a CPU target is loaded in bfloat16 by default if that is fast.

    The weights must be stored in bfloat16 and must not be changed by other options.
    """
    # SmolLM2's own checkpoint is; the file in its package was quantised from it.
    stored = getattr(config, "dtype", None) is torch.bfloat16 or shipped_name(name) == SMOLLM2
    left = loading.exactness != "ties" and not (
        loading.attn_implementation or loading.adapter or loading.quantize
    )
    whole = loading.device_map is None and getattr(config, "quantization_config", None) is None
    return stored and left and whole and computes_bfloat16_fast()


def _class(config: PreTrainedConfig) -> Any:
    """Return transformers' causal language model class for a config, or None if it has none."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return classes.get(type(config), None)


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a name or dtype; None for None and `auto`.

    Raises:
        UnknownName: the dtype does not exist, or nothing can be computed in it.
    """
    if dtype is None or dtype == "auto":
        return None
    name = (
        str(dtype).removeprefix("torch.")
        if isinstance(dtype, str | torch.dtype)
        else format_value(dtype)
    )
    name = canonical_name(DTYPE, name, DTYPES)
    if name not in DTYPES:
        raise UnknownName(DTYPE, name, DTYPES)
    found: torch.dtype = getattr(torch, name)
    return found


LONGEST_REASON = 80
"""Largest number of characters of torch's message that an error repeats."""


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return a device on which torch can compute; by default a GPU if one is available.

    Raises:
        UserError: torch cannot compute on it, or the device does not exist.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(device).partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device is {format_value(device)}, but there is no CUDA here: device='cpu'"
        )
    allowed = "allowed is one that torch can use here (cpu, cuda, …)"
    try:
        found = torch.empty(0, device=device).device
    except Exception as error:  # the type of error depends on the backend
        why = first_line(error)  # some backends print a long list
        raise UserError(
            f"device is {format_value(device)}, {allowed}{f': {why}' if len(why) < LONGEST_REASON else ''}"
        ) from error
    if found.type == "meta":
        raise UserError(f"device is {format_value(device)}, {allowed}: it holds no values")
    return found


def name_of(model: PreTrainedModel) -> str:
    """Return the name by which a model was loaded: `demo`, a folder or a hub id.

    For a model made in memory, return its class name followed by "in memory".
    """
    return short_target_name(str(model.name_or_path or "")) or f"{type(model).__name__} in memory"


def warn_of_training(model: PreTrainedModel) -> bool:
    """Log a warning if a model is in training mode, and return whether it is."""
    if training := any(module.training for module in model.modules()):
        told = "is in training mode and is put into evaluation mode, as with dropout no two passes would agree"
        warnings.warn(f"the {type(model).__name__} {told}", DraftreeWarning, stacklevel=4)
    return training


def tokenizer_of(target: str, source: Source = Source()) -> PreTrainedTokenizerBase:
    """Return a target's tokenizer, without loading its weights.

    Raises:
        UserError: the target has no tokenizer that can be read.
    """
    allowed = f"allowed: {ALLOWED}; load(…, tokenizer=…) takes one"
    with as_user_error(f"target '{target}' has no tokenizer that can be read ({allowed})"):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            locate_model(location(target), source.revision), **source.config_kwargs
        )
        found("a")
    if source.chat_template is not None:
        found.chat_template = read_template(source.chat_template)
    if source.system is not None:
        if not isinstance(found.chat_template, str):
            told = f"allowed with it is a chat template: --chat-template FILE, or {', '.join(template_names())}"
            raise UserError(
                f"system is given for target '{target}', whose tokenizer has no chat template; {told}"
            )
        found.chat_template = with_default_system(found.chat_template, source.system)
    return found
