"""What gateways do: requests, first tokens, queues, routes, errors."""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, quantile, quantiles, rate

OF = 'namespace=~"$namespace",service=~"$service"'
MODEL = f'{OF},model=~"$model"'


def grown(metric: str, by: str = "", labels: str = OF) -> str:
    """Return a counter's growth a second."""
    return rate(f"mizzen_gateway_{metric}", by, labels)


def total(metric: str, legend: str, by: str = "") -> Query:
    """Return a gauge, summed by a label."""
    return Query(f"sum by ({by}) (mizzen_gateway_{metric}{{{OF}}})", legend)


TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests by endpoint",
            "Requests a second, by path of the API.",
            "reqps", (Query(grown("requests_total", "path", MODEL), "{{path}}"),), stacked=True,
        ),
        Panel(
            "Requests by model",
            "Requests a second, by the model asked for; names that are not served are `other`.",
            "reqps", (Query(grown("requests_total", "model", MODEL), "{{model}}"),), stacked=True,
        ),
        Panel(
            "Requests by status code",
            "Answers a second, by status code; 499 are clients that left before theirs began.",
            "reqps", (Query(grown("requests_total", "code", MODEL), "{{code}}"),), stacked=True,
        ),
        Panel(
            "Tokens",
            "Tokens a second: of prompts, of prompts from a prefix cache, and generated.",
            "short",
            (
                Query(grown("prompt_tokens_total", "", MODEL), "prompts"),
                Query(grown("cached_prompt_tokens_total", "", MODEL), "prompts, cached"),
                Query(grown("output_tokens_total", "", MODEL), "generated"),
            ),
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens that engines' prefix caches had, by model.",
            "percentunit",
            (
                Query(
                    f"{grown('cached_prompt_tokens_total', 'model', MODEL)} / "
                    f"{grown('prompt_tokens_total', 'model', MODEL)}",
                    "{{model}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Refused requests",
            "Requests answered with 401, 403, 413, 429 or 503, a second, by error code.",
            "reqps", (Query(grown("refused_requests_total", "cause"), "{{cause}}"),),
        ),
    ),
)  # fmt: skip
LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to the first token, by model",
            "The 95th percentile of each model.",
            "s",
            (
                Query(
                    quantile(0.95, "mizzen_gateway_time_to_first_token_seconds", "model", MODEL),
                    "{{model}}",
                ),
            ),
            yellow=1, red=2,
        ),
        Panel(
            "Between tokens",
            "Time between two deliveries of tokens of a stream, by token.",
            "s", quantiles("mizzen_gateway_inter_token_seconds", MODEL), yellow=0.1, red=0.2,
        ),
        Panel(
            "What the gateway adds",
            "Time to the first token without the queue and without the engine's own: parsing, template, tokenizing, "
            "routing and the network.",
            "s", quantiles("mizzen_gateway_added_seconds", MODEL), yellow=0.05, red=0.2,
        ),
        Panel(
            "Time in the queue",
            "How long requests waited for their turn. Beyond `spec.gateway.admission.queueTimeoutSeconds` they get "
            "503.",
            "s", quantiles("mizzen_gateway_queue_seconds", MODEL), yellow=1, red=5,
        ),
        Panel(
            "Whole requests by their time",
            "How many requests a second took how long, to their last byte.",
            "s", (Query(grown("request_seconds_bucket", "le", MODEL), "{{le}}"),), "heatmap",
        ),
    ),
)  # fmt: skip
ROUTES = Row(
    "Queue and routes",
    (
        Panel(
            "Queue",
            "Requests that wait for their turn, and those that wait because no engine serves.",
            "short",
            (total("queued_requests", "queued"), total("waiting_requests", "without an engine")),
            yellow=10, red=100,
        ),
        Panel(
            "What decided routes",
            "Routed requests a second, by what decided: the longest cached prefix, the least load, a session, or "
            "that there was only one engine.",
            "reqps", (Query(grown("route_total", "reason"), "{{reason}}"),), stacked=True,
        ),
        Panel(
            "Engines by state",
            "Engines as gateways see them; the gateway that knows most of a state counts.",
            "short",
            (Query(f"max by (state) (mizzen_gateway_engines{{{OF}}})", "{{state}}"),),
        ),
        Panel(
            "Requests in work, by engine",
            "Requests that gateways have sent to each engine and that have not ended.",
            "short", (total("in_flight_requests", "{{engine}}", "engine"),),
        ),
        Panel(
            "Tokens in work, by engine",
            "The load by which gateways route: tokens of prompts and answers in work. Engines that share a service "
            "should be alike.",
            "short", (total("in_flight_tokens", "{{engine}}", "engine"),),
        ),
        Panel(
            "Prefix index",
            "Blocks of 64 tokens that gateways know to be cached somewhere, and blocks that they had to forget for "
            "want of room.",
            "short",
            (total("prefix_index_blocks", "known"), total("prefix_index_forgotten_blocks", "forgotten")),
        ),
    ),
)  # fmt: skip
STARTS = Row(
    "Warm starts",
    (
        Panel(
            "New engines filled",
            "New engines a second whose cache was filled before requests were routed to them, by how that ended: "
            "`done`; `needed`, for requests waited; `deadline` after `warmupTimeoutSeconds`; `failed`.",
            "ops", (Query(grown("warmups_total", "result"), "{{result}}"),), stacked=True,
        ),
        Panel(
            "Prefixes replayed",
            "Tokens of the hottest prefixes that gateways replay into new engines, a second: in rollouts, scale-ups "
            "and replacements.",
            "short", (Query(grown("warmed_tokens_total"), "tokens"),),
        ),
    ),
)  # fmt: skip
ERRORS = Row(
    "Errors, and what was done about them",
    (
        Panel(
            "Broken answers",
            "Answers that ended in an error after they had begun, a second, by cause.",
            "reqps", (Query(grown("stream_errors_total", "cause"), "{{cause}}"),), red=0.1,
        ),
        Panel(
            "Attempts that failed",
            "Attempts that failed before anything was sent, a second, by cause. Clients do not notice: another "
            "engine is tried.",
            "reqps", (Query(grown("retries_total", "cause"), "{{cause}}"),), yellow=1,
        ),
        Panel(
            "Answers that went on elsewhere",
            "Answers a second whose engine was lost in the middle: those that another engine went on with, by "
            "cause, and those that could not go on.",
            "reqps",
            (
                Query(grown("resumes_total", "cause"), "went on: {{cause}}"),
                Query(grown("resume_failures_total", "cause"), "could not: {{cause}}"),
            ),
        ),
        Panel(
            "Time until an answer goes on",
            "From the loss of an engine to the next token of its answers.",
            "s", quantiles("mizzen_gateway_resume_seconds", OF, (0.5, 0.95)), yellow=5, red=30,
        ),
        Panel(
            "Aborts",
            "Requests that the gateway ended in an engine, a second, by cause: mostly clients that left.",
            "reqps", (Query(grown("aborts_total", "cause"), "{{cause}}"),),
        ),
        Panel(
            "Breakers",
            "State of each engine's breaker: 0 closed, 1 half-open, 2 open. An engine whose breaker is open gets no "
            "requests.",
            "short",
            (Query(f"max by (engine) (mizzen_gateway_breaker_state{{{OF}}})", "{{engine}}"),),
            yellow=1, red=2,
        ),
        Panel(
            "Suspect engines",
            "Engines that should have been heard and were not: hung, or cut off.",
            "short", (total("suspect_engines", "suspect"),), red=1,
        ),
        Panel(
            "Watch of the pods",
            "Failed lists and watches of pods, a second: the gateway then routes by what it knew.",
            "ops", (Query(grown("watch_errors_total"), "failed"),), yellow=0.1,
        ),
        Panel(
            "In sync",
            "1 while every gateway has its routing table; a gateway that is not in sync is not ready.",
            "short", (Query(f"min(mizzen_gateway_synced{{{OF}}})", "in sync"),), "stat",
            falling=True, red=1,
        ),
    ),
)  # fmt: skip
PROCESS = Row(
    "Process",
    (
        Panel(
            "CPU",
            "Cores that each gateway uses; one process uses at most a little more than one.",
            "short",
            (Query(f'rate(process_cpu_seconds_total{{{OF},job="gateway"}}[$__rate_interval])', "{{pod}}"),),
            yellow=0.8, red=0.95,
        ),
        Panel(
            "Memory",
            "Resident memory of each gateway.",
            "bytes",
            (Query(f'process_resident_memory_bytes{{{OF},job="gateway"}}', "{{pod}}"),),
        ),
        Panel(
            "Certificate runs out in",
            "Time until the certificate of the API runs out; infinite where the gateway has no TLS.",
            "s",
            (
                Query(
                    f"min(mizzen_gateway_tls_certificate_expiry_timestamp_seconds{{{OF}}}) - time()",
                    "left",
                ),
            ),
            "stat", falling=True, red=604800, yellow=1814400,
        ),
    ),
)  # fmt: skip

GATEWAY = Dashboard(
    "mizzen-gateway",
    "Mizzen / Gateway",
    "Requests, first tokens, queues, routes and errors of the gateways.",
    (
        Variable("namespace", "mizzen_gateway_requests_total", "Namespace"),
        Variable("service", "mizzen_gateway_requests_total", "Service"),
        Variable("model", "mizzen_gateway_requests_total", "Model"),
    ),
    (TRAFFIC, LATENCY, ROUTES, STARTS, ERRORS, PROCESS),
)
