# SPDX-License-Identifier: Apache-2.0
"""A service that an operator manages, and queries about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from mizzen_operator.kube.last_applied import UNWATCHED

ENGINES = "mizzen.dev/component=engine"


def api_requests(metrics: str) -> dict[tuple[str, str, str], float]:
    """Return the number of an operator's API requests by verb, kind and code, from its metrics.

    Requests for the Lease and the regular lists of unwatched kinds are left out, because services do not
    cause them.
    """
    return {
        (sample.labels["verb"], sample.labels["kind"], sample.labels["code"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "mizzen_operator_api_requests_total" and sample.labels["kind"] != "Lease"
        if not (sample.labels["verb"] == "GET" and sample.labels["kind"] in UNWATCHED)
    }


def no_namespace_terminates(api: Any) -> bool:
    """Return whether no namespace is terminating; a terminating one would cause work for the operator."""
    namespaces = api.request("GET", "/api/v1/namespaces")["items"]
    return not any(namespace["status"]["phase"] == "Terminating" for namespace in namespaces)


class Service:
    """The service `demo` in a namespace of its own, and queries about it."""

    def __init__(self, api: Any, node: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.node, self.namespace, self.eventually = api, node, namespace, eventually

    def body(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo")

    def status(self) -> dict[str, Any]:
        return self.body().get("status", {})

    def condition(self, name: str) -> dict[str, Any]:
        absent = {"status": "Absent", "reason": "", "message": ""}
        return next((c for c in self.status().get("conditions", []) if c["type"] == name), absent)

    def patch(self, **spec: Any) -> None:
        self.api.patch("InferenceService", self.namespace, "demo", {"spec": spec})

    def pods(self) -> list[dict[str, Any]]:
        return self.api.list("Pod", self.namespace, ENGINES)

    def live(self) -> list[str]:
        return sorted(p["metadata"]["name"] for p in self.pods() if "deletionTimestamp" not in p["metadata"])

    def ready(self, groups: int) -> bool:
        """Return whether the service is Ready at its newest generation with exactly `groups` groups."""
        body = self.body()
        status = body.get("status", {})
        ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
        return (
            ready.get("status") == "True"
            and ready["observedGeneration"] == status["observedGeneration"] == body["metadata"]["generation"]
            and status["availableReplicas"] == status["replicas"] == groups == len(self.pods())
        )

    def settle(self, groups: int, seconds: float = 90) -> None:
        try:
            self.eventually(lambda: self.ready(groups), seconds)
        except AssertionError:
            raise AssertionError(f"not Ready with {groups} groups: {self.status()}") from None
