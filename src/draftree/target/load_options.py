"""Options of loading a target; free of torch, so that the command line can import them."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from typing_extensions import override

from draftree.aliases import LOADING
from draftree.errors import UserError
from draftree.models.backend_names import ATTENTION, EXACT, Kernels
from draftree.utils.validated_dataclass import Knobs, Rule, knob, optional, translate_names

PANEL = "Loading the model"
DTypeName = Literal["float64", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(DTypeName)
"""The dtypes in which a target may be computed."""
DTYPE_HELP = f"{', '.join(DTYPES)}; by default the checkpoint's own, but float32 where a CPU is slow in half precision."
MAP_HELP = "transformers' device_map: auto, or JSON by module."


ATTENTION_RULE: Rule = (
    f"{' or '.join(ATTENTION)}: others take no mask of a tree",
    optional(lambda value: value in ATTENTION),
)
DEVICE_MAP_RULE: Rule = (
    "auto, a device, or an object with a device, cpu or disk for each module",
    optional(
        lambda value: (
            bool(_values(value)) and all(type(v) in (int, str) and v != "" for v in _values(value))
        )
    ),
)


def _parse_device_map(places: Any) -> Any:
    """Return a device map; a JSON text is parsed."""
    if not isinstance(places, str) or not places.startswith("{"):
        return places
    with suppress(ValueError):
        return json.loads(places)
    return None


def _values(places: Any) -> list[Any]:
    """Return the devices that a device map names; none if it is not a device map."""
    found = _parse_device_map(places)
    if isinstance(found, Mapping):
        return list(found.values())
    return [found] if isinstance(found, str) and found else []


@dataclass(frozen=True)
class Source(Knobs):
    """Hold the options that select a target's config and tokenizer.

    Attributes:
        revision: a branch, a tag or a commit on the hub.
        trust_remote_code: whether code in the model's repository may be run.
        chat_template: a file with the template of chats, or the name of a shipped one, instead of
            the tokenizer's.
        system: a system message for chats that have none.
    """

    revision: str | None = knob(None, panel=PANEL, help="A branch, a tag or a commit on the hub.")
    trust_remote_code: bool = knob(False, panel=PANEL, help="Run code that comes with the model.")
    chat_template: str | None = knob(
        None,
        panel=PANEL,
        metavar="FILE|NAME",
        help="Chat template: a file, vicuna, llama-2, alpaca.",
    )
    system: str | None = knob(
        None, panel=PANEL, metavar="TEXT", help="The system message of chats that have none."
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the options that are given by name.

        Raises:
            UserError: an option is unknown, or its value is not allowed.
        """
        names = [f.name for f in fields(cls)]
        return cls(**translate_names(LOADING, given, names))

    @property
    def config_kwargs(self) -> dict[str, Any]:
        """Return arguments of `from_pretrained` for config, tokenizer and weights."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True)
class Loading(Source):
    """Hold the options by which a target is loaded.

    Files that are named without a folder are in `models/`.

    Attributes:
        device: a torch device; by default a GPU if one is available.
        dtype: the dtype of the weights, or its name; that of the checkpoint by default. On a CPU
            the default for half-precision checkpoints is float32. It is bfloat16 for checkpoints in
            bfloat16 if native kernels run the model or the processor has instructions for it, and
            then `exactness` is `bits`.
        device_map: transformers' map of layers to devices, instead of `device`. Layers that do not
            fit on a GPU stay in the host's memory (`cpu`) or on `disk` and are read again in each
            pass.
        attn_implementation: how attention is computed: sdpa, eager, grouped
            (`grouped_attention.py`, by default on a GPU for heads that share keys and values), or
            draftree (`invariant_attention.py`).
        adapter: the folder or hub id of a PEFT adapter, which is merged into the weights.
        quantize: int8 to let torchao round the weights to 8 bits as they are loaded; int4 for 4
            bits in groups of 32, only on a CPU and in bfloat16 (`int4_linear.py`). With native
            kernels the LM head then has 8 bits (`native_linear.py`), else 16.
        exactness: `bits` makes a token's logits bitwise the same alone, in a tree and in a batch,
            in any precision. It uses the attention `draftree` and batch-invariant layers
            (`batch_invariant_model.py`). `ties` leaves attention and layers as they are: if two
            tokens are almost equally likely, a tree may give another token than plain decoding. The
            default is `bits` in half precision if a step then takes at most 2 % longer
            (`target/batch_invariance_choice.py`), else `ties`.
        kernels: the kernels of linear layers on a CPU (`cpu_linear.py`); by default draftree's if
            native kernels run the model, else torch's or oneDNN's, whichever is faster for each
            shape.
        compile: whether the layers of target and drafter are compiled. On a CPU native kernels then
            run passes of any width (`native_runner.py`); by default if the target is large and the
            kernels support it and are faster. On a GPU passes have few widths and are recorded as
            CUDA graphs (`graph_capture.py`); by default if a recorded pass has the results of an
            eager one.
    """

    device: Any = knob(
        None, kind=str | None, panel=PANEL, help="A torch device; by default a GPU if there is one."
    )
    dtype: Any = knob(None, kind=DTypeName | None, metavar="TYPE", panel=PANEL, help=DTYPE_HELP)
    device_map: Any = knob(None, rule=DEVICE_MAP_RULE, kind=str | None, panel=PANEL, help=MAP_HELP)
    attn_implementation: str | None = knob(
        None,
        rule=ATTENTION_RULE,
        panel=PANEL,
        help=f"How attention is computed: {', '.join(ATTENTION)}.",
    )
    adapter: str | None = knob(
        None, panel=PANEL, help="Folder or hub id of a PEFT adapter, merged in."
    )
    quantize: Literal["int8", "int4"] | None = knob(
        None, panel=PANEL, help="Round weights to 8 or 4 bits (int4: on a CPU)."
    )
    exactness: Literal["bits", "ties"] | None = knob(
        None,
        panel=PANEL,
        help="bits: logits are bitwise those of plain decoding. ties: the text may differ at near ties.",
    )
    kernels: Kernels | None = knob(
        None,
        metavar="NAME",
        panel=PANEL,
        help="Linear layers on a CPU: stock, packed (oneDNN) or native; by default native or the faster other.",
    )
    compile: bool | None = knob(
        None,
        flag="--compile/--no-compile",
        panel=PANEL,
        help="Native kernels, on a GPU CUDA graphs; by default where they are faster.",
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for one, other in (("device", "device_map"), ("adapter", "quantize")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise UserError(f"{one} and {other} are given, allowed is one of them")
        if self.exactness == "bits" and self.attn_implementation not in (None, EXACT):
            raise UserError(
                f"exactness is 'bits' and attn_implementation '{self.attn_implementation}', allowed with it is {EXACT}"
            )

    @property
    def weight_kwargs(self) -> dict[str, Any]:
        """Return arguments of `from_pretrained` for weights, except their dtype."""
        given = {
            "device_map": _parse_device_map(self.device_map),
            "attn_implementation": self.attn_implementation,
        }
        return self.config_kwargs | {k: v for k, v in given.items() if v is not None}

    @property
    def explicit_options(self) -> dict[str, Any]:
        """Return the options that were set, except device and dtype, for the record of a run."""
        told = asdict(self).items()
        return {k: v for k, v in told if k not in ("device", "dtype") and v not in (None, False)}
