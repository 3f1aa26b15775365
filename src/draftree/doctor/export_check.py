"""Check an exported drafter without the engine it was exported for."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.errors import UserError
from draftree.formats import block_drafters, medusa, speculators
from draftree.formats.checkpoint import CONFIG, DRAFTREE_ENTRY, Checkpoint
from draftree.registry import method_of
from draftree.target.hub import is_hub_id
from draftree.training.export import CONVERTERS, formats_of
from draftree.utils.files import as_user_error, read_object


@dataclass(frozen=True)
class ExportReport:
    """Store the result of checking an exported drafter.

    Attributes:
        folder: the folder.
        drafter: name of the drafter's method.
        format: name of the export format.
        tensors: number of tensors in the folder.
        verifier: target that the config names; None if the format does not store it.
        faults: reasons why an engine cannot use the drafter.
        remarks: facts that a user should know.
    """

    folder: str
    drafter: str
    format: str
    tensors: int
    verifier: str | None
    faults: tuple[str, ...]
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as `draftree doctor --export --json` prints it."""
        return asdict(self)


def examine(folder: Path, target: str | None = None) -> ExportReport:
    """Check the config and the tensors of an exported drafter, and that it fits its target.

    Args:
        folder: folder of the export.
        target: name or folder of the target; None checks only that the sizes fit the drafter's
            config.

    Raises:
        UserError: the folder contains no drafter in an export format.
    """
    config = read_object(folder / CONFIG, "a drafter's config")
    method, form = method_of(folder), find_layout(config)
    if form not in formats_of(method):
        allowed = " or ".join(formats_of(method)) or "none"
        raise UserError(
            f"'{folder}' holds a drafter of '{method}' in the layout '{form}', allowed is {allowed}"
        )
    stored = Checkpoint.at(folder)
    faults, tensors = list[str](), dict[str, Tensor]()
    try:
        with as_user_error(f"'{folder}' is not what its config says"):
            tensors = (
                medusa.load_heads(stored) if method == "medusa" else stored.load_tensors()
            ).tensors
            if (
                form != "speculators"
                or (method in speculators.VERSIONS and method != "peagle")
                or target is not None
            ):
                CONVERTERS[form](method, stored, target)
    except UserError as error:
        faults.append(str(error))
    faults += [f"{name} has {what}" for name, what in _invalid_tensors(tensors)]
    named = speculators.describe_verifier(config)
    return ExportReport(
        folder=str(folder),
        drafter=method,
        format=form,
        tensors=len(tensors),
        verifier=named[0] if named else None,
        faults=tuple(faults),
        remarks=tuple(_remarks(config, method, form, named[0] if named else None)),
    )


def find_layout(config: dict[str, Any]) -> str:
    """Return the name of the export format that a drafter's config has."""
    if speculators.KIND in config:
        return "speculators"
    return (
        "vllm-medusa"
        if "truncated_vocab_size" in config or config.get("model_type") == "medusa"
        else "eagle"
    )


def _invalid_tensors(tensors: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors with unusable values, each with a description."""
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            yield name, "values that are not finite"
        elif tensor.is_floating_point() and tensor.dim() > 1 and not tensor.any():
            yield name, "only zeros"


def _remarks(config: dict[str, Any], method: str, form: str, verifier: str | None) -> Iterator[str]:
    if form == "speculators" and not (
        verifier and (is_hub_id(verifier) or Path(verifier).is_dir())
    ):
        yield f"it names the target '{verifier}', which is neither a hub id nor a folder: tell the engine which model it is for"
    if DRAFTREE_ENTRY in config:
        yield f"its config still has the entry '{DRAFTREE_ENTRY}': `draftree export` writes it without"
    if method == "eagle" and config.get("bias", config.get("fusion_bias")):
        yield "vLLM takes the bias of its fusing layer for attention's, and accepts no draft: export it as vllm-eagle"
    layers = config.get(speculators.LAYER_CONFIG)
    if (
        config.get(speculators.KIND) == "dflash"
        and config.get("sliding_window_non_causal") is False
        and isinstance(layers, dict)
        and "full_attention" in (layers.get("layer_types") or ())
    ):
        yield "vLLM takes its full layers for causal ones: export it again if it has no causal layers"
    if method in ("dspark", "dflash", "jetspec") and block_drafters.VOCABULARY_OFFSETS in config:
        yield "its head knows a part of the vocabulary"
