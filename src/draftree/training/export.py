"""Export checkpoints to the layouts of other programs.

speculators  eagle, eagle3, peagle, dflash, dspark, jetspec: the library of that name, and vLLM. An embedding in EAGLE's file
             is left out, as there it is always the target's; a peagle's has always one; the last three have copies of the
             target's embedding and head there. A JetSpec is a dflash there, with causal windows as long as the context.
eagle        eagle, eagle3: the original layout, which the official code and SGLang read, and vLLM that of an eagle3. vLLM takes
             an EAGLE's `bias`, which is that of the fusing layer, for attention's; the official code knows the three layers
             of EAGLE-3's defaults alone and no `norm_before_residual`, while vLLM reads both from the config.
vllm-eagle   eagle: the same without the bias, which an embedding of its own has in it.
vllm-medusa  medusa: vLLM's own layout.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from draftree.drafters.base import TrainableMethod
from draftree.drafters.neural.draft_configs import of_values
from draftree.drafters.neural.draft_vocabulary import offsets_to_ids
from draftree.drafters.peagle import PEAGLEDrafter
from draftree.errors import UnknownName, UserError
from draftree.formats import block_drafters, medusa, speculators
from draftree.formats.checkpoint import CONFIG, DRAFTREE_ENTRY, WEIGHTS, Checkpoint
from draftree.models.causal_lm import CausalLM
from draftree.registry import method_of, names, part, parts
from draftree.target.hub import download_model, is_hub_id
from draftree.target.target import Target
from draftree.target.target_names import (
    DEMO,
    location,
    missing_package,
    public_name,
    shipped_folder,
    shipped_name,
)
from draftree.utils.files import Entries, as_user_error, replace_folder

Written = tuple[dict[str, Any], dict[str, Tensor]]
"""Config and tensors of a checkpoint."""
VOCABULARY_TENSOR = "head.d2t"
"""Name of the tensor with the draft vocabulary of an `eagle` drafter. Other programs do not know
this tensor: in their layouts the LM head is the target's, with the whole vocabulary."""
MAX_BIAS_ERROR = 1e-6
"""Largest relative error that is allowed when a bias is moved into the embedding; see
`to_vllm_eagle`."""
PLACEHOLDER_LAYERS = 32
"""Number of layers of the placeholder target that a checkpoint is checked against if no target is
named."""


@dataclass(frozen=True)
class Exported:
    """Describe a checkpoint that has been exported.

    Attributes:
        drafter: name of the drafter's method.
        format: name of the new checkpoint's format.
        out: path of the new folder.
        tensors: number of tensors.
        bytes: bytes of all tensors.
    """

    drafter: str
    format: str
    out: str
    tensors: int
    bytes: int


def export(
    drafter: str | Path, wanted: str, out: Path, target: str | None = None, overwrite: bool = False
) -> Exported:
    """Write a drafter's checkpoint in another program's format.

    Args:
        drafter: folder of the checkpoint, in any layout that draftree reads, or name of a shipped
            drafter.
        wanted: name of the format, a key of `CONVERTERS`.
        out: path of the new folder; after an error nothing is left there.
        target: the drafter's target. By default it is the one that the checkpoint names, if the
            format stores a target. Most formats need only its config; see `CONVERTERS`.
        overwrite: whether the new folder may replace the files in `out`.

    Raises:
        UserError: the format does not exist or does not support this drafter; the checkpoint does
            not match its config; or `out` is not empty, or is being written by another process.
        OSError: the disk is full.
    """
    folder = drafter_folder(drafter, target)
    method, wanted = method_of(folder), first_format(folder, wanted)
    if not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' exists, allowed is a new or an empty folder")
    with as_user_error(f"'{drafter}' cannot be exported"):
        config, tensors = CONVERTERS[wanted](method, Checkpoint.at(folder), target)
    with replace_folder(out, overwrite) as beside:
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()},
            beside / WEIGHTS,
            metadata={"format": "pt"},
        )
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return Exported(method, wanted, str(out), len(tensors), size)


