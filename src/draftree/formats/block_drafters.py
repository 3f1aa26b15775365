"""Checkpoint layouts of block drafters (DFlash, DSpark, JetSpec) in five programs.

    z-lab         DFlash and JetSpec: a flat config; `dflash_config` has the layers that are read and
                  the mask token. SpecForge's DSpark has this layout too.
    DeepSpec      DSpark: a flat config, with its own embedding and LM head. Its slots are shifted:
                  slot 0, the root's, drafts already.
    speculators   the config of the layers is nested. It names entries of `hidden_states`; all other
                  layouts name layers, which are one less.
    transformers  the class that reads DFlash there: other names for two tensors, and sliding windows
                  in both directions.

Shapes: V vocabulary, V′ draft vocabulary.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from draftree.errors import UnknownName, UserError
from draftree.formats import config_entries
from draftree.formats.checkpoint import CONFIG, Checkpoint
from draftree.formats.speculators import KIND, LAYER_CONFIG, SPECULATORS_CONFIG_KEY
from draftree.tree import MAX_NODES
from draftree.utils.files import Entries

NESTED_CONFIG_KEY = "dflash_config"
EMBEDDING_WEIGHT = "embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"
VOCABULARY_OFFSETS = "d2t"
MARKS = "t2d"
CORE_TENSORS = ("fc.weight", "hidden_norm.weight")
"""Tensors that all block drafters have, under z-lab's names."""
NATIVE = "muse_glimmer_assistant"
NATIVE_NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
OWN_TENSOR_NAMES = {"lm_head.d2t": VOCABULARY_OFFSETS, "lm_head.t2d": MARKS}
"""Names of a draft vocabulary's tensors, which belong to the LM head in draftree."""
EARLY_HEAD_PREFIX = "logit_head."
"""The prefix of DSpark's head tensors in early files of SpecForge."""
DFLASH2_MARKS = ("attention_conv", "candidate_selector.")
"""Parts of tensor names that occur only in DFlash 2."""
Markov = Literal["vanilla", "gated", "rnn"]
SPECULATORS = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
DEFAULT_CONTEXT_LENGTH = 32768
"""The context length of a Qwen3 model whose config does not give it."""
DEFAULT_MAX_WINDOW_LAYERS = 28
"""The first sliding-window layer of a Qwen3 config without `max_window_layers`."""
LAST_VERSION = "0.5.0"
"""The version of speculators whose layout is written."""
DrafterKind = Literal["dflash", "dspark", "jetspec"]


@dataclass(frozen=True)
class Sight:
    """The positions that the slots of a drafter's layer can attend to.

    Attributes:
        causal: whether a slot sees only the earlier slots of its block; otherwise it sees all of
            them.
        window: number of previous positions that a slot sees; None for all.
    """

    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class BlockDrafterConfig:
    """Store the content of a published config, whatever the program that wrote it.

    Attributes:
        values: the config of the layers, flat.
        block: number of slots in a pass, including the slot of the root.
        mask: the token in all other slots.
        reads: indices into the target's `hidden_states`, in the order in which they are
            concatenated.
        shifted: whether the root's slot drafts the token after the root; otherwise it drafts none.
        sights: the visible positions of each layer.
        draft_vocab: V′, the size of the draft vocabulary; 0 for the whole vocabulary.
        markov: the kind of DSpark's Markov head.
        rank: the rank of the Markov head; 0 if there is none.
        confidence: whether there is a confidence head, and whether it also reads the previous
            token.
    """

    values: dict[str, Any]
    block: int
    mask: int
    reads: tuple[int, ...]
    shifted: bool
    sights: tuple[Sight, ...]
    draft_vocab: int = 0
    markov: Markov = "vanilla"
    rank: int = 0
    confidence: tuple[bool, bool] = (False, False)

    @property
    def drafts(self) -> int:
        """Return the number of tokens that one pass drafts."""
        return self.block if self.shifted else self.block - 1


def kind_of(config: Mapping[str, Any], keys: Set[str]) -> DrafterKind | None:
    """Return the method of a published folder, or None if it is not a block drafter."""
    if KIND in config:
        found = config[KIND]
        return found if found in ("dflash", "dspark") else None
    nested = config.get(NESTED_CONFIG_KEY)
    said = {**config, **nested} if isinstance(nested, dict) else config
    known = isinstance(nested, dict) or "Qwen3DSparkModel" in (config.get("architectures") or ())
    if config.get("model_type") != NATIVE and not (known and CORE_TENSORS[0] in keys):
        return None
    if said.get("causal_head"):
        return "jetspec"
    return (
        "dspark" if said.get("markov_rank") or any("markov_head." in k for k in keys) else "dflash"
    )


