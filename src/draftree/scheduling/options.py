"""Limits of the scheduler: sequences, cached tokens, tokens per step."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from draftree.aliases import LIMIT
from draftree.utils.validated_dataclass import Knobs, knob, translated


@dataclass(frozen=True)
class SchedulerOptions(Knobs):
    """The limits of continuous batching.

    Attributes:
        max_sequences: sequences that run at the same time.
        max_cache_tokens: tokens of all running sequences in the KV cache. None stands for as many
            as `max_sequences` sequences of the target's context have.
        max_batch_tokens: prompt tokens that are read in one step at most. Longer prompts are read
            in chunks, over several steps, so that running sequences go on meanwhile.
        max_step_seconds: seconds of one step, by which chunks are sized; 48 tokens are read in any
            case. None stands for a reading of at most 1.5 decoding steps of the running sequences,
            or 0.05 seconds while none runs.
        max_prefix_tokens: tokens of prompts that were read, kept for requests that begin with the
            same ones, as far as the running sequences leave room for them in `max_cache_tokens`; 0
            keeps none.
        prefix_block: tokens in a block; prompts share whole blocks.
        share_passes: whether chunks of prompts are read in the passes of running sequences, if the
            target can do that. None stands for yes where passes are packed, as those of native
            kernels.

    Raises:
        UserError: a limit is not a whole number of at least 1.
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
        """Return options by name.

        Raises:
            UnknownName: there is no such option.
        """
        return cls(**translated(LIMIT, given, [f.name for f in fields(cls)]))

    def cache_tokens(self, context: int) -> int:
        """Return the bound of the KV cache in tokens, for a target of the given context."""
        return (
            self.max_sequences * (context + 1)
            if self.max_cache_tokens is None
            else self.max_cache_tokens
        )
