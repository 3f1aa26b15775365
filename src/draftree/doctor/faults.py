"""Find a drafter's fault: change one setting at a time and see whether the drafts improve.

Each alternative is one change of what the drafter is told or of how it is read; weights are left as
they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftree.drafters.base import Drafter, Trainable
from draftree.drafters.neural.draft_vocabulary import offsets_to_ids
from draftree.drafters.neural.target_modules import TargetHead
from draftree.evaluation.target_trace import Recording, TokenText
from draftree.evaluation.teacher_forcing import ComparedDrafts, Source, drive
from draftree.models.hf_runner import UNNORMED
from draftree.models.kv_cache import SlotCache
from draftree.target.target import HiddenStateSpec, Probes, Target, VerificationResult
from draftree.tree import AcceptResult, Floats, Ints, Tree

HIDDEN_LAYER_FAULT = "hidden layer off by one"
TOKEN = "hidden states off by one token"
KV = "keys and values of the wrong layer"
ROPE, VOCABULARY = "wrong rope", "wrong vocabulary map"
OLD_THETA = 10_000.0
"""Rotary base that applies if a config names none. Some drafters were trained with it by
mistake."""
MIN_GAIN_ERRORS, MIN_OTHER_GAIN_ERRORS = 3.0, 1.0
"""Least gains in standard errors for a change to count as better. One of the two gains, of overlap
and of cross-entropy, must reach the first value, and the other one the second value."""
MIN_OVERLAP_GAIN = 0.005
"""Least increase of the overlap for a change to count as better."""
UNTRAINED_AGREEMENT = 0.1
"""Agreement with the target below which a drafter counts as untrained. A change has to reach it to
count as the correction of a fault."""
NEGLIGIBLE_GAIN = 1e-4
"""Difference of two gains up to which the change that was tried first is preferred."""


@dataclass(frozen=True)
class Alternative:
    """Describe one change to try on a drafter.

    The drafter drafts the same texts again with the change. If its drafts improve, the change shows
    what the fault is. The change is made either in what the drafter reads (`source`), or in the
    drafter itself (`made`).

    Attributes:
        cause: name of the fault that the drafter has if the change helps.
        change: description of the change.
        source: target or recording whose internals the drafter reads in this run.
        made: function that returns a context manager, inside which the drafter is changed; by
            default the drafter stays as it is.
    """

    cause: str
    change: str
    source: Source
    made: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Improvement:
    """Store the gain from driving a drafter with one change.

    Attributes:
        cause: name of the fault that the change corrects.
        change: description of the change.
        overlap: mean overlap Σ min(p, q) without and with the change.
        agreement: share of positions that agree with the target, without and with the change.
        z: increase of the overlap in standard errors.
        z_surprise: decrease of the cross-entropy in standard errors.
    """

    cause: str
    change: str
    overlap: tuple[float, float]
    agreement: tuple[float, float]
    z: float
    z_surprise: float

    @property
    def gain(self) -> float:
        """Return the increase of the mean overlap."""
        return self.overlap[1] - self.overlap[0]

    @property
    def sure(self) -> bool:
        """Return whether the gain is too large to be chance."""
        less, more = sorted((self.z, self.z_surprise))
        return (
            more >= MIN_GAIN_ERRORS
            and less >= MIN_OTHER_GAIN_ERRORS
            and self.gain >= MIN_OVERLAP_GAIN
            and self.agreement[1] >= UNTRAINED_AGREEMENT
        )

    @property
    def evidence(self) -> str:
        """Return a text with the overlap and the agreement without and with the change.

        The text also gives the changes of overlap and cross-entropy in standard errors.
        """
        return (
            f"with {self.change}, overlap goes from {self.overlap[0]:.3f} to {self.overlap[1]:.3f} and agreement from "
            f"{self.agreement[0]:.2f} to {self.agreement[1]:.2f} (overlap rises by {self.z:.1f} standard errors, cross-entropy "
            f"falls by {self.z_surprise:.1f})"
        )


def evaluate_alternative(
    alternative: Alternative,
    drafter: Drafter[Any],
    texts: Sequence[TokenText],
    base: ComparedDrafts,
) -> Improvement:
    """Run the drafter with one change, and compare the drafts with those without it.

    Args:
        alternative: the change.
        drafter: the drafter.
        texts: the texts along which it drafts.
        base: the drafts without the change.
    """
    with alternative.made():
        found = drive(alternative.source, drafter, texts)
    z, z_surprise = _z(found.overlap - base.overlap, base), _z(base.surprise - found.surprise, base)
    overlap = float(base.overlap.mean()), float(found.overlap.mean())
    agreement = float(base.agree.mean()), float(found.agree.mean())
    return Improvement(alternative.cause, alternative.change, overlap, agreement, z, z_surprise)


FEWEST_BLOCKS = 12
"""Least number of blocks from which the standard error of a gain is estimated."""


def _z(gains: Floats, places: ComparedDrafts) -> float:
    """Return the sum of gains over all positions, in standard errors.

    Positions of one block are not independent, so the error is estimated from the sums over blocks.
    It is 0 with fewer than `FEWEST_BLOCKS` blocks.
    """
    sums = np.bincount(places.block, gains)
    spread = float(sums.std(ddof=1)) * np.sqrt(len(sums)) if len(sums) >= FEWEST_BLOCKS else 0.0
    return float(sums.sum()) / spread if spread > 0 else 0.0


def best_by_cause(
    drafter: Drafter[Any],
    texts: Sequence[TokenText],
    base: ComparedDrafts,
    tried: Sequence[Alternative],
) -> list[Improvement]:
    """Try changes, and return the one that helps most for each fault.

    A change is returned only if its gain is certain, and at least half of the largest gain.
    """
    found: dict[str, Improvement] = {}
    for alternative in tried:
        better = evaluate_alternative(alternative, drafter, texts, base)
        if better.sure and (
            better.cause not in found or better.gain > found[better.cause].gain + NEGLIGIBLE_GAIN
        ):
            found[better.cause] = better
    most = max((b.gain for b in found.values()), default=0.0)
    return sorted((b for b in found.values() if b.gain >= most / 2), key=lambda b: -b.gain)


def alternatives(
    target: Target, drafter: Drafter[Any], texts: Sequence[TokenText], chart: "Map | None"
) -> list[Alternative]:
    """Return all changes to try on a drafter.

    `chart` is the drafter's vocabulary map; None if it has none.
    """
    needs, count = drafter.needs, int(target.decoder.config.num_hidden_layers)
    layers = tuple(target.decoder.hidden_index(layer) for layer in needs.hidden)
    around = [i for layer in layers for i in (layer - 1, layer, layer + 1) if 0 <= i <= count]
    around += [UNNORMED] * (UNNORMED in needs.hidden)
    record = Recording.of(target, texts, around)
    source: Source = target if needs.kv else record
    found = (
        []
        if needs.kv
        else [*_layer_alternatives(record, layers, count), *_token_alternatives(record, layers)]
    )
    if needs.kv:
        words = {-1: "one layer earlier", 1: "one layer deeper"}
        found += [
            Alternative(KV, f"the keys and values of {word}", ShiftedTarget(target, by))
            for by, word in words.items()
        ]
    if isinstance(drafter, Trainable):
        found += [*_rope_alternatives(target, drafter, source), *_map_alternatives(chart, source)]
    return found


def _layer_alternatives(
    record: Recording, layers: tuple[int, ...], count: int
) -> Iterator[Alternative]:
    groups = [layers] if len(layers) == 1 else [layers, *((layer,) for layer in layers)]
    for group in filter(None, groups):
        for by in (-1, 1):
            if all(0 <= layer + by <= count for layer in group):
                given = {layer: layer + by for layer in group}
                names = ", ".join(f"{new} for {old}" for old, new in given.items())
                yield Alternative(
                    HIDDEN_LAYER_FAULT, f"hidden state {names}", replace(record, given=given)
                )


def _token_alternatives(record: Recording, layers: tuple[int, ...]) -> Iterator[Alternative]:
    for by, word in ((-1, "earlier"), (1, "later")) if layers else ():
        yield Alternative(
            TOKEN, f"each token's hidden state taken one token {word}", replace(record, later=by)
        )


@dataclass(frozen=True)
class ShiftedTarget:
    """Wrap a target so that a drafter reads the keys and values of other layers.

    `by` is the offset in layers.
    """

    target: Target
    by: int

    def new_cache(self, rows: int, slots: int) -> SlotCache:
        """Return an empty cache; see `Target.new_cache`."""
        return self.target.new_cache(rows, slots)

    def prefill(
        self, cache: SlotCache, prompts: Sequence[Ints], needs: HiddenStateSpec
    ) -> VerificationResult:
        """Run the prompts through the target; see `Target.prefill`."""
        return self._lifted(self.target.prefill(cache, prompts, needs))

    def verify(
        self, cache: SlotCache, tree: Tree, needs: HiddenStateSpec, probes: Probes | None = None
    ) -> VerificationResult:
        """Run a draft tree through the target; see `Target.verify`."""
        return self._lifted(self.target.verify(cache, tree, needs, probes))

    def commit(self, cache: SlotCache, tree: Tree, verdict: AcceptResult) -> None:
        """Commit the accepted tokens to the cache; see `Target.commit`."""
        self.target.commit(cache, tree, verdict)

    def _lifted(self, verified: VerificationResult) -> VerificationResult:
        return replace(
            verified,
            hidden_states=replace(
                verified.hidden_states, cache=verified.hidden_states.cache.shift_layers(self.by)
            ),
        )


def rotary_modules(model: nn.Module, *holders: object) -> dict[str, nn.Module]:
    """Return the modules that have rotary frequencies, by name.

    The search covers the modules of `model`, and modules that these or the `holders` have as plain
    attributes.
    """
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        for inner, part in [(name, module), *_unregistered_modules(module, name)]:
            found.setdefault(part, inner)
    for holder in holders:
        for name, part in _unregistered_modules(holder, ""):
            found.setdefault(part, name)
    return {name: m for m, name in found.items() if isinstance(m._buffers.get("inv_freq"), Tensor)}


def _unregistered_modules(holder: object, where: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that an object has as plain attributes, not as registered submodules.

    Such modules are not saved with the object, and not cast with it.
    """
    for key, value in vars(holder).items():
        for held in value if isinstance(value, list) else [value]:
            name = f"{where}.{key}".strip(".")
            if isinstance(held, nn.Module):
                yield from ((f"{name}.{n}", m) for n, m in held.named_modules())


