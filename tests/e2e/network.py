"""What the NetworkPolicies of a cluster allow, whether or not its network enforces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cluster import Reader

Object = Mapping[str, Any]


class Network:
    """The policies and namespaces of a cluster as they are now."""

    def __init__(self, reader: Reader) -> None:
        """Read them."""
        self._policies = reader.get("/apis/networking.k8s.io/v1/networkpolicies")["items"]
        spaces = reader.get("/api/v1/namespaces")["items"]
        self._spaces = {one["metadata"]["name"]: one["metadata"]["labels"] for one in spaces}

    def allows(self, source: Object, target: Object, port: int, protocol: str = "TCP") -> bool:
        """Tell whether a pod may open a connection to a port of another one."""
        return self._way("Egress", source, target, target, port, protocol) and self._way(
            "Ingress", target, source, target, port, protocol
        )

    def isolates(self, pod: Object) -> bool:
        """Tell whether a policy says who may reach a pod."""
        return bool([*self._of(pod, "Ingress")])

    def _of(self, pod: Object, way: str) -> Iterator[dict[str, Any]]:
        for policy in self._policies:
            spec = policy["spec"]
            same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
            if (
                same
                and way in spec["policyTypes"]
                and _matches(spec["podSelector"], pod["metadata"]["labels"])
            ):
                yield spec

    def _way(self, way: str, pod: Object, peer: Object, target: Object, port: int, protocol: str) -> bool:
        policies = [*self._of(pod, way)]
        rules = [rule for policy in policies for rule in policy.get(way.lower(), [])]
        side = "from" if way == "Ingress" else "to"
        return not policies or any(
            _opens(rule, target, port, protocol)
            and (not rule.get(side) or any(self._is(one, pod, peer) for one in rule[side]))
            for rule in rules
        )

    def _is(self, given: Mapping[str, Any], pod: Object, peer: Object) -> bool:
        space = peer["metadata"]["namespace"]
        if "namespaceSelector" in given:
            near = _matches(given["namespaceSelector"], self._spaces[space])
        else:
            near = space == pod["metadata"]["namespace"]
        return near and _matches(given.get("podSelector", {}), peer["metadata"]["labels"])


def _opens(rule: Mapping[str, Any], target: Object, port: int, protocol: str) -> bool:
    names = {
        one["name"]: one["containerPort"]
        for container in target["spec"]["containers"]
        for one in container.get("ports", [])
        if "name" in one
    }
    return not rule.get("ports") or any(
        one.get("protocol", "TCP") == protocol and names.get(one["port"], one["port"]) == port
        for one in rule["ports"]
    )


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert not set(selector) - {"matchLabels"}, "none of our policies has expressions"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
