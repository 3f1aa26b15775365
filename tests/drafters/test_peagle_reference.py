"""P-EAGLE's decoding over again, number by number from its equations, beside the drafter's."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from architectures import target
from draftree.drafters.peagle import PEAGLE
from draftree.sampling.draft_sampling import Drawing
from draftree.tree import AcceptResult, Tree

THETA = 10000.0


def normed(x: Tensor, norm: Any) -> Tensor:
    """x / √(mean x² + ε) ⊙ w."""
    return norm.weight * x / (x.pow(2).mean() + norm.variance_epsilon).sqrt()


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """[heads, d] with the pairs (i, i + d/2) turned by the angle position · θ^(−2i/d)."""
    half, out = x.shape[-1] // 2, x.clone()
    for i in range(half):
        c, s = math.cos(position * theta ** (-i / half)), math.sin(position * theta ** (-i / half))
        out[:, i], out[:, i + half] = (
            c * x[:, i] - s * x[:, i + half],
            c * x[:, i + half] + s * x[:, i],
        )
    return out


def layer_over_again(
    layer: Any, reads: list[Tensor], residual: list[Tensor], theta: float, width: int
) -> list[Tensor]:
    """Causal attention and MLP, entry by entry; entry t stands at position t."""
    attention = layer.self_attn
    queries = []
    keys = []
    values = []
    out = []
    for t, x in enumerate(reads):
        queries.append(turned((attention.q_proj.weight @ x).view(-1, width), t, theta))
        keys.append(turned((attention.k_proj.weight @ x).view(-1, width), t, theta))
        values.append((attention.v_proj.weight @ x).view(-1, width))
        heads, share = [], len(queries[0]) // len(keys[0])
        for h, query in enumerate(queries[t]):
            scores = torch.stack(
                [query @ keys[s][h // share] / math.sqrt(width) for s in range(t + 1)]
            ).softmax(0)
            heads.append(sum(w * values[s][h // share] for s, w in enumerate(scores)))
        y = residual[t] + attention.o_proj.weight @ torch.cat(heads)
        z, mlp = normed(y, layer.post_attention_layernorm), layer.mlp
        gate = mlp.gate_proj.weight @ z
        out.append(y + mlp.down_proj.weight @ (gate * gate.sigmoid() * (mlp.up_proj.weight @ z)))
    return out


def drafts_over_again(
    net: Any, embedding: Tensor, tokens: list[int], hidden: Tensor, count: int
) -> Tensor:
    """[count, V] log q behind the last token: true pairs (f_t, x_{t+1}), then mask slots, whose features are the learnt ones.

    Args:
        net: the drafter's weights.
        embedding: [V, D] the target's.
        tokens: the text, its root last.
        hidden: [T − 1, 3 · D] the target's states of all tokens before the root.
        count: drafts of the pass.
    """
    fed = tokens[1:] + [net.mask] * (count - 1)
    features = [net.fc.weight @ f for f in [*hidden, *[net.mask_hidden[0, 0]] * (count - 1)]]
    first, width = net.layers[0], int(net.layers[0].self_attn.head_dim)
    reads = [
        torch.cat((normed(embedding[t], first.input_layernorm), normed(f, first.hidden_norm)))
        for t, f in zip(fed, features, strict=True)
    ]
    x = layer_over_again(first, reads, features, THETA, width)
    for layer in net.layers[1:]:
        x = layer_over_again(layer, [normed(e, layer.input_layernorm) for e in x], x, THETA, width)
    return torch.stack(
        [(net.lm_head.weight @ normed(e, net.norm)).log_softmax(-1) for e in x[-count:]]
    )


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_decoding_is_that_of_a_plain_loop(layers: int) -> None:
    """Two steps: the pairs of an accepted token come in, and of the first step's slots nothing stays."""
    t, text = target("llama"), [3, 1, 4, 1, 5, 9, 2]
    torch.manual_seed(1)
    drafter: Any = PEAGLE(layers=layers, drafts=4).example(t)
    for parameter in drafter.model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    cache = t.new_cache(1, 32)
    verified = t.prefill(cache, [np.array(text[:4])], drafter.needs)
    hidden = torch.cat([verified.hidden_states.hidden[layer] for layer in drafter.needs.hidden], -1)
    state = drafter.start([np.array(text[:4])], np.array([text[4]]), verified.hidden_states)
    for step in range(2):
        tree, root = Tree.from_roots(np.array([0]), np.array([text[4 + 2 * step]])), np.array([0])
        wanted = drafts_over_again(
            drafter.model,
            t.decoder.model.get_input_embeddings().weight,
            text[: 5 + 2 * step],
            hidden,
            4,
        )
        node = root
        for depth in range(4):
            candidates, state = drafter.expand(state, tree, node, 3, Drawing())
            assert (
                candidates.log_probs[0] - wanted[depth]
            ).abs().max() < 1e-5  # its angles are float32
            token = text[5] if depth == 0 else int(candidates.tokens[0, 0])
            tree = tree.append(node, np.array([token]), np.zeros(1), np.zeros(1), candidates)
            node = np.array([depth + 1])
        verified = t.verify(cache, tree, drafter.needs)
        verdict = AcceptResult((np.array([1]),), np.array([text[6]]))
        t.commit(cache, tree, verdict)
        hidden_states = verified.hidden_states.take(np.array([0, 1]))
        hidden = torch.cat(
            (hidden, torch.cat([hidden_states.hidden[layer] for layer in drafter.needs.hidden], -1))
        )
        state = drafter.commit(state, tree, verdict, hidden_states)
