"""`draftree serve`: an OpenAI-compatible server with a playground page."""

import asyncio
import errno
import gc
import logging
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from draftree.cli.console import remark
from draftree.cli.options import (
    DrafterSpec,
    LoadingOptions,
    PolicySpec,
    TargetName,
    dataclass_command,
)
from draftree.errors import UserError
from draftree.scheduling.options import SchedulerOptions
from draftree.serving.options import Limits, ServeOptions
from draftree.utils.validated_dataclass import knob

ACCESS_PANEL = "Who may use it"
BATCH_PANEL = "How much at a time"
LIMITS_PANEL = "What one request may ask for"
KEY_VARIABLE = "DRAFTREE_API_KEY"
DRAFTERS = ("suffix", "pld")
"""Drafters that a request may name if the operator lists none. They need no training."""
POLICIES = ("yield", "pct", "eagle2", "opttree", "chain")
ANSWER_SECONDS = 2
"""Seconds after `--drain-seconds` in which the errors of unfinished requests are sent."""


@dataclass(frozen=True)
class ServeCommand:
    """Store the options of `draftree serve`."""

    target: TargetName = "demo"
    host: str = knob(
        "127.0.0.1",
        help="The address to listen at; another than this machine's own needs an API key.",
    )
    port: int = knob(8000, min=0, help="The port; 0 for a free one.")
    drafter: DrafterSpec = None
    policy: PolicySpec = None
    model_name: str | None = knob(
        None, help="The name that clients use for the model; by default as it was loaded."
    )
    api_key: list[str] = knob(
        (),
        help=f"A key that clients must send; may be repeated. Also read from {KEY_VARIABLE}.",
        panel=ACCESS_PANEL,
    )
    open_to_network: bool = knob(
        False, help="Serve other machines without an API key.", panel=ACCESS_PANEL
    )
    log_prompts: bool = knob(
        False, help="Write prompts and answers to the log.", panel=ACCESS_PANEL
    )
    allow_drafter: list[str] = knob(
        (),
        help="A drafter that a request may name; may be repeated. [suffix, pld]",
        panel=ACCESS_PANEL,
    )
    allow_policy: list[str] = knob(
        (),
        help="A policy that a request may name; may be repeated. [yield, pct, eagle2, opttree, chain]",
        panel=ACCESS_PANEL,
    )
    max_sequences: int = knob(
        8, min=1, help="Maximum number of running sequences.", panel=BATCH_PANEL
    )
    max_cache_tokens: int | None = knob(
        None,
        min=2,
        help="Maximum number of tokens of all running sequences in the KV cache.",
        panel=BATCH_PANEL,
    )
    max_batch_tokens: int = knob(
        512, min=1, help="Maximum number of prompt tokens read in one step.", panel=BATCH_PANEL
    )
    max_step_seconds: float | None = knob(
        None,
        above=0,
        help="Time of a step, by which prompts are read in chunks; by default 1.5 decoding steps, or 0.05 s if none runs.",
        panel=BATCH_PANEL,
    )
    max_prefix_tokens: int = knob(
        4096,
        min=0,
        help="Tokens of prompts kept for requests that begin with the same ones; 0 keeps none.",
        panel=BATCH_PANEL,
    )
    max_waiting: int = knob(
        64,
        min=0,
        help="Maximum number of waiting requests; further ones get status 429.",
        panel=BATCH_PANEL,
    )
    max_new_tokens: int = knob(
        4096, min=1, help="Largest allowed value of max_tokens.", panel=LIMITS_PANEL
    )
    max_body_bytes: int = knob(
        1_000_000, min=1, help="Maximum size of a request.", panel=LIMITS_PANEL
    )
    request_seconds: float = knob(
        600.0, min=0.001, help="Time limit of a request.", panel=LIMITS_PANEL
    )
    drain_seconds: float = knob(
        30.0, min=0.0, help="Time for running requests to finish after SIGTERM.", panel=BATCH_PANEL
    )
    ray: int | None = knob(
        None, min=1, help="Number of replicas under Ray Serve.", panel=BATCH_PANEL
    )
    loading: LoadingOptions = knob(None)


@dataclass_command
def serve(ctx: typer.Context, asked: ServeCommand) -> None:
    """Serve a model over HTTP as OpenAI's API does, with a page to try it at /.

    Any OpenAI client can use it: its base URL is http://HOST:PORT/v1. Ctrl-C or SIGTERM ends it
    after the running requests.
    """
    options = serve_options(asked)
    from draftree.serving.app import check_installed

    check_installed()
    if asked.ray is not None:
        return run_replicas(asked, options)
    run_server(asked, options)


