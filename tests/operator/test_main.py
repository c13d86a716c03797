# SPDX-License-Identifier: Apache-2.0
"""The operator's process: it is quiet when idle, hands over to another replica, and reports its health."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from live_service import Service, api_requests, no_namespace_terminates
from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE


@pytest.fixture
def service(live_service: Callable[..., Service]) -> Callable[..., Service]:
    return live_service


def label(body: dict[str, Any], name: str) -> str:
    return body["metadata"]["labels"][f"mizzen.dev/{name}"]


WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")
IDLE_SECONDS = 20.0
"""An operator that polls at any shorter interval is not idle."""
NOT_OURS = ("leases", "tokenreviews", "subjectaccessreviews")


def writes(api: Any) -> dict[tuple[str, str], float]:
    """Count API writes by verb and resource; Leases, token reviews and access reviews are not counted."""
    counts: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(api.text("/metrics")):
        for sample in family.samples if family.name == "apiserver_request" else ():
            label = sample.labels
            if label["verb"] in WRITES and label["resource"] not in NOT_OURS:
                key = (label["verb"], f"{label['resource']}/{label['subresource']}")
                counts[key] = counts.get(key, 0) + sample.value
    return counts


def test_an_idle_operator_sends_no_requests_and_kopf_leaves_no_trace(
    service: Callable[..., Service], api: Any, operators: Any
) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    demo.eventually(lambda: not [p for p in demo.pods() if "deletionTimestamp" in p["metadata"]])
    demo.eventually(lambda: no_namespace_terminates(api), 120, "the namespaces of earlier tests are gone")
    assert writes(api)["POST", "inferenceservices/"] > 0
    assert writes(api)["APPLY", "inferenceservices/status"] > 0

    def requests() -> tuple[object, object]:
        return writes(api), api_requests(operators.http(operators.leader(), "/metrics"))

    def idle() -> bool:
        before = requests()
        for _ in range(2):  # so that a busy operator is seen after half of the time
            time.sleep(IDLE_SECONDS / 2)
            if requests() != before:
                return False
        return True

    # Work caused by earlier tests, or a regular reconcile, may fall into one of the intervals.
    demo.eventually(idle, 8 * IDLE_SECONDS, "neither a write nor a read")
    for kind in ("InferenceService", "Pod", "Deployment", "Service", "Secret"):
        for body in api.list(kind, demo.namespace):
            meta = body["metadata"]
            assert not meta.get("finalizers"), body
            assert not [name for name in meta.get("annotations", {}) if "kopf" in name], body
            assert "kopf" not in str(meta["managedFields"]), body


def test_another_operator_takes_over_at_once_after_sigterm(
    service: Callable[..., Service], operators: Any, eventually: Callable[..., Any]
) -> None:
    demo = service()
    demo.settle(1)
    first = operators.leader()
    second = operators.start()
    eventually(lambda: operators.answers(second))
    assert operators.kill(first, signal.SIGTERM) == 0
    assert operators.leader() in ("", second)  # released, so that no replica waits until it expires
    eventually(lambda: operators.leader() == second)
    demo.patch(replicas=2)
    demo.settle(2)


def test_another_operator_takes_over_after_sigkill_without_duplicate_or_lost_groups(
    service: Callable[..., Service], operators: Any, node: Any, eventually: Callable[..., Any]
) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    before = set(demo.live())
    node.reset_lowest(demo.namespace)
    second = operators.start()
    demo.patch(engine={"pageSize": 64})
    demo.eventually(lambda: set(demo.live()) - before)
    operators.kill(operators.leader())
    eventually(lambda: operators.leader() == second)
    demo.settle(2)
    assert node.lowest[demo.namespace] == 2
    ours = [name for name in node.names if name.startswith(f"{demo.namespace}/demo-")]
    assert len(ours) == len(set(ours))


def test_the_leader_serves_health_and_metrics_and_logs_no_errors(operators: Any) -> None:
    leader = operators.leader()
    assert operators.http(leader, "/healthz") == "ok\n"
    assert operators.http(leader, "/readyz") == "ok\n"
    families = {f.name: f for f in text_string_to_metric_families(operators.http(leader, "/metrics"))}
    assert families["mizzen_operator_leader"].samples[0].value == 1
    assert families["mizzen_operator_workqueue_depth"].samples[0].value >= 0
    ages = {s.labels["kind"]: s.value for s in families["mizzen_operator_watch_last_success_seconds"].samples}
    assert set(ages) == {"inferenceservices", "pods", "deployments", "services"}
    assert max(ages.values()) < 300
    # Not all tracebacks: kopf and aiohttp log some after tests in which the API server fails.
    errors = re.findall(r".*(?:unexpected error|the controller failed).*", operators.log())
    assert not [line for line in errors if not any(name in line for name in operators.expected_errors)]
