"""A service that an operator manages, and queries about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from mizzen_operator.kube.last_applied import UNWATCHED

ENGINES = "mizzen.dev/component=engine"


def api_requests(metrics: str) -> dict[tuple[str, str, str], float]:
    """Return an operator's API requests by verb, kind and code, as far as services caused them.

    Leaves out its Lease, and the regular lists of kinds without a watch, which are few for any number of
    services.
    """
    return {
        (one.labels["verb"], one.labels["kind"], one.labels["code"]): one.value
        for family in text_string_to_metric_families(metrics)
        for one in family.samples
        if one.name == "mizzen_operator_api_requests_total" and one.labels["kind"] != "Lease"
        if not (one.labels["verb"] == "GET" and one.labels["kind"] in UNWATCHED)
    }


def none_ends(api: Any) -> bool:
    """Return whether no namespace is terminating, which would cause work for the operator."""
    found = api.request("GET", "/api/v1/namespaces")["items"]
    return not any(one["status"]["phase"] == "Terminating" for one in found)


class Service:
    """One service in a namespace of its own."""

    def __init__(self, api: Any, node: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.node, self.namespace, self.eventually = api, node, namespace, eventually

    def body(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo")

    def status(self) -> dict[str, Any]:
        return self.body().get("status", {})

    def condition(self, name: str) -> dict[str, Any]:
        found = [c for c in self.status().get("conditions", []) if c["type"] == name]
        return found[0] if found else {"status": "Absent", "reason": "", "message": ""}

    def patch(self, **spec: Any) -> None:
        self.api.patch("InferenceService", self.namespace, "demo", {"spec": spec})

    def pods(self) -> list[dict[str, Any]]:
        return self.api.list("Pod", self.namespace, ENGINES)

    def live(self) -> list[str]:
        return sorted(p["metadata"]["name"] for p in self.pods() if "deletionTimestamp" not in p["metadata"])

    def ready(self, groups: int) -> bool:
        """Return whether it is Ready at the newest generation with exactly this many groups."""
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
