"""P-EAGLE: EAGLE-3's draft model, which drafts several tokens in one pass (arXiv 2602.01469).

The pair of the root is followed by K − 1 slots of a mask token, which have a learnt vector instead
of the target's features. A slot sees only what is before it. It predicts the token at its own
distance from the root, independently of the drafts before it.

Shapes: R rows, n pairs a row, M outputs, F frontier nodes, B batch, T tokens, A chains, S pairs and
slots of a text, D hidden size, V′ (draft) vocabulary, L layers of the target.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import Cache, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from typing_extensions import override

from draftree.drafters.base import Batch, Stage, TrainableMethod
from draftree.drafters.eagle3 import EAGLE3, EAGLE3Layer, FusingNet
from draftree.drafters.neural.draft_configs import (
    export_config,
    make_one_layer_config,
    of_values,
    stored_shape,
)
from draftree.drafters.neural.draft_masks import additive, block_starts
from draftree.drafters.neural.draft_vocabulary import (
    check_map,
    check_size,
    expand_logits,
    most_frequent_tokens,
)
from draftree.drafters.neural.feature_drafter import PairReader, PairState
from draftree.drafters.neural.head_drafter import group_by_depth, make_candidates
from draftree.drafters.neural.layer_stack import apply_layers, initialise
from draftree.drafters.neural.losses import select_target_logits
from draftree.drafters.neural.rotary import Rotary
from draftree.errors import UserError
from draftree.formats import speculators
from draftree.formats.checkpoint import CONFIG, Checkpoint, sizes
from draftree.formats.speculators import EMBEDDING_WEIGHT, LAYER_IDS
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import HiddenStateSpec, Target
from draftree.tree import Candidates, Ints, Tree
from draftree.utils.files import Entries
from draftree.utils.validated_dataclass import knob

MASK = "mask_hidden"
PARALLEL = "peagle"


@final
@dataclass(frozen=True)
class PEAGLE(TrainableMethod):
    """P-EAGLE's draft model.

    The paper uses 4 layers and K = 8. Here the default is 1 layer.

    Attributes:
        layers: number of layers; the first is a layer of EAGLE-3.
        drafts: K, the number of tokens that one pass drafts.
        mask: id of the mask token in the slots after the root; by default the token that is rarest
            in the training data.
        keep: r: at depth d, about the share rᵈ of the chains is trained.
        least: lower bound of this share.
        draft_vocab: V′, the number of tokens that can be drafted; 0 for all.
        init: the initial weights of the first layer, as in EAGLE-3: copies of a layer of the target
            (`target`), or random weights (`scratch`).
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        Stage(
            epochs=20,
            lr=1e-4,
            schedule="cosine",
            floor=0,
            warmup=0.0025,
            max_tokens=4096,
            loss="KL(p‖q) to the target, of every depth alike, deeper ones at fewer places",
            source="the recipe in SpecForge",
            ours=("batch_size", "schedule", "floor", "betas", "weight_decay", "clip"),
        ),
    )
    formats: ClassVar[tuple[str, ...]] = ("speculators",)

    layers: int = knob(1, least=1)
    drafts: int = knob(8, least=1)
    mask: int | None = knob(None, least=0)
    keep: float = knob(0.7, above=0, most=1)
    least: float = knob(0.2, above=0, most=1)
    draft_vocab: int = knob(0, least=0)
    init: Literal["target", "scratch"] = "target"

    @classmethod
    @override
    def recognises(cls, config: dict[str, Any], keys: Set[str]) -> bool:
        return (
            bool(config[speculators.KIND] == PARALLEL)
            if speculators.KIND in config
            else MASK in keys
        )

    @override
    def read(self, stored: Checkpoint, target: Target) -> "PEAGLEDrafter":
        stored = stored.load_tensors()
        config, where = stored.config, stored.folder / CONFIG
        said = Entries(config, where)
        values = speculators.layer_of(config, PARALLEL, stored.folder)
        stored.check_sizes(PARALLEL, values, sizes(target))
        named = (said.get(key, int | None, None) for key in speculators.MASKS)
        mask = next((token for token in named if token is not None), None)
        if mask is None or not 0 <= mask < target.decoder.vocab:
            raise UserError(
                f"'{stored.folder}' has mask_token_id {mask}, allowed are 0 … {target.decoder.vocab - 1}"
            )
        ids = said.get(LAYER_IDS, list[int] | None, None, least=0)
        three = (
            EAGLE3(low=ids[0], middle=ids[1], high=ids[2]) if ids and len(ids) == 3 else EAGLE3()
        )
        reads = three.layers(target)
        found = replace(
            self,
            layers=Entries(values, where).get("num_hidden_layers", int, 1, least=1),
            mask=mask,
            drafts=_drafts(config) or self.drafts,
            draft_vocab=len(stored.tensors["d2t"]) if "d2t" in stored.tensors else 0,
        )
        normed = bool(said.get("norm_before_residual", bool | None, False))
        own = EMBEDDING_WEIGHT in stored.tensors
        net = stored.network(lambda: PEAGLENet(values, found, target, reads, own, normed))
        check_map(stored.tensors.get("d2t"), target, stored.folder)
        return PEAGLEDrafter(found, net, target, stored)

    @override
    def new(self, target: Target) -> "PEAGLEDrafter":
        check_size(PARALLEL, self.draft_vocab, target)
        vocab, reads = target.decoder.vocab, EAGLE3().layers(target)
        if self.mask is not None and self.mask >= vocab:
            raise UserError(f"peagle: mask is {self.mask}, allowed are 0 … {vocab - 1}")
        llama = make_one_layer_config(target.decoder.config)
        values = export_config(llama, "PEagleDraftModel") | {"num_hidden_layers": self.layers}
        values |= {"draft_vocab_size": self.draft_vocab or vocab, LAYER_IDS: list(reads)}
        knobs = replace(self, mask=vocab - 1 if self.mask is None else self.mask)
        net = PEAGLENet(values, knobs, target, reads, embedding=False, normed=False)
        initialise(net, llama)
        nn.init.normal_(net.mask_hidden, std=llama.initializer_range)
        net.choose(np.arange(self.draft_vocab or vocab))
        if self.init == "target" and reads[-1] < len(target.decoder.layers):
            net.begin_as(target, reads[-1], net.layers[0])
        return PEAGLEDrafter(self, net, target, Checkpoint(values))


