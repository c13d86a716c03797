"""What is looked for, applied and removed of what a service may have or not."""

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


async def test_what_is_not_wanted_is_looked_for_once_and_removed() -> None:
    digests: dict[tuple[str, str], str] = {}
    server = OneObject({**BUDGET, "metadata": {**BUDGET["metadata"], "uid": "u"}})
    assert await unwanted(server, digests, fresh=False) == ["get", "delete u"]
    assert await unwanted(server, digests, fresh=False) == []
    digests.clear()  # once in a while all is looked for anew
    assert await unwanted(server, digests, fresh=False) == ["get"]


async def test_a_service_of_which_nothing_was_made_yet_has_nothing_to_remove() -> None:
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


async def test_what_a_new_service_needs_is_made_without_a_look_at_what_is_there() -> None:
    server = OneObject()
    assert await wanted(server, fresh=True) == ["make"]
    assert await wanted(server, fresh=True) == ["make", "get"], "its answer was lost"
    assert await wanted(server, fresh=False) == ["get"]
    assert await wanted(OneObject(), fresh=False) == ["get", "apply"]


@pytest.mark.parametrize("code", [400, 404, 422])
async def test_an_api_server_that_takes_no_version_of_a_new_object_is_asked_as_before(code: int) -> None:
    server = OneObject()
    server.refuses_versions = code
    assert await wanted(server, fresh=True) == ["make", "get", "apply"]


async def test_what_has_the_name_of_a_new_services_child_is_not_taken_over() -> None:
    foreign = {**BUDGET, "metadata": {**BUDGET["metadata"], "uid": "v"}}
    server = OneObject(foreign)
    with pytest.raises(Refused, match="PodDisruptionBudget x belongs to something else"):
        await wanted(server, fresh=True)
    assert server.requests == ["make", "get"]
    assert server.there is foreign


def binding(role: str, **meta: Any) -> dict[str, Any]:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    own = {"name": "x", "namespace": "a", "annotations": {labels.APPLIED_HASH: role}, **meta}
    return {"kind": "RoleBinding", "metadata": own, "roleRef": reference, "subjects": []}


async def bound(server: OneObject) -> list[str]:
    """Have the role `new` bound where `old` is."""
    applier = Applier(server, Metrics(), UnwatchedChildren())  # pyright: ignore[reportArgumentType]
    await applier.apply([binding("new")], {}, {}, lambda live: None)
    return server.requests


async def test_a_binding_of_another_role_is_made_anew() -> None:
    server = OneObject(binding("old", uid="v"))
    assert await bound(server) == ["get", "check", "delete v", "apply"]
    assert server.there is not None and server.there["roleRef"]["name"] == "new"


async def test_no_binding_goes_for_one_that_would_not_be_taken() -> None:
    server = OneObject(there := binding("old", uid="v"))
    server.forbids = "not allowed to bind the role new"
    with pytest.raises(KubeError, match=server.forbids):
        await bound(server)
    assert server.there is there


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from("abc"),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("xyz"), below, max_size=3),
    max_leaves=12,
)


@given(wanted=JSON, data=st.data())
def test_more_fields_and_another_order_are_no_drift(wanted: Any, data: st.DataObject) -> None:
    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            more = data.draw(st.dictionaries(st.sampled_from("uvw"), JSON, max_size=1))
            return {**more, **{key: grown(below) for key, below in value.items()}}
        if isinstance(value, list):
            if value and not any(isinstance(item, (dict, list)) for item in value):
                return value  # arguments: their order counts
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


def test_what_is_as_it_was_applied_needs_no_correction() -> None:
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
def test_amounts_are_the_same_however_they_are_written(live: Any, wanted: Any, same: bool) -> None:
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
def test_a_policy_is_ours_whole(live: dict[str, Any]) -> None:
    patch = drift_patch(live, policy(WIRE, ANYONE))
    assert patch is not None
    assert patch["metadata"] == {"resourceVersion": "7"}
    assert patch["spec"]["ingress"] == [WIRE, ANYONE]
    assert patch["spec"].get("egress") is None


def test_of_a_pod_template_only_what_the_api_server_fills_in_may_be_more() -> None:
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
    assert drift_patch(deployment({"containers": [changed]}), wanted) is None  # is applied again


class Stubborn(OneObject):
    """An API server whose admission adds a rule to every policy."""

    async def patch(self, ref: ObjectRef, patch: dict[str, Any]) -> None:
        self.requests.append("patch")


async def test_what_admission_adds_again_at_once_is_left() -> None:
    server = Stubborn(policy(WIRE, ANYONE))
    applier = Applier(server, Metrics(), UnwatchedChildren())  # pyright: ignore[reportArgumentType]
    digests: dict[tuple[str, str], str] = {}
    for _ in range(3):
        digests.pop(("NetworkPolicy", "x"), None)  # in doubt
        await applier.apply([policy(WIRE)], {}, digests, lambda live: None)
    assert server.requests == ["get", "patch", "get", "get", "get"]


def test_a_child_that_strayed_is_named_once() -> None:
    children, one = UnwatchedChildren(), policy(WIRE)
    meta = {**one["metadata"], "labels": {labels.SERVICE: "demo"}}
    one = {**one, "metadata": meta}

    def drifted(*there: dict[str, Any]) -> list[tuple[str, str, str]]:
        page = json.dumps({"items": [{"metadata": meta} for meta in there] or None}).encode()
        return [(*name, child.service) for name, child in children.pop_drifted("NetworkPolicy", [page])]

    children.record_applied(one)
    assert drifted({**meta, "resourceVersion": "8"}) == []  # its status alone
    edited = {**meta, "generation": 2}
    assert drifted(edited) == [("a", "x", "demo")]
    assert drifted(edited) == []
    children.record_applied({**one, "metadata": edited})
    assert drifted() == [("a", "x", "demo")]
    children.record_applied(one)
    children.record_deleted("NetworkPolicy", "a", "x")
    assert drifted() == []
