# SPDX-License-Identifier: Apache-2.0
"""ControllerRevisions are recorded once, restored, and rewritten after an upgrade of the operator."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.errors import Refused
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.revision_hash import revision
from mizzen_operator.rollout.revisions import Revisions, controller_revision, restore_service
from service_kit import SPEC, rolling, service

CONFIG = OperatorConfig(engine_image="engine:1")


def test_a_service_is_restored_from_its_revision() -> None:
    template = {"labels": {"team": "a"}, "affinity": {"nodeAffinity": {}}}
    old = service(podTemplate=template, parallelism={"tensor": 2})
    data = controller_revision(old, CONFIG, revision(old, CONFIG), 1)["data"]
    new = service(
        podTemplate={"labels": {}},
        model={**SPEC["model"], "source": "file:///new", "contextLength": 5, "aliases": ["x"]},
        engine={**SPEC["engine"], "image": "engine:9", "pageSize": 64},
        replicas=7,
    )
    again = restore_service(new, json.loads(json.dumps(data)))
    assert revision(again, OperatorConfig(engine_image="engine:2")) == revision(old, CONFIG)
    assert (again.model.source, again.model.context_length, again.tensor) == ("file:///m", None, 2)
    assert again.pod_template == template
    assert again.engine.image == "engine:1"
    assert (again.replicas, again.model.aliases) == (7, ("x",)), "what reaches no engine is as it is now"


class FakeKube:
    """Fake API server that stores ControllerRevisions and counts requests."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []

    async def create(self, body: dict[str, Any]) -> bool:
        self.calls.append("create")
        name = body["metadata"]["name"]
        if name in self.objects:
            return False
        self.objects[name] = msgspec.json.decode(msgspec.json.encode(body))
        self.objects[name]["metadata"]["uid"] = f"uid-{name}"
        return True

    async def list(self, ref: Any, selector: str) -> list[dict[str, Any]]:
        self.calls.append("list")
        return list(self.objects.values())

    async def get(self, ref: Any) -> dict[str, Any] | None:
        return self.objects.get(ref.name)

    async def patch(self, ref: Any, patch: dict[str, Any]) -> None:
        self.calls.append("patch")
        self.objects[ref.name].update(patch)

    async def delete(self, ref: Any, uid: str) -> bool:
        self.calls.append("delete")
        assert self.objects[ref.name]["metadata"]["uid"] == uid
        del self.objects[ref.name]
        return True


async def test_revisions_are_recorded_once_and_the_oldest_are_deleted() -> None:
    kube = FakeKube()
    revisions = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    demo = replace(rolling(), history_limit=1)
    assert await revisions.sync(demo, "a", ()) == {"a"}
    assert await revisions.sync(demo, "a", ()) == {"a"}
    assert kube.calls == ["create"], "a new service costs one request, and then none"
    demo = replace(demo, status={"updateRevision": "a"})
    for newest, used in (("b", {"a"}), ("c", {"b"}), ("d", {"c"})):
        recorded = await revisions.sync(demo, newest, used)
    assert recorded == {"b", "c", "d"}
    assert await revisions.sync(demo, "b", {"d"}) == {"b", "c", "d"}
    assert {name: body["revision"] for name, body in kube.objects.items()} == {
        "demo-b": 5,
        "demo-c": 3,
        "demo-d": 4,
    }
    calls = len(kube.calls)
    after_restart = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    assert await after_restart.sync(demo, "b", {"d"}) == {"b", "c", "d"}
    assert kube.calls[calls:] == ["list"]


async def test_a_record_with_unsorted_data_is_recreated_once() -> None:
    kube, demo = FakeKube(), replace(rolling(), status={"updateRevision": "b"})
    revisions = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    for newest in ("a", "b"):
        await revisions.sync(demo, newest, {"a"})
    before = json.dumps(kube.objects, sort_keys=True)
    for body in kube.objects.values():
        body["data"] = {"spec": body["data"]["spec"], "image": body["data"]["image"]}
        body["metadata"]["resourceVersion"] = "7"
    del kube.calls[:]
    for _ in range(2):
        after_upgrade = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
        assert await after_upgrade.sync(demo, "b", {"a"}) == {"a", "b"}
    assert kube.calls == ["list", "delete", "create", "delete", "create", "list", "list"]
    assert json.dumps(kube.objects, sort_keys=True) == before
    assert all(list(body["data"]) == ["image", "spec"] for body in kube.objects.values())


async def test_an_unreadable_or_deleted_record_is_reported_and_then_left_out() -> None:
    kube = FakeKube()
    revisions = Revisions(kube, CONFIG, Metrics())  # type: ignore[arg-type]
    demo = replace(rolling(), status={"updateRevision": "a"})
    await revisions.sync(demo, "a", ())
    await revisions.sync(demo, "b", {"a"})
    del kube.objects["demo-a"]["data"]["spec"]["engine"]["device"], kube.objects["demo-a"]["data"]["image"]
    with pytest.raises(Refused, match="revision a cannot be created again"):
        await revisions.restore(demo, "a")
    assert await revisions.sync(demo, "b", {"a"}) == {"b"}
    del kube.objects["demo-a"]
    with pytest.raises(Refused, match="revision a is gone"):
        await revisions.restore(demo, "a")


async def test_an_object_of_another_owner_is_not_taken_for_a_revision() -> None:
    kube = FakeKube()
    other = replace(rolling(), uid="other")
    await Revisions(kube, CONFIG, Metrics()).sync(other, "a", ())  # type: ignore[arg-type]
    with pytest.raises(Refused, match="belongs to something else"):
        await Revisions(kube, CONFIG, Metrics()).sync(rolling(), "a", ())  # type: ignore[arg-type]


def test_an_upgrade_of_the_operator_keeps_the_revision() -> None:
    """Fields that a release adds must not change a revision's name while they have their default values."""
    template = {"labels": {}, "sharedMemorySizeLimit": "8Gi"}
    spread = {"podDisruptionBudget": "Auto", "spreadTopologyKey": "kubernetes.io/hostname"}
    first = service(podTemplate=template, availability=spread)
    assert revision(first, OperatorConfig(engine_image="e:1")) == "af503b36", "as the first release named it"
    for part, change in (
        ("engine", {**SPEC["engine"], "kvCacheDtype": "FP8"}),
        ("engine", {**SPEC["engine"], "quantization": "FP8"}),
        ("availability", {**spread, "spreadTopologyKey": "zone"}),
    ):
        other = service(**{"podTemplate": template, "availability": spread, part: change})
        assert revision(other, OperatorConfig(engine_image="e:1")) != "af503b36"
