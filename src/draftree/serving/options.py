"""Options of the server: address, access, and limits of one request."""

import ipaddress
from dataclasses import dataclass

from typing_extensions import override

from draftree.errors import UserError
from draftree.scheduling.options import SchedulerOptions
from draftree.utils.validated_dataclass import Knobs, is_list_of, knob, text

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Host names that a browser may use for a server on a loopback address."""
TEXTS_RULE = ("texts of at least one character", lambda value: is_list_of(value, text))
BATCHING = SchedulerOptions()
SHORTEST_KEY = 8
"""Least number of characters in an API key."""


@dataclass(frozen=True)
class Limits(Knobs):
    """Set the limits of one request; requests with larger values are refused with a message.

    Attributes:
        body_bytes: largest size of a request's body in bytes.
        body_seconds: seconds within which a client has to send the body.
        new_tokens: largest `max_tokens` of a request, and its default for chats.
        choices: largest `n`, and largest number of prompts in a request.
        stops: largest number of stop texts.
        biases: largest number of entries in `logit_bias`.
        tools: largest number of tools.
        schema_bytes: largest size of a JSON schema, in characters of its JSON text.
        schema_depth: largest nesting depth of a JSON schema, also of tool parameters.
        waiting: largest number of texts that may wait. Requests beyond it are answered with status
            429.
        request_seconds: seconds after which a text ends, even if it is incomplete.
    """

    body_bytes: int = knob(1_000_000, least=1)
    body_seconds: float = knob(30.0, above=0)
    new_tokens: int = knob(4096, least=1)
    choices: int = knob(8, least=1)
    stops: int = knob(16, least=0)
    biases: int = knob(1024, least=0)
    tools: int = knob(64, least=0)
    schema_bytes: int = knob(65_536, least=1)
    schema_depth: int = knob(64, least=1)
    waiting: int = knob(64, least=0)
    request_seconds: float = knob(600.0, above=0)


@dataclass(frozen=True)
class ServeOptions(Knobs):
    """Set the options of a server.

    Attributes:
        host: name or address at which the server listens.
        port: port number; 0 for any free port.
        api_keys: keys one of which a client has to send; empty if no key is required.
        open_to_network: whether the server may run without API keys at an address that other
            machines can reach.
        model_name: name that clients use for the model.
        allowed_drafters: specs of drafters that a request may name in addition to the server's
            default.
        allowed_policies: specs of policies that a request may name in addition to the server's
            default.
        batching: limits of the batch of each engine.
        log_prompts: whether prompts and answers are logged.
        limits: limits of each request.

    Raises:
        UserError: a value is out of its range, or other machines could use the server without an
            API key although `open_to_network` is false.
    """

    host: str = knob("127.0.0.1", rule=("a host name or address", text))
    port: int = knob(8000, least=0, most=65_535)
    api_keys: tuple[str, ...] = knob((), rule=TEXTS_RULE)
    open_to_network: bool = False
    model_name: str = knob("draftree", rule=("a text of at least one character", text))
    allowed_drafters: tuple[str, ...] = knob((), rule=TEXTS_RULE)
    allowed_policies: tuple[str, ...] = knob((), rule=TEXTS_RULE)
    batching: SchedulerOptions = BATCHING
    log_prompts: bool = False
    limits: Limits = Limits()

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if short := [key for key in self.api_keys if len(key) < SHORTEST_KEY]:
            raise UserError(
                f"an API key has {len(short[0])} characters, allowed are at least {SHORTEST_KEY}"
            )
        if not (self.is_local or self.api_keys or self.open_to_network):
            raise UserError(
                f"host is {self.host}, which other machines reach: give an --api-key, or --open-to-network to serve everyone"
            )

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach the server."""
        if self.host in LOCAL_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