def load_checkpoint(stored: Checkpoint) -> tuple[Checkpoint, BlockDrafterConfig]:
    """Return a checkpoint with its tensors, under their stored names, and its config's layout.

    Raises:
        UserError: the checkpoint is DFlash 2, or an entry is missing or invalid.
    """
    stored = stored.load_tensors()
    config, where = stored.config, stored.folder
    second = any(mark in key for key in stored.tensors for mark in DFLASH2_MARKS)
    if second or "DFlash2DraftModel" in (config.get("architectures") or ()):
        raise UserError(
            f"'{where}' holds a DFlash 2, which adds convolutions and a selector: allowed is DFlash"
        )
    _check_entries(config, where)
    stored = replace(stored, name=_names(config, stored.tensors.keys()))
    return stored, _layout(config, stored)


def _check_entries(config: dict[str, Any], where: Path) -> None:
    """Refuse entries of other networks, and warn of unknown ones.

    Raises:
        UserError: an entry changes the network's computation in a way that is not supported.
    """
    nested = config.get(NESTED_CONFIG_KEY)
    layer = config.get(LAYER_CONFIG)
    method = str(config.get(KIND, "dflash"))
    if KIND in config:
        config_entries.SPECULATED_BLOCKS.check(config, where, method)
        config_entries.QWEN3.check(layer if isinstance(layer, dict) else {}, where, method)
    else:
        config_entries.FLAT_BLOCK_DRAFTER.check(config, where, method)
    config_entries.FLAT_BLOCK_DRAFTER.check(
        nested if isinstance(nested, dict) else {}, where, method
    )


def name(key: str) -> str:
    """Return the name on disk of a new drafter's tensor."""
    return OWN_TENSOR_NAMES.get(key, key)


def _names(config: Mapping[str, Any], keys: Set[str]) -> Callable[[str], str]:
    """Return a function from the names of the network's tensors to their names on disk."""
    native = NATIVE_NAMES if config.get("model_type") == NATIVE else {}
    early = any(key.startswith(EARLY_HEAD_PREFIX) for key in keys)

    def translate(key: str) -> str:
        for ours, theirs in native.items():
            if key.startswith(ours):
                return theirs + key.removeprefix(ours)
        return (
            EARLY_HEAD_PREFIX + key
            if early and key.startswith(("markov_head.", "confidence_head."))
            else name(key)
        )

    return translate


def _layout(config: dict[str, Any], stored: Checkpoint) -> BlockDrafterConfig:
    where = stored.folder / CONFIG
    outer = Entries(config, where)
    speculated, nested = KIND in config, outer.get(NESTED_CONFIG_KEY, dict[str, Any], {})
    values = outer.get(LAYER_CONFIG, dict[str, Any]) if speculated else dict(config)
    said = Entries(config | nested, where)  # block size and mask token may be in either place
    block, mask = said.get("block_size", int, least=1), said.get("mask_token_id", int, least=0)
    if block > MAX_NODES:  # masks grow with its square
        raise UserError(
            f"{said.where}: block_size is {block}, allowed is at most {MAX_NODES}, the most nodes of a tree"
        )
    ids = said.get("aux_hidden_state_layer_ids" if speculated else "target_layer_ids", list[int])
    reads = tuple(ids) if speculated else tuple(layer + 1 for layer in ids)
    official = "Qwen3DSparkModel" in (config.get("architectures") or ())
    specforge = said.get("projector_type", str | None, None) == "dspark"
    shifted = said.get("sample_from_anchor", bool, official or specforge)
    count = Entries(values, where).get("num_hidden_layers", int, least=1)
    markov = said.get("markov_head_type", str | None, None) or "vanilla"
    if markov not in get_args(Markov):
        raise UnknownName(f"markov_head_type in '{where}'", markov, get_args(Markov))
    head = "confidence_head.proj.weight"
    own = any(key.removeprefix(EARLY_HEAD_PREFIX) == head for key in stored.tensors)
    return BlockDrafterConfig(
        values=dict(values),
        block=block,
        mask=mask,
        reads=reads,
        shifted=shifted,
        sights=_sights(Entries(values, where), said, count, config.get("model_type") == NATIVE),
        draft_vocab=len(stored.tensors[VOCABULARY_OFFSETS])
        if VOCABULARY_OFFSETS in stored.tensors
        else 0,
        markov=cast(Markov, markov),
        rank=said.get("markov_rank", int | None, 0, least=0) or 0,
        confidence=(
            said.get("enable_confidence_head", bool, own),
            said.get("confidence_head_with_markov", bool, own),
        ),
    )


