# SPDX-License-Identifier: Apache-2.0
"""The gateway dashboard: requests, latency, queues, routing and errors."""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, quantile, quantiles, rate

OF = 'namespace=~"$namespace",service=~"$service"'
MODEL = f'{OF},model=~"$model"'


def grown(metric: str, by: str = "", labels: str = OF) -> str:
    """Return the per-second rate of a counter of the selected gateways as PromQL, summed by a label."""
    return rate(f"mizzen_gateway_{metric}", by, labels)


def total(metric: str, legend: str, by: str = "") -> Query:
    """Return a query for a gauge of the selected gateways, summed by a label."""
    return Query(f"sum by ({by}) (mizzen_gateway_{metric}{{{OF}}})", legend)


TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Requests by endpoint",
            "Requests per second, by API path.",
            "reqps", (Query(grown("requests_total", "path", MODEL), "{{path}}"),), stacked=True,
        ),
        Panel(
            "Requests by model",
            "Requests per second, by requested model; the names of models that are not served count as "
            "`other`.",
            "reqps", (Query(grown("requests_total", "model", MODEL), "{{model}}"),), stacked=True,
        ),
        Panel(
            "Requests by status code",
            "Responses per second, by status code; 499 means that the client disconnected before the "
            "response began.",
            "reqps", (Query(grown("requests_total", "code", MODEL), "{{code}}"),), stacked=True,
        ),
        Panel(
            "Tokens",
            "Tokens per second: prompt tokens, prompt tokens from a prefix cache, and generated tokens.",
            "short",
            (
                Query(grown("prompt_tokens_total", "", MODEL), "prompts"),
                Query(grown("cached_prompt_tokens_total", "", MODEL), "prompts, cached"),
                Query(grown("output_tokens_total", "", MODEL), "generated"),
            ),
        ),
        Panel(
            "Prefix cache hit rate",
            "Share of prompt tokens that were in the engines' prefix caches, by model.",
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
            "Rejected requests",
            "Requests per second answered with 401, 403, 413, 429, 503 or 529, by error code.",
            "reqps", (Query(grown("refused_requests_total", "cause"), "{{cause}}"),),
        ),
        Panel(
            "Images",
            "Images per second of requests by source, images sent to engines that lacked them, and requests "
            "refused because of an image.",
            "ops",
            (
                Query(grown("images_total", "source"), "{{source}}"),
                Query(grown("images_sent_total"), "sent"),
                Query(grown("images_refused_total", "cause"), "refused: {{cause}}"),
            ),
        ),
    ),
)  # fmt: skip
KEYS = Row(
    "API keys",
    (
        Panel(
            "Requests by API key",
            "Requests per second, by the name of the API key; the 50 busiest keys, and `other` for the rest.",
            "reqps", (Query(grown("key_requests_total", "key"), "{{key}}"),), stacked=True, width=12,
        ),
        Panel(
            "Tokens by API key",
            "Prompt and output tokens per second, by the name of the API key.",
            "short", (Query(grown("key_tokens_total", "key"), "{{key}}"),), stacked=True, width=12,
        ),
    ),
)  # fmt: skip
LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token (TTFT) by model",
            "95th percentile of the time from a request's arrival to its first token, by model.",
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
            "Inter-token latency (ITL)",
            "Time between consecutive deliveries of tokens on a stream, weighted by the number of tokens.",
            "s", quantiles("mizzen_gateway_inter_token_seconds", MODEL), yellow=0.1, red=0.2,
        ),
        Panel(
            "Gateway overhead",
            "Time to first token minus the time in the queue and in the engine: parsing, chat template, "
            "tokenization, routing and the network.",
            "s", quantiles("mizzen_gateway_added_seconds", MODEL), yellow=0.05, red=0.2,
        ),
        Panel(
            "Queue time",
            "Time that requests waited in the gateway's queue. After "
            "`spec.gateway.admission.queueTimeoutSeconds` a request gets 503.",
            "s", quantiles("mizzen_gateway_queue_seconds", MODEL), yellow=1, red=5,
        ),
        Panel(
            "End-to-end latency distribution",
            "Number of requests per second in each duration bucket, up to the last byte of the response.",
            "s", (Query(grown("request_seconds_bucket", "le", MODEL), "{{le}}"),), "heatmap",
        ),
    ),
)  # fmt: skip
ROUTES = Row(
    "Queue and routing",
    (
        Panel(
            "Queued requests",
            "Requests in the gateways' queues; `waiting for an engine` counts the requests that wait because "
            "no engine serves.",
            "short",
            (total("queued_requests", "queued"), total("waiting_requests", "waiting for an engine")),
            yellow=10, red=100,
        ),
        Panel(
            "Routing decisions by reason",
            "Routed requests per second, by the reason for the choice of the engine: the longest cached "
            "prefix, the least load, the session, or because only one engine was available.",
            "reqps", (Query(grown("route_total", "reason"), "{{reason}}"),), stacked=True,
        ),
        Panel(
            "Engines by state",
            "Number of engines in each state, as gateways see them. If gateways disagree, the largest number "
            "is shown.",
            "short",
            (Query(f"max by (state) (mizzen_gateway_engines{{{OF}}})", "{{state}}"),),
        ),
        Panel(
            "Requests in progress by engine",
            "Requests that gateways have sent to each engine and that have not finished.",
            "short", (total("in_flight_requests", "{{engine}}", "engine"),),
        ),
        Panel(
            "Tokens in progress by engine",
            "Prompt and answer tokens in progress, which is the load that routing decisions use. It should "
            "be similar for all engines of a service.",
            "short", (total("in_flight_tokens", "{{engine}}", "engine"),),
        ),
        Panel(
            "Prefix index",
            "Blocks of 64 tokens that gateways know to be cached on an engine, and blocks that they dropped "
            "from the index because it was full.",
            "short",
            (total("prefix_index_blocks", "known"), total("prefix_index_forgotten_blocks", "dropped")),
        ),
    ),
)  # fmt: skip
STARTS = Row(
    "Warm starts",
    (
        Panel(
            "Cache warm-ups",
            "New engines per second whose cache was warmed up before requests were routed to them, by "
            "result: `done`; `needed`, ended early because requests were waiting; `deadline`, ended after "
            "`warmupTimeoutSeconds`; `failed`.",
            "ops", (Query(grown("warmups_total", "result"), "{{result}}"),), stacked=True,
        ),
        Panel(
            "Replayed prefix tokens",
            "Tokens per second that gateways replay into the caches of new engines: the most used prefixes, "
            "after rollouts, scale-ups and replacements.",
            "short", (Query(grown("warmed_tokens_total"), "tokens"),),
        ),
    ),
)  # fmt: skip
ERRORS = Row(
    "Errors and recovery",
    (
        Panel(
            "Stream errors",
            "Answers per second that ended in an error after they had begun, by cause.",
            "reqps", (Query(grown("stream_errors_total", "cause"), "{{cause}}"),), red=0.1,
        ),
        Panel(
            "Failed attempts",
            "Attempts per second that failed before anything was sent to the client, by cause. Clients do "
            "not notice these failures, because the gateway tries another engine.",
            "reqps", (Query(grown("retries_total", "cause"), "{{cause}}"),), yellow=1,
        ),
        Panel(
            "Resumed answers",
            "Answers per second whose engine was lost before they were complete: `resumed` by another "
            "engine, or `not resumed`, by cause.",
            "reqps",
            (
                Query(grown("resumes_total", "cause"), "resumed: {{cause}}"),
                Query(grown("resume_failures_total", "cause"), "not resumed: {{cause}}"),
            ),
        ),
        Panel(
            "Time to resume",
            "Time from the loss of an engine until its answers got their next token from another engine.",
            "s", quantiles("mizzen_gateway_resume_seconds", OF, (0.5, 0.95)), yellow=5, red=30,
        ),
        Panel(
            "Aborts",
            "Requests per second that the gateway aborted in an engine, by cause. The most common cause is "
            "that the client disconnected.",
            "reqps", (Query(grown("aborts_total", "cause"), "{{cause}}"),),
        ),
        Panel(
            "Circuit breakers",
            "State of each engine's circuit breaker: 0 closed, 1 half-open, 2 open. An engine whose breaker "
            "is open gets no requests.",
            "short",
            (Query(f"max by (engine) (mizzen_gateway_breaker_state{{{OF}}})", "{{engine}}"),),
            yellow=1, red=2,
        ),
        Panel(
            "Suspect engines",
            "Number of engines whose heartbeat is overdue: they hang, or the connection to them is lost.",
            "short", (total("suspect_engines", "suspect"),), red=1,
        ),
        Panel(
            "Pod watch errors",
            "Lists and watches of pods that failed, per second. Meanwhile the gateway keeps its last known "
            "list of engines.",
            "ops", (Query(grown("watch_errors_total"), "failed"),), yellow=0.1,
        ),
        Panel(
            "Routing table in sync",
            "1 while the routing tables of all gateways are current, otherwise 0; a gateway whose table is "
            "not current is not ready.",
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
            "CPU cores that each gateway uses; one gateway process uses at most slightly more than one core.",
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
            "Certificate expires in",
            "Time until the API's certificate expires; infinite if the gateway has no TLS.",
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
    "Requests, latency, queues, routing and errors of the gateways.",
    (
        Variable("namespace", "mizzen_gateway_requests_total", "Namespace"),
        Variable("service", "mizzen_gateway_requests_total", "Service"),
        Variable("model", "mizzen_gateway_requests_total", "Model"),
    ),
    (TRAFFIC, KEYS, LATENCY, ROUTES, STARTS, ERRORS, PROCESS),
    OF,
)