def serve_options(asked: ServeCommand) -> ServeOptions:
    """Return the server's options for the options of the command.

    Raises:
        UserError: a value is out of its range, or other machines could use the server without an
            API key although that was not allowed.
    """
    keys = [*asked.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    batching = SchedulerOptions(
        max_sequences=asked.max_sequences,
        max_cache_tokens=asked.max_cache_tokens,
        max_batch_tokens=asked.max_batch_tokens,
        max_step_seconds=asked.max_step_seconds,
        max_prefix_tokens=asked.max_prefix_tokens,
    )
    limits = Limits(
        body_bytes=asked.max_body_bytes,
        new_tokens=asked.max_new_tokens,
        waiting=asked.max_waiting,
        request_seconds=asked.request_seconds,
    )
    return ServeOptions(
        host=asked.host,
        port=asked.port,
        api_keys=tuple(dict.fromkeys(keys)),
        open_to_network=asked.open_to_network,
        model_name=asked.model_name or model_name(asked.target),
        allowed_drafters=tuple(asked.allow_drafter or DRAFTERS),
        allowed_policies=tuple(asked.allow_policy or POLICIES),
        batching=batching,
        log_prompts=asked.log_prompts,
        limits=limits,
    )


def run_replicas(asked: ServeCommand, options: ServeOptions) -> None:
    """Serve replicas under Ray until a signal ends the program."""
    from draftree.cli import arguments
    from draftree.integrations import ray

    drafter = arguments.drafter(asked.drafter, asked.target)
    policy = policy_of(asked, drafter)
    with listen(options.host, options.port):
        pass  # a port that is taken gets our own message
    ray.serve_replicas(
        ray.Replicas(
            asked.target,
            drafter,
            policy,
            asked.ray or 1,
            loading=asked.loading,
            serving=options,
        )
    )


def policy_of(asked: ServeCommand, drafter: str) -> str:
    """Return the spec of the policy: the named one, or the usual one for the drafter."""
    from draftree.engine import usual_policy

    named = asked.drafter and drafter  # an unnamed drafter has the policy of the target
    return asked.policy or usual_policy(asked.target, named, asked.loading["device"])


def model_name(target: str) -> str:
    """Return the name of a model for clients: its hub id, or its path without the folders."""
    path = Path(target)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else target


def run_server(asked: ServeCommand, options: ServeOptions) -> None:
    """Load the model, and serve it until a signal ends the program.

    Raises:
        UserError: the model cannot be loaded, or the port is taken.
    """
    with listen(options.host, options.port) as bound:
        serve_at(bound, asked, options)


def serve_at(bound: socket.socket, asked: ServeCommand, options: ServeOptions) -> None:
    """Load the model, and serve it at a bound socket until a signal ends the program."""
    import uvicorn

    from draftree.cli import arguments, terminal
    from draftree.engine import load
    from draftree.serving.app import create_app
    from draftree.serving.state import ServerState
    from draftree.utils.gc_pause import end_gc_pause
    from draftree.utils.hardware import bound_memory

    bound_memory()
    drafter = arguments.drafter(asked.drafter, asked.target)
    arguments.quiet()
    with terminal.busy("loading"):
        policy = policy_of(asked, drafter)
        engine = load(asked.target, drafter, policy, **asked.loading)
    state = ServerState(engine, drafter, policy, options)

    class Server(uvicorn.Server):
        """Run uvicorn's server, and refuse new requests as soon as the server is shutting down.

        Requests that are unfinished after `drain_seconds` get an error.
        """

        def handle_exit(self, sig: int, frame: Any) -> None:
            state.worker.drain()
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(asked.drain_seconds, state.worker.stop, 0.0)
            await super().shutdown(sockets)

    logging.getLogger("draftree").setLevel(logging.INFO)
    config = uvicorn.Config(
        create_app(state),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(asked.drain_seconds) + ANSWER_SECONDS,
        timeout_keep_alive=30,
        server_header=False,
    )
    host, port = bound.getsockname()[:2]
    address = f"[{host}]" if bound.family == socket.AF_INET6 else host
    remark(
        f"{options.model_name} is served at http://{address}:{port} (API: /v1, page: /); Ctrl-C ends it"
    )
    end_gc_pause()
    gc.freeze()  # what has been loaded stays, so that garbage collections need not look at it
    try:
        Server(config).run(sockets=[bound])
    finally:
        gc.unfreeze()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; it listens when the server starts.

    Raises:
        UserError: the address does not belong to this machine, or the port is in use.
    """
    bound: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        told = (
            "another program listens there"
            if error.errno == errno.EADDRINUSE
            else error.strerror or str(error)
        )
        raise UserError(
            f"cannot listen at {host}:{port}: {told}; --port takes another, 0 a free one"
        ) from error
    return bound