OWN_EMBEDDING_OPTIONS: Mapping[str, dict[str, Any]] = {
    "edd": {"shared": False, "draft_vocab": 0},
    "vdm": {"shared": False, "draft_vocab": 0},
    "glide": {"init": "target", "draft_vocab": 0},
}
"""Methods whose drafters may have their own embedding and LM head, each with the options that it
needs for them."""


def formats_of(method: str) -> tuple[str, ...]:
    """Return the names of the formats in which drafters of a method can be exported."""
    kind = part("drafter", method)
    return kind.formats if issubclass(kind, TrainableMethod) else ()


def first_format(folder: Path, wanted: str | None = None) -> str:
    """Return the name of the format in which a drafter is exported.

    It is `wanted`, or by default the first format that supports the drafter.

    Args:
        folder: folder of the drafter's checkpoint.
        wanted: name of a format; None for the default.

    Raises:
        UserError: the format does not exist or does not support the drafter. The message lists the
            drafters that can be exported.
    """
    if wanted is not None and wanted not in CONVERTERS:
        raise UnknownName("format", wanted, CONVERTERS)
    allowed = formats_of(method := method_of(folder))
    if wanted in allowed or (wanted is None and allowed):
        return wanted or allowed[0]
    if allowed:
        raise UserError(
            f"a drafter of '{method}' cannot be exported as '{wanted}', allowed is {' or '.join(allowed)}"
        )
    can = {name: [m for m in parts("drafter") if name in formats_of(m)] for name in CONVERTERS}
    listed = "; ".join(f"{name}: {', '.join(methods)}" for name, methods in can.items())
    alone = (
        " (--standalone writes it as a model of its own)" if method in OWN_EMBEDDING_OPTIONS else ""
    )
    raise UserError(
        f"no other program has a drafter of '{method}'{alone}; what can be exported: {listed}"
    )


def standalone(
    drafter: str | Path, out: Path, target: str | None = None, overwrite: bool = False
) -> Exported:
    """Write a drafter's checkpoint with its own copies of the target's embedding and head.

    The copied head covers the whole vocabulary.

    A `vdm` drafter is then a complete Hugging Face model, which transformers can use as assistant
    model.

    Args:
        drafter: folder of the drafter, or name of a shipped one.
        out: path of the new folder; after an error nothing is left there.
        target: the drafter's target, which is loaded; by default the one that the checkpoint names.
        overwrite: whether the new folder may replace the files in `out`.

    Raises:
        UserError: drafters of this method cannot have their own embedding and head, or the
            checkpoint does not fit the target.
    """
    folder = drafter_folder(drafter, target)
    if (method := method_of(folder)) not in OWN_EMBEDDING_OPTIONS:
        raise UserError(
            f"'{method}' cannot be exported with --standalone, allowed is {' or '.join(OWN_EMBEDDING_OPTIONS)}"
        )
    loaded = Target.load(target or str(Checkpoint.at(folder).about.get("target", "demo")))
    kind = part("drafter", method)
    assert issubclass(kind, TrainableMethod)
    opened = kind(checkpoint=str(folder)).load_drafter(loaded)
    alone = replace(opened.knobs, **OWN_EMBEDDING_OPTIONS[method], checkpoint="").fresh(loaded)
    own, borrowing = alone.model.state_dict(), opened.model.state_dict()
    alone.model.load_state_dict(
        own | {name: value for name, value in borrowing.items() if name in own}
    )
    with replace_folder(out, overwrite) as beside:
        alone.save(beside)
    tensors = alone.model.state_dict().values()
    return Exported(
        method, "a model of its own", str(out), len(tensors), sum(2 * t.numel() for t in tensors)
    )


def drafter_folder(drafter: str | Path, target: str | None = None) -> Path:
    """Return the folder of a drafter's checkpoint; one on the hub is downloaded.

    Args:
        drafter: folder or hub id of a drafter, or the name of a shipped one: METHOD or
            TARGET/METHOD.
        target: target of a shipped drafter; by default the demo model.

    Raises:
        UserError: no such drafter exists.
    """
    if Path(drafter).is_dir():
        return Path(drafter)
    name, place = str(drafter), target or DEMO
    if name.count("/") == 1 and (other := shipped_name(name.partition("/")[0])):
        place, name = other, name.partition("/")[2]
    if is_hub_id(name):
        return download_model(name)
    shipped = {name: folder for name in names("drafter") if (folder := shipped_folder(place, name))}
    if name in names("drafter") and (told := missing_package(place)):
        raise UserError(told)
    if name not in shipped:
        raise UnknownName("drafter's folder or shipped drafter", name, shipped)
    return shipped[name]


