"""Errors of the server in OpenAI's format."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from draftree.errors import DraftreeError, cut

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
"""Field `type` of an error by HTTP status. All other errors have `invalid_request_error`."""


class ApiError(Exception):
    """Represent an error that is sent to the client as the answer.

    Args:
        status: HTTP status.
        message: text that names the received value and the allowed values.
        param: name of the wrong field in the request; None for no field.
        code: name of the error for programs; None for no name.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the answer in the form of OpenAI's API."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def response(self) -> JSONResponse:
        """Return the HTTP response for the error."""
        return JSONResponse(self.body, self.status, dict(self.headers or {}))


class ErrorDetails(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetails


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": HTTPStatus(status).phrase}
    for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503)
}
"""Error responses that every route can return, for the API's description."""


def install(app: FastAPI) -> None:
    """Register handlers that answer every error of an application in the form of OpenAI's API."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(DraftreeError)
    async def mistake(_: Request, error: DraftreeError) -> JSONResponse:
        return ApiError(400, cut(str(error))).response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return invalid_request(error).response

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            404: nothing_at(request.url.path),
            405: f"{request.method} is not allowed for {request.url.path}",
            400: "the body is not valid JSON",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return failure(error).response


def failure(error: object) -> ApiError:
    """Return the error response for a failure inside the server."""
    told = isinstance(error, DraftreeError)
    return ApiError(500, cut(str(error)) if told else f"the server failed: {type(error).__name__}")


def nothing_at(path: str) -> str:
    """Return the message for an unknown path, with the corresponding path of OpenAI's API."""
    told = f"there is nothing at {path[:200]}"
    return (
        told
        if path.startswith("/playground/")
        else f"{told}: this server speaks OpenAI's API, as {instead_of(path)}"
    )


def instead_of(path: str) -> str:
    """Return the route of this server that corresponds to a path of another server.

    Paths of ollama, llama.cpp, Anthropic and vLLM are known.
    """
    words = frozenset(path.strip("/").split("/"))
    if words & {"tags", "ps", "show", "models", "props", "slots"}:
        return "GET /v1/models"
    return (
        "POST /v1/completions"
        if words & {"generate", "completion", "completions", "infill"}
        else "POST /v1/chat/completions"
    )


def invalid_request(error: RequestValidationError) -> ApiError:
    """Return an error that describes the first fault of a request, and names the field."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(place) or None
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}"
        )
    if first["type"] == "extra_forbidden":
        told = (
            ": its values stand beside 'model', as max_tokens and temperature do"
            if field == "options"
            else ""
        )
        return ApiError(422, f"the field '{field}' is not known{told}", field, "unknown_field")
    got = "" if first["type"] == "missing" else f"; got {cut(repr(first.get('input')), 80)}"
    more = len(error.errors()) - 1
    told = f" ({more} more faults)" if more else ""
    return ApiError(422, f"{field or 'the body'}: {first['msg']}{got}{told}", field)
