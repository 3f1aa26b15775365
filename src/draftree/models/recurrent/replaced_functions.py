"""Tree versions of the functions that transformers' recurrent layers call.

Every modeling file calls the functions of its recurrent layers by names of its module. In a copy of
the model over the same weights, a dispatcher replaces them. In a pass of draftree, which a context
variable holds, it computes along the paths of a tree; otherwise it calls transformers' own
function. So nothing of transformers or of the model is changed. `causal_conv1d`, `fla` and
`mamba_ssm`, where they are installed, have the same names, and read prompts.

Shapes: R rows, n tokens, H heads, k and v widths of a key and a value, d channels, N entries of a
Mamba state for each.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

from draftree.models.recurrent.recurrences import (
    Stash,
    convolve_paths,
    delta_tree,
    s6_tree,
    ssd_tree,
)
from draftree.models.recurrent.state_cache import Final, Pass
from draftree.models.weight_sharing_copy import Model, share_weights

Stock = Callable[..., Any]
Known = TypeVar("Known", bound="Functions")


class Functions(Protocol):
    """Define replacements for transformers' functions of recurrent layers.

    Each method receives the function that it replaces and the arguments of the call.
    """

    def conv(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Run a causal convolution."""
        ...

    def delta(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Compute a gated delta rule instead of `stock`, which is transformers' function for it.

        `args` and `kwargs` are the arguments with which the layer calls that function.
        """
        ...

    def ssd(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Run a state space model as in Mamba-2."""
        ...

    def s6(self, stock: Stock, /, *args: Any, **kwargs: Any) -> Any:
        """Run a selective scan as in Mamba-1."""
        ...


NAMES: Mapping[str, str] = {
    "causal_conv1d_fn": "conv",
    "torch_chunk_gated_delta_rule": "delta",
    "chunk_kimi_delta_attention": "delta",
    "mamba2_chunk_scan": "ssd",
    "mamba_selective_scan": "s6",
}
"""Names of functions in modeling modules, and the method of `Functions` that replaces each."""
_CURRENT_FUNCTIONS: ContextVar[Functions | None] = ContextVar("draftree pass", default=None)


def dispatch_functions(model: Model) -> Model:
    """Return a model whose recurrent layers first call the functions set by `use_functions`.

    The result shares the weights of the given model. A model without recurrent layers is returned
    unchanged.

    The functions are globals of transformers' modules. The forwards of the layer classes are
    therefore rebuilt with other globals, in new classes.
    """
    if not any(_calls_functions(type(module)) for module in model.modules()):
        return model
    shared = share_weights(model)
    for module in shared.modules():
        kind: Any = type(module)
        if _calls_functions(kind):
            module.__class__ = _class_of(kind)
    return shared


def _calls_functions(kind: type[nn.Module]) -> bool:
    """Return whether a class's forward calls one of the functions in `NAMES` by its global name."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return (
        code is not None and not NAMES.keys().isdisjoint(code.co_names) and _MARK not in vars(kind)
    )


@cache
def _class_of(kind: Any) -> type[nn.Module]:
    """Return a copy of a class whose forward calls the dispatchers instead of the functions."""
    forward: Any = inspect.unwrap(kind.forward)
    known = forward.__globals__
    others = {name: _dispatcher(known[name], NAMES[name]) for name in NAMES.keys() & known.keys()}
    built = FunctionType(
        forward.__code__,
        {**known, **others},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    built.__kwdefaults__ = forward.__kwdefaults__
    own = {"forward": built, "__module__": kind.__module__, _MARK: True}
    return type(kind.__name__, (kind,), own)


def _dispatcher(stock: Stock, method: str) -> Stock:
    @wraps(stock)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        asked = _CURRENT_FUNCTIONS.get()
        return (
            stock(*args, **kwargs)
            if asked is None
            else getattr(asked, method)(stock, *args, **kwargs)
        )

    return dispatch


_MARK = "__draftree__"
"""The attribute that marks classes with dispatchers."""


@contextmanager
def use_functions(functions: Known) -> Iterator[Known]:
    """Call the given functions instead of transformers' inside the context.

    This affects only the current thread and task.
    """
    token = _CURRENT_FUNCTIONS.set(functions)
    try:
        yield functions
    finally:
        _CURRENT_FUNCTIONS.reset(token)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of recurrent states: at least float32, as in transformers."""
    return torch.promote_types(dtype, torch.float32)


class PassFunctions:
    """Provide the functions of recurrent layers during a forward pass of draftree.

    A prompt is computed by transformers' own functions, with its padding zeroed. A draft tree is
    computed along its paths.

    Args:
        at: the pass that holds the states.
    """

    def __init__(self, at: Pass) -> None:
        self._pass, self._paths = at, at.paths

    def conv(
        self,
        stock: Stock,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute a causal convolution over d channels.

        Its inputs are the K columns of the state and the columns of the M scratch slots.

        Returns:
            [R, d, n] the result for the pass's tokens.
        """
        if self._paths.whole:
            whole: Tensor = stock(x, weight, bias, activation=activation)
            return whole[:, :, -self._paths.slots :]
        out = convolve_paths(self._paths, x, weight, bias)
        return (out if activation is None else ACT2FN[activation](out)).to(x.dtype)

    def delta(
        self,
        stock: Stock,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Stash | Final]:
        """Compute the gated delta rule of inputs [R, n, H, …].

        Returns:
            The outputs, and the update of the state.
        """
        state = self._pass.state
        if self._paths.whole:
            decay, write = self._without_padding(g), self._without_padding(beta)
            normed: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            normed |= {"initial_state": state, "output_final_state": True}
            out, last = stock(query, key, value, g=decay, beta=write, **normed)
            return out, Final(last)
        q, k, v, b, decay = (
            t.transpose(1, 2).to(state.dtype) for t in (query, key, value, beta, g)
        )
        if use_qk_l2norm_in_kernel:
            q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        if (shared := v.shape[1] // k.shape[1]) > 1:
            q, k = (t.repeat_interleave(shared, 1) for t in (q, k))
        decay = decay if decay.dim() == 4 else decay[..., None]
        scaled = q * key.shape[-1] ** -0.5
        before = self._pass.stashed_tensors
        out, stash = delta_tree(self._paths, before, scaled, k, v, decay, b[..., None], state)
        return out.transpose(1, 2).to(query.dtype), stash

    def ssd(  # noqa: PLR0913  the signature of transformers' function
        self,
        stock: Stock,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[Tensor, Stash | Final]:
        """Compute Mamba-2 of x [R, n, H, P], dt [R, n, H], A [H], B and C [R, n, groups, N].

        Returns:
            Outputs [R, n, H, P], and the update of the state.
        """
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = softplus(dt) if dt_softplus else dt
        state = self._pass.state
        if self._paths.whole:
            step = self._without_padding(dt.clamp(*dt_limit))
            out, last = stock(
                x,
                step,
                A,
                B,
                C,
                chunk_size=chunk_size,
                D=D,
                initial_states=state,
                return_final_states=True,
            )
            return out, Final(last)
        # transformers' one-token form does not clamp the step, and a tree is decoding.
        inputs, step, a, b, c = (t.to(state.dtype) for t in (x, dt, A, B, C))
        b, c = (t.transpose(1, 2).repeat_interleave(x.shape[2] // B.shape[2], 1) for t in (b, c))
        of_head = (inputs * step[..., None]).transpose(1, 2), (step * a).transpose(1, 2)[..., None]
        out, stash = ssd_tree(self._paths, self._pass.stashed_tensors, *of_head, b, c, state)
        out = out.transpose(1, 2) if D is None else out.transpose(1, 2) + inputs * D[:, None]
        return out.contiguous(), stash  # some models need it for `view`

    def s6(  # noqa: PLR0913  the signature of transformers' function
        self,
        stock: Stock,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **how: Any,
    ) -> tuple[Tensor, Stash | Final]:
        """Compute Mamba-1 of x, dt and z [R, d, n], A [d, N], and B and C [R, N, n].

        Returns:
            Outputs [R, d, n], and the update of the state.
        """
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = softplus(dt) if delta_softplus else dt
        state = self._pass.state
        inputs, step, a, b, c = (t.to(state.dtype) for t in (x, dt, A, B, C))
        made: Stash | Final
        if self._paths.whole:
            # Its many-token form begins with nothing; as the rule is linear in the state, what that
            # adds comes on top.
            step = step.masked_fill(self._paths.padding[:, None], 0)
            out, last = stock(x, step.to(dt.dtype), A, B, C, **{**how, "return_last_state": True})
            left = (step.cumsum(2)[..., None] * a[:, None]).exp() * state[
                :, :, None
            ]  # [R, d, n, N]
            out = out + (left * c.mT[:, None]).sum(-1)
            made = Final(last + left[:, :, -1])
        else:
            rows = (t.mT[:, None] for t in (inputs, step, b, c))
            x_, step_, b_, c_ = rows
            out, made = s6_tree(
                self._paths, self._pass.stashed_tensors, x_, step_, a, b_, c_, state
            )
            out = out[:, 0].mT
        out = out if D is None else out + inputs * D[:, None]
        return (out if z is None else out * silu(z)).to(x.dtype), made

    def _without_padding(self, values: Tensor) -> Tensor:
        """Set the padding of values [R, n, …] to zero, so that it adds nothing to a state."""
        if not self._paths.is_ragged:
            return values
        return values.masked_fill(
            self._paths.padding.view(*self._paths.padding.shape, *(1,) * (values.dim() - 2)), 0
        )
