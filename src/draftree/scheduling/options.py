"""Limits of the scheduler: sequences, cached tokens, tokens per step."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from draftree.aliases import LIMIT
from draftree.utils.validated_dataclass import Knobs, knob, translate_names


@dataclass(frozen=True)
class SchedulerOptions(Knobs):
    """Set the limits of continuous batching.

    Attributes:
        max_sequences: largest number of sequences that run at the same time.
        max_cache_tokens: largest number of tokens in the KV cache, over all running sequences. None
            allows the full context of the target for each of `max_sequences` sequences.
        max_batch_tokens: largest number of prompt tokens that one step reads. Longer prompts are
            read in chunks over several steps, so that running sequences are not held up.
        max_step_seconds: intended seconds of one step, from which the size of chunks follows; at
            least 48 tokens are read, or 16 in a pass that also decodes. With None, reading takes at
            most the time of 1.5 decoding steps, or 0.05 seconds while no sequence runs.
        max_prefix_tokens: largest number of prompt tokens that are stored for later requests with
            the same beginning. They use only the part of `max_cache_tokens` that running sequences
            leave free. 0 stores none.
        prefix_block: number of tokens in a stored block; prompts share whole blocks.
        share_passes: whether chunks of prompts are read in the passes of running sequences, if the
            target supports that. With None, they are if the target packs its passes, as with native
            kernels.

    Raises:
        UserError: a limit is out of its range or has the wrong type.
    """

    max_sequences: int = knob(8, least=1)
    max_cache_tokens: int | None = knob(None, least=2)
    max_batch_tokens: int = knob(512, least=1)
    max_step_seconds: float | None = knob(None, above=0)
    max_prefix_tokens: int = knob(4096, least=0)
    prefix_block: int = knob(32, least=1)
    share_passes: bool | None = knob(None)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return options from a mapping of names to values.

        Raises:
            UnknownName: a name is not an option.
        """
        return cls(**translate_names(LIMIT, given, [f.name for f in fields(cls)]))

    def cache_tokens(self, context: int) -> int:
        """Return the largest number of tokens in the KV cache for a target's context length."""
        return (
            self.max_sequences * (context + 1)
            if self.max_cache_tokens is None
            else self.max_cache_tokens
        )
