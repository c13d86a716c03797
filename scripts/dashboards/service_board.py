"""The service dashboard, where an on-call engineer starts: is a service up, is it fast, is it full?"""

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
            "Successful requests",
            "Share of requests that neither got a 5xx response nor broke off. The objective is 99.9 %.",
            "percentunit",
            (Query(f"1 - ({FAILED} + {BROKEN}) / {ALL}", "good"),),
            "stat", falling=True, red=0.99, yellow=0.999, width=4, height=5,
        ),
        Panel(
            "Available services",
            "Share of the selected services whose condition Available is True: a request sent now would be "
            "answered.",
            "percentunit",
            (Query(f'avg(mizzen_operator_service_condition{{{OF},condition="Available"}})', "available"),),
            "stat", falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Serving engines",
            "Engines that gateways route to. Of several gateways, the one that sees the most engines "
            "counts.",
            "short",
            (Query(f'sum(max by (namespace, service) (mizzen_gateway_engines{{{OF},state="serving"}}))', "serving"),),
            "stat", falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Missing groups",
            "Groups that the specs ask for but that requests do not reach.",
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
            "Engines that ended by themselves and were restarted. An occasional restart is a fault that has "
            "been recovered; for several an hour, look at the log of the latest one.",
            "short",
            (Query(f"sum(increase(mizzen_operator_group_restarts_total{{{OF}}}[1h]))", "restarts"),),
            "stat", yellow=1, red=3, width=4, height=5,
        ),
        Panel(
            "Age of the oldest rollout",
            "How long ago the oldest change that is not yet in force was made; 0 if there is none.",
            "s",
            (Query(f"max(mizzen_operator_rollout_age_seconds{{{OF}}})", "rollout"),),
            "stat", yellow=600, red=1800, width=4, height=5,
        ),
        Panel(
            "Requests by status code",
            "Responses per second, by status code; 499 means that the client disconnected before the "
            "response began.",
            "reqps",
            (Query(rate("mizzen_gateway_requests_total", "code", OF), "{{code}}"),),
            width=12, stacked=True,
        ),
        Panel(
            "Failures",
            "5xx responses, and answers that broke off after they had begun, per second.",
            "reqps",
            (
                Query(rate("mizzen_gateway_requests_total", "code", f'{OF},code=~"5.."'), "{{code}}"),
                Query(rate("mizzen_gateway_stream_errors_total", "cause", OF), "stream error: {{cause}}"),
            ),
            red=0.1, width=12,
        ),
    ),
)  # fmt: skip
FAST = Row(
    "Is it fast?",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the gateway to its first token, as clients see it, including "
            "queueing and prefill. The objective is 2 s.",
            "s", quantiles(FIRST, OF), yellow=1, red=2,
        ),
        Panel(
            "First tokens within the objective",
            "Share of requests whose first token arrived within 2 s; the objective is 99 %.",
            "percentunit",
            (Query(f"{SLOW} / sum(rate({FIRST}_count{{{OF}}}[$__rate_interval]))", "within 2 s"),),
            falling=True, red=0.95, yellow=0.99, most=1,
        ),
        Panel(
            "Inter-token latency",
            "Time between two deliveries of tokens on a stream, weighted by token. Above 0.1 s, text "
            "arrives more slowly than people read.",
            "s", quantiles("mizzen_gateway_inter_token_seconds", OF), yellow=0.1, red=0.2,
        ),
        Panel(
            "Request duration",
            "From a request's arrival to the last byte of its response; long answers take long.",
            "s", quantiles("mizzen_gateway_request_seconds", OF),
        ),
        Panel(
            "Tokens generated",
            "Tokens per second delivered to clients, by model.",
            "short", (Query(rate("mizzen_gateway_output_tokens_total", "model", OF), "{{model}}"),), stacked=True,
        ),
    ),
)  # fmt: skip
FULL = Row(
    "Is it full?",
    (
        Panel(
            "Requests in engines",
            "Requests that hold a slot, and requests that wait in an engine's queue.",
            "short",
            (
                Query(f"sum(mizzen_engine_running_requests{{{OF}}})", "running"),
                Query(f"sum(mizzen_engine_waiting_requests{{{OF}}})", "waiting"),
            ),
        ),
        Panel(
            "Requests queued in gateways",
            "Requests in the gateways' queues, and those of them that wait because no engine serves. If the "
            "latter is above 0, a service that was scaled to zero is woken up.",
            "short",
            (
                Query(f"sum(mizzen_gateway_queued_requests{{{OF}}})", "queued"),
                Query(f"sum(mizzen_gateway_waiting_requests{{{OF}}})", "waiting for an engine"),
            ),
            yellow=10, red=100,
        ),
        Panel(
            "Queue time",
            "How long requests waited in the gateway's queue, and how long the oldest request in an engine "
            "has been waiting for its first token.",
            "s",
            (
                Query(quantile(0.95, "mizzen_gateway_queue_seconds", "", OF), "gateway, p95"),
                Query(f"max(mizzen_engine_oldest_wait_seconds{{{OF}}})", "engine, oldest"),
            ),
            yellow=5, red=15,
        ),
        Panel(
            "KV cache usage",
            "Share of the KV cache that running requests hold, by engine. Pages that only the prefix cache "
            "holds are reclaimed on demand and are not counted. Near 100 %, requests wait or are preempted.",
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
            "Rejected requests",
            "Requests per second answered with 401, 403, 413, 429 or 503, by error code.",
            "reqps", (Query(rate("mizzen_gateway_refused_requests_total", "cause", OF), "{{cause}}"),),
        ),
    ),
)  # fmt: skip

SERVICE = Dashboard(
    "mizzen-service",
    "Mizzen / Service",
    "Is a service up, is it fast, is it full? Start here when an alert fires.",
    (
        Variable("namespace", "mizzen_gateway_requests_total", "Namespace"),
        Variable("service", "mizzen_gateway_requests_total", "Service"),
    ),
    (UP, FAST, FULL),
)
