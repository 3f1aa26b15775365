"""Train what the tables of draft models compare: second seeds, GLIDE's and EDD's ablations.

    python recipes/ablations.py --data distilled/regenerated.jsonl --out drafters

The second seeds and GLIDE's variants have the budget of the shipped drafters, three epochs. EDD's ablations (EDD + PCT,
Table 3), the sweep over its hidden layer (Figure 5) and the noise of EAGLE's training have one epoch each, the paper's
budget, and so has the EDD and the VDM they are compared with. The tables are made by `benchmarks/draft_models.sh`.
"""

from demo_drafters import SPECS, arguments, train

SECOND_SEED = ("edd", "eagle", "vdm", "medusa")
GLIDE = {"glide-nocross": "glide:cross=false"}  # the paper's Vanilla Drafter
EDD = {
    "edd-e1": "edd",
    "edd-ce-e1": "edd:loss=ce",
    "edd-fixed-e1": "edd:min_block=5,max_block=5",
    "vdm-e1": "vdm",  # EDD without the target's encoding
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
    for name, spec in GLIDE.items():
        train(name, spec, args.data, args.out)
    for name, spec in (EDD | EAGLE).items():
        train(name, spec, args.data, args.out, epochs=1)
    for layer in LAYERS:
        train(f"edd-l{layer}-e1", f"edd:hidden_layer={layer}", args.data, args.out, epochs=1)


if __name__ == "__main__":
    main()