def _drafts(config: dict[str, Any]) -> int | None:
    """Return K from the proposal methods in a config of speculators, or from a separate entry."""
    how = config.get(speculators.SPECULATORS_CONFIG_KEY)
    proposals = how.get("proposal_methods") if isinstance(how, dict) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    found = first.get("speculative_tokens") if isinstance(first, dict) else None
    found = config.get(speculators.DEPTHS_ENTRY) if found is None else found
    return found if isinstance(found, int) and found > 0 else None


@final
class PEAGLENet(FusingNet):
    """The draft model, with the parameter names of speculators' checkpoints.

    Args:
        values: the config of the layers.
        knobs: the options; they give the number of layers, the mask token and the draft vocabulary.
        target: the target, whose embedding is used.
        reads: indices of the entries of the target's `hidden_states` that are fused.
        embedding: whether the checkpoint contains an embedding.
        normed: whether the residual of the first layer is the feature (the fused hidden states)
            after its norm, rather than before it.
    """

    def __init__(
        self,
        values: dict[str, Any],
        knobs: PEAGLE,
        target: Target,
        reads: Sequence[int],
        embedding: bool,
        normed: bool,
    ) -> None:
        super().__init__()
        config: LlamaConfig = of_values(values | {"num_hidden_layers": knobs.layers})
        size, vocab = int(config.hidden_size), target.decoder.vocab
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, 3 * target.decoder.hidden_size))
        self.fc = nn.Linear(3 * target.decoder.hidden_size, size, bias=False)
        first = EAGLE3Layer(config, normed)
        self.layers = nn.ModuleList(
            [first, *(LlamaDecoderLayer(config, i) for i in range(1, knobs.layers))]
        )
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, knobs.draft_vocab or vocab, bias=False)
        self.rotary = Rotary(config)
        mapped = knobs.draft_vocab or None
        self.register_buffer(
            "d2t", None if mapped is None else torch.zeros(mapped, dtype=torch.long)
        )
        self.register_buffer(
            "t2d", None if mapped is None else torch.zeros(vocab, dtype=torch.bool)
        )
        self.shape = stored_shape(config)
        self.width = size
        self.depth = knobs.layers
        self.reads = tuple(reads)
        self._target = target
        self.embed_tokens = nn.Embedding(vocab, size).requires_grad_(False) if embedding else None
        self.mask = knobs.mask or 0

    def unknown(self) -> Tensor:
        """Return the vector [D] that stands for the fused features in a slot."""
        found: Tensor = self.fc(self.mask_hidden[0, 0])
        return found

    @override
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: Cache
    ) -> Tensor:
        embeds = (
            self._target.decoder.embed(tokens)
            if self.embed_tokens is None
            else self.embed_tokens(tokens)
        )
        first, *others = self.layers
        x: Tensor
        x, _ = first(embeds.to(features.dtype), features, self.rotary, positions, mask, cache)
        if not others:
            return x
        return apply_layers(others, x, self.rotary(features, positions), mask, cache)


