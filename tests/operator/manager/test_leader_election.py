# SPDX-License-Identifier: Apache-2.0
"""An operator makes its Deployment the Lease's owner; if it cannot read the Deployment, it still leads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.manager.leader_election import Elector, VersionsWentBack

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

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.objects[manifest["kind"]] = manifest
        return manifest


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


class Versioned(Server):
    """Fake API server that gives each written Lease the next resourceVersion."""

    version = 100

    async def create(self, manifest: dict[str, Any]) -> bool:
        await self.replace(manifest)
        return True

    async def replace(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        stored = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(self.version)}}
        return await super().replace(stored)


FAST = OperatorConfig(identity="one", lease_seconds=3, renew_seconds=2, retry_seconds=0.1)


@pytest.mark.parametrize("holder", ["one", "two", ""])
async def test_a_leader_gives_up_if_versions_go_back(holder: str) -> None:
    server = Versioned({"Lease": EARLIER})
    elector = Elector(server, FAST)  # pyright: ignore[reportArgumentType]
    await elector.acquire()
    server.objects["Lease"] = {
        "metadata": {**NAME, "resourceVersion": "90"},
        "spec": {"holderIdentity": holder},
    }
    async with asyncio.timeout(5):
        with pytest.raises(VersionsWentBack, match="went back from 101 to 90"):
            await elector.keep_renewing()


async def test_a_standby_ends_if_versions_go_back() -> None:
    held = {"metadata": {**NAME, "resourceVersion": "70"}, "spec": {"holderIdentity": "two"}}
    server = Versioned({"Lease": held})
    waiting = asyncio.create_task(Elector(server, FAST).acquire())  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0.1)
    server.objects["Lease"] = {**held, "metadata": {**NAME, "resourceVersion": "69"}}
    with pytest.raises(VersionsWentBack):
        await asyncio.wait_for(waiting, 5)


async def test_a_recreated_lease_is_acquired_and_renewed() -> None:
    server = Versioned({"Lease": EARLIER})
    elector = Elector(server, FAST)  # pyright: ignore[reportArgumentType]
    await elector.acquire()
    del server.objects["Lease"]
    await elector.acquire()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(elector.keep_renewing(), 0.5)
