"""What a long prompt costs the others: first tokens and times between tokens while the server reads one.

    python benchmarks/interference.py [--target smollm2] [--tokens 2000] [--seconds 30] [-- OPTIONS OF draftree serve]

Two figures, each alone and while prompts of `--tokens` tokens are read one after the other, by p50
and p99: the time to the first token of short requests, and the time between the pieces of texts
that are streamed. No two prompts begin alike.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch

from draftree.utils.hardware import machine

PORT = 8379
WORDS = [
    "river",
    "stone",
    "garden",
    "window",
    "paper",
    "engine",
    "winter",
    "bridge",
    "music",
    "letter",
    "forest",
    "market",
    "island",
    "silver",
    "story",
    "doctor",
]
SHORTEST = 0.05
"""Seconds between two short requests at least."""


class Client:
    """Send requests to the server.

    Args:
        http: the connection.
        seed: seed of the prompts.
    """

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self.http, self.draw = http, random.Random(seed)

    async def prompt(self, tokens: int) -> list[int]:
        """Return a new prompt of so many tokens."""
        words = " ".join(self.draw.choices(WORDS, k=tokens))
        found = (await self.http.post("/tokenize", json={"prompt": words})).json()["tokens"]
        return list(found[:tokens])

    async def moments(self, prompt: Sequence[int], tokens: int) -> list[float]:
        """Return when a text was asked for, and when each of its pieces came."""
        body = {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        found = [time.perf_counter()]
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found.append(time.perf_counter())
        return found


@asynccontextmanager
async def reading(client: Client, tokens: int) -> AsyncIterator[list[float]]:
    """Let the server read long prompts one after the other, and collect the seconds of each.

    The seconds are those to the first token.
    """
    found: list[float] = []
    prompts = [await client.prompt(tokens) for _ in range(4)]

    async def ask() -> None:
        while True:
            for prompt in prompts:
                client.draw.shuffle(prompt)
                start, first, *_ = await client.moments(prompt, 1)
                found.append(first - start)

    task = asyncio.create_task(ask())
    await asyncio.sleep(0.2)
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def first_tokens(client: Client, seconds: float) -> list[float]:
    """Return the seconds to the first token of short requests that come at random."""
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start, first, *_ = await client.moments(await client.prompt(24), 1)
        found.append(first - start)
        await asyncio.sleep(SHORTEST + client.draw.expovariate(20))
    return found


async def between_tokens(client: Client, seconds: float, sequences: int = 4) -> list[float]:
    """Return the seconds between the pieces of several concurrent texts, without the first ones."""
    prompts = [await client.prompt(24) for _ in range(sequences)]
    found, end = list[float](), time.perf_counter() + seconds

    async def write(prompt: list[int]) -> None:
        while time.perf_counter() < end:
            _, *at = await client.moments(prompt, 200)
            found.extend(b - a for a, b in pairwise(at))

    await asyncio.gather(*map(write, prompts))
    return found


def figures(seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles in milliseconds."""
    ordered = sorted(seconds)
    p99 = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
    return {
        "count": len(ordered),
        "p50_ms": 1000 * statistics.median(ordered),
        "p99_ms": 1000 * p99,
    }


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    found: dict[str, Any] = {}
    measured: dict[str, Callable[[Client, float], Awaitable[list[float]]]] = {
        "first_token": first_tokens,
        "between_tokens": between_tokens,
    }
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as http:
        for name, ask in measured.items():
            client = Client(http, 1)
            await ask(client, 2.0)  # costs that are learnt, and paths that run for the first time
            alone = figures(await ask(client, asked.seconds))
            async with reading(Client(http, 2), asked.tokens) as long:
                meanwhile = figures(await ask(client, asked.seconds))
            ratio = meanwhile["p99_ms"] / alone["p99_ms"]
            found[name] = {
                "alone": alone,
                "meanwhile": meanwhile,
                "long_prompts": figures(long),
                "p99_ratio": ratio,
            }
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Start the server, measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*")
    asked = parser.parse_args()
    words = [
        sys.executable,
        "-m",
        "draftree",
        "serve",
        asked.target,
        "--port",
        str(PORT),
        *asked.options,
    ]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                try:
                    if httpx.get(f"http://127.0.0.1:{PORT}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            found = asyncio.run(measure(asked))
        finally:
            server.terminate()
    chip = machine(torch.device("cpu"))
    told = json.dumps(
        {
            "processor": chip["device"],
            "threads": chip["threads"],
            "target": asked.target,
            "tokens": asked.tokens,
            "options": asked.options,
            **found,
        },
        indent=1,
    )
    print(told)
    if asked.out is not None:
        asked.out.write_text(told + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