def _config_of(target: str) -> PreTrainedConfig:
    """Load the config of a target by its name or folder."""
    with as_user_error(f"cannot read the config of target '{target}', name another with --target"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(location(target))
        return config


def _check_export(
    method: str, folder: Path, values: Mapping[str, Any], target: str | None
) -> Target:
    """Open a drafter's checkpoint for a target without weights, and return the target.

    An error is raised if tensors are missing or have other shapes.

    Args:
        method: name of the drafter's method.
        folder: folder of the checkpoint.
        values: config of the checkpoint.
        target: name of the target; None for a placeholder with the sizes in the config.
    """
    config, name = (
        _any_target(values, folder) if target is None else _config_of(target),
        target or "any",
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of copies to where nothing is, and of targets that are not named
        with as_user_error(f"target '{name}' is not a causal language model"):
            model = AutoModelForCausalLM.from_config(config)
        opened = Target(CausalLM(model), name)
        part("drafter", method)(checkpoint=str(folder)).open(opened)
    return opened


def _any_target(values: Mapping[str, Any], folder: Path) -> PreTrainedConfig:
    """Return the config of a placeholder target that has the sizes in a drafter's config."""
    said = Entries(values, folder / CONFIG)
    vocab, hidden = said.get("vocab_size", int, least=1), said.get("hidden_size", int, least=1)
    hidden = values.get("target_hidden_size") or hidden
    layers = max(values.get(speculators.LAYER_IDS) or (PLACEHOLDER_LAYERS,))
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=1,
        intermediate_size=1,
    )


def _original(method: str, stored: Checkpoint, values: dict[str, Any]) -> Written:
    """Return a checkpoint's config and tensors in the original layout of EAGLE or EAGLE-3.

    The checkpoint may have this layout or that of speculators. `values` are the entries of the new
    config.
    """
    rename = speculators.to_original_name(stored.config)
    tensors = {rename(k): v for k, v in stored.tensors.items() if k != VOCABULARY_TENSOR}
    config = (
        {"model_type": "llama", "num_hidden_layers": 1}
        | values
        | _rope(values)
        | speculators.make_defaults_explicit(values, method)
    )
    for key in (DRAFTREE_ENTRY, "rope_parameters", "transformers_version"):
        config.pop(key, None)
    if speculators.KIND in stored.config:
        config["architectures"] = [speculators.ARCHITECTURES[method][1]]
    if "torch_dtype" not in config and "dtype" not in config:
        config["torch_dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    return config, tensors


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` for a config, which all versions of transformers read.

    `rope_parameters` is read only by version 5.
    """
    said: dict[str, Any] = dict(of_values(deepcopy(values)).rope_parameters or {})
    theta, kind = said.pop("rope_theta"), said.pop("rope_type", "default")
    return {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else said | {"type": kind, "rope_type": kind},
    }


def to_original(method: str, stored: Checkpoint, target: str | None) -> Written:
    """Return a checkpoint in the original layout of EAGLE or EAGLE-3.

    The fusing layer keeps its `bias`, if it has one.
    """
    stored, values = speculators.load_checkpoint(stored, method)
    _check_export(method, stored.folder, values, target)
    return _original(method, stored, values)


def to_speculators(method: str, stored: Checkpoint, target: str | None) -> Written:
    """Return a checkpoint in the layout of the library speculators.

    The new config contains the name of the target.

    Args:
        method: the drafter's method.
        stored: the checkpoint.
        target: name of the target; by default the name in the checkpoint's config, or else the
            demo model.

    Raises:
        UserError: the target does not fit; or the drafter's layer has biases only for queries, keys
            and values, which the layers of speculators cannot have.
    """
    if method in get_args(block_drafters.DrafterKind):
        return _blocks_to_speculators(method, stored, target)
    if method == "peagle":
        return _peagle_to_speculators(stored, target)
    stored, values = speculators.load_checkpoint(stored, method)
    folder = stored.folder
    said = speculators.describe_verifier(stored.config) if target is None else None
    name = said[0] if said else target or str(stored.about.get("target", "demo"))
    own = _any_target(values, folder)
    fits = own if said else _config_of(name)
    text = fits.get_text_config(decoder=True)
    if target is None and (text.vocab_size, text.hidden_size) != (own.vocab_size, own.hidden_size):
        raise UserError(
            f"'{folder}' does not fit target '{name}': name the drafter's own with --target"
        )
    checked = _check_export(method, folder, values, None if said else name)
    if values.get("qkv_bias"):
        raise UserError(f"'{folder}' has qkv_bias true, allowed for 'speculators' is false")
    config, tensors = _original(method, stored, values)
    architectures = (
        said[1] if said else fits.architectures or [type(checked.decoder.model).__name__]
    )
    verifier = {"name_or_path": public_name(name), "architectures": list(architectures)}
    nested = speculators.to_speculators(config, method, verifier)
    rename = speculators.checkpoint_name_map(nested)
    return nested, {
        rename(k): v for k, v in tensors.items() if k not in speculators.OMITTED_TENSORS[method]
    }


def _blocks_to_speculators(method: str, stored: Checkpoint, target: str | None) -> Written:
    """Return a DFlash, DSpark or JetSpec drafter in the layout of speculators.

    This layout contains copies of the target's embedding and of the rows of its head for the draft
    vocabulary. So the target is loaded.
    """
    name = target or str(stored.about.get("target", "demo"))
    loaded, kind = Target.load(name), part("drafter", method)
    assert issubclass(kind, TrainableMethod)
    opened = kind(checkpoint=str(stored.folder)).load_drafter(loaded)
    stored, layout = block_drafters.load_checkpoint(stored)
    names = {key: stored.name(key) for key in opened.model.state_dict()}
    tensors = {block_drafters.name(key): stored.tensors[there] for key, there in names.items()}
    outer: Any = loaded.decoder.model
    ids = (
        offsets_to_ids(tensors[block_drafters.VOCABULARY_OFFSETS])
        if block_drafters.VOCABULARY_OFFSETS in tensors
        else slice(None)
    )
    for own, module, rows in (
        (block_drafters.EMBEDDING_WEIGHT, outer.get_input_embeddings(), slice(None)),
        (block_drafters.HEAD_WEIGHT, outer.get_output_embeddings(), ids),
    ):
        tensors.setdefault(own, module.weight.detach().cpu()[rows].to(tensors["fc.weight"].dtype))
    if block_drafters.VOCABULARY_OFFSETS in tensors and block_drafters.MARKS not in tensors:
        tensors[block_drafters.MARKS] = torch.zeros(
            loaded.decoder.vocab, dtype=torch.bool
        ).index_fill(0, offsets_to_ids(tensors[block_drafters.VOCABULARY_OFFSETS]), True)
    verifier = {"name_or_path": public_name(name), "architectures": [type(outer).__name__]}
    return block_drafters.to_speculators(
        layout, "dspark" if method == "dspark" else "dflash", verifier
    ), tensors


def _peagle_to_speculators(stored: Checkpoint, target: str | None) -> Written:
    """Return a P-EAGLE drafter in the layout of speculators.

    This layout contains an embedding: the drafter's own, or a copy of the target's. So the target
    is loaded.
    """
    stored = stored.load_tensors()
    config, said = stored.config, speculators.describe_verifier(stored.config)
    name = target or (said[0] if said else str(stored.about.get("target", "demo")))
    loaded = Target.load(name)
    drafter = part("drafter", "peagle")(checkpoint=str(stored.folder)).open(loaded)
    assert isinstance(drafter, PEAGLEDrafter)
    knobs, outer = drafter.resolved_knobs, cast(Any, loaded.decoder.model)
    values = {
        k: v
        for k, v in (config | config.get(speculators.LAYER_CONFIG, {})).items()
        if k not in speculators.WRAPPER_KEYS
    }
    values |= _rope(values) | {speculators.LAYER_IDS: list(drafter.needs.hidden)}
    values.pop("rope_parameters", None)
    verifier = {"name_or_path": public_name(name), "architectures": [type(outer).__name__]}
    nested = speculators.to_speculators(values, "peagle", verifier, knobs.layers, knobs.drafts)
    embedding = (
        outer.get_input_embeddings().weight.detach().cpu().to(stored.tensors["fc.weight"].dtype)
    )
    return nested | {speculators.MASKS[0]: knobs.mask}, {
        speculators.EMBEDDING_WEIGHT: embedding
    } | stored.tensors


def to_vllm_medusa(method: str, stored: Checkpoint, target: str | None) -> Written:
    """Return the heads of a Medusa drafter in vLLM's layout.

    Raises:
        UserError: the heads share the target's output layer instead of having their own; or they
            have a draft vocabulary, with which vLLM 0.32 cannot load heads of their own.
    """
    stored, folder = medusa.load_heads(stored), stored.folder
    if medusa.VLLM_ONLY_TENSOR in stored.tensors:
        stored = medusa.convert_from_vllm(stored)
    heads, layers = medusa.count_heads(tensors := stored.tensors, folder)
    if lacking := [name for i in range(heads) if (name := f"{i}.{layers}.weight") not in tensors]:
        raise UserError(
            f"'{folder}' lacks {', '.join(lacking[:4])}, allowed for 'vllm-medusa' are heads with layers of their own"
        )
    if medusa.VOCABULARY_OFFSETS in tensors:
        size = len(tensors[medusa.VOCABULARY_OFFSETS])
        raise UserError(
            f"'{folder}' has a draft vocabulary of {size} tokens, allowed for 'vllm-medusa' is the whole vocabulary"
        )
    config, tensors = medusa.to_vllm(stored.config, tensors)
    _check_export(method, folder, config, target)
    return config, tensors


def to_vllm_eagle(method: str, stored: Checkpoint, target: str | None) -> Written:
    """Return an EAGLE drafter for vLLM, in a layout whose fusing layer has no bias.

    The fusing layer computes W e + U h + b for an embedding e and a hidden state h. For a vector c
    with W c = b this equals W (e + c) + U h. So the drafter gets its own embedding with the rows e
    + c.

    Raises:
        UserError: no vector c satisfies W c = b.
    """
    config, tensors = to_original(method, stored, target)
    bias = tensors.pop("fc.bias", None)
    config["bias"] = False
    if bias is None:
        return config, tensors
    embedding = tensors.get(speculators.EMBEDDING_WEIGHT)
    if embedding is None:
        outer: Any = Target.load(target or str(stored.about.get("target", "demo"))).decoder.model
        embedding = outer.get_input_embeddings().weight.detach().cpu()
    fusing = tensors["fc.weight"].double()[:, : embedding.shape[1]]
    shift = torch.linalg.lstsq(fusing, bias.double()[:, None], driver="gelsd").solution[:, 0]
    if not torch.allclose(
        fusing @ shift,
        bias.double(),
        rtol=MAX_BIAS_ERROR,
        atol=MAX_BIAS_ERROR * float(bias.abs().max()),
    ):
        raise UserError(
            f"the bias of '{stored.folder}' cannot be added to an embedding, allowed is 'eagle'"
        )
    tensors[speculators.EMBEDDING_WEIGHT] = (embedding.double() + shift).to(
        tensors["fc.weight"].dtype
    )
    return config, tensors


CONVERTERS: Mapping[str, Callable[[str, Checkpoint, str | None], Written]] = {
    "speculators": to_speculators,
    "eagle": to_original,
    "vllm-eagle": to_vllm_eagle,
    "vllm-medusa": to_vllm_medusa,
}
"""Functions that convert a checkpoint, by the name of the export format. Their arguments are the
method's name, the checkpoint, and the named target or None."""
