"""Write what a target itself answers, greedily, to the prompts of some data: the text a drafter should be trained on.

    python recipes/distil.py --target demo --data gsm8k_train.jsonl --out distilled

`draftree train … --regenerate` does this for one drafter; here it is done once for several. The
rows are in `distilled/regenerated.jsonl`; interrupted, the same command goes on. `accelerate launch
recipes/distil.py …` shares the work.
"""

import argparse
import pathlib

from draftree import Target
from draftree.cli.terminal import progress
from draftree.training.distributed import Processes
from draftree.training.generation_run import GenerationRun
from draftree.training.regenerate import Regeneration, regenerate


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--target", default="demo")
    ap.add_argument("--data", type=pathlib.Path, action="append", required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--tokens", type=int, default=192)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--max-tokens", type=int, default=512)
    args = ap.parse_args()
    processes = Processes.on(None)
    target = Target.load(args.target, device=processes.device(None))
    how = Regeneration(tokens=args.tokens, batch=args.batch, max_tokens=args.max_tokens)
    with progress("answering", None) as tell:
        print(regenerate(target, args.data, args.out, how, GenerationRun(processes, tell)))


if __name__ == "__main__":
    main()
