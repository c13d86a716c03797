# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies of a service: allowed peers of each port; a changed spec creates or deletes policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FILES = {"source": "file:///models/demo", "cache": None}


def allowed_peers(policy: dict[str, Any]) -> dict[int, list[dict[str, Any]] | None]:
    """Return the allowed peers of each TCP port of a policy's pods; None stands for all peers."""
    rules = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["protocol"] == "TCP"]
    return {rule["ports"][0]["port"]: rule.get("from") for rule in rules}


def test_policies_admit_only_the_gateway_prometheus_and_the_operator(
    api: Any,
    operators: Any,
    node: Any,
    namespace: str,
    minimal: Callable[..., Any],
    eventually: Callable[..., Any],
) -> None:
    body = minimal(engine={"device": "CPU"}, gateway={"replicas": 1}, networkPolicy="Enabled", replicas=0)
    body["metadata"]["namespace"] = namespace
    api.create(body)

    def names() -> list[str]:
        return sorted(policy["metadata"]["name"] for policy in api.list("NetworkPolicy", namespace))

    eventually(lambda: names() == ["demo-engine", "demo-gateway"], 120)
    engine, gateway = (api.get("NetworkPolicy", namespace, name) for name in names())
    assert engine["spec"]["podSelector"]["matchLabels"]["mizzen.dev/component"] == "engine"
    assert engine["spec"]["policyTypes"] == gateway["spec"]["policyTypes"] == ["Ingress"]
    wire = allowed_peers(engine)[5557]
    assert wire is not None
    assert [peer["podSelector"]["matchLabels"]["mizzen.dev/component"] for peer in wire] == ["gateway"]
    assert not any("namespaceSelector" in peer for peer in wire)
    metrics = allowed_peers(engine)[8081]
    assert metrics is not None
    assert metrics[0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    assert set(allowed_peers(engine)) == {5557, 5558, 8081}
    assert allowed_peers(gateway)[8000] is None
    admin = allowed_peers(gateway)[8001]
    assert admin is not None
    space = admin[0]["namespaceSelector"]["matchLabels"]
    assert space == {"kubernetes.io/metadata.name": "mizzen-system"}
    own = {"mizzen.dev/service": "demo", "mizzen.dev/component": "gateway"}
    assert admin[2] == {"podSelector": {"matchLabels": own}}, "gateway pods share the limits of API keys"
    assert set(allowed_peers(gateway)) == {8000, 8001}
    model = {
        "source": "hf://org/tiny",
        "cache": {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "1Gi"},
    }
    api.patch("InferenceService", namespace, "demo", {"spec": {"model": model}})
    eventually(lambda: names() == ["demo-engine", "demo-fetch", "demo-gateway"], 120)
    fetch = api.get("NetworkPolicy", namespace, "demo-fetch")
    assert fetch["spec"]["podSelector"]["matchLabels"]["mizzen.dev/component"] == "fetch"
    assert allowed_peers(fetch) == {8082: [admin[0]]}
    api.patch("InferenceService", namespace, "demo", {"spec": {"model": FILES}})
    eventually(lambda: names() == ["demo-engine", "demo-gateway"], 120)
    api.patch("InferenceService", namespace, "demo", {"spec": {"networkPolicy": "Disabled"}})
    eventually(lambda: names() == [], 120)
    api.delete("InferenceService", namespace, "demo")
