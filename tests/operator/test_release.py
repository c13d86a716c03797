# SPDX-License-Identifier: Apache-2.0
"""A stopping leader releases its Lease, even if a renewal is in progress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.manager.leader_election import Elector


class Server:
    """Fake API server with one Lease; a write with an outdated resourceVersion is refused."""

    def __init__(self, holder: str) -> None:
        self.version = 1
        self.spec: dict[str, Any] = {"holderIdentity": holder}
        self.renewals = 0
        """Number of renewals that the Lease's holder will still make, each directly after a read."""

    async def get(self, ref: ObjectRef) -> dict[str, Any]:
        read = {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.spec)}
        if self.renewals:
            self.renewals -= 1
            self.version += 1
        return read

    async def replace(self, manifest: dict[str, Any]) -> None:
        if manifest["metadata"]["resourceVersion"] != str(self.version):
            raise KubeError(409, "Conflict", "the object has been modified")
        self.version += 1
        self.spec = manifest["spec"]


def elector(server: Server) -> Elector:
    return Elector(server, OperatorConfig(identity="one"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("renewals", [0, 1, 3])
async def test_the_lease_is_released_even_if_renewals_are_in_progress(renewals: int) -> None:
    server = Server("one")
    server.renewals = renewals
    await elector(server).release()
    assert server.spec["holderIdentity"] == ""


async def test_a_lease_of_another_replica_is_not_released() -> None:
    server = Server("another")
    await elector(server).release()
    assert (server.spec["holderIdentity"], server.version) == ("another", 1)


async def test_the_release_is_given_up_after_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen_operator.manager.leader_election.RELEASE_SECONDS", 0.05)
    server = Server("one")

    async def hang(ref: ObjectRef) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "get", hang)
    async with asyncio.timeout(60):
        await elector(server).release()
    assert server.spec["holderIdentity"] == "one"
