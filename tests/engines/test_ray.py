"""Two replicas under Ray Serve, asked by several clients at a time."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from draftree.integrations.ray import HEADER, Replicas, application
from draftree.serving.options import ServeOptions

serve: Any = pytest.importorskip("ray.serve")
PORT = 18123


def asked(number: int, session: str | None = None) -> httpx.Response:
    body = {"model": "demo", "prompt": f"def f{number % 3}(", "max_tokens": 12, "temperature": 0}
    headers = {HEADER: session} if session else {}
    return httpx.post(
        f"http://127.0.0.1:{PORT}/v1/completions", json=body, headers=headers, timeout=300
    )


def test_two_replicas_answer_alike_under_load() -> None:
    ray: Any = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        replicas = Replicas("demo", "suffix", count=2, serving=ServeOptions(model_name="demo"))
        serve.run(application(replicas), name="draftree")
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(asked, range(40)))
            of_one = list(pool.map(lambda i: asked(i, "same"), range(10)))
        assert [a.status_code for a in answers + of_one] == [200] * 50
        texts = [a.json()["choices"][0]["text"] for a in answers]
        assert all(texts[i] == texts[i % 3] for i in range(40))
        assert (
            serve.status()
            .applications["draftree"]
            .deployments["draftree"]
            .replica_states["RUNNING"]
            == 2
        )
    finally:
        serve.shutdown()
        ray.shutdown()
