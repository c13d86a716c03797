# SPDX-License-Identifier: Apache-2.0
"""Evaluates the NetworkPolicies of a cluster, whether or not its network plugin enforces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cluster import Reader

Object = Mapping[str, Any]


class Network:
    """A snapshot of a cluster's NetworkPolicies and namespace labels."""

    def __init__(self, reader: Reader) -> None:
        """Read the policies and namespaces."""
        self._policies = reader.get("/apis/networking.k8s.io/v1/networkpolicies")["items"]
        spaces = reader.get("/api/v1/namespaces")["items"]
        self._spaces = {space["metadata"]["name"]: space["metadata"]["labels"] for space in spaces}

    def allows(self, source: Object, target: Object, port: int, protocol: str = "TCP") -> bool:
        """Return whether the policies allow one pod to open a connection to a port of another pod."""
        return self._permits("Egress", source, target, target, port, protocol) and self._permits(
            "Ingress", target, source, target, port, protocol
        )

    def isolates(self, pod: Object) -> bool:
        """Return whether an ingress policy selects a pod."""
        return bool([*self._specs(pod, "Ingress")])

    def _specs(self, pod: Object, direction: str) -> Iterator[dict[str, Any]]:
        for policy in self._policies:
            spec = policy["spec"]
            same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
            if (
                same
                and direction in spec["policyTypes"]
                and _matches(spec["podSelector"], pod["metadata"]["labels"])
            ):
                yield spec

    def _permits(
        self, direction: str, pod: Object, peer: Object, target: Object, port: int, protocol: str
    ) -> bool:
        policies = [*self._specs(pod, direction)]
        rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
        side = "from" if direction == "Ingress" else "to"
        return not policies or any(
            _has_port(rule, target, port, protocol)
            and (not rule.get(side) or any(self._selects(selector, pod, peer) for selector in rule[side]))
            for rule in rules
        )

    def _selects(self, selector: Mapping[str, Any], pod: Object, peer: Object) -> bool:
        space = peer["metadata"]["namespace"]
        if "namespaceSelector" in selector:
            namespace_matches = _matches(selector["namespaceSelector"], self._spaces[space])
        else:
            namespace_matches = space == pod["metadata"]["namespace"]
        return namespace_matches and _matches(selector.get("podSelector", {}), peer["metadata"]["labels"])


def _has_port(rule: Mapping[str, Any], target: Object, port: int, protocol: str) -> bool:
    numbers = {
        entry["name"]: entry["containerPort"]
        for container in target["spec"]["containers"]
        for entry in container.get("ports", [])
        if "name" in entry
    }
    return not rule.get("ports") or any(
        entry.get("protocol", "TCP") == protocol and numbers.get(entry["port"], entry["port"]) == port
        for entry in rule["ports"]
    )


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert not set(selector) - {"matchLabels"}, "matchExpressions are not supported here"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
