"""Generate training answers by a server with OpenAI's API, such as vLLM or SGLang."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import anyio
import httpx2
import torch
from anyio.from_thread import start_blocking_portal
from typing_extensions import override

from draftree.errors import UserError, first_line, format_value
from draftree.target.target import Target
from draftree.training.answer_source import Author, GeneratedText, PendingPrompt
from draftree.training.base import LOG
from draftree.utils.validated_dataclass import check_fields, knob
from draftree.utils.validated_dataclass import text as is_text

KEY_VARIABLE = "DRAFTREE_SERVER_KEY"
"""Environment variable with the API key for the server."""
RETRIED_STATUSES = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which a request is repeated."""


@dataclass(frozen=True)
class Server:
    """Set the address of a server, and the options of requests to it.

    Attributes:
        url: URL of the API. Without a path, `/v1` is used, as in vLLM and SGLang.
        model: name of the model on the server.
        parallel: largest number of simultaneous requests.
        tries: largest number of attempts for a request.
        backoff: seconds before the second attempt; the wait doubles before every further attempt.
        timeout: largest number of seconds that an answer may take.
        check: number of answers that are compared with the local target before any answer is used;
            0 for no check.
        agreement: least share of the tokens of these answers that must be the local target's
            likeliest ones.
    """

    url: str = knob(
        rule=(
            "a text that begins with http:// or https://",
            lambda v: str(v).startswith(("http://", "https://")),
        )
    )
    model: str = knob(rule=("a text", is_text))
    parallel: int = knob(16, least=1)
    tries: int = knob(6, least=1)
    backoff: float = knob(0.5, least=0)
    timeout: float = knob(600.0, above=0)
    check: int = knob(16, least=0)
    agreement: float = knob(0.9, least=0, most=1)

    def __post_init__(self) -> None:
        """Raise an error for a value that is not allowed."""
        check_fields(self, "server ")

    @property
    def base(self) -> str:
        """Return the URL to which the paths of the API are appended."""
        url = httpx2.URL(self.url)
        return str(url.copy_with(path="/v1") if url.path in ("", "/") else url).rstrip("/") + "/"


class Remote(Author):
    """Generate texts with a model on a server.

    The server's answers are compared with the local target before any of them is used.

    Args:
        server: address of the server, and options of requests.
        target: local copy of the model that the server should have.
    """

    def __init__(self, server: Server, target: Target) -> None:
        self._server = server
        self._target = target
        self._trusted = not server.check
        self.name = server.model

    @property
    @override
    def probes(self) -> int:
        return 0 if self._trusted else self._server.check

    @override
    def write(self, waiting: deque[PendingPrompt]) -> Iterator[GeneratedText]:
        running, held = set[Future[GeneratedText]](), list[GeneratedText]()
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(self._client()) as client,
        ):
            while waiting or running or held:
                while waiting and len(running) < self._server.parallel:
                    running.add(portal.start_task_soon(self._ask, client, waiting.popleft()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                written = [future.result() for future in done]
                if not self._trusted:
                    held += [each for each in written if each.asked.sampling.greedy]
                    written = [each for each in written if not each.asked.sampling.greedy]
                    if len(held) >= self.probes or (held and not (running or waiting)):
                        self._compare(held)
                        written, held = [*written, *held], []
                yield from written

    def _client(self) -> httpx2.AsyncClient:
        key = os.environ.get(KEY_VARIABLE)
        most = httpx2.Limits(max_connections=self._server.parallel)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx2.AsyncClient(
            base_url=self._server.base, timeout=self._server.timeout, limits=most, headers=headers
        )

    async def _ask(self, client: httpx2.AsyncClient, asked: PendingPrompt) -> GeneratedText:
        """Request the text for a prompt, and return it; after failures the request is repeated.

        Raises:
            UserError: the server refuses the request, or all attempts failed.
        """
        path, body = self._request(asked)
        for attempt in count(1):
            try:
                answer = await client.post(path, json=body)
                if answer.is_success:
                    return _parse_completion(asked, answer)
                error = f"status {answer.status_code}: {' '.join(answer.text.split()) or answer.reason_phrase}"
                if answer.status_code < 500 and answer.status_code not in RETRIED_STATUSES:
                    raise UserError(f"server '{self._server.url}' refuses the request, {error}")
            except httpx2.TransportError as failure:
                error = first_line(failure)
            except _InvalidResponse as failure:
                error = str(failure)
            if attempt == self._server.tries:
                raise UserError(
                    f"server '{self._server.url}' was asked {attempt} times without success, {error}"
                )
            await anyio.sleep(self._server.backoff * 2 ** (attempt - 1))
        raise AssertionError

    def _request(self, asked: PendingPrompt) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of the HTTP request for a prompt."""
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": self._server.model,
            "max_tokens": asked.most,
            "temperature": sampling.temperature,
        }
        if not sampling.greedy:
            body |= {
                "top_p": sampling.top_p,
                "seed": (sampling.seed * 1_000_003 + asked.number) % 2**31,
            }
        if asked.stops:
            body["stop"] = list(asked.stops)
        if isinstance(
            asked.content, str
        ):  # as ids, lest the server puts another beginning of text before it
            return "completions", body | {"prompt": asked.ids}
        return "chat/completions", body | {"messages": asked.content}

    def _compare(self, held: Sequence[GeneratedText]) -> None:
        """Raise an error if the server's answers differ from the target's own.

        Raises:
            UserError: too few tokens of the answers are the target's likeliest ones.
        """
        share, url = greedy_agreement(self._target, held), self._server.url
        told = f"of the tokens of {len(held)} answers {share:.0%} are the likeliest of '{self._target.name}'"
        if share < self._server.agreement:
            why = "it serves another model or another chat template"
            raise UserError(
                f"server '{url}': {told}, allowed are {self._server.agreement:.0%} or more: {why}"
            )
        LOG.info("server '%s': %s", url, told)
        self._trusted = True


class _InvalidResponse(Exception):
    """Signal that a server's answer does not have the form of OpenAI's API."""


def _parse_completion(asked: PendingPrompt, answer: httpx2.Response) -> GeneratedText:
    try:
        choice = answer.json()["choices"][0]
        text = choice["text"] if isinstance(asked.content, str) else choice["message"]["content"]
        if not isinstance(text, str):
            raise TypeError
        return GeneratedText(asked, text, choice.get("finish_reason") == "stop")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise _InvalidResponse(
            f"it answers {format_value(answer.text)}, allowed is a completion as OpenAI's API has it"
        ) from None


@torch.inference_mode()
def greedy_agreement(target: Target, written: Sequence[GeneratedText]) -> float:
    """Return the share of tokens in greedy answers that are the target's likeliest ones.

    The share is 0 if there are no tokens.

    Args:
        target: model that should have generated the answers.
        written: the answers; their texts are encoded by the target's tokenizer.
    """
    hits = 0
    total = 0
    decoder = target.decoder
    for each in written:
        answer = list(target.tokenizer(each.text, add_special_tokens=False)["input_ids"])
        ids = torch.tensor([[*each.asked.ids, *answer][: decoder.context]], device=decoder.device)
        states = cast(Any, decoder.stack)(
            input_ids=ids, use_cache=False, **decoder.hf.causal(ids)
        ).last_hidden_state
        begin = len(each.asked.ids)
        likeliest = decoder.head(states[0, begin - 1 : -1]).argmax(-1)
        hits, total = hits + int((likeliest == ids[0, begin:]).sum()), total + ids.shape[1] - begin
    return hits / max(total, 1)
