"""A batch of requests as vLLM 0.32 shows it to a proposer, without vLLM: rows of tokens, chunks of prompts, rows that move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

Model = Callable[[Sequence[int]], int]
"""The token after a text."""
CONTEXT = 256
LONGEST = 8


def vllm_config(longest: int = LONGEST, vocab: int = 50, **options: Any) -> Any:
    """What a proposer reads of vLLM's configuration."""
    text = SimpleNamespace(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=vocab,
    )
    dtype = SimpleNamespace(itemsize=4)
    model = SimpleNamespace(
        model="any", max_model_len=CONTEXT, hf_text_config=text, dtype=dtype, quantization=None, enforce_eager=True,
        get_vocab_size=lambda: vocab,
    )  # fmt: skip
    return SimpleNamespace(
        additional_config={"draftree": options},
        speculative_config=SimpleNamespace(num_speculative_tokens=longest),
        model_config=model,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            world_size=1,
            distributed_executor_backend="uni",
        ),
        device_config=SimpleNamespace(device="cpu"),
    )


@dataclass
class Request:
    """One request.

    Attributes:
        text: prompt and output so far.
        prompt: its length.
        most: tokens that it writes.
        unread: tokens of the prompt that have not been read.
        drafts: proposed after the last step.
        accepted: tokens of drafts, in all.
    """

    text: list[int]
    prompt: int
    most: int
    unread: int
    drafts: list[int] = field(default_factory=list)
    accepted: int = 0

    @property
    def output(self) -> list[int]:
        return self.text[self.prompt :]


class Batch:
    """Runs requests by a model and asks a proposer after every step.

    Args:
        propose: of the proposer.
        model: that writes.
        rows: of the batch; further requests wait.
        chunk: tokens of a prompt that are read in a step.
        cut: drafts that are verified at most, whatever was proposed.
    """

    def __init__(
        self,
        propose: Callable[..., list[list[int]]],
        model: Model,
        rows: int = 8,
        chunk: int = 1000,
        cut: int = 1000,
    ) -> None:
        self.propose = propose
        self.model = model
        self.rows = rows
        self.chunk = chunk
        self.cut = cut
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.proposals: list[list[list[int]]] = []

    def add(self, prompt: Sequence[int], most: int) -> Request:
        request = Request(list(prompt), len(prompt), most, len(prompt))
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        for requests in (self.waiting, self.running):
            if request in requests:
                self._remove(requests, request)

    def preempt(self, request: Request) -> None:
        """Take a request out of the batch; it comes back and reads its whole text again."""
        self._remove(self.running, request)
        request.unread, request.drafts = len(request.text), []
        self.waiting.insert(0, request)

    @staticmethod
    def _remove(requests: list[Request], request: Request) -> None:
        """The last row moves into the place that becomes free, as vLLM does it."""
        at = requests.index(request)
        requests[at] = requests[-1]
        requests.pop()

    def step(self) -> None:
        while self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.pop(0))
        sampled = [self._verified(request) for request in self.running]
        tokens = np.full((self.rows, CONTEXT), -7, np.int32)
        counts = np.zeros(self.rows, np.int32)
        for i, (request, new) in enumerate(zip(self.running, sampled, strict=True)):
            verified, before = request.drafts[: self.cut], len(request.text) - len(new)
            tokens[i, before : before + len(verified)] = verified
            tokens[i, : len(request.text)], counts[i] = request.text, len(request.text)
        proposed = self.propose(sampled, counts, tokens, slot_mappings=None)
        assert len(proposed) == len(self.running)
        assert all(not chain for chain, new in zip(proposed, sampled, strict=True) if not new)
        self.proposals.append(proposed)
        for request, chain in zip(self.running, proposed, strict=True):
            assert all(type(token) is int for token in chain)
            request.drafts = chain
        for request in [r for r in self.running if len(r.output) >= r.most]:
            del request.text[request.prompt + request.most :]
            self._remove(self.running, request)

    def _verified(self, request: Request) -> list[int]:
        """The tokens that a request gets in a step."""
        request.unread -= min(self.chunk, request.unread)
        if request.unread:
            return []
        new: list[int] = []
        for token in [*request.drafts[: self.cut], None]:
            new.append(self.model(request.text + new))
            if new[-1] != token:
                break
        request.accepted += len(new) - 1
        request.text += new
        return new

    def run(self, steps: int = 10_000) -> None:
        while (self.waiting or self.running) and steps:
            self.step()
            steps -= 1


def written(model: Model, prompt: Sequence[int], most: int) -> list[int]:
    """What a model writes without drafts."""
    text = list(prompt)
    for _ in range(most):
        text.append(model(text))
    return text[len(prompt) :]
