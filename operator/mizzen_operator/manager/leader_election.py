# SPDX-License-Identifier: Apache-2.0
"""Leader election with a Lease of coordination.k8s.io, by the algorithm of client-go.

Clocks of different machines are never compared: a Lease has expired once a replica has observed it unchanged
for its whole duration. A leader that cannot renew its Lease gives up before another replica may take over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef

logger = logging.getLogger(__name__)


RELEASE_SECONDS = 5.0
STANDBY_RETRY_FACTOR = 0.25
"""Retry interval of a standby, as a multiple of the leader's; short, to acquire a released Lease soon."""


class LeadershipLost(Exception):
    """Another replica holds the Lease, or this replica has not renewed it in time."""


class VersionsWentBack(LeadershipLost):
    """The API server's resourceVersions went back: etcd was restored from a backup.

    The state of this process is newer than the API server's, and its watches would get no events until the
    versions have caught up. A new process begins without that state.
    """


class Elector:
    """Acquires, renews and releases the Lease for this replica."""

    def __init__(self, kube: KubeClient, config: OperatorConfig) -> None:
        self._kube = kube
        self._config = config
        self._ref = ObjectRef("Lease", config.lease_namespace, config.lease_name)
        self._owners: list[dict[str, Any]] = []
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0
        self._newest_version = 0
        """Newest resourceVersion of the Lease; renewals keep it close to the newest of all objects."""

    async def acquire(self) -> None:
        """Wait until this replica is the leader.

        Raises:
            VersionsWentBack: etcd was restored from a backup.
        """
        while True:
            try:
                if self._config.lease_owner and not self._owners:
                    self._owners = await self._owner_references()
                if await asyncio.wait_for(self._try_acquire_or_renew(), self._config.renew_seconds):
                    logger.info("%s is the leader", self._config.holder)
                    return
            except (KubeError, TimeoutError) as error:
                logger.warning("cannot acquire the Lease %s: %s", self._ref.name, error or "timed out")
            await asyncio.sleep(self._config.retry_seconds * STANDBY_RETRY_FACTOR)

    async def keep_renewing(self) -> None:
        """Renew the Lease while this replica is the leader.

        Raises:
            LeadershipLost: another replica holds the Lease, or it was not renewed for `renew_seconds`.
            VersionsWentBack: etcd was restored from a backup.
        """
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(self._config.retry_seconds)
            remaining = renewed + self._config.renew_seconds - time.monotonic()
            if remaining <= 0:
                raise LeadershipLost(f"the Lease was not renewed for {self._config.renew_seconds} s")
            try:
                began = time.monotonic()
                if not await asyncio.wait_for(self._try_acquire_or_renew(), remaining):
                    raise LeadershipLost("another replica holds the Lease")
                renewed = began
            except (KubeError, TimeoutError) as error:
                logger.warning("cannot renew the Lease %s: %s", self._ref.name, error or "timed out")

    async def release(self) -> None:
        """Release the Lease if this replica holds it, so that another one can lead at once.

        If the Lease changes between read and write, both are repeated: a cancelled renewal may have been
        written after all.
        """
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                while not await self._release_once():
                    pass
        except (KubeError, TimeoutError) as error:
            logger.warning("cannot release the Lease: %s", error or "timed out")

    async def _release_once(self) -> bool:
        """Release the Lease if this replica holds it; return False if it changed between read and write."""
        lease = await self._kube.get(self._ref)
        if lease is None or lease.get("spec", {}).get("holderIdentity") != self._config.holder:
            return True
        lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            await self._kube.replace(lease)
        except KubeError as error:
            if error.code == 409:
                return False
            raise
        logger.info("%s has released the Lease", self._config.holder)
        return True

    async def _owner_references(self) -> list[dict[str, Any]]:
        """Return the Lease's owner references; they name the operator's Deployment.

        With them, the garbage collector deletes the Lease together with the Deployment. The list is empty if
        the Deployment does not exist or cannot be read.
        """
        try:
            deployment = await self._kube.get(
                ObjectRef("Deployment", self._ref.namespace, self._config.lease_owner)
            )
        except KubeError as error:
            text = "the Lease %s will remain when the operator is deleted: cannot read its Deployment: %s"
            logger.warning(text, self._ref.name, error)
            return []
        if deployment is None:
            return []
        name, uid = deployment["metadata"]["name"], deployment["metadata"]["uid"]
        return [{"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}]

    async def _try_acquire_or_renew(self) -> bool:
        lease = await self._kube.get(self._ref)
        if lease is None:
            return await self._kube.create(self._lease({}, transitions=0, acquired=True))
        self._check_version(lease)
        spec = lease.get("spec", {})
        mine = spec.get("holderIdentity") == self._config.holder
        if not mine and not self._is_free(spec):
            return False
        transitions = spec.get("leaseTransitions", 0) + (not mine)
        try:
            lease = self._lease(lease, transitions=transitions, acquired=not mine)
            self._check_version(await self._kube.replace(lease))
        except KubeError as error:
            if error.code == 409 and not mine:
                return False  # another replica was faster
            raise  # a leader tries again: only the Lease says which replica holds it
        return True

    def _check_version(self, lease: Mapping[str, Any]) -> None:
        """Record the Lease's version.

        Raises:
            VersionsWentBack: it is older than before; even a recreated Lease has a newer version.
        """
        version = int(lease["metadata"].get("resourceVersion", 0))
        if version < self._newest_version:
            raise VersionsWentBack(
                f"the API server's resourceVersions went back from {self._newest_version} to {version} "
                "(was etcd restored from a backup?): restarting"
            )
        self._newest_version = version

    def _is_free(self, spec: Mapping[str, Any]) -> bool:
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        now = time.monotonic()
        if record != self._seen:
            self._seen, self._seen_at = record, now
        if not spec.get("holderIdentity"):
            return True
        return now - self._seen_at > spec.get("leaseDurationSeconds", self._config.lease_seconds)

    def _lease(self, before: Mapping[str, Any], *, transitions: int, acquired: bool) -> dict[str, Any]:
        now = _now()
        old = before.get("spec", {})
        metadata = before.get("metadata", {"name": self._ref.name, "namespace": self._ref.namespace})
        owners = {"ownerReferences": self._owners} if self._owners else {}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**metadata, **owners},
            "spec": {
                **old,
                "holderIdentity": self._config.holder,
                "leaseDurationSeconds": max(1, round(self._config.lease_seconds)),
                "acquireTime": now if acquired else old.get("acquireTime", now),
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }


def _now() -> str:
    """Return the current time as a MicroTime of the Kubernetes API."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
