"""A proposer for vLLM: draftree's retrieval drafters behind vLLM's speculative method `custom_class`.

vllm serve MODEL --speculative-config '{"method": "custom_class", "model":
    "draftree.integrations.vllm.Proposer", "num_speculative_tokens": 16}' --additional-config
    '{"draftree": {"drafter": "suffix"}}'
"""

from draftree.integrations.vllm.proposer import Proposer

__all__ = ["Proposer"]
