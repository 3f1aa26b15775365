"""A server on a free port of this machine, in a thread of the test's own process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from draftree.engine import Engine
from draftree.serving.app import create_app
from draftree.serving.options import ServeOptions
from draftree.serving.state import ServerState


@dataclass(frozen=True)
class Running:
    """A server that runs, and its address."""

    url: str
    state: ServerState


@contextmanager
def served(engine: Engine, drafter: str, policy: str, **options: Any) -> Iterator[Running]:
    """Serve an engine until the end of the block."""
    state = ServerState(engine, drafter, policy, ServeOptions(port=0, **options))
    config = uvicorn.Config(create_app(state), log_level="error", access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not (server.started and state.warm):
        assert thread.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", state)
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
