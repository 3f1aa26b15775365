"""Build, load and save draft models of one layer of the target's architecture."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from draftree.drafters.neural.draft_vocabulary import check_size
from draftree.drafters.neural.target_modules import TargetEmbedding, TargetHead
from draftree.errors import UserError
from draftree.formats.checkpoint import CONFIG, WEIGHTS, Checkpoint, sizes
from draftree.models.causal_lm import CausalLM
from draftree.target.model_construction import load_pretrained, one_layer
from draftree.target.target import Target
from draftree.utils.files import as_user_error, fill_folder


def copy_one_layer(target: Target) -> PreTrainedModel:
    """Return a float32 model for training.

    It is one new layer of the target's architecture between copies of the target's embedding and LM
    head, as in the paper (EDD + PCT, section 3.1). The copies are tied if the target's are.
    """
    _ = target.decoder.head_weight  # raises an error if the head is quantised
    model, whole = one_layer(target.decoder.config), target.decoder.model
    for ours, theirs in (
        (model.get_input_embeddings(), whole.get_input_embeddings()),
        (model.get_output_embeddings(), whole.get_output_embeddings()),
    ):
        ours.load_state_dict({k: v.float() for k, v in theirs.state_dict().items()})
    return model


def make_borrowing_model(
    config: PreTrainedConfig, target: Target, draft_vocab: int
) -> PreTrainedModel:
    """Return a float32 model of one new layer between the target's own embedding and LM head.

    The embedding and the head are neither trained nor stored.

    Args:
        config: the config of the layer.
        target: the target.
        draft_vocab: V′, the number of tokens of the head; 0 for all.
    """
    model: Any = one_layer(config)
    norm = next(p for p in model.parameters() if p.dim() == 1)
    model.set_input_embeddings(TargetEmbedding(target, lambda: norm))
    model.set_output_embeddings(TargetHead(target, draft_vocab, raw=True))
    borrowed: PreTrainedModel = model
    return borrowed


def copy_target_layer(model: PreTrainedModel, target: Target, layer: int) -> None:
    """Copy one of the target's layers and its final norm into a one-layer model.

    Each is copied only if the shapes are equal. The norm is needed because the LM head expects its
    output. The layer is useful because hidden states have a few very large entries, which the
    layers of the target have learnt to scale down.
    """
    ours, theirs = CausalLM(model), target.decoder
    norms = [[m for m in d.stack.children() if "Norm" in type(m).__name__] for d in (ours, theirs)]
    for mine, its in ((ours.layers[0], theirs.layers[layer]), *zip(*norms, strict=True)):
        values = {name: value.float() for name, value in its.state_dict().items()}
        if {n: v.shape for n, v in mine.state_dict().items()} == {
            n: v.shape for n, v in values.items()
        }:
            mine.load_state_dict(values)


def head_of(model: PreTrainedModel) -> TargetHead | None:
    """Return the target's head if a model uses it; otherwise None."""
    head: Any = model.get_output_embeddings()
    return head if isinstance(head, TargetHead) else None


def new_model(method: str, target: Target, shared: bool, draft_vocab: int) -> PreTrainedModel:
    """Return a float32 model of one layer for training.

    Args:
        method: name of the method, for error messages.
        target: the target, whose architecture is used.
        shared: whether to use the target's embedding and LM head. Otherwise the model has copies,
            which are trained.
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all.

    Raises:
        UserError: a draft vocabulary is requested without `shared`, or it is larger than the
            target's vocabulary.
    """
    if shared:
        check_size(method, draft_vocab, target)
        return make_borrowing_model(target.decoder.config, target, draft_vocab)
    if draft_vocab:
        told = "a head of its own is whole, shared=true borrows the target's"
        raise UserError(
            f"{method}: draft_vocab is {draft_vocab}, allowed with shared=false is 0: {told}"
        )
    return copy_one_layer(target)


def check_attends(method: str, decoder: CausalLM) -> None:
    """Check that the layer of a one-layer model has attention, and no recurrent state.

    Methods that add keys and values before the text need attention.

    Raises:
        UserError: the layer has no attention; the message names the architecture.
    """
    if not decoder.attention_layers:
        name, told = (
            type(decoder.model).__name__,
            "no layer of its kind has attention and keeps no state",
        )
        raise UserError(
            f"{method}: {name} is not supported: {told}; "
            "medusa, hydra, eagle and eagle3 draft for any target"
        )


def has_own(stored: Checkpoint) -> bool:
    """Return whether a checkpoint contains its own embedding and head.

    Checkpoints from before the option `shared` lack the entry; they contain both.
    """
    return not stored.about.get("shared", False)


def load_model(
    stored: Checkpoint, method: str, target: Target, draft_vocab: int = 0
) -> PreTrainedModel:
    """Return the one-layer Hugging Face model of a checkpoint.

    The model is complete, fits the target, and has the target's dtype.

    Args:
        stored: the checkpoint.
        method: name of the method, for error messages.
        target: the target; its embedding and head are used if the checkpoint has none.
        draft_vocab: V′, the number of tokens that can be drafted, as stored in the checkpoint.

    Raises:
        UserError: the file of weights or some tensors are missing, there are unexpected tensors, or
            vocabulary or hidden size do not fit.
    """
    folder = stored.folder
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"'{folder}' has no weights: a file {WEIGHTS} was expected")
    stored.check_sizes(method, stored.config, sizes(target))
    if not has_own(stored):
        with as_user_error(f"cannot load drafter '{folder}'"):
            config = AutoConfig.from_pretrained(folder)
            return stored.load_tensors().network(
                lambda: make_borrowing_model(config, target, draft_vocab)
            )
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the checks below replace the warnings of transformers
    try:
        with as_user_error(f"cannot load drafter '{folder}'"):
            model, info = load_pretrained(
                str(folder), AutoConfig.from_pretrained(folder), target.decoder.dtype
            )
    finally:
        logging.set_verbosity(level)
    for kind in ("missing_keys", "unexpected_keys"):
        if names := sorted(map(str, info[kind])):
            raise UserError(
                f"'{folder}' does not hold exactly a '{method}': "
                f"{kind.replace('_', ' ')}: {', '.join(names[:4])}"
            )
    loaded: PreTrainedModel = model
    return loaded


def save_model(
    folder: Path, model: PreTrainedModel, stored: Checkpoint, about: dict[str, Any]
) -> None:
    """Write a one-layer model in float16, and its config with further entries.

    Modules that belong to the target are left out.

    Args:
        folder: the folder, which is created.
        model: the model, with its own embedding and head or with those of the target.
        stored: the checkpoint from which it was read.
        about: the further entries.
    """
    if head_of(model) is not None:
        config = json.loads(model.config.to_json_string(use_diff=True)) | {"dtype": "float16"}
        stored.write(folder, config | about, model.state_dict())
        return
    halves: dict[int, Tensor] = {}  # tied tensors are converted and written once
    state = model.state_dict()
    for value in state.values():
        halves.setdefault(value.data_ptr(), value.detach().to("cpu", torch.float16))
    with fill_folder(folder, last=CONFIG) as beside:
        model.save_pretrained(
            beside, state_dict={k: halves[v.data_ptr()] for k, v in state.items()}
        )
        config = Checkpoint.at(beside).config | {"dtype": "float16"} | about
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
