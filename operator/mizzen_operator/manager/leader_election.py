"""Leader election with a Lease of coordination.k8s.io, by client-go's algorithm.

Clocks of different machines are never compared: a Lease has run out when it was seen unchanged for its whole
duration. A leader that cannot renew gives up before the others may take over.
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
WAITING_SHARE = 0.25
"""Who waits looks this much more often than a leader renews: a Lease that is given back is taken at once."""


class LeadershipLost(Exception):
    """Another replica holds the Lease, or it could not be renewed in time."""


class Elector:
    """This replica's part in the election."""

    def __init__(self, kube: KubeClient, config: OperatorConfig) -> None:
        self._kube = kube
        self._config = config
        self._ref = ObjectRef("Lease", config.lease_namespace, config.lease_name)
        self._owners: list[dict[str, Any]] = []
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        while True:
            try:
                if self._config.lease_owner and not self._owners:
                    self._owners = await self._owner()
                if await asyncio.wait_for(self._try(), self._config.renew_seconds):
                    logger.info("%s leads", self._config.holder)
                    return
            except (KubeError, TimeoutError) as error:
                logger.warning("cannot take the Lease %s: %s", self._ref.name, error or "timed out")
            await asyncio.sleep(self._config.retry_seconds * WAITING_SHARE)

    async def hold(self) -> None:
        """Renew for as long as this replica leads.

        Raises:
            LeadershipLost: the Lease is another's, or was not renewed for `renew_seconds`.
        """
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(self._config.retry_seconds)
            left = renewed + self._config.renew_seconds - time.monotonic()
            if left <= 0:
                raise LeadershipLost(f"the Lease was not renewed for {self._config.renew_seconds} s")
            try:
                began = time.monotonic()
                if not await asyncio.wait_for(self._try(), left):
                    raise LeadershipLost("another replica holds the Lease")
                renewed = began
            except (KubeError, TimeoutError) as error:
                logger.warning("cannot renew the Lease %s: %s", self._ref.name, error or "timed out")

    async def release(self) -> None:
        """Give the Lease back if this replica has it, so that another one leads at once.

        It is read anew when it has changed meanwhile: a renewal that was cancelled may have been written.
        """
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                while not await self._give_back():
                    pass
        except (KubeError, TimeoutError) as error:
            logger.warning("cannot give the Lease back: %s", error or "timed out")

    async def _give_back(self) -> bool:
        """Whether the Lease is not, or no longer, this replica's; False when it has changed meanwhile."""
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
        logger.info("%s has given the Lease back", self._config.holder)
        return True

    async def _owner(self) -> list[dict[str, Any]]:
        """Owner references by which the garbage collector removes the Lease with the Deployment."""
        try:
            found = await self._kube.get(
                ObjectRef("Deployment", self._ref.namespace, self._config.lease_owner)
            )
        except KubeError as error:
            logger.warning("the Lease %s will stay when the operator goes: %s", self._ref.name, error)
            return []
        if found is None:
            return []
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        return [{"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}]

    async def _try(self) -> bool:
        lease = await self._kube.get(self._ref)
        if lease is None:
            return await self._kube.create(self._lease({}, transitions=0, taken=True))
        spec = lease.get("spec", {})
        mine = spec.get("holderIdentity") == self._config.holder
        if not mine and not self._free(spec):
            return False
        transitions = spec.get("leaseTransitions", 0) + (not mine)
        try:
            await self._kube.replace(self._lease(lease, transitions=transitions, taken=not mine))
        except KubeError as error:
            if error.code == 409 and not mine:
                return False  # another was faster
            raise  # a holder tries again: who has the Lease, only the Lease says
        return True

    def _free(self, spec: Mapping[str, Any]) -> bool:
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        now = time.monotonic()
        if record != self._seen:
            self._seen, self._seen_at = record, now
        if not spec.get("holderIdentity"):
            return True
        return now - self._seen_at > spec.get("leaseDurationSeconds", self._config.lease_seconds)

    def _lease(self, before: Mapping[str, Any], *, transitions: int, taken: bool) -> dict[str, Any]:
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
                "acquireTime": now if taken else old.get("acquireTime", now),
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }


def _now() -> str:
    """A MicroTime."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
