"""Replicas of the server under Ray Serve, each with a model of its own.

    from ray import serve
    from draftree.integrations.ray import Replicas, application

    serve.run(application(Replicas("smollm2", count=2)))

Requests with the same `x-session-id` header go to the same replica, whose caches and memories know
their prefix: Ray's consistent hashing. Ray's router by prefixes reads the requests of its own LLM
servers alone. Requests without the header are spread evenly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftree.errors import UserError
from draftree.serving.options import ServeOptions
from draftree.utils.validated_dataclass import Part, knob

STICKY = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
HEADER = "x-session-id"
"""HTTP header by whose value Ray routes requests. The environment variable
RAY_SERVE_SESSION_ID_HEADER_KEY can name another header."""


@dataclass(frozen=True)
class Replicas(Part):
    """Describe the replicas of one model.

    Attributes:
        target: the model, as for `draftree serve`.
        drafter: spec of a drafter; by default the drafter that `draftree serve` would use.
        policy: spec of a policy; by default the policy that `draftree serve` would use.
        count: number of replicas.
        cpus: number of CPUs that Ray reserves for each replica.
        gpus: number of GPUs that Ray reserves for each replica.
        loading: options for loading the target.
        serving: options of each server; host and port apply to Ray's proxy.
    """

    target: str = "demo"
    drafter: str | None = None
    policy: str | None = None
    count: int = knob(1, least=1)
    cpus: float = knob(1.0, least=0)
    gpus: float = knob(0.0, least=0)
    loading: Mapping[str, Any] = field(default_factory=dict)
    serving: ServeOptions = field(default_factory=ServeOptions)


def check_installed() -> None:
    """Raise an error if Ray Serve is not installed.

    Raises:
        UserError: Ray Serve is not installed.
    """
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise UserError(
            "replicas need Ray Serve, which is not installed: pip install 'draftree[ray]'"
        ) from error


class Replica:
    """Serve the model as one replica; Ray creates it in a separate process.

    Args:
        replicas: description of the model and its options.
    """

    def __init__(self, replicas: Replicas) -> None:
        from draftree.engine import load, usual_drafter, usual_policy
        from draftree.serving.state import ServerState
        from draftree.utils.hardware import bound_memory

        bound_memory()
        drafter = replicas.drafter or usual_drafter(replicas.target)[0]
        policy = replicas.policy or usual_policy(
            replicas.target, replicas.drafter, replicas.loading.get("device")
        )
        engine = load(replicas.target, drafter, policy, **replicas.loading)
        self.state = ServerState(engine, drafter, policy, replicas.serving)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the web application of the loaded model; Ray calls this method."""
        from draftree.serving.app import create_app

        return create_app(self.state)

    def check_health(self) -> None:
        """Raise an error if the worker thread has ended, so that Ray starts another replica."""
        if not self.state.worker.alive:
            raise RuntimeError("the worker of the server has ended")


def application(replicas: Replicas) -> Any:
    """Return the Ray application for `ray.serve.run`.

    Raises:
        UserError: Ray Serve is not installed.
    """
    check_installed()
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    deployment: Any = serve.deployment(
        name="draftree",
        num_replicas=replicas.count,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        request_router_config=RequestRouterConfig(request_router_class=STICKY),
        max_ongoing_requests=64,
    )
    return deployment(serve.ingress()(Replica)).bind(replicas)


def serve_replicas(replicas: Replicas) -> None:
    """Serve at the host and port of the options until the program is interrupted.

    If a Ray cluster runs on this machine, it is used.

    Raises:
        UserError: Ray Serve is not installed.
    """
    found = application(replicas)
    from ray import serve

    serve.start(http_options={"host": replicas.serving.host, "port": replicas.serving.port})
    serve.run(found, name="draftree", blocking=True)
