"""A stock Hugging Face causal language model, fed with tokens, positions, mask and cache from outside.

The target is one, and so are the drafters that are transformers; no modeling file is forked.

Shapes: R rows, n tokens a row in one pass (padded), S slots, D hidden size, V vocabulary, L layers.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel

from draftree.boundary.phases import phase
from draftree.errors import UserError
from draftree.models.architectures import (
    FULL,
    LENGTH_DEPENDENT_ROPE,
    SLIDING,
    cache_argument,
    check_bounds,
    refuse_unsupported,
)
from draftree.models.cache import LayerShape, SlotCache, Writer
from draftree.models.capture import Capture, Eager, Given, Made, Then
from draftree.models.catching import first_stored
from draftree.models.dispatch import Answers, answering, install
from draftree.models.exact_attention import register
from draftree.models.feed import DeviceFeed, Feed
from draftree.models.ladder import Ladder
from draftree.models.linears import rows_of
from draftree.models.recorder import Kept, Recorder
from draftree.models.sources import ATTENTION
from draftree.models.states import States
from draftree.models.straight import Straight

register()

UNNORMED = 2**16
"""Beyond transformers' `hidden_states`: what the last layer gives, before the last norm."""


class Decoder:
    """A model with the little that trees need to know about it.

    Args:
        model: a causal language model of transformers 5.
        within: makes the context of each pass; by default there is none.
        capture: how passes over trees are run; by default as they are written.

    Raises:
        UserError: the architecture cannot be fed a tree; the text names it and the reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        capture: Capture = Eager(),
    ) -> None:
        refuse_unsupported(model.config, type(model))
        refuse_attention(model)
        self.model, self._within, self.capture = model, within, capture
        model.train(False)
        self.config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        self.layer_types: tuple[str, ...] = tuple(getattr(self.config, "layer_types", None) or ())
        self._found: Straight | None = None
        self._tried = False
        self._takes = inspect.signature(type(model).forward).parameters
        install(model)
        sliding = not self.layer_types or SLIDING in self.layer_types
        self.window: int | None = getattr(self.config, "sliding_window", None) if sliding else None

    @cached_property
    def device(self) -> torch.device:
        """The model's device; like the dtype it is asked for often and looked up once."""
        device: torch.device = self.model.device
        return device

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocab(self) -> int:
        """V, the width of its logits."""
        return int(self._head.weight.shape[0])

    @property
    def hidden(self) -> int:
        """D, the width of its hidden states."""
        return int(self.config.hidden_size)

    @cached_property
    def context(self) -> int:
        """The number of positions it knows."""
        known = int(getattr(self.config, "max_position_embeddings", None) or 2**31)
        rope = self._changing_rope
        if rope is None or rope["rope_type"] != "dynamic":
            return known
        return int(known * max(rope["factor"], 1.0))  # the config holds the length before any stretching

    @cached_property
    def stack(self) -> PreTrainedModel:
        """The transformer without its LM head, and without the encoders of other media."""
        base: Any = self.model.base_model
        inner: PreTrainedModel = base.get_decoder()  # the outer model may call its LM head `decoder`
        return inner

    @cached_property
    def layers(self) -> nn.ModuleList:
        """Its transformer layers."""
        count = self.config.num_hidden_layers
        for module in self.stack.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise UserError(f"{type(self.model).__name__} is not supported: its {count} layers are not one stack")

    @cached_property
    def _changing_rope(self) -> dict[str, Any] | None:
        parameters = getattr(self.config, "rope_parameters", None) or {}
        kinds = (parameters, *(p for p in parameters.values() if isinstance(p, dict)))
        return next((p for p in kinds if p.get("rope_type") in LENGTH_DEPENDENT_ROPE), None)

    @cached_property
    def rope_boundary(self) -> tuple[str, int] | None:
        """(kind, length) where the rotary frequencies change with the length of the text, else None."""
        rope = self._changing_rope
        if rope is None:
            return None
        key = "original_max_position_embeddings"
        known = self.config.max_position_embeddings  # where `dynamic` begins to stretch, whatever else is said
        return rope["rope_type"], int(known if rope["rope_type"] == "dynamic" else rope.get(key) or known)

    @cached_property
    def kept(self) -> Kept:
        """What its layers keep of a text, learnt from a pass over one token.

        Raises:
            UserError: a layer keeps what draftree cannot reach.
        """
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = self.by_type(torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device))
        with torch.inference_mode(), answering(Recorder(self.config, type(self.model).__name__)) as recorder:
            self.model(input_ids=one, **self._laid_out(one, mask), **self.cached(recorder))
        return recorder.kept()

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shape of each layer's keys and values."""
        return self.kept.shapes

    @property
    def keyed_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values."""
        return tuple(i for i, shape in enumerate(self.shapes) if shape.heads)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values alone, no state."""
        states = {layer for layer, _ in self.kept.states}
        return tuple(i for i in self.keyed_layers if i not in states)

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """An empty cache for `rows` sequences with room for `slots` tokens each, to begin with."""
        kept = self.kept
        states = States(kept.states, rows, self.dtype, self.device, kept.clamped) if kept.states else None
        ladder = self.capture.ladder if states is None and self.rope_boundary is None else Ladder()
        cache = SlotCache(kept.shapes, rows, self.dtype, self.device, states, ladder)
        cache.reserve(slots)
        return cache

    def _laid_out(self, positions: Tensor, mask: Tensor | Mapping[str, Tensor]) -> dict[str, Any]:
        """Positions and mask as arguments of the model's forward; models that have states alone take neither."""
        return {"position_ids": positions, "attention_mask": mask} if "position_ids" in self._takes else {}

    def cached(self, cache: Cache) -> dict[str, Any]:
        """A cache as arguments of the model's forward, and of its stack's."""
        return {str(cache_argument(self._takes)): cache, "use_cache": True}

    def by_type(self, full: Tensor, sliding: Tensor | None = None) -> Tensor | Mapping[str, Tensor]:
        """The mask in the form the model takes: one tensor, or one for each type of layer it mixes."""
        windowed = full if sliding is None else sliding
        if len(set(self.layer_types)) > 1 or set(self.layer_types) - {FULL, SLIDING}:
            return _Masks({FULL: full, "attention": full, SLIDING: windowed})
        return windowed if self.window is not None else full

    def mask(self, cache: SlotCache, feed: Feed) -> Tensor | Mapping[str, Tensor]:
        """Additive attention mask [R, 1, n, S] of a feed behind what a cache holds, in the form the model takes."""
        return self.by_type(cache.mask(feed), None if self.window is None else cache.mask(feed, self.window))

    def causal(self, ids: Tensor, cache: Cache | None = None) -> dict[str, Any]:
        """Positions and mask of whole texts [B, T], and a cache that catches what they store, as arguments of the forward."""
        rows, count = ids.shape
        at = torch.arange(count, device=ids.device)
        lowest = torch.finfo(self.dtype).min
        full = torch.zeros(count, count, dtype=self.dtype, device=ids.device).masked_fill(at[None, :] > at[:, None], lowest)
        sliding = full if self.window is None else full.masked_fill(at[:, None] - at[None, :] >= self.window, lowest)
        mask = self.by_type(full[None, None], sliding[None, None])
        return self._laid_out(at.expand(rows, count), mask) | ({} if cache is None else self.cached(cache))

    def forward(self, cache: SlotCache, feed: Feed, keep: int | Tensor = 0) -> Tensor:
        """One pass over a feed, written into scratch slots of the cache.

        Args:
            cache: of this model.
            feed: the tokens.
            keep: as transformers' `logits_to_keep`: 0 for all columns, or a tensor of columns.

        Returns:
            Logits [R, n or len(keep), V].
        """
        return self.read(cache, feed, keep)[0]

    def read(
        self, cache: SlotCache, feed: Feed, keep: int | Tensor = 0, layers: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `forward`, and hidden states [R, n, D] of the pass.

        Args:
            cache: of this model.
            feed: the tokens.
            keep: the columns of the logits.
            layers: entries of transformers' `hidden_states`, negative ones counted from the end.
        """
        n = feed.tokens.shape[1]
        logits, *hidden = self.run(cache, feed, keep, layers)
        return logits[:, :n], {layer: h[:, :n] for layer, h in zip(layers, hidden, strict=True)}

    def run(
        self,
        cache: SlotCache,
        feed: Feed | DeviceFeed,
        keep: int | Tensor = 0,
        layers: Sequence[int] = (),
        then: Then = Then(),
    ) -> Made:
        """Logits and hidden states of a pass as it was run, padded as its size asks for; or what is made of them.

        Args:
            cache: of this model.
            feed: the tokens.
            keep: the columns of the logits.
            layers: as `read` takes them.
            then: what is done with the results, in the same recording.
        """
        captured = cache.ladder.few and not feed.whole and isinstance(keep, int)
        feed = feed.widened(cache.ladder.width(feed.width)) if captured else feed
        at = cache.states.begin(feed, cache.lengths) if cache.states is not None and isinstance(feed, Feed) else None
        writer = cache.writer(feed.starts, feed.width, at)
        given = self._given(cache, feed, writer if captured else None)
        assert given.keys().isdisjoint(then.given), "two tensors of a pass have one name"
        given |= then.given
        window, dtype = self.window, self.dtype

        def body(given: Given) -> Made:
            laid = feed.laid(given, writer.end, dtype, window) if isinstance(feed, DeviceFeed) else given
            mask = self.by_type(laid["full"], laid.get("sliding"))
            past = writer.at(laid["slots"]) if "slots" in laid else writer
            stock = partial(self._stock, laid, mask, past, keep, layers)
            if captured or at is not None or isinstance(feed, DeviceFeed) or not isinstance(mask, Tensor):
                return then.made(stock(), given)
            return then.made(self._shortened(feed, mask, writer, keep, layers, stock), given)

        ours = nullcontext() if at is None else answering(Answers(at))
        with self._within(), self._rows_apart(feed), ours, phase("model"):
            if not captured:
                return body(given)
            shapes = tuple((name, t.shape) for name, t in given.items())
            return self.capture.run((cache.place, feed.width, feed.kind, keep, tuple(layers), then.kind, shapes), given, body)

    def _given(self, cache: SlotCache, feed: Feed | DeviceFeed, writer: Writer | None) -> dict[str, Tensor]:
        """What a pass is given, by name; of a recorded one the slots are part of it."""
        if isinstance(feed, DeviceFeed):
            return dict(feed.given)
        given = {"tokens": feed.tokens, "positions": torch.from_numpy(feed.positions).to(self.device), "full": cache.mask(feed)}
        if self.window is not None:
            given["sliding"] = cache.mask(feed, self.window)
        return given if writer is None else given | {"slots": writer.slots}

    def _stock(
        self, laid: Given, mask: Tensor | Mapping[str, Tensor], past: Writer, keep: int | Tensor, layers: Sequence[int]
    ) -> Made:
        """Logits and hidden states of a pass as the model itself makes it."""
        with self.tapped(layers) as caught:
            laid_out = self._laid_out(laid["positions"], mask)
            logits: Tensor = self.model(input_ids=laid["tokens"], logits_to_keep=keep, **laid_out, **self.cached(past)).logits
        return logits, *(caught[layer] for layer in layers)

    def _shortened(
        self, feed: Feed, mask: Tensor, writer: Writer, keep: int | Tensor, layers: Sequence[int], stock: Callable[[], Made]
    ) -> Made:
        """The same, straight through layers that are machine code where that was found to give the same bits."""
        straight, anew = self._straight, feed.whole or not feed.starts.all()
        if straight is None or not straight.free(anew) or (held := straight.within(writer)) is None:
            return stock()
        entries = [self.hidden_index(layer) for layer in layers]
        ours = partial(straight, feed.tokens, feed.positions, mask, held, keep, entries)
        if straight.agreed:
            return ours()
        made = stock()
        if feed.positions.max() > 0:  # at position 0 nothing is rotated
            straight.compare(ours, made)  # both write the same into the cache
        return made

    @property
    def _straight(self) -> Straight | None:
        """The way through layers that are machine code, once they are."""
        if not self._tried and Straight.may(self.stack):
            self._tried = True
            self._found = Straight.of(self.model, self.stack, lambda: self._head, self._behind_head)
        return self._found

    @contextmanager
    def _rows_apart(self, feed: Feed | DeviceFeed) -> Iterator[None]:
        """Inside, every row is rotated as if it were alone and the model had read nothing else before.

        Where rotary frequencies change with the length of the text, transformers takes the longest row's for all, and
        `dynamic` keeps those of the longest text until a short one comes.
        """
        if self.rope_boundary is None or isinstance(feed, DeviceFeed):
            yield
            return
        reach = feed.positions.max(axis=1) + 1 if feed.reach is None else feed.reach

        def apart(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> tuple[Tensor, ...]:
            call = inspect.signature(module.forward).bind(*args, **kwargs)

            def turn(positions: Sequence[int]) -> tuple[Tensor, ...]:
                call.arguments["position_ids"] = torch.tensor([positions], device=self.device)
                turned: tuple[Tensor, ...] = module.forward(*call.args, **call.kwargs)
                return turned

            rows = []
            for places, length in zip(feed.positions.tolist(), reach.tolist(), strict=True):
                turn([0])  # makes `dynamic` forget
                rows.append([t[:, :-1] for t in turn([*places, length - 1])])
            turn([0])
            return tuple(torch.cat(each) for each in zip(*rows, strict=True))

        with ExitStack() as stack:
            for module in self.stack.modules():
                if "rope_type" in vars(module):  # a rotary embedding
                    stack.callback(module.register_forward_hook(apart, with_kwargs=True).remove)
            yield

    def hidden_index(self, layer: int) -> int:
        """A layer number in transformers' `hidden_states` numbering as 0 … L: 0 embeds, L is after the last norm.

        `UNNORMED` is L + 1.

        Raises:
            UserError: there is no such entry.
        """
        count = int(self.config.num_hidden_layers) + 1
        if layer == UNNORMED:
            return count
        if not -count <= layer < count:
            raise UserError(f"hidden state {layer} does not exist: the target's are {-count} … {count - 1}")
        return layer % count

    @contextmanager
    def tapped(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Catches hidden states [R, n, D] of the passes inside, without storing every layer.

        Args:
            layers: entries of transformers' `hidden_states`, negative ones counted from the end.
        """
        caught: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer in layers:
                index = self.hidden_index(layer)
                if layer == UNNORMED:
                    raw = lambda _m, _i, out, layer=layer: caught.update({layer: out if isinstance(out, Tensor) else out[0]})
                    hook = self.layers[-1].register_forward_hook(raw)
                elif index == self.config.num_hidden_layers:
                    after = lambda _m, _i, out, layer=layer: caught.update({layer: out[0]})
                    hook = self.stack.register_forward_hook(after)
                else:  # what goes into a layer, and not the embeddings themselves: some models scale them
                    before = lambda _m, args, layer=layer: caught.update({layer: args[0]})
                    hook = self.layers[index].register_forward_pre_hook(before)
                stack.callback(hook.remove)
            yield caught

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [R, n, D] of tokens, as the model's embedding module gives them."""
        outer: Any = self.model
        embedded: Tensor = outer.get_input_embeddings()(tokens)
        return embedded

    def head(self, states: Tensor) -> Tensor:
        """Logits […, V] of what the last layer's norm gave, […, D], by the stock head and what the model does behind it."""
        if self._behind_head is None:
            return self._through_model(states)
        return self._behind_head(self._head(states))

    def head_for(self, ids: Tensor | None, raw: bool = False) -> Callable[[Tensor], Tensor]:
        """A function that gives the logits […, V′] of some tokens alone, of states […, D].

        Args:
            ids: [V′] the tokens; none for all of them.
            raw: whether what the model does behind its head is left out, as a model of the same kind will do it.
        """
        behind = (lambda x: x) if raw else self._behind_head
        if behind is None:
            return lambda states: self._through_model(states).index_select(-1, ids) if ids is not None else self.head(states)
        if ids is None:
            return lambda states: behind(self._head(states))
        bias = getattr(self._head, "bias", None)
        with torch.inference_mode(False), torch.no_grad():  # a drafter's loss may go through them
            rows, biases = self._head.weight[ids], None if bias is None else bias[ids]
        multiplied = rows_of(self._head, rows, biases)
        return lambda states: behind(multiplied(states))

    @property
    def _head(self) -> Any:  # untyped, as much of transformers is
        return self.model.get_output_embeddings()

    @cached_property
    def _behind_head(self) -> Callable[[Tensor], Tensor] | None:
        """The model's change of its head's output: nothing, a cap or a scale; None where it is another one."""
        cap = getattr(self.config, "final_logit_softcapping", None) or 1.0  # Gemma 2
        by, over = getattr(self.config, "logit_scale", None) or 1.0, getattr(self.config, "logits_scaling", None) or 1.0
        known: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: x,
            lambda x: torch.tanh(x / cap) * cap,
            lambda x: x * by,  # Cohere
            lambda x: x / over,  # Granite
        )
        with torch.no_grad():
            probe = torch.linspace(-3, 3, self.hidden, device=self.device, dtype=self.dtype)[None]
            wanted, raw = self._through_model(probe).float(), self._head(probe)
            return next((f for f in known if torch.allclose(f(raw).float(), wanted, rtol=1e-4, atol=1e-5)), None)

    def _through_model(self, states: Tensor) -> Tensor:
        """A pass over one token in which the head is given other states."""
        hook = self._head.register_forward_pre_hook(lambda _, args: (states[None],))
        try:
            one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            logits: Tensor = self.model(input_ids=one, use_cache=False).logits
        finally:
            hook.remove()
        return logits[0]

    def keys_and_values(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's keys and values [R, H, n, width] for given inputs [R, n, D] at positions [R, n].

        The pass is cut where the layer hands them to its cache, so that nothing behind them is computed.
        """
        straight = self._straight
        if straight is not None and straight.agreed and straight.free(anew=False) and embeds.dtype is self.dtype:
            return straight.stored(embeds, positions)
        mask = self.by_type(embeds.new_zeros(1, 1, 1, 1))
        given = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
        return first_stored(lambda cache: self.model.base_model(**given, **self.cached(cache)))


class _Masks(dict[str, Tensor]):
    """Masks by type of layer; layers of any other type get none, as they see by their state."""

    def __missing__(self, key: str) -> None:
        return None


def refuse_attention(model: PreTrainedModel) -> None:
    """Refuses a loaded model whose attention takes no mask of a tree.

    Raises:
        UserError: it names the implementation.
    """
    chosen = model.config.get_text_config(decoder=True)._attn_implementation
    if chosen not in (None, *ATTENTION):
        name, allowed = type(model).__name__, " or ".join(ATTENTION)
        raise UserError(f"{name} has attn_implementation '{chosen}', which takes no mask of a tree: allowed is {allowed}")


def pretrained(folder: str, config: PreTrainedConfig, dtype: torch.dtype, **how: Any) -> tuple[Any, dict[str, Any]]:
    """A model loaded by transformers from a folder or a hub id, and its report of the tensors there.

    Args:
        folder: or hub id.
        config: the model's.
        dtype: of the weights.
        how: what else `from_pretrained` takes.

    Raises:
        UserError: the config's sizes are not those of the weights.
    """
    check_bounds(config, Path(folder))
    auto: Any = AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True, **how)
    except RuntimeError as error:
        if "mismatch" in str(error):  # transformers names them in a log
            raise UserError(f"'{folder}' has a config.json whose sizes are not those of the weights beside it") from error
        raise
    return model, info


def one_layer(config: PreTrainedConfig, layers: int = 1, **changes: Any) -> PreTrainedModel:
    """A fresh float32 model of the same architecture with few layers, all with full attention where types are mixed."""
    values = config.to_dict() | {"num_hidden_layers": layers, "dtype": "float32"} | changes
    for name in ("layer_types", "layers_block_type"):
        if values.get(name):
            values[name] = [FULL] * layers
    if "attn_layer_period" in values:  # Jamba
        values |= {"attn_layer_period": 1, "attn_layer_offset": 0}
    if values.get("attn_layer_indices"):  # Bamba
        values["attn_layer_indices"] = list(range(layers))
    if values.get("mlp_layer_types"):
        values["mlp_layer_types"] = values["mlp_layer_types"][:layers]
    small = type(config)(**{k: v for k, v in values.items() if k != "transformers_version"})
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(small, dtype=torch.float32)
    return model
