# SPDX-License-Identifier: Apache-2.0
"""Metrics of the gateway. The number of label values is bounded, whatever clients send; see `LABELS`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from mizzen import __version__
from mizzen.gateway.fields.known import (
    HOSTED_TOOLS,
    KNOWN_FIELDS,
    MESSAGES_HOSTED_TOOLS,
    field_label,
)
from mizzen.gateway.images.limits import IMAGE_ERROR_CODES
from mizzen.gateway.telemetry.fast_metrics import (
    OTHER_LABEL,
    FastCounter,
    FastCounterFamily,
    FastHistogram,
    FastHistogramFamily,
)
from mizzen.gateway.telemetry.key_usage import MAX_KEYS, KeyUsage
from mizzen.gateway.telemetry.request_record import RequestRecord

FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
ADDED_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
BETWEEN_TOKENS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_SECONDS = (0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PREFIX = "mizzen_gateway_"
LOSSES = ("no_engine", "connection", "engine_error", "no_answer", "silent", "slow", "stuck", "restart")
"""Causes that can make an answer end with an error; each has a series in the metrics from the start."""
REFUSED = frozenset({401, 403, 413, 429, 503, 529})
MAX_MODELS = 256
"""Maximum number of model names used as label values; further models are counted as `other`."""

LABELS: dict[str, tuple[str, str, str]] = {
    "model": ("257", "names of at most 256 served models, and `other`", "model that the request names"),
    "path": ("paths", "the API's paths, and `other`", "endpoint of the request"),
    "code": (
        "16",
        "about 15 status codes that the gateway returns",
        "status code of the response; 499 if the client disconnected",
    ),
    "source": ("2", "`data`, `https`", "whether the body has the file of an image, or its URL"),
    "reason": (
        "scorers + 2",
        "names of scorers, `only`, `random`",
        "scorer that decided the route; see docs/routing.md",
    ),
    "cause": ("causes", "about 20 constants in the source", "cause of the refusal, failure, abort or resume"),
    "key": (
        str(MAX_KEYS + 1),
        f"names of the {MAX_KEYS} busiest API keys, and `other`",
        "name of the API key; without API keys, there is only `other`",
    ),
    "type": ("2", "`prompt`, `output`", "kind of tokens"),
    "field": (
        str(len(KNOWN_FIELDS | HOSTED_TOOLS | MESSAGES_HOSTED_TOOLS) + 1),
        "known fields, types of hosted tools, and `other`",
        "name of the ignored field, or type of the hosted tool",
    ),
    "engine": ("engines", "engines of the services", "name of the engine; on Kubernetes, of its pod"),
    "version": ("1", "the running version", "version of the program"),
    "result": ("4", "`done`, `deadline`, `needed`, `failed`", "result of warming an engine's cache"),
    "state": (
        "7",
        "`connecting`, `verifying`, `warming`, `serving`, `suspect`, `draining`, `broken`",
        "state of an engine, as in the admin API",
    ),
}
"""For each label: the maximum number of values, the values, and the meaning, for the metrics reference."""


class ModelMetrics:
    """Counters and histograms of one model."""

    __slots__ = (
        "added_seconds", "between_tokens_seconds", "cached_tokens", "first_token_seconds", "output_tokens",
        "prompt_tokens", "queue_seconds", "request_seconds",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = FastCounter()
        self.cached_tokens = FastCounter()
        self.output_tokens = FastCounter()
        self.request_seconds = FastHistogram(REQUEST_SECONDS)
        self.first_token_seconds = FastHistogram(FIRST_TOKEN_SECONDS)
        self.between_tokens_seconds = FastHistogram(BETWEEN_TOKENS_SECONDS)
        self.queue_seconds = FastHistogram(FIRST_TOKEN_SECONDS)
        self.added_seconds = FastHistogram(ADDED_SECONDS)


class Metrics:
    """All metrics of one gateway process, in a separate registry."""

    def __init__(self, models: Callable[[], Collection[str]] = tuple) -> None:
        """Create all metrics; `models` returns the names of the served models."""
        self.registry = CollectorRegistry()
        self._served = models
        self._models: dict[str, ModelMetrics] = {OTHER_LABEL: ModelMetrics()}
        self.requests = self._counter(
            "requests", "Requests, by endpoint, status code and model", "path", "code", "model"
        )
        self._register_model_metrics()
        self.refusals = self._counter(
            "refused_requests",
            "Requests answered with 401, 403, 413, 429, 503 or 529, by error code",
            "cause",
        )
        self._key_usage = KeyUsage(PREFIX)
        self.registry.register(self._key_usage)  # pyright: ignore[reportArgumentType]
        self.ignored_fields = self._counter(
            "ignored_fields", "Requests that set a field that was ignored, by field", "field"
        )
        self.routes = self._counter(
            "route", "Routed requests, by the scorer that decided the route", "reason"
        )
        self.retries = self._counter(
            "retries", "Attempts that failed before anything was sent to the client, by cause", "cause"
        )
        self.stream_errors = self._counter(
            "stream_errors", "Answers that ended with an error, by cause", "cause"
        )
        self.aborts = self._counter("aborts", "Requests aborted in the engine, by cause", "cause")
        self.resumes = self._counter(
            "resumes", "Answers resumed after their engine was lost, by cause", "cause"
        )
        self.resume_failures = self._counter(
            "resume_failures", "Answers that could not be resumed, by cause", "cause"
        )
        self.resume_seconds = self._histogram(
            "resume_seconds",
            "Time from the loss of an engine to the next token of the answer",
            FIRST_TOKEN_SECONDS,
        )
        self.warmups = self._counter(
            "warmups", "New engines whose cache was warmed before they served, by result", "result"
        )
        self.warmed_tokens = self._counter("warmed_tokens", "Tokens of prefixes replayed into new engines")
        self.images = self._counter(
            "images", "Images of valid requests, by source: in the body, or a URL to fetch", "source"
        )
        self.images_refused = self._counter(
            "images_refused", "Requests refused because of an image, by error code", "cause"
        )
        self.images_requested = self._counter("images_requested", "Images whose files engines requested")
        self.images_sent = self._counter("images_sent", "Images whose files were sent to engines")
        self.image_bytes = self._counter("image_bytes_sent", "Bytes of images sent to engines")
        self.breaker = self._gauge(
            "breaker_state", "State of an engine's circuit breaker: 0 closed, 1 half-open, 2 open", "engine"
        )
        self.breaker_opened = self._gauge(
            "breaker_opened", "Number of times that an engine's circuit breaker has opened", "engine"
        )
        self.suspects = self._gauge(
            "suspect_engines", "Engines that have sent no message for longer than --engine-suspect-seconds"
        )
        self.waiting = self._gauge(
            "waiting_requests",
            "Requests that wait because no engine serves; if above 0, an engine should be started",
        )
        self.prefix_blocks = self._gauge("prefix_index_blocks", "Blocks of 64 tokens in the prefix index")
        self.prefix_forgotten = self._gauge(
            "prefix_index_forgotten_blocks", "Blocks dropped from the prefix index because it was full"
        )
        self.in_flight = self._gauge("in_flight_requests", "Requests in progress, by engine", "engine")
        self.load_tokens = self._gauge(
            "in_flight_tokens", "Tokens of the requests in progress, by engine", "engine"
        )
        self.engines = self._gauge("engines", "Engines, by state", "state")
        self.queued = self._gauge("queued_requests", "Requests waiting for an engine")
        self.synced = self._gauge("synced", "1 once the engines of all services are known")
        self.api_keys_unusable = self._gauge(
            "api_keys_unusable",
            "1 while API key files hold no key or cannot be read; meanwhile the previous keys stay in force",
        )
        self.watch_errors = self._counter("watch_errors", "Failed list and watch requests for pods")
        self.dropped_spans = self._counter(
            "dropped_spans", "Spans of traces that were dropped: queue full, or not accepted by the collector"
        )
        self.certificate = self._gauge(
            "tls_certificate_expiry_timestamp_seconds",
            "Unix time at which the TLS certificate of the API expires",
        )
        self.certificate.set(float("inf"))
        self._initialize_rare_counters()
        self._gauge("build_info", "Always 1; the label holds the version", "version").labels(__version__).set(
            1
        )
        ProcessCollector(registry=self.registry)

    def _initialize_rare_counters(self) -> None:
        """Initialize rare counters to 0, because PromQL's `increase()` misses a new series' first event."""
        for cause in LOSSES:
            self.stream_errors.labels(cause)
        for cause in ("no_engine", "too_many"):
            self.resume_failures.labels(cause)
        for code in IMAGE_ERROR_CODES:
            self.images_refused.labels(code)
        for source in ("data", "https"):
            self.images.labels(source)
        for result in ("done", "needed", "deadline", "failed"):
            self.warmups.labels(result)

    def for_model(self, model: str) -> ModelMetrics:
        """Return the metrics of a model; all models that are not served share the metrics of `other`."""
        return self._models.get(model) or self._add_model(model)

    def count_request(self, record: RequestRecord, path: str) -> None:
        """Count a request that has ended; `path` is a path template of the API, or `other`."""
        model = record.model
        counted = self.for_model(model)
        label = model if model in self._models else OTHER_LABEL
        self.requests.labels(path, str(record.status), label).inc()
        if record.status in REFUSED and record.error:
            self.refusals.labels(record.error).inc()
        if record.key:
            self._key_usage.count(record.key, record.prompt_tokens, record.completion_tokens)
        for field in set(map(field_label, record.ignored_fields)):
            self.ignored_fields.labels(field).inc()
        if not record.attempt_count and not record.model:
            return
        counted.request_seconds.observe(record.seconds)
        if record.first_token is not None:
            counted.first_token_seconds.observe(record.first_token - record.began)
            added = record.added_seconds
            if added is not None:
                counted.added_seconds.observe(added)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _add_model(self, model: str) -> ModelMetrics:
        if len(self._models) > MAX_MODELS or model not in self._served():
            return self._models[OTHER_LABEL]
        model_metrics = self._models[model] = ModelMetrics()
        return model_metrics

    def _register_model_metrics(self) -> None:
        for field, name, text in (
            ("request_seconds", "request_seconds", "Time from a request's arrival to its last byte"),
            (
                "first_token_seconds",
                "time_to_first_token_seconds",
                "Time from a request's arrival to its first token",
            ),
            (
                "between_tokens_seconds",
                "inter_token_seconds",
                "Time between two deliveries of an answer's tokens, per delivered token",
            ),
            ("queue_seconds", "queue_seconds", "Time that a request waited for an engine"),
            (
                "added_seconds",
                "added_seconds",
                "Time that the gateway and the network add to the first token, excluding queue and engine",
            ),
            ("prompt_tokens", "prompt_tokens", "Prompt tokens of routed requests"),
            ("cached_tokens", "cached_prompt_tokens", "Prompt tokens found in the engines' prefix caches"),
            ("output_tokens", "output_tokens", "Tokens received from engines"),
        ):
            family = FastCounterFamily if field.endswith("_tokens") else FastHistogramFamily
            values = partial(self._column, field)
            self.registry.register(family(PREFIX + name, text, "model", values))  # pyright: ignore

    def _column(self, field: str) -> list[tuple[str, Any]]:
        return [(model, getattr(counted, field)) for model, counted in self._models.items()]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, (), registry=self.registry, buckets=buckets)
