"""What the operator does: looks at services, rollouts, its queue, calls of the API server."""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, quantile, quantiles, rate

OF = 'namespace=~"$namespace"'


def grown(metric: str, by: str = "") -> str:
    """Return a counter's growth a second."""
    return rate(f"mizzen_operator_{metric}", by)


CHARGE = Row(
    "Is anybody in charge?",
    (
        Panel(
            "Leaders",
            "Replicas that lead. Exactly one works; without one nothing is repaired, though services go on serving.",
            "short", (Query("sum(mizzen_operator_leader)", "leaders"),), "stat",
            falling=True, red=1, width=4, height=5,
        ),
        Panel(
            "Replicas",
            "Operators that are there, the leader and those that wait to take over.",
            "short", (Query("count(mizzen_operator_leader)", "replicas"),), "stat",
            falling=True, red=1, yellow=2, width=4, height=5,
        ),
        Panel(
            "Watches answered",
            "Time since each kind's watch was answered last. A watch is answered every four minutes at least; beyond "
            "five and a half, nobody watches, and the operator is restarted.",
            "s",
            (Query("max by (kind) (mizzen_operator_watch_last_success_seconds)", "{{kind}}"),),
            yellow=260, red=330,
        ),
    ),
)  # fmt: skip
LOOKS = Row(
    "Looks and queue",
    (
        Panel(
            "Looks at services",
            "Reconciles a second, by how they ended: `ok`, `waits` for something that no watch tells of, `failure` "
            "that the status names, `error`.",
            "ops", (Query(grown("reconcile_duration_seconds_count", "result"), "{{result}}"),), stacked=True,
        ),
        Panel(
            "Time of a look",
            "How long a look at one service took.",
            "s", quantiles("mizzen_operator_reconcile_duration_seconds"), yellow=1, red=10,
        ),
        Panel(
            "Failed looks",
            "Reconciles a second that failed, by reason; they are tried again, ever more slowly.",
            "ops", (Query(grown("reconcile_errors_total", "reason"), "{{reason}}"),), red=0.1,
        ),
        Panel(
            "Services that wait",
            "Services that are due for a look.",
            "short", (Query("sum(mizzen_operator_workqueue_depth)", "waiting"),), yellow=50, red=500,
        ),
        Panel(
            "Age of the queue",
            "How long the service waits that waits longest for a look.",
            "s", (Query("max(mizzen_operator_workqueue_age_seconds)", "oldest"),), yellow=10, red=60,
        ),
        Panel(
            "Changes made",
            "Changes to the cluster a second, by what was changed. None in a cluster where nothing happens.",
            "ops", (Query(grown("actions_total", "action"), "{{action}}"),), stacked=True,
        ),
    ),
)  # fmt: skip
API = Row(
    "Calls",
    (
        Panel(
            "Requests to the API server",
            "Requests a second, by verb. The token bucket allows 50 a second by default.",
            "reqps", (Query(grown("api_requests_total", "verb"), "{{verb}}"),), stacked=True, yellow=45,
        ),
        Panel(
            "Requests by kind of object",
            "Requests to the API server a second, by the kind of object asked for.",
            "reqps", (Query(grown("api_requests_total", "kind"), "{{kind}}"),), stacked=True,
        ),
        Panel(
            "Answers other than good",
            "Answers of the API server a second that were not 2xx, by code; 0 is no answer. 404 and 409 are usual.",
            "reqps",
            (Query(rate("mizzen_operator_api_requests_total", "code", 'code!~"2.."'), "{{code}}"),),
        ),
        Panel(
            "Time of requests",
            "The 99th percentile of the time until the API server answered, by verb.",
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
            "Questions to gateways",
            "Questions to gateways' admin API a second, by how they ended.",
            "reqps", (Query(grown("gateway_queries_total", "result"), "{{result}}"),), stacked=True,
        ),
        Panel(
            "CPU",
            "Cores that the operators use.",
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
            "Services whose condition is True.",
            "short", (Query("sum by (condition) (mizzen_operator_services)", "{{condition}}"),),
        ),
        Panel(
            "Rollouts that ended",
            "Changes of services in the last hour that came into force, or failed.",
            "short",
            (
                Query(
                    "sum by (result) (increase(mizzen_operator_rollout_duration_seconds_count[1h]))",
                    "{{result}}",
                ),
            ),
        ),
        Panel(
            "Time of a rollout",
            "From a change of a service until nothing was left to do, over the last hour.",
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
            "Rollouts under way",
            "How long each service's change is under way; 0 without one.",
            "s",
            (Query(f"max by (namespace, service) (mizzen_operator_rollout_age_seconds{{{OF}}})", "{{namespace}}/{{service}}"),),
            yellow=600, red=1800,
        ),
        Panel(
            "Cold starts",
            "From a group's creation until requests are routed to it, over the last hour.",
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
            "Resident memory of the operators.",
            "bytes", (Query('process_resident_memory_bytes{job="operator"}', "{{pod}}"),),
            yellow=268435456, red=429496729,
        ),
    ),
)  # fmt: skip

OPERATOR = Dashboard(
    "mizzen-operator",
    "Mizzen / Operator",
    "Looks at services, rollouts, the queue and calls of the operator.",
    (Variable("namespace", "mizzen_operator_service_groups", "Namespace"),),
    (CHARGE, LOOKS, API, SERVICES),
)
