# SPDX-License-Identifier: Apache-2.0
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
    "Availability",
    (
        Panel(
            "Successful requests",
            "Share of requests that got no 5xx response and whose answer did not break off. The objective is "
            "99.9 %.",
            "percentunit",
            (Query(f"1 - ({FAILED} + {BROKEN}) / {ALL}", "good"),),
            "stat", falling=True, red=0.99, yellow=0.999, width=4, height=5,
        ),
        Panel(
            "Available services",
            "Share of the selected services whose condition Available is True, so that a request sent now "
            "would be answered.",
            "percentunit",
            (Query(f'avg(mizzen_operator_service_condition{{{OF},condition="Available"}})', "available"),),
            "stat", falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Serving engines",
            "Number of engines to which gateways route requests. If gateways disagree, the largest number is "
            "shown.",
            "short",
            (Query(f'sum(max by (namespace, service) (mizzen_gateway_engines{{{OF},state="serving"}}))', "serving"),),
            "stat", falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Missing groups",
            "Number of groups that the specs want but to which no requests are routed.",
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
            "Number of engines that exited by themselves and were restarted. An occasional restart means "
            "that a fault was repaired; if several happen per hour, read the log of the latest one.",
            "short",
            (Query(f"sum(increase(mizzen_operator_group_restarts_total{{{OF}}}[1h]))", "restarts"),),
            "stat", yellow=1, red=3, width=4, height=5,
        ),
        Panel(
            "Age of the oldest rollout",
            "Time since the oldest change whose rollout is not complete; 0 if no rollout is in progress.",
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
            "5xx responses per second by status code, and answers per second that broke off, by cause.",
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
    "Latency and throughput",
    (
        Panel(
            "Time to first token (TTFT)",
            "Time from a request's arrival at the gateway to its first token, including queueing and "
            "prefill. The objective is 2 s.",
            "s", quantiles(FIRST, OF), yellow=1, red=2,
        ),
        Panel(
            "First tokens within the objective",
            "Share of requests whose first token arrived within 2 s. The objective is 99 %.",
            "percentunit",
            (Query(f"{SLOW} / sum(rate({FIRST}_count{{{OF}}}[$__rate_interval]))", "within 2 s"),),
            falling=True, red=0.95, yellow=0.99, most=1,
        ),
        Panel(
            "Inter-token latency (ITL)",
            "Time between consecutive deliveries of tokens on a stream, weighted by the number of tokens. "
            "Above 0.1 s, text arrives more slowly than people read.",
            "s", quantiles("mizzen_gateway_inter_token_seconds", OF), yellow=0.1, red=0.2,
        ),
        Panel(
            "End-to-end latency",
            "Time from a request's arrival at the gateway to the last byte of its response, which depends "
            "mostly on the length of the answer.",
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
    "Saturation",
    (
        Panel(
            "Requests in engines",
            "Requests that run in a slot of an engine, and requests that wait in an engine's queue.",
            "short",
            (
                Query(f"sum(mizzen_engine_running_requests{{{OF}}})", "running"),
                Query(f"sum(mizzen_engine_waiting_requests{{{OF}}})", "waiting"),
            ),
        ),
        Panel(
            "Requests queued in gateways",
            "Requests in the gateways' queues; `waiting for an engine` counts the requests that wait because "
            "no engine serves. They wake up a service that was scaled to zero.",
            "short",
            (
                Query(f"sum(mizzen_gateway_queued_requests{{{OF}}})", "queued"),
                Query(f"sum(mizzen_gateway_waiting_requests{{{OF}}})", "waiting for an engine"),
            ),
            yellow=10, red=100,
        ),
        Panel(
            "Queue time",
            "Time that requests waited in the gateway's queue, and time that the oldest request in an engine "
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
            "Requests per second answered with 401, 403, 413, 429, 503 or 529, by error code.",
            "reqps", (Query(rate("mizzen_gateway_refused_requests_total", "cause", OF), "{{cause}}"),),
        ),
    ),
)  # fmt: skip

SCALING = Row(
    "Autoscaling",
    (
        Panel(
            "Autoscaler saturation",
            "Load of each service with `spec.autoscaling`, divided by the target of its serving groups. Above "
            "1, the service needs more groups.",
            "short",
            (Query(f"max by (namespace, service) (mizzen_operator_autoscaler_saturation{{{OF}}})", "{{service}}"),),
            yellow=1.1, red=2,
        ),
        Panel(
            "Groups and autoscaler",
            "Number of groups that the load needs (`desired`, before the limits of the spec are applied), that "
            "the spec wants, and that are available.",
            "short",
            (
                Query(f"sum(mizzen_operator_autoscaler_desired_groups{{{OF}}})", "desired"),
                Query(f'sum(mizzen_operator_service_groups{{{OF},state="wanted"}})', "wanted"),
                Query(f'sum(mizzen_operator_service_groups{{{OF},state="available"}})', "available"),
            ),
        ),
        Panel(
            "Autoscalers at their maximum",
            "Number of services that have `maxReplicas` groups while their load needs more.",
            "short", (Query(f"sum(mizzen_operator_autoscaler_at_maximum{{{OF}}})", "at maximum"),), red=1,
        ),
        Panel(
            "Autoscaler decisions",
            "Number of times in the last hour that the autoscaler changed `spec.replicas`, by reason.",
            "short",
            (
                Query(
                    f"sum by (reason) (increase(mizzen_operator_autoscaler_decisions_total{{{OF}}}[1h]))",
                    "{{reason}}",
                ),
            ),
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
    (UP, FAST, FULL, SCALING),
    OF,
)
