"""Access control of the server: API keys, origins, and limits on request bodies."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.serving.errors import ApiError, nothing_at
from draftree.serving.options import LOCAL_NAMES, ServeOptions

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/version", "/favicon.ico"))
"""Paths that are served without an API key: the page, which asks the user for a key, and the paths
that load balancers read."""
OPEN_PREFIX = "/playground/"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the page. It forbids other origins, inline scripts and inline
styles."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
DISCARD_SECONDS, DISCARD_BYTES = 2.0, 100_000_000
"""Limits of what is read of the body of a refused request.

A connection that is closed while data arrive is reset, and the client may lose the answer.
"""
ANYONE = "everyone"
"""Name of the owner for all clients if no API key is required."""


class Keys:
    """Check API keys; only hashes of the valid keys are stored.

    Args:
        keys: valid keys; empty if no key is required.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._salt = secrets.token_bytes(16)
        self._hashes = [self._hash(key) for key in keys]

    def _hash(self, key: str) -> bytes:
        return hashlib.sha256(self._salt + key.encode(errors="surrogateescape")).digest()

    def owner(self, authorization: str | None) -> str:
        """Check the header `Authorization`, and return a name for the owner of its key.

        Drafters' memories are separate for each owner. The key is compared with all valid keys in
        constant time, so that the response time reveals nothing about them.

        Raises:
            ApiError: the header contains no valid key.
        """
        if not self._hashes:
            return ANYONE
        kind, _, key = (authorization or "").partition(" ")
        sent = self._hash(key.strip())
        matches = [hmac.compare_digest(sent, known) for known in self._hashes]
        if kind.lower() != "bearer" or not any(matches):
            told = (
                "the API key is wrong"
                if key
                else "no API key was sent; send Authorization: Bearer KEY"
            )
            raise ApiError(
                401, told, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        return f"key {matches.index(True)}"


def owner_of(request: Request) -> str:
    """Return the owner of a request that `Guard` has accepted."""
    return str(request.state.owner)


class Guard:
    """Refuse forbidden requests before their bodies are parsed, and add headers to all answers.

    Args:
        app: the ASGI application that serves accepted requests.
        options: options of the server.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._options = options
        self._keys = Keys(options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        number = request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = number

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                for name, value in {**HEADERS, "x-request-id": number}.items():
                    added[name] = value
            await send(message)

        body = Body(receive, self._options.limits.body_bytes, self._options.limits.body_seconds)

        async def refuse(message: Message) -> None:
            if message["type"] == "http.response.body" and "expect" not in headers:
                await answer({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await answer(message)

        try:
            self._check(scope, headers)
            scope["state"]["owner"] = self._owner(scope, headers)
            received = body.receive
            if scope["method"] in ("POST", "PUT", "PATCH"):
                received = await body.read()
        except ApiError as error:
            response = error.response
            response.headers["connection"] = "close"
            await response(scope, receive, refuse)
            return
        if scope["method"] == "HEAD":  # the HTTP server leaves the body out
            scope = {**scope, "method": "GET"}
        await self._app(scope, received, answer)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise an `ApiError` if origin, host, content type or announced length is not allowed."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._options.is_local and hostname(host) not in (*LOCAL_NAMES, self._options.host, ""):
            raise ApiError(
                403,
                f"the host {host[:80]!r} is not this server's, allowed are {', '.join(LOCAL_NAMES)}",
            )
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(
                403,
                f"the origin {origin[:80]!r} is not this server's; pages of other origins are refused",
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._options.limits.body_bytes:
            raise too_large(self._options.limits.body_bytes)
        kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and scope["path"].startswith(
            "/api/"
        ):  # ollama's; its clients name no type of the body
            raise ApiError(404, nothing_at(scope["path"]))
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(415, f"content-type is {kind[:80]!r}, allowed is application/json")

    def _owner(self, scope: Scope, headers: Headers) -> str:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return ANYONE
        return self._keys.owner(headers.get("authorization"))


class Body:
    """Read the body of a request with limits of size and time.

    Args:
        receive: the ASGI callable of the request.
        most: largest size of the body in bytes.
        seconds: time in seconds within which the whole body must arrive.
    """

    def __init__(self, receive: Receive, most: int, seconds: float) -> None:
        self.receive = receive
        self._most = most
        self._seconds = seconds
        self._ended = False

    async def _next(self) -> bytes:
        """Return the next part of the body; after the last one `_ended` is true."""
        message = await self.receive()
        self._ended = not message.get("more_body", False)  # so it is after a disconnection
        part: bytes = message.get("body", b"")
        return part

    async def discard(self) -> None:
        """Read what is left of the body, within `DISCARD_SECONDS` and `DISCARD_BYTES`."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._ended and size < DISCARD_BYTES:
                    size += len(await self._next())

    async def read(self) -> Receive:
        """Read the whole body, and return an ASGI callable that passes it to the application.

        Raises:
            ApiError: the body is too large, or did not arrive in time.
        """
        parts: list[bytes] = []
        size, end = 0, time.monotonic() + self._seconds
        while not self._ended:
            try:
                part = await asyncio.wait_for(self._next(), max(end - time.monotonic(), 0.001))
            except TimeoutError:
                raise ApiError(
                    408, f"the body did not arrive within {self._seconds:g} seconds"
                ) from None
            size += len(part)
            if size > self._most:
                raise too_large(self._most)
            parts.append(part)
        whole: list[Message] = [
            {"type": "http.request", "body": b"".join(parts), "more_body": False}
        ]

        async def receive_body() -> Message:
            return whole.pop() if whole else await self.receive()

        return receive_body


def too_large(most: int) -> ApiError:
    """Return the error for a body of more than `most` bytes."""
    return ApiError(
        413, f"the body is larger than {most} bytes, which are allowed", code="body_too_large"
    )


def hostname(host: str) -> str:
    """Return the host name in a `Host` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") <= 1 else host


def request_id(sent: str | None) -> str:
    """Return the request id that the client sent, or a new one.

    A new id is created if the client sent no id, or one that is not allowed in a header.
    """
    if sent is not None and 0 < len(sent) <= 128 and sent.isascii() and sent.isprintable():
        return sent
    return secrets.token_hex(16)
