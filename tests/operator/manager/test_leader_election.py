"""The Lease goes with the operator's Deployment, and a missing right to look at that costs no leadership."""

from __future__ import annotations

from typing import Any

import pytest

from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.manager.leader_election import Elector

OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "mizzen-operator", "uid": "u1"}


class Server:
    """Objects by kind, as the elector reads and writes them."""

    def __init__(self, objects: dict[str, dict[str, Any]], *, forbidden: bool = False) -> None:
        self.objects = objects
        self._forbidden = forbidden

    async def get(self, ref: ObjectRef) -> dict[str, Any] | None:
        if ref.kind == "Deployment" and self._forbidden:
            raise KubeError(403, "Forbidden", "deployments are forbidden")
        return self.objects.get(ref.kind)

    async def create(self, manifest: dict[str, Any]) -> bool:
        self.objects[manifest["kind"]] = manifest
        return True

    async def replace(self, manifest: dict[str, Any]) -> None:
        self.objects[manifest["kind"]] = manifest


async def lead(server: Server, owner: str) -> dict[str, Any]:
    config = OperatorConfig(lease_owner=owner, identity="one")
    await Elector(server, config).acquire()  # pyright: ignore[reportArgumentType]
    lease = server.objects["Lease"]
    assert lease["spec"]["holderIdentity"] == "one"
    return lease["metadata"]


DEPLOYMENT = {"metadata": {"name": "mizzen-operator", "uid": "u1"}}
NAME = {"name": "mizzen-operator", "namespace": "default"}
EARLIER = {"metadata": {**NAME, "resourceVersion": "7"}, "spec": {}}


@pytest.mark.parametrize("earlier", [{}, {"Lease": EARLIER}], ids=["made", "taken over"])
async def test_the_deployment_owns_the_lease(earlier: dict[str, Any]) -> None:
    metadata = await lead(Server({"Deployment": DEPLOYMENT, **earlier}), "mizzen-operator")
    assert metadata["ownerReferences"] == [OWNER]
    assert metadata.get("resourceVersion") == ("7" if earlier else None)


@pytest.mark.parametrize("server", [Server({}), Server({}, forbidden=True)], ids=["absent", "forbidden"])
async def test_without_a_deployment_the_lease_has_no_owner(server: Server) -> None:
    assert "ownerReferences" not in await lead(server, "mizzen-operator")


async def test_an_operator_that_is_told_of_no_owner_asks_for_none() -> None:
    assert "ownerReferences" not in await lead(Server({"Deployment": DEPLOYMENT}, forbidden=True), "")
