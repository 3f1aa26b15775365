"""A server on a free port of this machine: in a thread of the test's own process, or in a process of its own."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from draftree.engine import Engine
from draftree.serving.app import create_app
from draftree.serving.options import ServeOptions
from draftree.serving.state import ServerState


@dataclass(frozen=True)
class Running:
    """A server that runs, and its address."""

    url: str
    state: ServerState

    @property
    def busy(self) -> bool:
        """True while any text is written or waits."""
        return self.state.worker.busy


@dataclass(frozen=True)
class Apart:
    """A server in a process of its own, and its address."""

    url: str
    process: int

    @property
    def busy(self) -> bool:
        """True while any text is written or waits."""
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        return bool(found["num_requests_running"] or found["num_requests_waiting"])

    @property
    def resident(self) -> int:
        """Resident memory in bytes."""
        return int(Path(f"/proc/{self.process}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )


@contextmanager
def served(engine: Engine, drafter: str, policy: str, **options: Any) -> Iterator[Running]:
    """Serve an engine until the end of the block."""
    state = ServerState(engine, drafter, policy, ServeOptions(port=0, **options))
    config = uvicorn.Config(
        create_app(state), log_level="error", access_log=False, timeout_graceful_shutdown=5
    )
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


@contextmanager
def served_apart(target: str) -> Iterator[Apart]:
    """Run `draftree serve` on a target until the end of the block."""
    words = [sys.executable, "-m", "draftree", "serve", target, "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told, reader = (
        list[str](),
        threading.Thread(target=process.stderr.read, daemon=True),
    )  # a full pipe would stop the server
    try:
        for line in process.stderr:
            told.append(line)
            if address := re.search(r"is served at (http://[^ ]+)", line):
                break
        else:
            raise AssertionError("".join(told))
        reader.start()
        server = Apart(address[1], process.pid)
        while not ready(server.url):
            assert process.poll() is None
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stderr.close()


def ready(url: str) -> bool:
    """Return whether a server takes requests."""
    try:
        return httpx.get(f"{url}/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False
