"""Options of the server: address, access, and limits of one request."""

import ipaddress
from dataclasses import dataclass

from typing_extensions import override

from draftree.errors import UserError
from draftree.scheduling.options import SchedulerOptions
from draftree.utils.validated_dataclass import Knobs, knob, several, text

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names of this machine that a browser may use for a server on a loopback address."""
TEXTS = ("texts of at least one character", lambda value: several(value, text))
BATCHING = SchedulerOptions()
SHORTEST_KEY = 8
"""Characters of an API key at least."""


@dataclass(frozen=True)
class Limits(Knobs):
    """Limit what one request may ask for; larger values are refused with a clear message.

    Attributes:
        body_bytes: the size of a request's body.
        body_seconds: the time that a client may take to send a body.
        new_tokens: `max_tokens` of a request, and its default for chats.
        choices: `n` of a request.
        stops: the number of stop texts.
        biases: the number of entries of `logit_bias`.
        tools: the number of tools.
        schema_bytes: the size of a JSON schema, written as JSON.
        schema_depth: the nesting of a JSON schema, of messages and of tool parameters.
        waiting: the number of requests that may wait; a further one is answered with 429.
        request_seconds: the time after which a request ends; its text is cut there.
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
    """Hold the options of a server.

    Attributes:
        host: the address that it listens at.
        port: the port; 0 for a free one.
        api_keys: who sends one of these may use the server; nobody is asked for one where there are
            none.
        open_to_network: whether an address that is not this machine's own may be used without API
            keys.
        model_name: the name that clients use for the model.
        allowed_drafters: specs that a request may name in addition to the server's own drafter.
        allowed_policies: specs that a request may name in addition to the server's own policy.
        batching: the limits of each running batch.
        log_prompts: whether prompts and answers are logged.
        limits: limits of each request.

    Raises:
        UserError: a value is out of its range, or the server would be open to a network without an
            API key.
    """

    host: str = knob("127.0.0.1", rule=("a host name or address", text))
    port: int = knob(8000, least=0, most=65_535)
    api_keys: tuple[str, ...] = knob((), rule=TEXTS)
    open_to_network: bool = False
    model_name: str = knob("draftree", rule=("a text of at least one character", text))
    allowed_drafters: tuple[str, ...] = knob((), rule=TEXTS)
    allowed_policies: tuple[str, ...] = knob((), rule=TEXTS)
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
