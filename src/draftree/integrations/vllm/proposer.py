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

from draftree.errors import UserError, first_line
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
        self._report_failed = False
        version = vllm_version()
        reason = _unsupported(vllm_config.parallel_config, version, self.options.any_version)
        if reason is not None:
            LOG.warning("draftree proposes nothing: %s", reason)
            return
        model = vllm_config.model_config
        vocab, name = int(model.get_vocab_size()), str(model.model)
        longest = int(vllm_config.speculative_config.num_speculative_tokens)
        bounds = longest, int(model.max_model_len), vocab
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
            self._make = partial(Chains, drafter, policy, costs, *bounds)
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
            longest = self.chains.longest
            rows = [
                _row(sampled_token_ids[i], int(num_tokens_no_spec[i]), token_ids_cpu[i], longest)
                for i in live
            ]
            chains = self.chains.step(rows, steady=len(live) == len(sampled_token_ids))
            for i, chain in zip(live, chains, strict=True):
                proposed[i] = chain
        except Exception as error:
            self._fail(error)
            return [[] for _ in sampled_token_ids]
        self._report()
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
        """Write the figures to the file that the options name, if any; log the first failure."""
        if (
            self.options.report is None
            or self.chains is None
            or time.monotonic() - self._written < REPORT_SECONDS
        ):
            return
        self._written = time.monotonic()
        live = {"live": len(self.chains.slots.live), "slots": len(self.chains.slots.texts)}
        figures = asdict(self.chains.figures) | live
        try:
            write_text(Path(self.options.report), json.dumps(figures) + "\n")
        except (OSError, UserError) as error:
            if not self._report_failed:
                LOG.warning("draftree cannot write its report: %s", first_line(error))
            self._report_failed = True


def vllm_version() -> str:
    """Return the version of the vLLM in this process; "not loaded" if there is none."""
    return str(getattr(sys.modules.get("vllm"), "__version__", "not loaded"))


def _unsupported(parallel: Any, version: str, any_version: bool) -> str | None:
    """Return the reason why nothing is proposed with a version and a way of running it; or None.

    With pipeline parallelism, vLLM's scheduler takes the drafts of a step before its sampled token,
    and appends them to the wrong text. Processes of an external launcher schedule the same requests
    each on its own, and their drafts differ, as the lengths depend on measured times.
    """
    if not any_version and not version.startswith(TESTED_VERSIONS):
        known = " and ".join(f"{v}x" for v in TESTED_VERSIONS)
        return f"vLLM is {version}, tested is {known} (any_version: true tries it)"
    if (stages := parallel.pipeline_parallel_size) > 1:
        return f"pipeline_parallel_size is {stages}, allowed is 1"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return f"external_launcher has {parallel.world_size} processes, allowed is 1"
    return None


def _row(new: Sequence[int], length: int, tokens: Any, longest: int) -> RequestStep:
    read = np.array(tokens[: length + longest], np.int64)
    return RequestStep(read[:length], len(new), read[length:])


def _tokenizer(model_config: Any) -> Any:
    """Load the tokenizer of vLLM's model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_config.tokenizer, trust_remote_code=model_config.trust_remote_code
    )