@final
class PEAGLEDrafter(PairReader):
    """Draft all tokens of a step in one pass over the root and placeholder tokens after it.

    The pass reads the pair of the root (its token and the target's features) and one slot for each
    further token. Their keys and values are not kept.
    """

    knobs: PEAGLE
    model: PEAGLENet
    expands_paths = True

    @property
    @override
    def ahead(self) -> int:  # type: ignore[override]
        return self.knobs.drafts

    @property
    @override
    def needs(self) -> HiddenStateSpec:
        return HiddenStateSpec(hidden=self.model.reads)

    @property
    @override
    def resolved_knobs(self) -> PEAGLE:
        return replace(self.knobs, mask=self.model.mask)

    @override
    def fit_vocabulary(self, counts: Ints) -> None:
        if self.model.d2t is not None:
            self.model.choose(most_frequent_tokens(counts, len(self.model.d2t)))
        if not self._stored.tensors and self.knobs.mask is None:
            self.model.mask = int(np.flatnonzero(counts == counts.min())[-1])

    @override
    def to_published_layout(
        self, config: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        new = (
            {}
            if self._stored.tensors
            else {speculators.MASKS[0]: self.model.mask, speculators.DEPTHS_ENTRY: self.ahead}
        )
        return config | new, tensors

    @override
    def passes(self, state: PairState, tree: Tree, frontier: Ints) -> int:
        reached = (tree.depth[frontier] < self.ahead).any()
        return tree.roots if not len(state.nodes) and reached else 0

    @torch.inference_mode()
    def expand(
        self, state: PairState, tree: Tree, frontier: Ints, k: int, drawing: Drawing
    ) -> tuple[Candidates, PairState]:
        """Return the candidates of each node, computed in the slot for the node's depth.

        There are no candidates below the last slot.
        """
        if self.passes(state, tree, frontier):
            state = self._slots(self.flush(state), tree)
        nodes, which = (frontier, None) if drawing.by_node else group_by_depth(tree, frontier)
        depths, rows = tree.depth[nodes], tree.row[nodes]
        outputs = (
            state.outputs
            if len(state.nodes)
            else self._like.new_zeros(tree.roots * self.ahead, self.model.width)
        )
        at = np.searchsorted(tree.row[: tree.roots], rows) * self.ahead + np.minimum(
            depths, self.ahead - 1
        )
        logits = self.model.logits(outputs[torch.from_numpy(at).to(outputs.device)])
        logits = logits.masked_fill(
            torch.from_numpy(depths >= self.ahead).to(logits.device)[:, None], 0.0
        )
        found = make_candidates(
            logits, self.ahead, k, drawing, rows, depths, self.model.draft_vocabulary
        )
        return found if which is None else found.share_lists(which), state

    def _slots(self, state: PairState, tree: Tree) -> PairState:
        """Read the pending pairs of each sequence, the root's pair, and the slots after it."""
        cache = state.decoding.cache
        roots = np.arange(tree.roots)
        more = self.ahead - 1
        tokens, fed = [np.zeros(0, np.int64)] * cache.rows, list(state.decoding.fed)
        state.features.reserve(int(state.features.lengths.max()) + more)
        known = state.features.layer(0)[0]
        for root, row in zip(roots.tolist(), tree.row[roots].tolist(), strict=True):
            tokens[row] = np.concatenate(
                (state.decoding.pending[row], tree.tokens[[root]], np.full(more, self.model.mask))
            )
            fed[row] = np.array([root])
            begin = int(state.features.lengths[row])
            known[row, 0, begin : begin + more] = (
                self.model.unknown()
            )  # in scratch slots after the committed ones
        outputs = self._read(state, tokens, tree.row[roots], self.ahead)
        return PairState(
            replace(state.decoding, fed=tuple(fed)), state.features, roots, outputs.flatten(0, 1)
        )

    @override
    def forward(self, batch: Batch, block: int, phase: int) -> Tensor:
        rows, count = batch.tokens.shape
        starts = block_starts(count, block, phase)
        roots = starts[starts > 0].unique()
        logits = self._like.new_zeros(*batch.tokens.shape, self.model.lm_head.out_features)
        if len(roots):
            depth = torch.arange(1, max(min(block, self.ahead), 1))
            chains = (roots - 1).repeat_interleave(len(depth)).expand(rows, -1)
            deep = depth.repeat(len(roots)).expand(rows, -1)
            out = self.model.logits(
                self._outputs(batch, chains.to(batch.tokens.device), deep.to(batch.tokens.device))
            )
            logits[:, roots] = out[:, roots - 1].to(logits.dtype)
            place = roots.repeat_interleave(len(depth)) + depth.repeat(len(roots))
            inside = place < count
            inside &= starts[place.clamp(max=count - 1)] == roots.repeat_interleave(len(depth))
            logits[:, place[inside]] = out[:, count - 1 :][:, inside.to(out.device)].to(
                logits.dtype
            )
        return expand_logits(logits, self.model.draft_vocabulary)

    def _outputs(self, batch: Batch, chains: Tensor, depths: Tensor) -> Tensor:
        """Return the outputs [B, T − 1 + A, D] for T − 1 true pairs and A masks of each text.

        Args:
            batch: the texts.
            chains: [B, A] the index of the true pair that each mask follows.
            depths: [B, A] the number of steps from that pair to the mask, 1 or more.
        """
        rows, count = batch.tokens.shape
        device, true = (
            batch.tokens.device,
            torch.arange(count - 1, device=batch.tokens.device).expand(rows, -1),
        )
        features = self._features(batch)[:, :-1]
        unknown = self.model.unknown().expand(rows, chains.shape[1], -1)
        owner, depth = torch.cat((true, chains), 1), torch.cat((torch.zeros_like(true), depths), 1)
        tokens = torch.cat((batch.tokens[:, 1:], torch.full_like(chains, self.model.mask)), 1)
        behind = (depth[:, None, :] == 0) & (owner[:, None, :] <= owner[:, :, None])
        own = (
            (depth[:, None, :] > 0)
            & (owner[:, None, :] == owner[:, :, None])
            & (depth[:, None, :] <= depth[:, :, None])
        )
        mask = additive((behind | own)[:, None].to(device), features.dtype)
        out: Tensor = self.model(
            tokens, torch.cat((features, unknown), 1), owner + depth, mask, DynamicCache()
        )
        return out

    @override
    def loss(self, batch: Batch) -> Tensor:
        count, drafts = batch.tokens.shape[1], self.ahead
        chains, depths, valid = draw_slots(batch, drafts, self.knobs.keep, self.knobs.least)
        true = torch.arange(count - 1, device=chains.device).expand(len(chains), -1)
        learn = torch.cat(
            (batch.learn[:, 2:], torch.zeros_like(batch.learn[:, :1])), 1
        )  # pair t predicts token t + 2
        places = torch.cat((true + 1, chains + depths + 1), 1).clamp(
            max=count - 1
        )  # places whose next token is predicted
        there = torch.cat((learn, valid), 1)
        marked = torch.zeros_like(batch.learn)
        row = torch.arange(len(chains), device=chains.device)[:, None].expand_as(places)
        marked[row[there], places[there]] = True
        number = marked.flatten().long().cumsum(0).view_as(marked) - 1
        theirs = select_target_logits(batch, marked, self.model.draft_vocabulary)[
            number[row[there], places[there]]
        ]
        q = torch.log_softmax(
            self.model.logits(self._outputs(batch, chains, depths)[there]).float(), dim=-1
        )
        log_p = torch.log_softmax(theirs.detach().float(), dim=-1)
        each = kl_div(q, log_p, reduction="none", log_target=True).sum(-1)
        weight = batch.learn.sum(1) / there.sum(1).clamp(min=1)
        return (each * weight[row[there]]).sum() / batch.count


def draw_slots(
    batch: Batch, drafts: int, keep: float, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the slots that are trained; return their pairs, depths and validity, [B, A] each.

    Deeper slots follow fewer pairs. Let n be the number of pairs of a text after which a label
    follows. Depth d then uses (n − d) · max(keepᵈ, least) of them, which are among those of depth d
    − 1, as in the official codes. Entries that are not valid are padding.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for learn, generator in zip(batch.learn.cpu(), batch.generators, strict=True):
        able = learn[2:].nonzero()[:, 0]
        order = able[torch.randperm(len(able), generator=generator)]
        pairs = []
        depths = []
        for d in range(1, drafts):
            order = order[: max(int((len(able) - d) * max(keep**d, least)), 0)]
            inside = order[order + d + 2 < len(learn)]
            inside = inside[learn[inside + d + 2]]
            pairs.append(inside)
            depths.append(torch.full_like(inside, d))
        found.append(
            (torch.cat(pairs) if pairs else able[:0], torch.cat(depths) if depths else able[:0])
        )
    size, device = (len(found), max(len(p) for p, _ in found)), batch.tokens.device
    chains = torch.zeros(size, dtype=torch.long)
    deep = torch.ones(size, dtype=torch.long)
    valid = torch.zeros(size)
    for i, (p, depth) in enumerate(found):
        chains[i, : len(p)], deep[i, : len(p)], valid[i, : len(p)] = p, depth, 1
    return chains.to(device), deep.to(device), valid.bool().to(device)