def _sights(layers: Entries, said: Entries, count: int, native: bool) -> tuple[Sight, ...]:
    """Return the visible positions of each layer.

    A sliding-window layer is causal unless the config has another entry. In transformers' class it
    sees both directions.
    """
    window = layers.get("sliding_window", int | None, None, least=1)
    switched = layers.get("use_sliding_window", bool | None, None)
    named = layers.get("layer_types", list[str] | None, None)
    types = named or ["full_attention"] * count
    if not named and switched and window is not None:  # as transformers derives them
        first = layers.get("max_window_layers", int, DEFAULT_MAX_WINDOW_LAYERS)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
        raise UserError(
            f"layer_types is {types}, allowed are {count} of full_attention and sliding_attention"
        )
    if switched is False and window is not None and "sliding_attention" in types:
        raise UserError(
            f"use_sliding_window is false and layer_types is {types}, allowed is full_attention"
        )
    causal = said.get("causal_head", bool | None, None) or said.get(
        "is_causal", bool | None, said.get("causal", bool | None, None)
    )
    both = native or said.get("sliding_window_non_causal", bool, False)
    sliding = [t == "sliding_attention" for t in types]
    return tuple(
        Sight(bool(causal) if causal is not None else s and not both, window if s else None)
        for s in sliding
    )


def make_config(layout: BlockDrafterConfig, kind: DrafterKind) -> dict[str, Any]:
    """Return the config of a new drafter in z-lab's layout; for DSpark, in SpecForge's form."""
    nested: dict[str, Any] = {
        "target_layer_ids": [i - 1 for i in layout.reads],
        "mask_token_id": layout.mask,
    }
    if kind == "jetspec":
        nested |= {"causal_head": True}
    if kind == "dspark":
        nested |= {"projector_type": "dspark"} | _heads(layout)
    architecture = "DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"
    return layout.values | {
        "architectures": [architecture],
        "block_size": layout.block,
        NESTED_CONFIG_KEY: nested,
    }


def _heads(layout: BlockDrafterConfig) -> dict[str, Any]:
    """Return the config entries of DSpark's heads."""
    there, with_markov = layout.confidence
    return {
        "markov_rank": layout.rank,
        "markov_head_type": layout.markov,
        "enable_confidence_head": there,
        "confidence_head_with_markov": with_markov,
    }


def to_speculators(
    layout: BlockDrafterConfig, kind: DrafterKind, verifier: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config in the layout of speculators.

    Args:
        layout: the layout of the checkpoint's config.
        kind: `dflash` or `dspark`; a JetSpec drafter is stored as `dflash`.
        verifier: `name_or_path` and `architectures` of the target.

    Raises:
        UserError: the layers have different attention windows.
    """
    outside = {
        "architectures",
        "auto_map",
        "block_size",
        "draftree",
        "dtype",
        "torch_dtype",
        "transformers_version",
        NESTED_CONFIG_KEY,
    }
    layer = {k: v for k, v in layout.values.items() if k not in outside} | {"model_type": "qwen3"}
    sliding, both = _window_entries(
        layout, layer.get("max_position_embeddings", DEFAULT_CONTEXT_LENGTH)
    )
    layer |= sliding
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": layout.drafts,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    how = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    return {
        KIND: kind,
        "speculators_version": LAST_VERSION,
        "architectures": [SPECULATORS[kind]],
        "draft_vocab_size": layout.draft_vocab or layer["vocab_size"],
        "block_size": layout.block,
        "aux_hidden_state_layer_ids": list(layout.reads),
        "mask_token_id": layout.mask,
        "target_hidden_size": layer["hidden_size"],
        "sample_from_anchor": layout.shifted,
        "sliding_window_non_causal": both,
        **(_heads(layout) if kind == "dspark" else {}),
        SPECULATORS_CONFIG_KEY: how | {"verifier": dict(verifier)},
        LAYER_CONFIG: layer,
    }


def _window_entries(layout: BlockDrafterConfig, context: int) -> tuple[dict[str, Any], bool]:
    """Return the config entries of attention windows in the layout of speculators.

    In this layout only sliding-window layers are causal in their block. A causal layer that sees
    the whole context, as in JetSpec, therefore gets a window of the context's length.

    Returns:
        The entries, and whether sliding-window layers see both directions. Without such layers this
        is true, as vLLM reads the entry for all layers.
    """
    slides = {(s.causal, s.window or context) for s in layout.sights if s.causal or s.window}
    if len(slides) > 1:
        raise UserError(
            f"its layers see {sorted(slides)} (causal, window), allowed for 'speculators' is one kind beside full ones"
        )
    causal, window = slides.pop() if slides else (False, None)
    types = [
        "sliding_attention" if s.causal or s.window else "full_attention" for s in layout.sights
    ]
    return {
        "layer_types": types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }, not causal