def rotary_frequencies(module: nn.Module) -> Tensor:
    """Return [k] the rotary frequencies that a module has in its buffer `inv_freq`."""
    found = module._buffers["inv_freq"]
    assert found is not None
    return found


def rotary_base(frequencies: Tensor) -> float:
    """Return the rotary base θ of unscaled frequencies [k], which are fᵢ = θ^(−i/k)."""
    k = len(frequencies)
    return float(frequencies[1].cpu().double() ** -k) if k > 1 else 1.0


def _rope_alternatives(
    target: Target, drafter: Trainable[Any], source: Source
) -> Iterator[Alternative]:
    """Yield changes of the rotary frequencies, in all modules together and in each alone.

    Each change sets the target's frequencies, or the frequencies with the base `OLD_THETA`.
    """
    theirs = next(map(rotary_frequencies, rotary_modules(target.decoder.stack).values()), None)
    own = rotary_modules(drafter.model, drafter)
    wanted = [] if theirs is None else [("the target's rotary base", rotary_base(theirs), theirs)]
    wanted.append(("the usual rotary base", OLD_THETA, torch.empty(0)))
    for group in [own] if len(own) == 1 else [own, *({name: m} for name, m in own.items())]:
        bases = ", ".join(
            sorted({f"{rotary_base(rotary_frequencies(m)):.0f}" for m in group.values()})
        )
        where = "" if group is own else f" in {next(iter(group))}"
        for name, base, exact in wanted:
            old = {m: rotary_frequencies(m) for m in group.values()}
            # θ^(−i/k) where the target's own do not fit; on the host, as not all devices have
            # float64
            powers = {
                m: base ** -torch.linspace(0, 1, len(f) + 1, dtype=torch.float64)[:-1]
                for m, f in old.items()
            }
            new = {
                m: exact.clone() if exact.shape == f.shape else powers[m].to(f.dtype).to(f.device)
                for m, f in old.items()
            }
            if any(
                not torch.allclose(old[m].cpu().double(), f.cpu().double(), rtol=1e-3)
                for m, f in new.items()
            ):
                yield Alternative(
                    ROPE,
                    f"{name} {base:.0f} instead of {bases}{where}",
                    source,
                    _replaced_buffer("inv_freq", new),
                )


