# SPDX-License-Identifier: Apache-2.0
"""An operator that starts before its CRD, or while the API server starts, works once both are there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from marks import in_cluster
from mizzen_operator.informers import discovery
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef

SECONDS = 20.0
"""Limit of each wait; an operator on an idle machine needs less than 5 s."""


@in_cluster
def test_an_operator_that_starts_before_its_crd_works_once_the_crd_is_created(
    operators_without_crd: tuple[Any, Callable[[], Any]],
    minimal: Callable[..., dict[str, Any]],
    eventually: Callable[..., Any],
) -> None:
    operators, create_crd = operators_without_crd
    stopped, started = operators.start(), operators.start()
    for identity in (stopped, started):
        eventually(lambda identity=identity: operators.answers(identity), expectation="it answers")
    eventually(lambda: operators.log().count("create the CRD") == 2, expectation="the log names the CRD")
    assert not operators.leader()
    assert operators.kill(stopped, signal.SIGTERM) == 0
    api = create_crd()
    body = minimal(engine={"device": "CPU"})
    body["metadata"]["namespace"] = "default"
    api.create(body)
    eventually(
        lambda: api.find("Deployment", "default", "demo-gateway"), SECONDS, "the service is reconciled"
    )
    assert operators.leader() == started
    assert operators.log().count("create the CRD") == 2, "a reason is logged once"


GROUPS = {"groups": [{"name": "apps"}, {"name": "mizzen.dev"}]}
RESOURCES = {"resources": [{"name": "inferenceservices"}, {"name": "inferenceservices/status"}]}
STARTING: list[Any] = [
    (KubeError(0, "Unreachable", "connection refused"), RESOURCES),
    (KubeError(403, "Forbidden", "no role binding yet"), RESOURCES),
    (KubeError(503, "ServiceUnavailable", "not ready"), RESOURCES),
    ({"groups": []}, None),
    ({"groups": None}, RESOURCES),
    ({"groups": [{"name": "mizzen.dev"}]}, RESOURCES),
    ({"groups": [{"name": "apps"}]}, RESOURCES),
    (GROUPS, None),
    (GROUPS, {"resources": []}),
    (GROUPS, {"resources": [{"name": "other"}]}),
]
"""Answers of an API server that does not serve all kinds: the list of groups, and the CRD's resources."""


class StartingServer:
    """Fake API server that gives `answers` in turn, and then serves everything."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    async def get(self, ref: ObjectRef) -> dict[str, Any] | None:
        groups, resources = self.answers[0] if self.answers else (GROUPS, RESOURCES)
        if ref.kind == "APIResourceList" and self.answers:
            self.answers.pop(0)
        answer = groups if ref.kind == "APIGroupList" else resources
        if isinstance(answer, KubeError):
            self.answers.pop(0)
            raise answer
        return answer


async def test_an_api_server_that_is_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "POLL_SECONDS", 0.0)
    server = StartingServer(list(STARTING))
    await discovery.wait_until_served(server)  # pyright: ignore[reportArgumentType]
    assert not server.answers


def test_discovery_has_the_paths_that_kopf_reads() -> None:
    kinds = ("APIGroupList", "APIResourceList")
    assert [ObjectRef(kind, "").path() for kind in kinds] == ["/apis", "/apis/mizzen.dev/v1alpha1"]
