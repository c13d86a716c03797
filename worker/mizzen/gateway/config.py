# SPDX-License-Identifier: Apache-2.0
"""Configuration of a gateway process; the options of `mizzen gateway` are generated from this dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.common.options import check, option
from mizzen.common.otlp import ENDPOINT_HELP, HEADERS_FILE_HELP, check_endpoint

VLLM_TOOL_PARSER, VLLM_REASONING_PARSER = "openai", "openai_gptoss"
"""vLLM's names of the parsers of gpt-oss, which are other names of `gpt-oss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Options of `mizzen gateway`; each field defines the option of the same name."""

    served_name: str = option(
        "", "Name of the model in requests; required unless --services-file or --services-config-map is given"
    )
    alias: tuple[str, ...] = option((), "Additional name of the model; repeatable")
    service: str = option(
        "", "Name of the InferenceService, for discovery and metrics; --served-name by default"
    )
    services_file: str | None = option(
        None, "JSON file that lists the services of a shared gateway; read again when it changes"
    )
    services_config_map: str = option(
        "", "ConfigMap with a services file as services.json; the gateway watches it and the services' pods"
    )

    host: str = option(
        "127.0.0.1",
        "Address of the OpenAI API",
    )
    loopback: bool = option(
        True,
        "Serve the OpenAI API on the loopback address too, which `kubectl port-forward` needs, if --host is "
        "another address",
    )
    port: int = option(8000, "Port of the OpenAI API", low=0, high=65535)
    grpc_port: int = option(
        0, "Port of the gRPC API at the address --host; 0 turns it off", low=0, high=65535
    )
    admin_host: str = option("127.0.0.1", "Address of /healthz, /readyz, /metrics and the admin API")
    admin_port: int = option(8001, "Port of /healthz, /readyz, /metrics and the admin API", low=0, high=65535)
    admin_token_file: str | None = option(
        None, "File with the bearer token of the admin API; the admin API is off without it"
    )

    engine: tuple[str, ...] = option(
        (), "ZMQ endpoint of an engine; repeatable. If not given, the gateway finds engines by watching pods"
    )
    namespace: str = option("", "Namespace whose pods are watched; the pod's own by default")
    keys: str | None = option(None, "Folder with CURVE keys; required for tcp:// endpoints beyond loopback")

    api_keys_file: tuple[str, ...] = option(
        (), "File with API keys, or folder of such files; repeatable. If not given, requests need no key"
    )
    key_limits_divided_by: int = option(
        1,
        "If above 1, limits of API keys are divided by this number, and not shared with other gateways",
        low=1,
        high=1024,
    )
    keyless_max_priority: int = option(
        0,
        "Without effect: if there are no API keys, all requests have the priority 0",
        low=-8,
        high=8,
    )
    route_header: bool = option(
        True, "Send x-mizzen-route, which tells clients which engine answered, and why"
    )
    strict_fields: bool = option(
        False, "Refuse unknown fields, fields that only advise, and hosted tools, instead of ignoring them"
    )
    any_dimensions: bool = option(
        False,
        "Shorten embeddings on request even if config.json does not say that the model was trained for it",
    )
    tokenizer_info: bool = option(
        False, "Serve /tokenizer_info, with which clients load a model's chat template and special tokens"
    )
    api_metrics: bool = option(
        False, "Serve /metrics on the port of the OpenAI API too, to clients that may use that API"
    )
    moderation_category: tuple[str, ...] = option(
        (), "LABEL=CATEGORY: reports a classifier's label as a category of /v1/moderations; repeatable"
    )
    playground: bool = option(
        False, "Serve a chat page for browsers at /playground, which uses the gateway's own API"
    )
    cors_origin: tuple[str, ...] = option((), "Origin of web pages that may call the API (CORS); repeatable")
    tls_cert: str | None = option(
        None, "Certificate chain of the OpenAI API (PEM); read again when it changes"
    )
    tls_key: str | None = option(None, "Private key of the certificate (PEM)")

    tool_parser: str = option(
        "auto",
        "Tool call format of the model; auto detects it from the chat template",
        choices=(
            *("auto", "none", "hermes", "qwen3-coder", "llama3", "mistral", "granite", "phi4-mini", "cohere"),
            *("command-r", "hunyuan", "glm4", "glm45", "seed-oss", "olmo3", "pythonic"),
            *("gpt-oss", VLLM_TOOL_PARSER),
        ),
    )
    reasoning_parser: str = option(
        "auto",
        "Reasoning format of the model; auto detects it from the chat template and the vocabulary",
        choices=(
            *("auto", "none", "qwen3", "deepseek-r1", "magistral", "granite", "granite32", "hunyuan"),
            *("cohere", "seed-oss", "gpt-oss", VLLM_REASONING_PARSER),
        ),
    )

    suspended: bool = option(False, "Answer every request with 503, because the service is suspended")
    max_in_flight: int = option(2000, "Maximum number of requests in progress", low=1)
    max_tokens_in_flight: int = option(
        0, "Approximate maximum number of prompt and output tokens in progress; 0 is no limit", low=0
    )
    queue_size: int = option(1000, "Maximum number of requests that wait for an engine", low=0)
    queue_timeout_seconds: float = option(
        60.0, "Time that a request waits for an engine before it is answered with 503", low=0
    )
    max_body_bytes: int = option(
        8 * 1024 * 1024, "Maximum size of a request body; larger bodies are answered with 413", low=1024
    )
    max_images: int = option(8, "Maximum number of images in a request", low=1, high=1024)
    max_image_bytes: int = option(
        10 * 1024 * 1024, "Maximum size of an image file in a request", low=1024, high=256 * 1024 * 1024
    )
    max_image_pixels: int = option(
        64_000_000, "Maximum number of pixels of an image before it is resized", low=1, high=1_000_000_000
    )
    max_image_body_bytes: int = option(
        32 * 1024 * 1024,
        "Maximum size of a request body with images, while a model that reads images is served; its text is "
        "limited by --max-body-bytes",
        low=1024,
    )
    image_urls: str = option(
        "refused",
        "Whether requests may give images as https URLs, which the gateway then fetches",
        choices=("refused", "allowed"),
    )
    image_hosts: tuple[str, ...] = option(
        (), "Host from which images may be fetched, exact or as *.example.com; repeatable"
    )
    image_blocked_network: tuple[str, ...] = option(
        (),
        "Network (CIDR) from which images are never fetched, in addition to private ones; repeatable",
    )
    max_bodies_bytes: int = option(
        256 * 1024 * 1024,
        "Maximum total size of the bodies of all requests in progress; further requests get 503",
        low=1024,
    )
    response_store_seconds: float = option(
        0.0,
        "Time that the Responses API keeps a response after its last use, in memory; 0 stores no responses",
        low=0,
        high=86400,
    )
    response_store_size: int = option(10_000, "Maximum number of stored responses", low=1)
    response_store_bytes: int = option(
        256 * 1024 * 1024, "Maximum size of all stored responses with their conversations", low=1024
    )
    request_timeout_seconds: float = option(
        0.0, "Timeout of requests that do not set one; 0 is no timeout", low=0
    )
    max_request_timeout_seconds: float = option(3600.0, "Longest timeout that a request may set", low=1)
    max_attempts: int = option(
        3, "Maximum number of engines that a request is tried on before its first token", low=1, high=10
    )
    max_resumes: int = option(
        3,
        "Maximum number of lost engines that an answer survives by resuming on others; 0 turns resuming off",
        low=0,
        high=100,
    )
    resume_timeout_seconds: float = option(
        60.0, "Time that an answer whose engine is lost waits for capacity on the engines that serve", low=0
    )
    resume_wait_seconds: float = option(
        1.0, "Time that an answer whose engine is lost waits for a replacement if no engine serves", low=0
    )
    wake_timeout_seconds: float = option(
        0.0,
        "Time that a request waits if no engine serves, but never less than --queue-timeout-seconds",
        low=0,
    )
    load_factor_percent: int = option(
        150, "Requests avoid engines whose load they would raise above this percentage of the mean", low=100
    )
    prefix_index_blocks: int = option(
        1 << 19, "Maximum number of blocks (64 tokens, 112 bytes each) in a service's prefix index", low=1024
    )
    warm_tokens: int = option(
        0,
        "Tokens of the hottest prefixes to replay into a new engine before it serves; 0 turns this off",
        low=0,
    )
    warm_seconds: float = option(
        10.0, "Maximum time that the replay of hot prefixes may delay a new engine", low=0.1
    )
    breaker_failures: int = option(5, "Consecutive failures that open an engine's circuit breaker", low=1)
    breaker_max_seconds: float = option(30.0, "Longest time for which a circuit breaker stays open", low=1)
    engine_suspect_seconds: float = option(
        2.0,
        "Time without a message after which an engine gets new requests only if no other engine is left",
        low=0.1,
    )
    engine_timeout_seconds: float = option(
        5.0, "Time without a message after which an engine gets no new requests", low=0.5
    )
    engine_stuck_seconds: float = option(
        60.0,
        "Time without a step after which a responsive engine's requests count as lost; 0 means never",
        low=0,
    )
    engine_lost_seconds: float = option(
        90.0, "Time without a message after which an engine's requests count as lost", low=0.5
    )
    drain_timeout_seconds: float = option(120.0, "Time that open streams get to end after SIGTERM", low=0)

    processes: int = option(
        1,
        "Number of gateway processes behind the port; limits apply to each process",
        low=1,
        high=64,
    )
    access_log: str = option(
        "on",
        "Access log on standard output, one line of JSON per request; `prompts` includes the prompts",
        choices=("off", "on", "prompts"),
    )
    otlp_endpoint: str = option("", ENDPOINT_HELP)
    otlp_headers_file: str = option("", HEADERS_FILE_HELP)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: a value is invalid; the message names the option and the allowed values.
        """
        check(self)
        check_endpoint(self.otlp_endpoint)
        given = [self.served_name, self.services_file, self.services_config_map]
        if sum(map(bool, given)) != 1:
            raise ValueError("give one of --served-name, --services-file and --services-config-map")
        if not self.served_name and (self.engine or self.alias or self.service or self.suspended):
            raise ValueError(
                "--engine, --alias, --service and --suspended apply to a single service: with several"
                " services, set them per service in --services-file"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both")

        if (self.image_urls == "allowed") != bool(self.image_hosts):
            raise ValueError("--image-urls allowed and --image-hosts belong together: give both")
        if self.response_store_seconds and self.processes > 1:
            raise ValueError(
                "--response-store-seconds needs --processes 1, because each process has its own store"
            )
        if self.api_metrics and self.processes > 1:
            raise ValueError(
                "--api-metrics needs --processes 1: use the admin port, which adds up all processes"
            )

    @property
    def shared(self) -> bool:
        """True if this gateway serves several services."""
        return not self.served_name


@dataclass(frozen=True, slots=True)
class ProcessNumber:
    """Number of a gateway process, from 0, among the `count` processes of its gateway."""

    index: int = 0
    count: int = 1


ONLY_PROCESS = ProcessNumber()
"""Number of the process of a gateway that has only one."""