def _replaced_buffer(
    name: str, new: dict[nn.Module, Tensor]
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that opens a context in which modules hold another buffer.

    Args:
        name: the name of the buffer.
        new: for each module, the tensor that it holds within the context.
    """

    @contextmanager
    def changed() -> Iterator[None]:
        old = [(module, module._buffers[name]) for module in new]
        for module, value in new.items():
            module._buffers[name] = value
        try:
            yield
        finally:
            for module, before in old:
                module._buffers[name] = before

    return changed


@dataclass(frozen=True)
class Map:
    """Store the map between a draft vocabulary and the target's vocabulary.

    `module` has the map as buffers. `d2t` [V′] is the target's id minus the draft id, for each
    draft id. `t2d` [V] marks the target's ids that can be drafted.
    """

    module: nn.Module
    d2t: Tensor
    t2d: Tensor

    @property
    def drafted(self) -> Tensor:
        """Return [V′] the target's id for each draft id."""
        return offsets_to_ids(self.d2t)

    @property
    def distinct(self) -> bool:
        """Return whether all draft ids, clamped to the vocabulary, stand for different tokens."""
        inside = self.drafted.clamp(0, len(self.t2d) - 1)
        return int(inside.unique().numel()) == len(inside)

    @property
    def complaints(self) -> list[str]:
        """Return descriptions of the map's faults; empty for a sound map."""
        ids = self.drafted
        vocab = len(self.t2d)
        found = []
        if outside := int(((ids < 0) | (ids >= vocab)).sum()):
            found.append(
                f"{outside} of {len(ids)} draft ids stand for none of the target's 0 … {vocab - 1}"
            )
        if int(ids.unique().numel()) < len(ids):
            found.append(
                f"{len(ids) - int(ids.unique().numel())} draft ids stand for a token that another stands for"
            )
        if int(self.t2d.sum()) != len(ids):
            found.append(f"t2d marks {int(self.t2d.sum())} tokens, d2t has {len(ids)}")
        inside = ids[(ids >= 0) & (ids < vocab)]
        if odd := int((~self.t2d.bool()[inside]).sum()):
            found.append(f"{odd} tokens that d2t points at are not marked in t2d")
        return found

    def putting(self, ids: Tensor) -> Callable[[], AbstractContextManager[None]]:
        """Return a function whose context manager maps the draft ids to other target ids.

        `ids` [V′] are these target ids.
        """
        inside = ids.clamp(0, len(self.t2d) - 1)
        return _replaced_buffer(
            "d2t", {self.module: inside - torch.arange(len(ids), device=ids.device)}
        )


def vocabulary_map(model: nn.Module, vocab: int) -> Map | None:
    """Return the vocabulary map of a drafter's model, if its LM head has its own weights.

    If the drafter uses the target's head, the result is None: the map then selects the rows of the
    head, so that it cannot be wrong.

    Args:
        model: model of a drafter.
        vocab: size V of the target's vocabulary.
    """
    for module in model.modules():
        d2t, t2d = module._buffers.get("d2t"), module._buffers.get("t2d")
        if isinstance(d2t, Tensor) and not isinstance(module, TargetHead):
            marks = torch.zeros(vocab, dtype=torch.bool, device=d2t.device)
            marks[offsets_to_ids(d2t).clamp(0, vocab - 1)] = True
            return Map(module, d2t, t2d if isinstance(t2d, Tensor) else marks)
    return None


def draft_vocabulary(model: nn.Module, vocab: int) -> int:
    """Return the size of a drafter's vocabulary; without a map it is `vocab`, the target's size."""
    maps = (module._buffers.get("d2t") for module in model.modules())
    return next((len(d2t) for d2t in maps if isinstance(d2t, Tensor)), vocab)


def _map_alternatives(found: Map | None, source: Source) -> Iterator[Alternative]:
    if found is None:
        return
    plain, marked = torch.arange(len(found.d2t), device=found.d2t.device), found.t2d.nonzero()[:, 0]
    choices = {
        "d2t read as the target's ids, not as offsets": found.d2t,
        "draft ids taken for the target's ids": plain,
        "draft ids standing for the next token": found.drafted + 1,
        "draft ids standing for the token before": found.drafted - 1,
    } | ({"the ids that t2d marks, in order": marked} if len(marked) == len(plain) else {})
    for change, ids in choices.items():
        if not torch.equal(ids.clamp(0, len(found.t2d) - 1), found.drafted):
            yield Alternative(VOCABULARY, change, source, found.putting(ids))
