# SPDX-License-Identifier: Apache-2.0
"""A pod that waits for its volumes: the message names the fields, and what the claims' states show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mizzen_operator.pods.group import read_single_pod_group
from mizzen_operator.status.missing_refs import CLAIM, RequiredRef
from mizzen_operator.status.pending_volumes import claim_refs, describe_volume_wait, explain_claim
from service_kit import SPEC, group, service

REF = RequiredRef(CLAIM, "models", "spec.model.source")
MOUNTING = replace(group("a0"), node="n1", creating_containers=True, mounting_volumes=True)
PULLING = replace(MOUNTING, mounting_volumes=False)
UNPLACED = replace(group("a1"), node="", containers_ready=False)
SECRET_VOLUME = {"name": "certs", "secret": {"secretName": "authority"}}
NFS_VOLUME = {"name": "data", "nfs": {"server": "files", "path": "/"}}
PLAIN = service()
DEMO = service(
    model={**SPEC["model"], "source": "pvc://models/demo"},
    podTemplate={"volumes": [SECRET_VOLUME, NFS_VOLUME]},
)


def claim(phase: str, *modes: str, **meta: str) -> dict[str, Any]:
    spec = {"accessModes": list(modes or ("ReadWriteMany",))}
    return {"metadata": {"namespace": "llm", **meta}, "spec": spec, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("body", "mounting", "expected"),
    [
        (claim("Pending"), False, "is not bound to a volume yet: kubectl describe pvc models -n llm"),
        (claim("Lost"), False, "has lost its volume"),
        (claim("Bound", deletionTimestamp="2026-01-01T00:00:00Z"), False, "is being deleted"),
        (claim("Bound", "ReadWriteOnce"), True, "is ReadWriteOnce, so only the pods of one node"),
        (claim("Bound", "ReadWriteOnce"), False, ""),
        (claim("Bound", "ReadWriteOnce", "ReadOnlyMany"), True, ""),
        (claim("Bound"), True, ""),
    ],
)
def test_the_state_of_a_claim_shows_the_cause(body: dict[str, Any], mounting: bool, expected: str) -> None:
    cause = explain_claim(PLAIN, REF, body, mounting=mounting)
    assert expected in cause and bool(cause) is bool(expected)
    assert not cause or cause.startswith("PersistentVolumeClaim models (spec.model.source) ")


@pytest.mark.parametrize(
    ("cache", "body", "words"),
    [
        (
            {"size": "9Gi", "accessMode": "ReadWriteMany"},
            claim("Pending"),
            "if the cause is its accessMode (ReadWriteMany, which few storage classes offer), size (9Gi) or "
            "storageClassName (the cluster's default), correct spec.model.cache, delete the claim, and it is "
            "created again",
        ),
        (
            {"size": "9Gi", "accessMode": "ReadWriteOnce", "storageClassName": "fast"},
            claim("Pending"),
            "accessMode (ReadWriteOnce), size (9Gi) or storageClassName (fast)",
        ),
        (
            {"size": "9Gi", "accessMode": "ReadWriteOnce"},
            claim("Bound", "ReadWriteOnce"),
            "change spec.model.cache.accessMode to ReadWriteMany, delete the claim",
        ),
        ({}, claim("Bound", "ReadWriteOnce"), "use a claim with the access mode ReadWriteMany"),
    ],
)
def test_the_claim_of_a_cache_names_the_fields_to_change(
    cache: dict[str, str], body: dict[str, Any], words: str
) -> None:
    wanted = {"mode": "PersistentVolumeClaim", "claimName": "models", **cache}
    demo = service(model={**SPEC["model"], "source": "hf://a/b@main", "cache": wanted})
    ref = RequiredRef(CLAIM, "models", "spec.model.cache.claimName")
    cause = explain_claim(demo, ref, body, mounting=True)
    assert words in cause
    assert ("and it is created again" in cause) is bool(cache)


def test_without_a_known_cause_the_message_lists_the_fields_of_all_volumes() -> None:
    message = describe_volume_wait(DEMO, [UNPLACED, MOUNTING], [])
    fields = "spec.model.source, spec.podTemplate.volumes[0] (certs), spec.podTemplate.volumes[1] (data)"
    assert message.startswith(
        f"{MOUNTING.name} waits on node n1 for its volumes: {fields}; kubectl describe pod"
    )


@pytest.mark.parametrize(
    ("demo", "groups", "causes"),
    [(DEMO, [], ["c"]), (DEMO, [PULLING], []), (DEMO, [UNPLACED], []), (PLAIN, [MOUNTING], [])],
    ids=["no group waits", "the image is pulled", "no node is free", "no volumes of the user"],
)
def test_other_waits_are_not_blamed_on_volumes(demo: Any, groups: list[Any], causes: list[str]) -> None:
    assert describe_volume_wait(demo, groups, causes) == ""


def test_a_claim_that_keeps_a_pod_from_being_scheduled_is_reported() -> None:
    assert describe_volume_wait(DEMO, [UNPLACED], ["the claim is not bound"]) == "the claim is not bound"


def test_a_claim_that_the_operator_creates_is_known() -> None:
    cache = {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "10Gi"}
    model = {**SPEC["model"], "source": "hf://a/b@main", "cache": cache}
    assert [(ref.name, ref.field) for ref in claim_refs(service(model=model))] == [
        ("weights", "spec.model.cache.claimName")
    ]


@pytest.mark.parametrize(("init", "mounting"), [(True, True), (False, True), (False, False)])
def test_a_pod_without_a_sandbox_waits_for_its_volumes(init: bool, mounting: bool) -> None:
    reason = "PodInitializing" if init else "ContainerCreating"
    waiting = {"name": "engine", "state": {"waiting": {"reason": reason}}}
    sandbox = {"type": "PodReadyToStartContainers", "status": "False" if mounting else "True"}
    status = {"phase": "Pending", "containerStatuses": [waiting], "conditions": [sandbox]}
    if init:
        status["initContainerStatuses"] = [{**waiting, "name": "proxy"}]
    labels = {"mizzen.dev/group": "0", "mizzen.dev/revision": "a", "mizzen.dev/incarnation": "0"}
    pod = {
        "metadata": {"name": "p", "uid": "u", "labels": labels},
        "spec": {"nodeName": "n"},
        "status": status,
    }
    seen = read_single_pod_group(pod)
    assert (seen.creating_containers, seen.mounting_volumes) == (True, mounting)
