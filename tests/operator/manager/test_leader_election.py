"""An operator makes its Deployment the Lease's owner; if it cannot read the Deployment, it still leads."""

from __future__ import annotations

from typing import Any

import pytest

from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.manager.leader_election import Elector

OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "mizzen-operator", "uid": "u1"}


class Server:
    """Fake API server with one object of each kind; reading the Deployment may be forbidden."""

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


@pytest.mark.parametrize("earlier", [{}, {"Lease": EARLIER}], ids=["created Lease", "existing Lease"])
async def test_the_deployment_owns_the_lease(earlier: dict[str, Any]) -> None:
    metadata = await lead(Server({"Deployment": DEPLOYMENT, **earlier}), "mizzen-operator")
    assert metadata["ownerReferences"] == [OWNER]
    assert metadata.get("resourceVersion") == ("7" if earlier else None)


@pytest.mark.parametrize(
    "server", [Server({}), Server({}, forbidden=True)], ids=["absent Deployment", "forbidden Deployment"]
)
async def test_if_the_deployment_cannot_be_read_the_lease_has_no_owner(server: Server) -> None:
    assert "ownerReferences" not in await lead(server, "mizzen-operator")


async def test_without_the_option_lease_owner_the_deployment_is_not_read() -> None:
    assert "ownerReferences" not in await lead(Server({"Deployment": DEPLOYMENT}, forbidden=True), "")
