"""State recurrences of SSM and linear-attention layers along all paths of a tree.

A token's own quantities, and those that its ancestors left in the stash, are enough: the state
itself is read once and is not copied for each token. In all equations a(i) are the ancestors of
token i, itself included, S₀ is the committed state, Gᵢ = Σ g_j over a(i) the logarithm of the decay
along the path, and Dᵢⱼ = exp(Gᵢ − Gⱼ) for j in a(i), else 0.

Shapes: R rows, H heads, n tokens of the pass, M slots of the stash, p tokens of a path; k, v and N
widths of a key, a value and a Mamba state, P the width of a Mamba head, d channels, c widths of a
decay (1, or one for each entry of a key).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.models.recurrent.token_ancestors import TreePaths

Parts = Mapping[str, Tensor]
"""The tensors of a stash by name: [R, H, M, …] for all slots, or [H, p, …] for one path."""


@dataclass(frozen=True)
class Stash:
    """Hold the updates of a state by the tokens in scratch slots, for any path of the tree.

    Attributes:
        fold: updates a state in place by the tensors of a path.
        parts: the tensors of all slots, by name.
    """

    fold: Callable[[Tensor, Parts], None]
    parts: Parts

    def to(self, *_: object) -> "Stash":
        """Return the stash itself; some models cast all values that they hand to their cache."""
        return self

    def move(self, state: Tensor, row: int, path: Tensor) -> None:
        """Apply a path of slots [p] to the state of a sequence, in place."""
        self.fold(
            state, {name: part[row].index_select(-2, path) for name, part in self.parts.items()}
        )


def _decay(paths: TreePaths, along: Tensor, slots: Tensor) -> Tensor:
    """Return the decays D [R, H, n, M, c] from slots to tokens; 0 off a token's path.

    Args:
        paths: the tree paths.
        along: [R, H, n, c] G, the summed log decay of each token.
        slots: [R, H, M, c] G of each slot.
    """
    between = along[:, :, :, None] - slots[:, :, None]
    return between.masked_fill(
        ~paths.mask[:, None, :, :, None], -torch.inf
    ).exp()  # masked first, as exp could overflow


def _along(paths: TreePaths, own: Tensor) -> Tensor:
    """Return the sums [R, H, n, c] of the log decays along each token's path to the root.

    Args:
        paths: the paths of n tokens of each sequence, over M slots.
        own: [R, H, M, c] the log decay of each slot itself, for c channels of H heads.
    """
    return torch.einsum("rij,rhjc->rhic", paths.mask.to(own.dtype), own)


def delta_tree(
    paths: TreePaths,
    before: Parts,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Stash]:
    """Compute the gated delta rule for all tokens of a draft tree.

    The source is Yang, Kautz and Hatamizadeh, 2412.06464, eq. 10; with a decay by channel it is
    Kimi's rule, 2510.26692.

    With a(i) for token i and its ancestors, uᵢ = βᵢ (vᵢ − (e^Gᵢ kᵢ)·S₀ − Σ Dᵢⱼ (kᵢ·kⱼ) uⱼ) with j
    over a(i) without i. This is a triangular system, because parents come before their children.
    The outputs are oᵢ = (e^Gᵢ qᵢ)·S₀ + Σ Dᵢⱼ (qᵢ·kⱼ) uⱼ with j over a(i).

    Args:
        paths: the tree paths of the pass.
        before: the stash of earlier passes of this step; empty in the first.
        q: [R, H, n, k] scaled queries.
        k: [R, H, n, k] keys.
        v: [R, H, n, v] values.
        g: [R, H, n, c] logarithms of the decay.
        beta: [R, H, n, 1] the strengths of the writes.
        state: [R, H, k, v] S₀, the committed state.

    Returns:
        o [R, H, n, v], and the stash of k, u and G.
    """
    own = paths.place(before.get("g"), g)
    along = _along(paths, own)
    slots, keys = paths.place(before.get("G"), along), paths.place(before.get("k"), k)
    decay, reading = _decay(paths, along, slots), along.exp()
    if decay.shape[-1] == 1:
        kk, qk = (k @ keys.mT) * decay[..., 0], (q @ keys.mT) * decay[..., 0]
    else:
        kk, qk = (torch.einsum("rhic,rhjc,rhijc->rhij", x, keys, decay) for x in (k, q))
    read = (
        torch.cat((k * reading, q * reading), 2) @ state
    )  # one product, as reading the state dominates
    wanted = v - read[:, :, : k.shape[2]]
    if paths.later:
        wanted = wanted - kk @ paths.place(
            before.get("u"), torch.zeros_like(v)
        )  # those of this pass are still zero
        kk = kk.gather(3, paths.at[:, None, None, :].expand(*kk.shape[:3], -1))
    u = torch.linalg.solve_triangular(
        beta * kk.tril(-1), beta * wanted, upper=False, unitriangular=True
    )
    values = paths.place(before.get("u"), u)
    out = read[:, :, k.shape[2] :] + qk @ values
    return out, Stash(delta_fold, {"k": keys, "u": values, "G": slots, "g": own})


def delta_fold(state: Tensor, parts: Parts) -> None:
    """Update the state [H, k, v] in place by a path whose last token has the summed log decay G.

    S = e^G S₀ + Σ e^(G − Gⱼ) kⱼ uⱼᵀ, with j over the path.
    """
    k = parts["k"]
    u = parts["u"]
    along = parts["G"]
    last = along[:, -1:]
    state.mul_(last.exp().mT).baddbmm_((k * (last - along).exp()).mT, u)


def ssd_tree(
    paths: TreePaths, before: Parts, x: Tensor, g: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Stash]:
    """Compute the state space duality (SSD) of Mamba-2 for all tokens of a draft tree.

    The source is Dao and Gu, 2405.21060, section 6; for trees it is STree, 2505.14969, section 3.

    yᵢ = e^Gᵢ S₀ Cᵢ + Σ Dᵢⱼ (Cᵢ·Bⱼ) xⱼ, with j over token i and its ancestors.

    Args:
        paths: the tree paths of the pass.
        before: the stash of earlier passes of this step; empty in the first.
        x: [R, H, n, P] inputs times their time step Δ.
        g: [R, H, n, 1] Δ A, the logarithms of the decay.
        b: [R, H, n, N] B, the input projections.
        c: [R, H, n, N] C, the output projections.
        state: [R, H, P, N] S₀, the committed state.

    Returns:
        y [R, H, n, P], and the stash of x, B and G.
    """
    own = paths.place(before.get("g"), g)
    along = _along(paths, own)
    slots, inputs, into = (
        paths.place(before.get(name), new) for name, new in (("G", along), ("x", x), ("B", b))
    )
    out = (c @ state.mT) * along.exp() + (
        (c @ into.mT) * _decay(paths, along, slots)[..., 0]
    ) @ inputs
    return out, Stash(ssd_fold, {"x": inputs, "B": into, "G": slots, "g": own})


def ssd_fold(state: Tensor, parts: Parts) -> None:
    """Update the state [H, P, N] in place by a path whose last token has the summed log decay G.

    S = e^G S₀ + Σ e^(G − Gⱼ) xⱼ Bⱼᵀ, with j over the path.
    """
    x = parts["x"]
    b = parts["B"]
    along = parts["G"]
    last = along[:, -1:]
    state.mul_(last.exp()).baddbmm_((x * (last - along).exp()).mT, b)


def s6_tree(
    paths: TreePaths,
    before: Parts,
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
) -> tuple[Tensor, Stash]:
    """Run the selective scan of Mamba-1 (Gu and Dao, 2312.00752, algorithm 2) over a draft tree.

    The decay differs for each channel and entry of the state, so that D would have n² d N entries.
    Tokens are therefore computed level by level, each from its parent's state S′: S = e^(Δ A) S′ +
    Δ x Bᵀ and y = S C. States are kept for one pass only. A later pass of the step computes the
    states of earlier slots again.

    Args:
        paths: the tree paths of the pass.
        before: the stash of earlier passes of this step; empty in the first.
        x: [R, 1, n, d] inputs.
        step: [R, 1, n, d] Δ, the time steps.
        a: [d, N] A.
        b: [R, 1, n, N] B, the input projections.
        c: [R, 1, n, N] C, the output projections.
        state: [R, d, N] S₀, the committed state.

    Returns:
        y [R, 1, n, d], and the stash of Δ x, Δ and B.
    """
    steps, inputs, into = (
        paths.place(before.get(name), new) for name, new in (("Δ", step), ("x", step * x), ("B", b))
    )
    states = torch.cat(
        (state[:, None], state.new_zeros(len(state), paths.slots, *state.shape[1:])), 1
    )
    for rows, slots, parents in paths.levels:
        kept = (steps[rows, 0, slots, :, None] * a).exp() * states[rows, parents + 1]
        states[rows, slots + 1] = (
            kept + inputs[rows, 0, slots, :, None] * into[rows, 0, slots, None]
        )
    own = states.gather(1, (paths.at + 1)[:, :, None, None].expand(-1, -1, *state.shape[1:]))
    out = (own @ c[:, 0, :, :, None])[..., 0][:, None]

    def fold(state: Tensor, parts: Parts) -> None:
        s6_fold(state, parts, a)

    return out, Stash(fold, {"x": inputs, "Δ": steps, "B": into})


def s6_fold(state: Tensor, parts: Parts, a: Tensor) -> None:
    """Update the state [d, N] in place by a path.

    S = e^(A ΣΔ) S₀ + Σⱼ e^(A (ΣΔ − Σ Δ up to j)) xⱼ Bⱼᵀ, where the x of the stash include Δ.
    """
    x = parts["x"][0]
    b = parts["B"][0]
    until = parts["Δ"][0].cumsum(0)
    left = ((until[-1:] - until)[:, :, None] * a).exp()
    state.mul_((until[-1, :, None] * a).exp()).add_((left * x[:, :, None] * b[:, None]).sum(0))


def convolve_paths(
    paths: TreePaths, columns: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute a causal depthwise convolution along tree paths.

    A token's result is the weighted sum of the last K columns of its path, which ends with its own
    column.

    Args:
        paths: the tree paths of the pass.
        columns: [R, d, K + M] the last K committed columns, followed by the M columns of the slots;
            each column is contiguous in memory.
        weight: [d, K] the weights of the columns.
        bias: [d] the bias of the channels.

    Returns:
        [R, d, n] the result for each token of the pass.
    """
    by_slot = columns.mT.flatten(0, 1)  # in memory order, so that each is copied at once
    summed = torch.promote_types(weight.dtype, torch.float32)
    begin = weight.new_zeros(len(weight)) if bias is None else bias
    out = begin.to(summed).repeat(paths.columns.size, 1)
    for at, by in zip(
        paths.windows(weight.shape[-1]), weight.mT.to(summed).contiguous(), strict=True
    ):
        out.addcmul_(by_slot.index_select(0, at).to(summed), by)
    return out.to(weight.dtype).view(*paths.columns.shape, -1).mT
