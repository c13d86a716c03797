# SPDX-License-Identifier: Apache-2.0
"""Per-service record of the children that were applied, so that unchanged children are not read again.

No watch reports Secrets, ServiceAccounts, RoleBindings, NetworkPolicies or PodDisruptionBudgets. They are
compared with their manifests once, and again when their record is dropped: after `resync_seconds`, after
`recheck_seconds` while a service is neither complete nor progressing, or when a child is invalidated.
The writers of keys, gateways, policies and pods share one record per service.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.service_ref import ServiceRef
from mizzen_operator.config import OperatorConfig

Digests = dict[tuple[str, str], str]
"""Digest of each applied manifest, by kind and name."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class AppliedChildren:
    """Children of one service that were applied since its record was created.

    Attributes:
        uid: uid of the service.
        since: monotonic time at which the record was created.
        digests: digest of each applied manifest, by kind and name.
        foreign_pod_names: names that the service's pods need, but that other pods, which lack the service's
            label, already have.
        progress: marker of the service's progress at the last reconcile; see `expire`.
    """

    uid: str
    since: float
    digests: Digests = field(default_factory=dict[tuple[str, str], str])
    foreign_pod_names: set[str] = field(default_factory=set[str])
    progress: tuple[object, ...] = ()


class ApplyCache:
    """Records of the applied children of all services."""

    def __init__(self, config: OperatorConfig) -> None:
        self._config = config
        self._records: dict[ServiceKey, AppliedChildren] = {}

    def record(self, service: ServiceRef) -> AppliedChildren:
        """Return the record of a service; create it if the service's uid has no record."""
        key = ServiceKey(service.namespace, service.name)
        record = self._records.get(key)
        if record is None or record.uid != service.uid:
            record = self._records[key] = AppliedChildren(service.uid, time.monotonic())
        return record

    def forget(self, key: ServiceKey) -> None:
        """Drop the record of a service, so that the next reconcile compares all of its children."""
        self._records.pop(key, None)

    def invalidate(self, key: ServiceKey, kind: str, name: str) -> None:
        """Make the next reconcile compare one child of a service with its manifest."""
        if key in self._records:
            self._records[key].digests.pop((kind, name), None)

    def expire(self, service: ServiceRef, progress: tuple[object, ...], *, settled: bool) -> bool:
        """Drop the record of a service if it is too old; return whether it was dropped.

        The limit is `resync_seconds` for a service that is settled or has progressed since the last
        reconcile, and `recheck_seconds` for others. Progress shows that no child is missing. With the short
        limit, the children of a thousand services that were created at once would be compared again while
        the API server is busiest.

        Args:
            service: the service.
            progress: marker that changes with the service's progress.
            settled: whether everything that the spec wants is running.
        """
        key = ServiceKey(service.namespace, service.name)
        record = self._records.get(key)
        if record is None:
            return False
        progressed, record.progress = record.progress != progress, progress
        trusted = settled or progressed
        limit = self._config.resync_seconds if trusted else self._config.recheck_seconds
        if time.monotonic() - record.since <= limit:
            return False
        self.forget(key)
        self.record(service).progress = progress
        return True
