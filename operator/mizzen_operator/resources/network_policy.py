"""NetworkPolicies: who may reach engines, gateways and fetches. Probes of a node's kubelet always get in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.metadata import metadata, stamped

PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
"""The label that Prometheus' pods have by convention, in whichever namespace they are."""
OPERATOR = {"app.kubernetes.io/component": "operator"}
NAMESPACE = "kubernetes.io/metadata.name"


def policies(service: InferenceService, config: OperatorConfig) -> list[dict[str, Any]]:
    """The policies of a service's engines and, unless it is shared, of its gateway.

    Engines hear the gateway on the wire and Prometheus on the metrics' port; the gateway hears anyone on its
    API's port, and on its admin port the operator and Prometheus. Pods of groups reach one another on any
    port: ranks choose theirs as they meet.
    """
    engines = {labels.SERVICE: service.name, labels.COMPONENT: labels.ENGINE}
    gateway = {labels.SERVICE: service.name, labels.COMPONENT: labels.GATEWAY}
    if service.shared:
        gateway = {labels.GATEWAY_LABEL: labels.SHARED, labels.COMPONENT: labels.GATEWAY}
    prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": PROMETHEUS}}
    operator = _operator(config)
    made = [
        _policy(
            metadata(service, child_names.engine_network_policy(service.name), labels.ENGINE),
            engines,
            [
                _rule(labels.WIRE_PORT, {"podSelector": {"matchLabels": gateway}}),
                _rule(labels.ODD_WIRE_PORT, {"podSelector": {"matchLabels": gateway}}),
                _rule(labels.ENGINE_HTTP_PORT, prometheus),
                *([{"from": [{"podSelector": {"matchLabels": engines}}]}] if service.pods > 1 else []),
            ],
        )
    ]
    if not service.shared:
        made.append(
            _policy(
                metadata(service, child_names.gateway_name(service.name), labels.GATEWAY),
                gateway,
                [
                    _rule(labels.HTTP_PORT),
                    _rule(labels.ADMIN_PORT, operator, prometheus),
                    {"ports": [{"protocol": "UDP", "port": labels.ADMIN_PORT}], "from": [operator]},
                ],
            )
        )
    return made


def fetch_policy(service: InferenceService, config: OperatorConfig) -> dict[str, Any]:
    """The policy of the pods that fetch a service's model: the operator asks them how far they are."""
    pods = {labels.SERVICE: service.name, labels.COMPONENT: labels.FETCH}
    meta = metadata(service, child_names.fetch_network_policy(service.name), labels.FETCH)
    return _policy(meta, pods, [_rule(labels.FETCH_PORT, _operator(config))])


def _operator(config: OperatorConfig) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE: config.lease_namespace}},
        "podSelector": {"matchLabels": OPERATOR},
    }


def _rule(port: int, *peers: Mapping[str, Any]) -> dict[str, Any]:
    """What lets peers reach a port; anyone without peers."""
    rule: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": port}]}
    return {**rule, "from": list(peers)} if peers else rule


def _policy(
    meta: dict[str, Any], selector: Mapping[str, str], ingress: list[dict[str, Any]]
) -> dict[str, Any]:
    manifest = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta,
        "spec": {
            "podSelector": {"matchLabels": dict(selector)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
    return stamped(manifest)
