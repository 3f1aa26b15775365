"""The proposer class that vLLM calls after each step. Its errors never reach the engine.

vLLM verifies what is proposed itself: by the likeliest token at temperature 0, by rejection
sampling above it.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from draftree.errors import first_line
from draftree.integrations.vllm.chains import Chains
from draftree.integrations.vllm.costs import step_costs
from draftree.integrations.vllm.options import (
    ProposerOptions,
    open_corpus,
    open_drafter,
    open_policy,
)
from draftree.integrations.vllm.requests import RequestStep
from draftree.integrations.vllm.text_chains import TextChains
from draftree.utils.files import write_text

LOG = logging.getLogger("vllm.draftree")
"""Logger below vLLM's own logger, so that vLLM's handlers print its messages."""
TESTED_VERSIONS = ("0.32.",)
"""Prefixes of the versions of vLLM with which the proposer was tested."""
MAX_FAILURES = 3
"""Number of failed calls after which nothing more is proposed."""
REPORT_SECONDS = 1.0
"""Least number of seconds between two writes of the report."""


class Proposer:
    """Propose chains of up to `num_speculative_tokens` tokens to vLLM, or none if none pays off.

    Args:
        vllm_config: configuration object of vLLM.

    Raises:
        UserError: an option names a drafter or policy that cannot be used. No errors are raised
            after the start of the engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.options = ProposerOptions.of(vllm_config.additional_config)
        self.chains: Chains | TextChains | None = None
        self._make: Callable[[], Chains | TextChains]
        self._config = vllm_config
        self._failures = 0
        self._written = 0.0
        version = vllm_version()
        if not self.options.any_version and not version.startswith(TESTED_VERSIONS):
            known = " and ".join(f"{v}x" for v in TESTED_VERSIONS)
            LOG.warning(
                "draftree proposes nothing: vLLM is %s, tested is %s (any_version: true tries it)",
                version,
                known,
            )
            return
        model = vllm_config.model_config
        vocab, name = int(model.get_vocab_size()), str(model.model)
        longest = int(vllm_config.speculative_config.num_speculative_tokens)
        bounds = longest, int(model.max_model_len)
        tokenizer = partial(_tokenizer, model)
        if (spec := self.options.drafter) is None:
            corpus = open_corpus(self.options.datastore, vocab, tokenizer, name)
            about = f"suffix matches and a corpus of {len(corpus.tokens)} tokens"
            costs = step_costs(vllm_config, about, version)
            self._make = partial(TextChains, corpus, costs, *bounds)
        else:
            drafter = open_drafter(spec, vocab, tokenizer, name)
            policy = open_policy(self.options.policy or "yield", longest)
            about = f"{drafter.description} with {policy}"
            costs = step_costs(vllm_config, drafter.description, version)
            self._make = partial(Chains, drafter, policy, costs, *bounds, vocab)
        self.chains = self._make()
        LOG.info("draftree proposes by %s", about)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; vLLM's CPU runner calls this method of every proposer."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a chain of token ids for each request of vLLM's batch; an empty one for no draft.

        Args:
            sampled_token_ids: [R] lists of the tokens that each request got in the last step; empty
                while its prompt is being read.
            num_tokens_no_spec: [R] number of tokens of each request.
            token_ids_cpu: [R, T] token ids of each request, padded to T tokens.
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
        """Log a failure and start with a new state; stop proposing after `MAX_FAILURES` of them."""
        self._failures += 1
        told = f"{type(error).__name__}: {first_line(error)}"
        LOG.warning(
            "draftree's proposer failed (%s); requests continue without drafts",
            told,
            exc_info=self._failures == 1,
        )
        self.chains = self._make()
        if self._failures >= MAX_FAILURES:
            self.chains = None
            LOG.warning("draftree has stopped proposing: it failed %d times", MAX_FAILURES)

    def _report(self) -> None:
        """Write the figures to the file that the options name, if any."""
        if (
            self.options.report is None
            or self.chains is None
            or time.monotonic() - self._written < REPORT_SECONDS
        ):
            return
        self._written = time.monotonic()
        live = {"live": len(self.chains.slots.live), "slots": len(self.chains.slots.texts)}
        write_text(Path(self.options.report), json.dumps(asdict(self.chains.figures) | live) + "\n")


def vllm_version() -> str:
    """Return the version of the vLLM in this process; "not loaded" if there is none."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "not loaded"))


def _row(new: Sequence[int], length: Any, tokens: Any) -> RequestStep:
    return RequestStep(np.array(tokens[: int(length)], np.int64), len(new))


def _tokenizer(model_config: Any) -> Any:
    """Load the tokenizer of vLLM's model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_config.tokenizer, trust_remote_code=model_config.trust_remote_code
    )
