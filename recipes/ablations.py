"""Train what the tables of draft models compare: second seeds, GLIDE's and EDD's ablations.

    python recipes/ablations.py --data distilled/regenerated.jsonl --out drafters

The second seeds, and the comparison of GLIDE with its Vanilla Drafter, have the budget of the
shipped drafters, three epochs. The sweep over the layer that GLIDE reads (GliDe + CaPE, Figure 7),
EDD's ablations (EDD + PCT, Table 3), the sweep over its hidden layer (Figure 5) and the noise of
EAGLE's training have one epoch each, EDD's budget, and so has what they are compared with. The
tables are made by `benchmarks/draft_models.sh`.
"""

from demo_drafters import SPECS, arguments, train

OURS = "phase=random"
"""Where the saved ablations of EDD begin their blocks: anywhere, as decoding does."""
SECOND_SEED = ("edd", "eagle", "vdm", "medusa", "glide")
NO_CROSS = "glide:preset=fast,cross=false"
"""The paper's Vanilla Drafter, of two seeds."""
KV_LAYERS = (0, 10, *range(16, 24))
"""Layers of the target, counted from 0: the upper third, among which `auto` chooses, and two far
below. Of the grown demo target those with odd numbers are inserted ones, which hardly attend."""
GLIDE = {
    **{f"glide-kv{layer}-e1": f"glide:preset=fast,kv_layer={layer}" for layer in KV_LAYERS},
    "glide-nocross-e1": NO_CROSS,
    "glide-scratch-e1": "glide:preset=fast,kv_layer=20,init=scratch",
    "glide-nocross-scratch-e1": f"{NO_CROSS},init=scratch",
}
EDD = {
    "edd-e1": f"edd:{OURS}",
    "edd-ce-e1": f"edd:loss=ce,{OURS}",
    "edd-phase0-e1": "edd",  # the paper's EDD
    "edd-fixed-e1": f"edd:min_block=5,max_block=5,{OURS}",
    "edd-fixed-phase0-e1": "edd:min_block=5,max_block=5",  # and its "w/o random division length"
    # "w/o encoding result": the paper does not say whether its decoder then reads the whole text or
    # the block alone. VDM reads the whole; EDD's own mask without the soft prompt would leave it
    # the block.
    "vdm-e1": "vdm",
}
EAGLE = {
    "eagle-noise-e1": "eagle",  # the paper's ± 0.1: no text is longer than 512 tokens
    "eagle-noise-none-e1": "eagle:noise=0",
    "eagle-noise-much-e1": "eagle:noise=0.3",  # the mean, over tokens, of 0.1 · 512 / T on these texts
}
LAYERS = (4, 12, 24)
"""Entries of `hidden_states` beside 21, the fourth-to-last layer's output, which `edd-e1` reads."""


def main() -> None:
    args = arguments(__doc__ or "")
    for name in SECOND_SEED:
        train(f"{name}-s1", SPECS[name], args.data, args.out, seed=1)
    for seed, name in enumerate(("glide-nocross", "glide-nocross-s1")):
        train(name, NO_CROSS, args.data, args.out, seed=seed)
    for name, spec in {**GLIDE, **EDD, **EAGLE}.items():
        train(name, spec, args.data, args.out, epochs=1)
    for layer in LAYERS:
        train(f"edd-l{layer}-e1", f"edd:hidden_layer={layer},{OURS}", args.data, args.out, epochs=1)


if __name__ == "__main__":
    main()
