# SPDX-License-Identifier: Apache-2.0
"""Caches each service's keys between reconciles; `gateway/reconcile.py` calls it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple
from weakref import WeakKeyDictionary

from mizzen_operator.api.types import InferenceService
from mizzen_operator.keys.rotation import KeyRotator, ServiceKeys
from mizzen_operator.kube.apply_cache import AppliedChildren, ApplyCache


class _SyncedKeys(NamedTuple):
    keys: ServiceKeys
    gateway_public: tuple[str, ...]
    """Public keys of the shared gateway when the Secrets were written."""


class KeyCache:
    """Keys of all services; an entry lives as long as the service's record in the apply cache."""

    def __init__(self, rotator: KeyRotator, applied: ApplyCache) -> None:
        self._rotator = rotator
        self._applied = applied
        self._synced: WeakKeyDictionary[AppliedChildren, _SyncedKeys] = WeakKeyDictionary()

    async def sync(self, service: InferenceService, gateway_public: tuple[str, ...] = ()) -> ServiceKeys:
        """Create a service's missing Secrets, begin a key rotation if one is due, and return the keys.

        Args:
            service: the owner of the Secrets.
            gateway_public: public keys of the shared gateway: the present one, and the next one during a
                rotation; empty if the service has a gateway of its own.

        Raises:
            Refused: a Secret with a name that the service needs belongs to something else, or lacks a
                required value.
            KubeError: the API server failed.
        """
        record = self._applied.record(service)
        synced = self._synced.pop(record, None)
        if (
            synced is not None
            and synced.gateway_public == gateway_public
            and self._is_current(service, synced)
        ):
            self._synced[record] = synced
            return synced.keys
        keys = await self._rotator.sync(service, gateway_public)
        self._synced[record] = _SyncedKeys(keys, gateway_public)
        return keys

    def _is_current(self, service: InferenceService, synced: _SyncedKeys) -> bool:
        return not (
            synced.keys.rotating or self._rotator.is_rotation_due(service, synced.keys, datetime.now(UTC))
        )

    async def drop_previous(self, service: InferenceService) -> None:
        """Drop the previous generation of a service's keys; call it once nothing uses them any more.

        Raises:
            Refused: a Secret with a name that the service needs belongs to something else.
            KubeError: the API server failed.
        """
        await self._rotator.drop_previous(service)
        self._synced.pop(self._applied.record(service), None)
