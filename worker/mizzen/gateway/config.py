"""Everything that a gateway process can be told, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.core.options import check, option, required


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Options of `mizzen gateway`; each field is an option of the same name."""

    served_name: str = required("Name of the model in requests")
    alias: tuple[str, ...] = option((), "Further names of the model; repeatable")
    service: str = option(
        "", "Name of the InferenceService, for discovery and metrics; served_name when empty"
    )

    host: str = option("127.0.0.1", "Address of the OpenAI API")
    port: int = option(8000, "Port of the OpenAI API", low=0, high=65535)
    admin_host: str = option("127.0.0.1", "Address of /healthz, /readyz, /metrics and the admin API")
    admin_port: int = option(8001, "Port of /healthz, /readyz, /metrics and the admin API", low=0, high=65535)
    admin_token_file: str | None = option(
        None, "File with the bearer token of the admin API; without it the admin API is off"
    )

    engine: tuple[str, ...] = option(
        (), "ZMQ endpoint of an engine; repeatable. Without any, pods are watched"
    )
    namespace: str = option("", "Namespace whose pods are watched; the pod's own when empty")
    keys: str | None = option(None, "Folder with CURVE keys; required for tcp:// beyond loopback")

    suspended: bool = option(False, "Answer 503 to everything; the service is suspended")
    max_in_flight: int = option(2000, "Requests in work at once", low=1)
    queue_size: int = option(1000, "Requests that may wait for an engine", low=0)
    queue_timeout_seconds: float = option(60.0, "How long a request waits for an engine before 503", low=0)
    max_body_bytes: int = option(8 * 1024 * 1024, "Larger request bodies are 413", low=1024)
    max_attempts: int = option(3, "Engines tried before the first token", low=1, high=10)
    load_factor_percent: int = option(
        125, "An engine above this share of the mean load gets no prefix affinity", low=100
    )
    engine_timeout_seconds: float = option(5.0, "An engine silent for this long gets nothing new", low=0.5)
    engine_lost_seconds: float = option(
        90.0, "Requests of an engine that is silent for this long are lost", low=0.5
    )
    drain_timeout_seconds: float = option(120.0, "On SIGTERM, open streams get this long", low=0)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the option and what would be right.
        """
        check(self)
