"""Write what a target itself answers, greedily, to every question of a file: the text a drafter should be trained on.

    python recipes/distil.py --target src/draftree/demo/target --questions gsm8k_train.jsonl --out distilled.jsonl

Reads rows with a `question`, writes rows of `{"messages"}`; goes on where an interrupted run stopped.
"""

import argparse
import json
import pathlib

from draftree import Request, Target
from draftree.drafters.pld import PLD
from draftree.engine import Engine
from draftree.policies.chain import Chain


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--target", default="demo")
    ap.add_argument("--questions", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--max-new-tokens", type=int, default=192)
    args = ap.parse_args()
    target = Target.load(args.target)
    engine = Engine(target, PLD().open(target), Chain())
    questions = [json.loads(line)["question"].strip() for line in pathlib.Path(args.questions).read_text().splitlines()]
    questions.sort(key=len)  # rows of one batch end at about the same time
    out = pathlib.Path(args.out)
    done = len(out.read_text().splitlines()) if out.exists() else 0
    with out.open("a") as file:
        for at in range(done, len(questions), args.batch):
            asked = questions[at : at + args.batch]
            chats = [[{"role": "user", "content": q}] for q in asked]
            prompts = [engine.tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
            answers = engine.plain([Request(p, args.max_new_tokens, engine.eos) for p in prompts]).tokens
            for chat, ids in zip(chats, answers, strict=True):
                reply = engine.tokenizer.decode([t for t in ids if t not in engine.eos])
                file.write(json.dumps({"messages": [*chat, {"role": "assistant", "content": reply}]}) + "\n")
            file.flush()
            print(f"{at + len(asked)} of {len(questions)}", flush=True)


if __name__ == "__main__":
    main()
