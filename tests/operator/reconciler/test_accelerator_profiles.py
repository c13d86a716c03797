# SPDX-License-Identifier: Apache-2.0
"""Services with an accelerator profile, while the operator's profiles change and disappear."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.kube.refs import ObjectRef

pytestmark = CONTROL_PLANE
TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
MIG: dict[str, Any] = {
    "resourceName": "nvidia.com/mig-3g.40gb",
    "nodeSelector": {"gpu": "h100", "zone": "a"},
    "tolerations": [TAINT],
    "memory": "39Gi",
}
GROUP = {"engine": {"device": "CUDA"}, "accelerator": {"profile": "mig", "nodeSelector": {"zone": "b"}}}


@pytest.fixture
def operate(operators: Any, eventually: Any) -> Iterator[Callable[..., None]]:
    """Yield a function that replaces the operator by one with other profiles."""

    def replace(*options: str) -> None:
        former = operators.leader()
        new = operators.start(*options)
        eventually(lambda: operators.answers(new), expectation="the new operator is up")
        operators.kill(former, signal.SIGTERM)
        eventually(lambda: operators.leader() == new, expectation="the new operator leads")

    def with_profiles(**profiles: Any) -> None:
        replace("--accelerator-profiles", json.dumps(profiles))

    yield with_profiles
    replace()


def pod_fields(pod: dict[str, Any]) -> tuple[str, dict[str, str], bool]:
    """Return a pod's requested accelerator, node selector, and whether it tolerates `TAINT`."""
    spec = pod["spec"]
    [resource] = [name for name in spec["containers"][0]["resources"]["limits"] if "nvidia.com" in name]
    return resource, spec["nodeSelector"], TAINT in spec["tolerations"]


def test_services_follow_their_profile_and_keep_their_revision_without_it(
    operate: Callable[..., None], live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    operate(mig=MIG)
    demo = live_service(**GROUP, model={"parameters": "8B"})
    demo.settle(1)
    [first] = demo.live()
    assert pod_fields(demo.pods()[0]) == ("nvidia.com/mig-3g.40gb", {"gpu": "h100", "zone": "b"}, True)
    revision = demo.status()["updateRevision"]
    [record] = api.list("ControllerRevision", namespace)
    assert record["data"]["spec"]["accelerator"]["resourceName"] == "nvidia.com/mig-3g.40gb"
    assert "0.90 of 39Gi" in demo.condition("Scheduled")["message"]
    assert demo.status()["resourceName"] == "nvidia.com/mig-3g.40gb"

    demo.patch(podTemplate={"resources": {"limits": {MIG["resourceName"]: 2}}})
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "InvalidSpec")
    assert "spec.podTemplate.resources.limits must not contain" in demo.condition("Ready")["message"]
    assert (demo.live(), demo.condition("Available")["status"]) == ([first], "True")
    demo.patch(podTemplate={"resources": {"limits": None}})
    demo.settle(1)
    assert demo.live() == [first]

    operate()  # the profile is missing
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "ProfileMissing")
    assert (
        "there is no accelerator profile mig; the operator has no profiles"
        in demo.condition("Ready")["message"]
    )
    demo.patch(replicas=2, engine={"pageSize": 32})
    demo.eventually(lambda: demo.status()["availableReplicas"] == 2, expectation="the service is scaled")
    assert first in demo.live()
    assert {pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in demo.pods()} == {revision}
    assert len({json.dumps(pod_fields(pod)) for pod in demo.pods()}) == 1
    assert demo.condition("Available")["status"] == "True"
    api.request("DELETE", f"{ObjectRef('Pod', namespace).path()}/{first}")
    demo.eventually(lambda: first not in demo.live() and demo.status()["availableReplicas"] == 2)
    assert {pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in demo.pods()} == {revision}
    demo.patch(replicas=1, engine={"pageSize": 16})

    operate(mig={**MIG, "memory": "40Gi"})  # its memory is not part of the revision
    demo.settle(1)
    assert demo.status()["updateRevision"] == revision
    assert "0.90 of 40Gi" in demo.condition("Scheduled")["message"]
    [kept] = demo.live()

    operate(mig={**MIG, "nodeSelector": {"gpu": "h200"}})
    demo.eventually(lambda: kept not in demo.live(), expectation="the group is replaced")
    demo.settle(1)
    assert pod_fields(demo.pods()[0]) == ("nvidia.com/mig-3g.40gb", {"gpu": "h200", "zone": "b"}, True)
    assert demo.status()["updateRevision"] == demo.status()["currentRevision"] != revision


def test_groups_stay_without_a_profile_and_without_a_record(
    operate: Callable[..., None], live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    """If the ControllerRevision is lost as well, the operator changes nothing until the profile is back."""
    operate(mig=MIG)
    demo = live_service(**GROUP)
    demo.settle(1)
    before = demo.live()
    [record] = api.list("ControllerRevision", namespace)
    api.delete("ControllerRevision", namespace, record["metadata"]["name"])
    operate()
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "ProfileMissing")
    demo.patch(replicas=2)
    demo.eventually(lambda: demo.status()["observedGeneration"] == demo.body()["metadata"]["generation"])
    assert demo.live() == before
    assert not api.list("ControllerRevision", namespace)
    operate(mig=MIG)
    demo.settle(2)
    assert before[0] in demo.live()


def test_a_new_service_waits_for_its_profile(
    operate: Callable[..., None], live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    operate(large={})
    demo = live_service(**GROUP)
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "ProfileMissing")
    assert (
        "there is no accelerator profile mig; the operator has the profiles large"
        in (demo.condition("Failed")["message"])
    )
    assert not demo.pods() and not api.list("Deployment", namespace)
    demo.patch(accelerator={"profile": "large"})
    demo.settle(1)
    assert demo.condition("Failed")["status"] == "False"
