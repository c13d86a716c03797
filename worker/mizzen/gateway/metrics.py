"""The gateway's metrics. Labels take few values, whatever clients send."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
BETWEEN_TOKENS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_SECONDS = (0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """All metrics of one gateway process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by endpoint and status code", "path", "code")
        self.request_seconds = self._histogram(
            "request_seconds", "Time from a request's arrival to its last byte", REQUEST_SECONDS
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token",
            FIRST_TOKEN_SECONDS,
        )
        self.between_tokens_seconds = self._histogram(
            "inter_token_seconds", "Time between two deliveries of tokens, by token", BETWEEN_TOKENS_SECONDS
        )
        self.queue_seconds = self._histogram(
            "queue_seconds", "Time that a request waited for an engine", FIRST_TOKEN_SECONDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were routed")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens from engines' prefix caches"
        )
        self.output_tokens = self._counter("output_tokens", "Tokens received from engines")
        self.routes = self._counter("route", "Routed requests by what decided", "reason")
        self.retries = self._counter("retries", "Attempts that failed before anything was sent", "cause")
        self.stream_errors = self._counter("stream_errors", "Answers that ended in an error", "cause")
        self.aborts = self._counter("aborts", "Requests aborted in the engine", "cause")
        self.resumes = self._counter(
            "resumes", "Answers that went on after their engine was lost, by cause", "cause"
        )
        self.resume_failures = self._counter("resume_failures", "Answers that could not go on", "cause")
        self.resume_seconds = self._histogram(
            "resume_seconds", "Time from an engine's loss to an answer's next token", FIRST_TOKEN_SECONDS
        )
        self.breaker = self._gauge("breaker_state", "0 closed, 1 half-open, 2 open", "engine")
        self.breaker_opened = self._gauge("breaker_opened", "How often an engine's breaker opened", "engine")
        self.suspects = self._gauge("suspect_engines", "Engines that should have been heard and were not")
        self.waiting = self._gauge(
            "waiting_requests", "Requests that wait while no engine serves: more than 0 asks to wake one"
        )
        self.prefix_blocks = self._gauge("prefix_index_blocks", "Blocks of 64 tokens in the prefix index")
        self.prefix_forgotten = self._gauge(
            "prefix_index_forgotten_blocks", "Blocks that the prefix index dropped for want of room"
        )
        self.in_flight = self._gauge("in_flight_requests", "Requests in work by engine", "engine")
        self.load_tokens = self._gauge("in_flight_tokens", "Tokens in work by engine", "engine")
        self.engines = self._gauge("engines", "Engines by state", "state")
        self.queued = self._gauge("queued_requests", "Requests that wait for an engine")
        self.synced = self._gauge("synced", "1 once the routing table has been filled")
        self.watch_errors = self._counter("watch_errors", "Failed lists and watches of pods")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mizzen_gateway_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"mizzen_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mizzen_gateway_{name}", text, (), registry=self.registry, buckets=buckets)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
