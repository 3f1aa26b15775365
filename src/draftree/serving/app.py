"""The ASGI application: routes of OpenAI's API, of operations, and of the playground."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from draftree.errors import UserError
from draftree.serving import errors
from draftree.serving.access import Guard, owner_of
from draftree.serving.completion_responses import Answer, CompletionAnswer, to_json_line
from draftree.serving.errors import DOCUMENTED, ApiError
from draftree.serving.prompts import chat_ids
from draftree.serving.request_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    TokenizeBody,
)
from draftree.serving.responses_api import ResponsesAnswer, chat_body
from draftree.serving.state import ServerState
from draftree.viewer.html import HOME
from draftree.viewer.layout import GAP, HEIGHT, PAD

LOG = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "playground"
PAGE_FILES = {
    "style.css": (PAGE / "style.css", "text/css"),
    "app.js": (PAGE / "app.js", "text/javascript"),
    "tree.css": (HOME / "tree.css", "text/css"),
    "text.css": (HOME / "text.css", "text/css"),
    "tree.js": (HOME / "tree.js", "text/javascript"),
}
"""Files of the playground page, with their content types. Trees and texts are drawn by the same
files as on saved pages.
"""
PING_SECONDS = 15
GENERATION_RESPONSES = DOCUMENTED | {200: {"content": {"text/event-stream": {}}}}
"""Documented responses of routes that generate texts: JSON, or server-sent events with `stream`."""
T = TypeVar("T")


class ModelList(BaseModel):
    """The answer of `/v1/models`."""

    object: str
    data: list[Model]


class Tokens(BaseModel):
    """The answer of `/tokenize`, with the field names of vLLM."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The answer of `/detokenize`, by vLLM's names."""

    prompt: str


def create_app(state: ServerState) -> FastAPI:
    """Return the web application for a model; its worker thread starts and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(asyncio.to_thread(state.begin))
        yield
        await warming
        await asyncio.to_thread(state.worker.stop)

    app = FastAPI(
        title="draftree",
        version=version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
    )
    app.state.server = state
    errors.install(app)
    app.add_middleware(Guard, options=state.options)
    add_generation(app, state)
    add_models(app, state)
    add_operation(app, state)
    add_playground(app, state)
    return app


def version() -> str:
    """Return draftree's version."""
    from draftree import __version__

    return str(__version__)


def add_generation(app: FastAPI, state: ServerState) -> None:
    """Add the routes that generate texts."""

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=GENERATION_RESPONSES)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer the messages of a chat."""
        prepared = await asyncio.to_thread(state.prepare_chat, body, owner_of(request))
        return await send_answer(
            Answer(state, body, prepared, state.worker.submit(prepared.work)), request
        )

    @app.post("/v1/completions", response_model=Completion, responses=GENERATION_RESPONSES)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue a text."""
        prepared = await asyncio.to_thread(state.prepare_completion, body, owner_of(request))
        return await send_answer(
            CompletionAnswer(state, body, prepared, state.worker.submit(prepared.work)), request
        )

    @app.post("/v1/responses", response_model=dict[str, Any], responses=GENERATION_RESPONSES)
    async def respond(body: ResponsesBody, request: Request) -> Response:
        """Answer an input; nothing is stored."""
        chat = chat_body(body)
        prepared = await asyncio.to_thread(state.prepare_chat, chat, owner_of(request))
        answer = ResponsesAnswer(state, body, chat, prepared, state.worker.submit(prepared.work))
        return await send_answer(answer, request, bool(body.stream))


async def send_answer(answer: Answer, request: Request, stream: bool | None = None) -> Response:
    """Return a streamed answer, or wait for the complete answer and return it.

    If the client disconnects, the generation is cancelled. `stream` replaces the field of the same
    name in the request's body.
    """
    log_request(answer, request)
    if answer.body.stream if stream is None else stream:
        return StreamedAnswer(answer)
    whole = await run_until_disconnect(answer.finish(), request)
    log_answer(answer, whole)
    return JSONResponse(whole)


class StreamedAnswer(StreamingResponse):
    """Send an answer as server-sent events; if the client disconnects, cancel the generation."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(
            with_pings(events(answer)),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )
        self._job = answer.job

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # the client may be gone before the first event was asked for
            self._job.close()


async def events(answer: Answer) -> AsyncIterator[str]:
    """Yield the server-sent events of an answer; after an error, the last event describes it."""
    try:
        async with aclosing(answer.stream()) as stream:
            async for data in stream:
                yield event(data, answer.names_events)
    except ApiError as error:
        yield event(to_json_line(error.body))
    except Exception as error:
        LOG.exception("%s has failed", answer.id)
        yield event(to_json_line(errors.failure(error).body))
    else:
        log_answer(answer, [text.content for text in answer.texts])


def event(data: str, named: bool = False) -> str:
    """Return a server-sent event; if `named`, its name is the field `type` of its data."""
    name = f"event: {json.loads(data)['type']}\n" if named else ""
    return f"{name}data: {data}\n\n"


async def with_pings(source: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield events, and a comment after every `PING_SECONDS` without an event.

    The comments keep the connection open.
    """
    waiting = asyncio.ensure_future(anext(source))
    try:
        while True:
            done, _ = await asyncio.wait((waiting,), timeout=PING_SECONDS)
            if not done:
                yield ": the answer is on its way\n\n"
                continue
            try:
                yield waiting.result()
            except StopAsyncIteration:
                return
            waiting = asyncio.ensure_future(anext(source))
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration):
            await waiting


