"""A trained drafter on disk: an ordinary Hugging Face folder, and `draftree.json` with the method and its knobs."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from draftree.decoder import one_layer
from draftree.errors import UserError
from draftree.target import Target, demo_folder

ABOUT = "draftree.json"
WEIGHTS = "model.safetensors"


def shipped(method: str, checkpoint: str, target: Target) -> Path:
    """The folder of a checkpoint, by default the one shipped for the demo target.

    Raises:
        UserError: no checkpoint was named and none is shipped for this target.
    """
    if checkpoint:
        return Path(checkpoint)
    if target.name != "demo" or not demo_folder(method).is_dir():
        raise UserError(
            f"no '{method}' is shipped for target '{target.name}': train one (draftree train {method} --target … --data … "
            f"--out FOLDER) and name its folder, or use {method}:checkpoint=FOLDER"
        )
    return demo_folder(method)


def beginning(target: Target) -> PreTrainedModel:
    """One float32 layer of the target's architecture, to be trained, between the target's embedding and LM head.

    Embedding and head are copies (EDD + PCT, section 3.1), and tied where the target's are.
    """
    model, whole = one_layer(target.decoder.config), target.decoder.model
    for ours, theirs in (
        (model.get_input_embeddings(), whole.get_input_embeddings()),
        (model.get_output_embeddings(), whole.get_output_embeddings()),
    ):
        ours.load_state_dict({k: v.float() for k, v in theirs.state_dict().items()})
    placed: Any = model
    placed.to(target.decoder.device)
    return model


def about(folder: Path) -> dict[str, Any]:
    """What `draftree.json` says.

    Raises:
        UserError: the folder is not a drafter's.
    """
    try:
        found: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        found["drafter"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{folder}' is not a drafter's folder: no readable {ABOUT} that names its method in it") from error
    return found


def load_model(folder: Path, method: str, target: Target) -> PreTrainedModel:
    """The model of a checkpoint, complete and fitting the target, on its device and in its dtype.

    Raises:
        UserError: weights are missing, tensors are missing or foreign, or vocabulary or hidden size do not fit.
    """
    said = about(folder)
    if said["drafter"] != method:
        raise UserError(f"'{folder}' holds a drafter '{said['drafter']}', asked for was '{method}'")
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"'{folder}' has no weights: a file {WEIGHTS} was expected")
    _check_sizes(folder, method, target)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what transformers would warn of is checked below, and refused
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.decoder.dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f"cannot load drafter '{folder}': {str(error).strip().splitlines()[0]}") from error
    finally:
        logging.set_verbosity(level)
    model, info = read
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[kind])):
            raise UserError(f"'{folder}' does not hold exactly a '{method}': {kind.replace('_', ' ')}: {', '.join(names[:4])}")
    loaded: PreTrainedModel = model.to(target.decoder.device)
    return loaded


def _check_sizes(folder: Path, method: str, target: Target) -> None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"'{folder}' has no readable config.json") from error
    for key, wanted in (("vocab_size", target.decoder.vocab), ("hidden_size", target.decoder.hidden)):
        if config.get(key) != wanted:
            raise UserError(f"'{method}' in '{folder}' has {key} {config.get(key)}, allowed is the target's: {wanted}")


def save_model(folder: Path, method: str, model: PreTrainedModel, knobs: dict[str, Any], target: str) -> None:
    """Writes weights in float16 beside the config and what draftree has to know."""
    folder.mkdir(parents=True, exist_ok=True)
    halves: dict[int, torch.Tensor] = {}  # tied tensors stay one, and are written once
    state = model.state_dict()
    for value in state.values():
        halves.setdefault(value.data_ptr(), value.detach().to("cpu", torch.float16))
    model.save_pretrained(folder, state_dict={k: halves[v.data_ptr()] for k, v in state.items()})
    (folder / ABOUT).write_text(json.dumps({"drafter": method, "target": target, **knobs}, indent=1) + "\n")
