"""The proposer class that vLLM calls after each step. Its errors never reach the engine.

vLLM verifies what is proposed itself: by the likeliest token at temperature 0, by rejection
sampling above it.
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from draftree.errors import first_line
from draftree.integrations.vllm.chains import Chains
from draftree.integrations.vllm.costs import step_costs
from draftree.integrations.vllm.options import ProposerOptions, open_drafter, open_policy
from draftree.integrations.vllm.requests import Row
from draftree.utils.files import write_text

LOG = logging.getLogger("vllm.draftree")
"""Below vLLM's own logger, whose handlers show its lines."""
TESTED = ("0.32.",)
"""The versions of vLLM that it was tested with."""
PATIENCE = 3
"""Calls that may fail until nothing is proposed any more."""
EVERY = 1.0
"""Seconds between two writes of the report."""


class Proposer:
    """Proposes chains of any length up to `num_speculative_tokens`, none where none pays.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        UserError: an option names no drafter or policy that can be used. Nothing is raised once the
            engine runs.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.options = ProposerOptions.of(vllm_config.additional_config)
        self.chains: Chains | None = None
        self._config = vllm_config
        self._failures = 0
        self._written = 0.0
        version = vllm_version()
        if not self.options.any_version and not version.startswith(TESTED):
            known = " and ".join(f"{v}x" for v in TESTED)
            LOG.warning(
                "draftree proposes nothing: vLLM is %s, tested is %s (any_version: true tries it)",
                version,
                known,
            )
            return
        model = vllm_config.model_config
        vocab, name = int(model.get_vocab_size()), str(model.model)
        drafter = open_drafter(self.options.drafter, vocab, partial(_tokenizer, model), name)
        longest = int(vllm_config.speculative_config.num_speculative_tokens)
        policy = open_policy(self.options.policy, longest)
        costs = step_costs(vllm_config, drafter, version)
        self._make = partial(
            Chains, drafter, policy, costs, longest, int(model.max_model_len), vocab
        )
        self.chains = self._make()
        LOG.info("draftree proposes by %s with %s", drafter.described, policy)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: vLLM's CPU runner asks every proposer to."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a chain for each request of vLLM's batch.

        Args:
            sampled_token_ids: [R] what each row has got in the last step; nothing while its prompt
                is being read.
            num_tokens_no_spec: [R] the number of tokens of each request.
            token_ids_cpu: [R, tokens] these tokens.
            slot_mappings: not used.
        """
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.chains is None:
            return proposed
        try:
            live = [i for i, new in enumerate(sampled_token_ids) if len(new)]
            rows = [
                _row(sampled_token_ids[i], num_tokens_no_spec[i], token_ids_cpu[i]) for i in live
            ]
            chains = self.chains.step(rows, steady=len(live) == len(sampled_token_ids))
            for i, chain in zip(live, chains, strict=True):
                proposed[i] = chain
            self._report()
        except Exception as error:
            self._fail(error)
            return [[] for _ in sampled_token_ids]
        return proposed

    def _fail(self, error: Exception) -> None:
        """Begin anew after a failure; after some of them propose nothing any more."""
        self._failures += 1
        told = f"{type(error).__name__}: {first_line(error)}"
        LOG.warning(
            "draftree's proposer failed (%s); requests go on without drafts",
            told,
            exc_info=self._failures == 1,
        )
        self.chains = self._make()
        if self._failures >= PATIENCE:
            self.chains = None
            LOG.warning("draftree proposes nothing any more: it failed %d times", PATIENCE)

    def _report(self) -> None:
        """Write the figures, where a file was named for them."""
        if (
            self.options.report is None
            or self.chains is None
            or time.monotonic() - self._written < EVERY
        ):
            return
        self._written = time.monotonic()
        live = {"live": len(self.chains.slots.live), "slots": len(self.chains.slots.texts)}
        write_text(Path(self.options.report), json.dumps(asdict(self.chains.figures) | live) + "\n")


def vllm_version() -> str:
    """Return the version of the vLLM that runs; "not loaded" where none does."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "not loaded"))


def _row(new: Sequence[int], length: Any, tokens: Any) -> Row:
    return Row(np.array(tokens[: int(length)], np.int64), len(new))


def _tokenizer(model_config: Any) -> Any:
    """Return the tokenizer of vLLM's model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_config.tokenizer, trust_remote_code=model_config.trust_remote_code
    )