async def run_until_disconnect(work: Awaitable[T], request: Request) -> T:
    """Wait for work and return its result; cancel the work when the client disconnects.

    Raises:
        ApiError: the client has disconnected, so that nobody reads the error.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has disconnected")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await one


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client of a request has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def log_answer(answer: Answer, text: object) -> None:
    """Log the text of an answer if `log_prompts` is set."""
    if answer.state.options.log_prompts:
        LOG.info("%s answered: %s", answer.id, text)


def log_request(answer: Answer, request: Request) -> None:
    """Log a request; its text is logged only if `log_prompts` is set."""
    speculative = answer.job.work.speculative
    how = "without drafts" if speculative.plain else f"{speculative.drafter}, {speculative.policy}"
    number = request.state.request_id
    LOG.info(
        "%s request %s: %d prompt tokens, %s", answer.id, number, answer.prepared.prompt_tokens, how
    )
    if answer.state.options.log_prompts:
        LOG.info("%s asked: %s", answer.id, answer.body.model_dump_json(exclude_unset=True))


def add_models(app: FastAPI, state: ServerState) -> None:
    """Add the routes that describe the model, and those that convert texts and tokens."""

    def model() -> dict[str, Any]:
        return {
            "id": state.options.model_name,
            "object": "model",
            "created": state.started,
            "owned_by": "draftree",
            "max_model_len": state.target.decoder.context,
        }

    @app.get("/v1/models", response_model=ModelList, responses=DOCUMENTED)
    async def models() -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", response_model=Model, responses=DOCUMENTED)
    async def one_model(name: str) -> dict[str, Any]:
        """Describe the model."""
        state.check_model(name)
        return model()

    @app.post("/tokenize", response_model=Tokens, responses=DOCUMENTED)
    def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Return the tokens of a text or of a chat."""
        state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "allowed is one of prompt and messages", "prompt")
        if body.messages is not None:
            ids = chat_ids(state.tokenizer, body.messages, [])
        else:
            ids = list(
                state.tokenizer(str(body.prompt), add_special_tokens=body.add_special_tokens)[
                    "input_ids"
                ]
            )
        texts = (
            [state.spellings.data(token).decode(errors="replace") for token in ids]
            if body.return_token_strs
            else None
        )
        return {
            "count": len(ids),
            "max_model_len": state.target.decoder.context,
            "tokens": ids,
            "token_strs": texts,
        }

    @app.post("/detokenize", response_model=Text, responses=DOCUMENTED)
    def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """Return the text of the given token ids."""
        state.check_model(body.model)
        vocabulary = state.target.decoder.vocab
        if body.tokens and max(body.tokens) >= vocabulary:
            raise ApiError(
                400, f"tokens has id {max(body.tokens)}, allowed are 0 … {vocabulary - 1}", "tokens"
            )
        return {"prompt": str(state.tokenizer.decode(body.tokens))}


def add_operation(app: FastAPI, state: ServerState) -> None:
    """Add the routes for operators: health, readiness, version and metrics."""

    @app.get("/health", response_model=dict[str, str])
    async def health() -> dict[str, str]:
        """Report that the server runs."""
        return {"status": "ok"}

    @app.get("/ready", response_model=dict[str, str], responses={503: DOCUMENTED[503]})
    async def ready() -> dict[str, str]:
        """Report whether requests are accepted.

        They are not before the model is warm, nor while the server ends.
        """
        if state.worker.draining:
            raise ApiError(503, "the server is shutting down")
        if not state.warm:
            raise ApiError(503, "the model is still warming up")
        return {"status": "ready"}

    @app.get("/version", response_model=dict[str, str])
    async def show_version() -> dict[str, str]:
        """Return draftree's version."""
        return {"version": version()}

    @app.get("/metrics", response_class=PlainTextResponse, responses=DOCUMENTED)
    async def metrics() -> Response:
        """Return the figures that Prometheus reads."""
        return Response(state.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def add_playground(app: FastAPI, state: ServerState) -> None:
    """Add the playground page at `/`, and the files that it loads."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", media_type="text/html")

    @app.get("/playground/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name == "config.json":
            return JSONResponse(playground_config(state))
        if name not in PAGE_FILES:
            raise ApiError(404, f"there is nothing at /playground/{name[:80]}")
        path, kind = PAGE_FILES[name]
        return FileResponse(path, media_type=kind)


def playground_config(state: ServerState) -> dict[str, Any]:
    """Return the settings of the playground page, such as the allowed drafters and policies."""
    return {
        "model": state.options.model_name,
        "drafters": list(state.drafters),
        "policies": list(state.policies),
        "chat": bool(state.tokenizer.chat_template),
        "key": bool(state.options.api_keys),
        "max_tokens": state.options.limits.new_tokens,
        "drawing": {"height": HEIGHT, "pad": PAD, "gap": GAP},
    }


def check_installed() -> None:
    """Raise a `UserError` if the packages that the server needs are not installed."""
    try:
        import fastapi, openai, prometheus_client, uvicorn  # noqa: E401, F401, I001
    except ImportError as error:
        raise UserError(f"the server needs {error.name}: pip install 'draftree[serve]'") from error
