"""Everything that a gateway process can be told, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.core.options import check, option


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Options of `mizzen gateway`; each field is an option of the same name."""

    served_name: str = option("", "Name of the model in requests; required without --services-...")
    alias: tuple[str, ...] = option((), "Further names of the model; repeatable")
    service: str = option(
        "", "Name of the InferenceService, for discovery and metrics; served_name when empty"
    )
    services_file: str | None = option(
        None, "JSON file of several services behind this gateway; read again when it changes"
    )
    services_config_map: str = option(
        "", "ConfigMap with such a file (services.json); it and the services' pods are watched"
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

    api_keys_file: tuple[str, ...] = option(
        (), "File with API keys, or folder of such files; repeatable. Without any, everyone is served"
    )
    key_limits_divided_by: int = option(
        1,
        "A gateway process allows this part of keys' limits: processes times gateways",
        low=1,
        high=1024,
    )
    keyless_max_priority: int = option(
        0, "Without API keys, a request that asks for a higher priority gets this one", low=-8, high=8
    )
    route_header: bool = option(True, "Tell clients by x-mizzen-route which engine answered, and why")
    cors_origin: tuple[str, ...] = option((), "Origin of web pages that may call the API; repeatable")
    tls_cert: str | None = option(None, "Certificate chain of the OpenAI API (PEM); read when it changes")
    tls_key: str | None = option(None, "Private key of the certificate (PEM)")

    tool_parser: str = option(
        "auto",
        "How the model writes tool calls; auto looks at its chat template",
        choices=("auto", "none", "hermes", "qwen3-coder", "llama3", "mistral"),
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its reasoning; auto looks at its chat template and its tokens",
        choices=("auto", "none", "qwen3", "deepseek-r1", "magistral"),
    )

    suspended: bool = option(False, "Answer 503 to everything; the service is suspended")
    max_in_flight: int = option(2000, "Requests in work at once", low=1)
    max_tokens_in_flight: int = option(
        0, "Tokens of prompts and answers in work at once, about; 0 is no limit", low=0
    )
    queue_size: int = option(1000, "Requests that may wait for an engine", low=0)
    queue_timeout_seconds: float = option(60.0, "How long a request waits for an engine before 503", low=0)
    max_body_bytes: int = option(8 * 1024 * 1024, "Larger request bodies are 413", low=1024)
    max_bodies_bytes: int = option(
        256 * 1024 * 1024, "Bytes of all request bodies in work; more are 503", low=1024
    )
    request_timeout_seconds: float = option(
        0.0, "A request that asks for no timeout ends after this long; 0 is never", low=0
    )
    max_request_timeout_seconds: float = option(3600.0, "Longest timeout that a request may ask for", low=1)
    max_attempts: int = option(3, "Engines tried before the first token", low=1, high=10)
    max_resumes: int = option(
        3, "Engines that an answer may lose and go on in another; 0 ends it with an error", low=0, high=100
    )
    resume_timeout_seconds: float = option(
        60.0, "How long an answer whose engine is lost waits for room in those that serve", low=0
    )
    resume_wait_seconds: float = option(
        1.0, "How long an answer whose engine is lost waits for a replacement when none serves", low=0
    )
    wake_timeout_seconds: float = option(
        0.0, "How long a request waits that finds no engine, if longer than --queue-timeout-seconds", low=0
    )
    load_factor_percent: int = option(
        150, "A request goes to no engine that it would lift above this share of the mean load", low=100
    )
    prefix_index_blocks: int = option(
        1 << 19, "Blocks of 64 tokens that the prefix index of a service holds; 112 bytes each", low=1024
    )
    warm_tokens: int = option(
        0, "Tokens of the hottest prefixes that are replayed into a new engine before it serves", low=0
    )
    warm_seconds: float = option(10.0, "How long that may hold a new engine back", low=0.1)
    breaker_failures: int = option(5, "Failures in a row after which an engine is left alone", low=1)
    breaker_max_seconds: float = option(30.0, "How long it is left alone at most", low=1)
    engine_suspect_seconds: float = option(
        2.0, "An engine silent for this long gets new requests only where no other is left", low=0.1
    )
    engine_timeout_seconds: float = option(5.0, "An engine silent for this long gets nothing new", low=0.5)
    engine_stuck_seconds: float = option(
        60.0, "Requests of an engine that answers and makes no step for this long are lost; 0 is never", low=0
    )
    engine_lost_seconds: float = option(
        90.0, "Requests of an engine that is silent for this long are lost", low=0.5
    )
    drain_timeout_seconds: float = option(120.0, "On SIGTERM, open streams get this long", low=0)

    processes: int = option(
        1, "Processes behind the port; each is a gateway of its own, and limits hold for each", low=1, high=64
    )
    access_log: str = option(
        "on",
        "A line of JSON a request on standard output; with `prompts`, prompts are in it",
        choices=("off", "on", "prompts"),
    )
    otlp_endpoint: str = option(
        "", "Base URL of an OpenTelemetry collector (OTLP over HTTP); OTEL_EXPORTER_OTLP_ENDPOINT when empty"
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the option and what would be right.
        """
        check(self)
        given = [self.served_name, self.services_file, self.services_config_map]
        if sum(map(bool, given)) != 1:
            raise ValueError("give one of --served-name, --services-file and --services-config-map")
        if not self.served_name and (self.engine or self.alias or self.service or self.suspended):
            raise ValueError(
                "--engine, --alias, --service and --suspended speak of one service: with several, each says"
                " so in --services-file"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both")

    @property
    def shared(self) -> bool:
        """Whether several services are behind this gateway."""
        return not self.served_name
