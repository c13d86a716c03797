# SPDX-License-Identifier: Apache-2.0
"""The operator dashboard: reconciles, work queue, API server requests and rollouts."""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, quantile, quantiles, rate

OF = 'namespace=~"$namespace"'


def grown(metric: str, by: str = "") -> str:
    """Return the per-second rate of a counter of the operator as PromQL, summed by a label."""
    return rate(f"mizzen_operator_{metric}", by)


CHARGE = Row(
    "Leader election and watches",
    (
        Panel(
            "Leaders",
            "Number of replicas that hold the Lease; normally exactly one. Without a leader, services keep "
            "serving, but nothing is repaired.",
            "short", (Query("sum(mizzen_operator_leader)", "leaders"),), "stat",
            falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Replicas",
            "Number of running operator replicas: the leader and the standbys.",
            "short", (Query("count(mizzen_operator_leader)", "replicas"),), "stat",
            falling=True, red=1, yellow=2, width=4, height=5,
        ),
        Panel(
            "Time since last watch response",
            "Time since the watch of each kind last received a response, which happens at least every four "
            "minutes. After five and a half minutes the watch is considered dead, and the operator is "
            "restarted.",
            "s",
            (Query("max by (kind) (mizzen_operator_watch_last_success_seconds)", "{{kind}}"),),
            yellow=260, red=330,
        ),
    ),
)  # fmt: skip
LOOKS = Row(
    "Reconciles and work queue",
    (
        Panel(
            "Reconciles",
            "Reconciles per second, by result: `ok`; `waits`, for something that no watch reports; "
            "`failure`, which the status reports; `error`, which is retried.",
            "ops", (Query(grown("reconcile_duration_seconds_count", "result"), "{{result}}"),), stacked=True,
        ),
        Panel(
            "Reconcile duration",
            "Duration of one reconcile of one service.",
            "s", quantiles("mizzen_operator_reconcile_duration_seconds"), yellow=1, red=10,
        ),
        Panel(
            "Failed reconciles",
            "Reconciles per second that failed, by reason; they are retried with exponential back-off.",
            "ops", (Query(grown("reconcile_errors_total", "reason"), "{{reason}}"),), red=0.1,
        ),
        Panel(
            "Work queue depth",
            "Number of services that are due for a reconcile.",
            "short", (Query("sum(mizzen_operator_workqueue_depth)", "waiting"),), yellow=50, red=500,
        ),
        Panel(
            "Work queue age",
            "Longest time that a service has been due for a reconcile.",
            "s", (Query("max(mizzen_operator_workqueue_age_seconds)", "oldest"),), yellow=10, red=60,
        ),
        Panel(
            "Changes made",
            "Changes that the operator makes in the cluster per second, by type. While nothing happens in "
            "the cluster, it makes no changes.",
            "ops", (Query(grown("actions_total", "action"), "{{action}}"),), stacked=True,
        ),
    ),
)  # fmt: skip
API = Row(
    "API server and gateways",
    (
        Panel(
            "API server requests",
            "Requests per second, by verb. The token bucket allows 50 writes per second by default.",
            "reqps", (Query(grown("api_requests_total", "verb"), "{{verb}}"),), stacked=True, yellow=45,
        ),
        Panel(
            "API server requests by kind",
            "Requests per second, by kind of object.",
            "reqps", (Query(grown("api_requests_total", "kind"), "{{kind}}"),), stacked=True,
        ),
        Panel(
            "API server errors",
            "Responses per second with a status code other than 2xx, by code; 0 means that no response "
            "arrived. 404 and 409 are normal.",
            "reqps",
            (Query(rate("mizzen_operator_api_requests_total", "code", 'code!~"2.."'), "{{code}}"),),
        ),
        Panel(
            "API server latency",
            "99th percentile of the API server's response time, by verb.",
            "s",
            (
                Query(
                    quantile(0.99, "mizzen_operator_api_request_duration_seconds", "verb"),
                    "{{verb}}",
                ),
            ),
            yellow=1, red=5,
        ),
        Panel(
            "Gateway queries",
            "Requests per second to the gateways' admin API, by result.",
            "reqps", (Query(grown("gateway_queries_total", "result"), "{{result}}"),), stacked=True,
        ),
        Panel(
            "CPU",
            "CPU cores that the operator replicas use.",
            "short",
            (Query('sum by (pod) (rate(process_cpu_seconds_total{job="operator"}[$__rate_interval]))', "{{pod}}"),),
            yellow=0.5, red=0.9,
        ),
    ),
)  # fmt: skip
SERVICES = Row(
    "Services",
    (
        Panel(
            "Services by condition",
            "Number of services for which each condition is True.",
            "short", (Query("sum by (condition) (mizzen_operator_services)", "{{condition}}"),),
        ),
        Panel(
            "Finished rollouts",
            "Number of rollouts in the last hour that were completed, or failed.",
            "short",
            (
                Query(
                    "sum by (result) (increase(mizzen_operator_rollout_duration_seconds_count[1h]))",
                    "{{result}}",
                ),
            ),
        ),
        Panel(
            "Rollout duration",
            "Time from a change of a service until its rollout was complete, over the last hour.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, "
                    "sum by (le) (increase(mizzen_operator_rollout_duration_seconds_bucket[1h])))",
                    f"p{round(share * 100)}",
                )
                for share in (0.5, 0.95)
            ),
            yellow=600, red=1800,
        ),
        Panel(
            "Rollouts in progress",
            "Time since each service's rollout began; 0 if no rollout is in progress.",
            "s",
            (Query(f"max by (namespace, service) (mizzen_operator_rollout_age_seconds{{{OF}}})", "{{namespace}}/{{service}}"),),
            yellow=600, red=1800,
        ),
        Panel(
            "Cold starts",
            "Time from a group's creation until requests were routed to it, over the last hour.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, "
                    "sum by (le) (increase(mizzen_operator_group_start_seconds_bucket[1h])))",
                    f"p{round(share * 100)}",
                )
                for share in (0.5, 0.95)
            ),
            yellow=300, red=900,
        ),
        Panel(
            "Memory",
            "Resident memory of the operator replicas.",
            "bytes", (Query('process_resident_memory_bytes{job="operator"}', "{{pod}}"),),
            yellow=268435456, red=429496729,
        ),
    ),
)  # fmt: skip

OPERATOR = Dashboard(
    "mizzen-operator",
    "Mizzen / Operator",
    "Reconciles, work queue, API server requests and rollouts of the operator.",
    (Variable("namespace", "mizzen_operator_service_groups", "Namespace"),),
    (CHARGE, LOOKS, API, SERVICES),
    OF,
)
