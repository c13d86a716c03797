# SPDX-License-Identifier: Apache-2.0
"""Builds the NetworkPolicies of engine, gateway and fetch pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.metadata import metadata, with_applied_hash

PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
"""Label that Prometheus pods have by convention; the policies admit such pods from every namespace."""
OPERATOR = {"app.kubernetes.io/component": "operator"}
NAMESPACE = "kubernetes.io/metadata.name"


def service_network_policies(service: InferenceService, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the policies of a service's engines and, if the service has its own gateway, of the gateway.

    Engines admit gateways to the wire ports and Prometheus to the metrics port. A gateway pod admits everyone
    to its API port, and the operator, Prometheus and the gateway's other pods to its admin port. Pods of a
    group admit one another to any port, because ranks choose their ports when they connect.
    """
    engines = {labels.SERVICE: service.name, labels.COMPONENT: labels.ENGINE}
    gateway = {labels.SERVICE: service.name, labels.COMPONENT: labels.GATEWAY}
    if service.shares_gateway:
        gateway = {labels.GATEWAY_LABEL: labels.SHARED, labels.COMPONENT: labels.GATEWAY}
    prometheus = {"namespaceSelector": {}, "podSelector": {"matchLabels": PROMETHEUS}}
    operator = _operator(config)
    manifests = [
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
    if not service.shares_gateway:
        manifests.append(
            _policy(
                metadata(service, child_names.gateway_name(service.name), labels.GATEWAY),
                gateway,
                [
                    _rule(labels.HTTP_PORT),
                    *([_rule(labels.GRPC_PORT)] if service.gateway.grpc else []),
                    _rule(labels.ADMIN_PORT, operator, prometheus, {"podSelector": {"matchLabels": gateway}}),
                    {"ports": [{"protocol": "UDP", "port": labels.ADMIN_PORT}], "from": [operator]},
                ],
            )
        )
    return manifests


def fetch_network_policy(service: InferenceService, config: OperatorConfig) -> dict[str, Any]:
    """Return the policy of pods that fetch a model; it admits the operator, which polls their progress."""
    pods = {labels.SERVICE: service.name, labels.COMPONENT: labels.FETCH}
    meta = metadata(service, child_names.fetch_network_policy(service.name), labels.FETCH)
    return _policy(meta, pods, [_rule(labels.FETCH_PORT, _operator(config))])


def _operator(config: OperatorConfig) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE: config.lease_namespace}},
        "podSelector": {"matchLabels": OPERATOR},
    }


def _rule(port: int, *peers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ingress rule that admits peers to a port, or everyone if no peers are given."""
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
    return with_applied_hash(manifest)
