"""The first dashboard of an on-call engineer: is a service up, is it fast, is it full?"""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, quantile, quantiles, rate

OF = 'namespace=~"$namespace",service=~"$service"'
REQUESTS = f"mizzen_gateway_requests_total{{{OF}"
ALL = f"sum(rate({REQUESTS}}}[$__rate_interval]))"
FAILED = f'(sum(rate({REQUESTS},code=~"5.."}}[$__rate_interval])) or vector(0))'
BROKEN = f"(sum(rate(mizzen_gateway_stream_errors_total{{{OF}}}[$__rate_interval])) or vector(0))"
FIRST = "mizzen_gateway_time_to_first_token_seconds"
SLOW = f'sum(rate({FIRST}_bucket{{{OF},le="2.0"}}[$__rate_interval]))'

UP = Row(
    "Is it up?",
    (
        Panel(
            "Good requests",
            "Share of requests that were neither answered with 5xx nor broken off. The objective is 99.9 %.",
            "percentunit",
            (Query(f"1 - ({FAILED} + {BROKEN}) / {ALL}", "good"),),
            "stat", falling=True, red=0.99, yellow=0.999, width=4, height=5,
        ),
        Panel(
            "Services available",
            "Share of the services chosen whose condition Available is True: a request would be answered now.",
            "percentunit",
            (Query(f'avg(mizzen_operator_service_condition{{{OF},condition="Available"}})', "available"),),
            "stat", falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Serving engines",
            "Engines that gateways route to, as the gateway that knows most of them sees it.",
            "short",
            (Query(f'sum(max by (namespace, service) (mizzen_gateway_engines{{{OF},state="serving"}}))', "serving"),),
            "stat", falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Groups missing",
            "Groups that specs ask for and requests do not reach.",
            "short",
            (
                Query(
                    f'sum(mizzen_operator_service_groups{{{OF},state="wanted"}}) - '
                    f'sum(mizzen_operator_service_groups{{{OF},state="available"}})',
                    "missing",
                ),
            ),
            "stat", yellow=1, red=2, width=4, height=5,
        ),
        Panel(
            "Engine restarts in the last hour",
            "Engines that ended by themselves and were started again. One now and then is a fault that was "
            "healed; several an hour are a reason to look at the log of the last one.",
            "short",
            (Query(f"sum(increase(mizzen_operator_group_restarts_total{{{OF}}}[1h]))", "restarts"),),
            "stat", yellow=1, red=3, width=4, height=5,
        ),
        Panel(
            "Rollout under way for",
            "How long the oldest change that is not yet in force takes; 0 without one.",
            "s",
            (Query(f"max(mizzen_operator_rollout_age_seconds{{{OF}}})", "rollout"),),
            "stat", yellow=600, red=1800, width=4, height=5,
        ),
        Panel(
            "Requests by status code",
            "Answers a second by status code; 499 are clients that left before theirs began.",
            "reqps",
            (Query(rate("mizzen_gateway_requests_total", "code", OF), "{{code}}"),),
            width=12, stacked=True,
        ),
        Panel(
            "Failures",
            "Answers with 5xx, and answers that broke off after they had begun, a second.",
            "reqps",
            (
                Query(rate("mizzen_gateway_requests_total", "code", f'{OF},code=~"5.."'), "{{code}}"),
                Query(rate("mizzen_gateway_stream_errors_total", "cause", OF), "broken off: {{cause}}"),
            ),
            red=0.1, width=12,
        ),
    ),
)  # fmt: skip
FAST = Row(
    "Is it fast?",
    (
        Panel(
            "Time to the first token",
            "From a request's arrival at the gateway to its first token, as clients feel it: queue, prompt and "
            "all. The objective is 2 s.",
            "s", quantiles(FIRST, OF), yellow=1, red=2,
        ),
        Panel(
            "Within the objective of the first token",
            "Share of requests whose first token came within 2 s; the objective is 99 %.",
            "percentunit",
            (Query(f"{SLOW} / sum(rate({FIRST}_count{{{OF}}}[$__rate_interval]))", "within 2 s"),),
            falling=True, red=0.95, yellow=0.99, most=1,
        ),
        Panel(
            "Between tokens",
            "Time between two deliveries of tokens of a stream, by token. Above a tenth of a second a text comes "
            "more slowly than people read.",
            "s", quantiles("mizzen_gateway_inter_token_seconds", OF), yellow=0.1, red=0.2,
        ),
        Panel(
            "Whole requests",
            "From a request's arrival to its last byte; long answers take long.",
            "s", quantiles("mizzen_gateway_request_seconds", OF),
        ),
        Panel(
            "Tokens generated",
            "Tokens a second that clients got, by model.",
            "short", (Query(rate("mizzen_gateway_output_tokens_total", "model", OF), "{{model}}"),), stacked=True,
        ),
    ),
)  # fmt: skip
FULL = Row(
    "Is it full?",
    (
        Panel(
            "Requests in the engines",
            "Requests that hold a slot, and requests that wait in an engine's queue.",
            "short",
            (
                Query(f"sum(mizzen_engine_running_requests{{{OF}}})", "running"),
                Query(f"sum(mizzen_engine_waiting_requests{{{OF}}})", "waiting"),
            ),
        ),
        Panel(
            "Requests in the gateways' queues",
            "Requests that wait for their turn, and those of them that wait because no engine serves: more than 0 "
            "of these wake a service that was scaled to zero.",
            "short",
            (
                Query(f"sum(mizzen_gateway_queued_requests{{{OF}}})", "queued"),
                Query(f"sum(mizzen_gateway_waiting_requests{{{OF}}})", "without an engine"),
            ),
            yellow=10, red=100,
        ),
        Panel(
            "Time in queues",
            "How long requests waited in the gateway's queue, and how long the engine's oldest request without a "
            "token waits now.",
            "s",
            (
                Query(quantile(0.95, "mizzen_gateway_queue_seconds", "", OF), "gateway, p95"),
                Query(f"max(mizzen_engine_oldest_wait_seconds{{{OF}}})", "engine, oldest"),
            ),
            yellow=5, red=15,
        ),
        Panel(
            "KV cache in use",
            "Share of the KV cache that running requests hold, by engine. What the prefix cache alone holds is "
            "free on demand and not counted. Near 100 % requests wait or are put back.",
            "percentunit",
            (
                Query(
                    f"mizzen_engine_kv_pages_used{{{OF}}} / mizzen_engine_kv_pages{{{OF}}}",
                    "{{pod}}",
                ),
            ),
            yellow=0.9, red=0.95, most=1,
        ),
        Panel(
            "Refused requests",
            "Requests answered with 401, 403, 413, 429 or 503, a second, by error code.",
            "reqps", (Query(rate("mizzen_gateway_refused_requests_total", "cause", OF), "{{cause}}"),),
        ),
    ),
)  # fmt: skip

SERVICE = Dashboard(
    "mizzen-service",
    "Mizzen / Service",
    "Is a service up, is it fast, is it full? The place to begin when an alert fires.",
    (
        Variable("namespace", "mizzen_gateway_requests_total", "Namespace"),
        Variable("service", "mizzen_gateway_requests_total", "Service"),
    ),
    (UP, FAST, FULL),
)
