# SPDX-License-Identifier: Apache-2.0
"""Optional children of a service are applied, corrected and removed with as few requests as possible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen_operator.api import labels
from mizzen_operator.kube.apply import Applier, name_taken_error
from mizzen_operator.kube.drift import covers, drift_patch
from mizzen_operator.kube.errors import KubeError, Refused
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from one_object import OneObject

BUDGET: dict[str, Any] = {
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "x", "namespace": "a", "annotations": {labels.APPLIED_HASH: "1"}},
    "spec": {"maxUnavailable": 1},
}


async def unwanted(server: OneObject, digests: dict[tuple[str, str], str], *, fresh: bool) -> list[str]:
    applier = Applier(server, Metrics(), UnwatchedChildren())  # pyright: ignore[reportArgumentType]
    server.requests.clear()
    await applier.apply_or_delete([BUDGET], digests, lambda live: None, wanted=False, assume_absent=fresh)
    return list(server.requests)


async def test_an_unwanted_child_is_read_once_and_deleted() -> None:
    digests: dict[tuple[str, str], str] = {}
    server = OneObject({**BUDGET, "metadata": {**BUDGET["metadata"], "uid": "u"}})
    assert await unwanted(server, digests, fresh=False) == ["get", "delete u"]
    assert await unwanted(server, digests, fresh=False) == []
    digests.clear()  # the cache expires from time to time
    assert await unwanted(server, digests, fresh=False) == ["get"]


async def test_unwanted_children_of_a_new_service_are_not_read() -> None:
    digests: dict[tuple[str, str], str] = {}
    assert await unwanted(OneObject(), digests, fresh=True) == []
    assert await unwanted(OneObject(), digests, fresh=False) == []


async def wanted(server: OneObject, *, fresh: bool) -> list[str]:
    def require(live: Mapping[str, Any]) -> None:
        if live["metadata"].get("uid") != "u":
            raise name_taken_error(live)

    applier = Applier(server, Metrics(), UnwatchedChildren())  # pyright: ignore[reportArgumentType]
    server.requests.clear()
    await applier.apply_or_delete([BUDGET], {}, require, wanted=True, assume_absent=fresh)
    return list(server.requests)


async def test_children_of_a_new_service_are_created_without_a_read() -> None:
    server = OneObject()
    assert await wanted(server, fresh=True) == ["make"]
    assert await wanted(server, fresh=True) == ["make", "get"], (
        "as if the response to the first creation was lost"
    )
    assert await wanted(server, fresh=False) == ["get"]
    assert await wanted(OneObject(), fresh=False) == ["get", "apply"]


@pytest.mark.parametrize("code", [400, 404, 422])
async def test_if_the_api_server_rejects_versions_of_new_objects_the_child_is_read_first(code: int) -> None:
    server = OneObject()
    server.version_error_code = code
    assert await wanted(server, fresh=True) == ["make", "get", "apply"]


async def test_a_foreign_object_with_the_name_of_a_new_child_is_not_taken_over() -> None:
    foreign = {**BUDGET, "metadata": {**BUDGET["metadata"], "uid": "v"}}
    server = OneObject(foreign)
    with pytest.raises(Refused, match="PodDisruptionBudget x belongs to something else"):
        await wanted(server, fresh=True)
    assert server.requests == ["make", "get"]
    assert server.stored is foreign


def binding(role: str, **meta: Any) -> dict[str, Any]:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    own = {"name": "x", "namespace": "a", "annotations": {labels.APPLIED_HASH: role}, **meta}
    return {"kind": "RoleBinding", "metadata": own, "roleRef": reference, "subjects": []}


async def bind_new_role(server: OneObject) -> list[str]:
    """Apply a RoleBinding that refers to the role `new`; return the requests that the server receives."""
    applier = Applier(server, Metrics(), UnwatchedChildren())  # pyright: ignore[reportArgumentType]
    await applier.apply([binding("new")], {}, {}, lambda live: None)
    return server.requests


async def test_a_binding_to_another_role_is_recreated() -> None:
    server = OneObject(binding("old", uid="v"))
    assert await bind_new_role(server) == ["get", "check", "delete v", "apply"]
    assert server.stored is not None and server.stored["roleRef"]["name"] == "new"


async def test_a_binding_is_not_deleted_if_its_replacement_would_be_rejected() -> None:
    server = OneObject(stored := binding("old", uid="v"))
    server.dry_run_error = "not allowed to bind the role new"
    with pytest.raises(KubeError, match=server.dry_run_error):
        await bind_new_role(server)
    assert server.stored is stored


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from("abc"),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("xyz"), below, max_size=3),
    max_leaves=12,
)


@given(wanted=JSON, data=st.data())
def test_additional_fields_and_another_order_are_not_drift(wanted: Any, data: st.DataObject) -> None:
    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            more = data.draw(st.dictionaries(st.sampled_from("uvw"), JSON, max_size=1))
            return {**more, **{key: grown(below) for key, below in value.items()}}
        if isinstance(value, list):
            if value and not any(isinstance(item, (dict, list)) for item in value):
                return value  # the order of plain values, such as arguments, matters
            more = data.draw(st.lists(JSON, max_size=1))
            return data.draw(st.permutations([*map(grown, value), *more]))
        return value

    assert covers(grown(wanted), wanted)
    assert not covers({"there": grown(wanted)}, {"there": wanted, "absent": 1})


def policy(*rules: Any, **more: Any) -> dict[str, Any]:
    meta = {"name": "x", "namespace": "a", "resourceVersion": "7", "uid": "u", "generation": 1}
    annotated = {**meta, "annotations": {labels.APPLIED_HASH: "1"}}
    return {"kind": "NetworkPolicy", "metadata": annotated, "spec": {"ingress": list(rules), **more}}


WIRE = {"ports": [{"port": 1}], "from": [{"podSelector": {"matchLabels": {"a": "b"}}}]}
ANYONE = {"ports": [{"port": 2}]}


def test_an_unchanged_object_has_no_drift() -> None:
    assert drift_patch(policy(WIRE, ANYONE), policy(WIRE, ANYONE)) is None
    assert not covers({"args": ["--a", "1", "--b", "2"]}, {"args": ["--a", "2", "--b", "1"]})


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"cpu": "1", "memory": "1Gi"}, {"cpu": "1000m", "memory": "1024Mi"}, True),
        ({"cpu": "500m", "nvidia.com/gpu": "1"}, {"cpu": "0.5", "nvidia.com/gpu": 1}, True),
        ({"cpu": "1", "memory": "1Gi"}, {"cpu": 1}, True),
        ({"cpu": "1"}, {"cpu": "100m"}, False),
        ({"cpu": "1"}, {"cpu": "1", "memory": "1Gi"}, False),
        ({"memory": "1G"}, {"memory": "1Gi"}, False),
        ({"cpu": "2001m"}, {"cpu": "2.0000001"}, True),
        ({"a": "x"}, {"a": "y"}, False),
        ({"a": "1"}, {"a": "1e999999"}, False),
        (["1"], ["1000m"], False),
    ],
)
def test_quantities_are_compared_by_value(live: Any, wanted: Any, same: bool) -> None:
    assert covers({"limits": live}, {"limits": wanted}) == same
    assert not covers({"limits": None}, {"limits": wanted})
    assert covers({"other": live}, {"other": wanted}) == (live == wanted)


@pytest.mark.parametrize(
    "live",
    [
        policy(WIRE, ANYONE, {}),
        policy(WIRE, ANYONE, ANYONE),
        policy(WIRE, {**ANYONE, "from": []}),
        policy({**WIRE, "from": [{**WIRE["from"][0], "namespaceSelector": {}}]}, ANYONE),
        policy({**WIRE, "from": [*WIRE["from"], {"ipBlock": {"cidr": "0.0.0.0/0"}}]}, ANYONE),
        policy(WIRE, ANYONE, egress=[{}]),
    ],
)
def test_any_change_of_a_network_policy_is_drift(live: dict[str, Any]) -> None:
    patch = drift_patch(live, policy(WIRE, ANYONE))
    assert patch is not None
    assert patch["metadata"] == {"resourceVersion": "7"}
    assert patch["spec"]["ingress"] == [WIRE, ANYONE]
    assert patch["spec"].get("egress") is None


def test_additional_fields_of_a_pod_template_are_drift_unless_they_are_defaults() -> None:
    container = {"name": "gateway", "image": "i", "env": [{"name": "A", "value": "1"}]}
    meta = {"name": "x", "namespace": "a", "resourceVersion": "7"}

    def deployment(spec: dict[str, Any], **annotations: str) -> dict[str, Any]:
        template = {"metadata": {"labels": {"a": "b"}, "annotations": annotations}, "spec": spec}
        return {"kind": "Deployment", "metadata": meta, "spec": {"template": template}}

    wanted = deployment({"containers": [container], "serviceAccountName": "x"})
    filled_in = {
        "containers": [{**container, "resources": {}, "terminationMessagePath": "/dev/termination-log"}],
        "serviceAccountName": "x",
        "serviceAccount": "x",
        "restartPolicy": "Always",
    }
    assert drift_patch(deployment(filled_in, restarted="now"), wanted) is None
    patch = drift_patch(deployment({**filled_in, "nodeSelector": {"a": "b"}}, restarted="now"), wanted)
    assert patch is not None
    assert patch["spec"]["template"] == {
        "spec": {"containers": [container], "serviceAccountName": "x", "nodeSelector": None}
    }
    other = {**container, "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "1"}]}
    assert drift_patch(deployment({"containers": [other]}), wanted) is not None
    changed = {**container, "image": "other"}
    assert (
        drift_patch(deployment({"containers": [changed]}), wanted) is None
    )  # the applied hash differs, so it is applied again anyway


class Stubborn(OneObject):
    """Fake API server that ignores patches, as if an admission webhook undid each patch at once."""

    async def patch(self, ref: ObjectRef, patch: dict[str, Any]) -> None:
        self.requests.append("patch")


async def test_a_change_that_admission_restores_is_corrected_only_once() -> None:
    server = Stubborn(policy(WIRE, ANYONE))
    applier = Applier(server, Metrics(), UnwatchedChildren())  # pyright: ignore[reportArgumentType]
    digests: dict[tuple[str, str], str] = {}
    for _ in range(3):
        digests.pop(("NetworkPolicy", "x"), None)  # the child must be compared again
        await applier.apply([policy(WIRE)], {}, digests, lambda live: None)
    assert server.requests == ["get", "patch", "get", "get", "get"]


def test_a_drifted_child_is_reported_once() -> None:
    children, child = UnwatchedChildren(), policy(WIRE)
    meta = {**child["metadata"], "labels": {labels.SERVICE: "demo"}}
    child = {**child, "metadata": meta}

    def drifted(*stored: dict[str, Any]) -> list[tuple[str, str, str]]:
        page = json.dumps({"items": [{"metadata": meta} for meta in stored] or None}).encode()
        return [(*name, entry.service) for name, entry in children.pop_drifted("NetworkPolicy", [page])]

    children.record_applied(child)
    assert drifted({**meta, "resourceVersion": "8"}) == []  # only the status has changed
    edited = {**meta, "generation": 2}
    assert drifted(edited) == [("a", "x", "demo")]
    assert drifted(edited) == []
    children.record_applied({**child, "metadata": edited})
    assert drifted() == [("a", "x", "demo")]
    children.record_applied(child)
    children.record_deleted("NetworkPolicy", "a", "x")
    assert drifted() == []
