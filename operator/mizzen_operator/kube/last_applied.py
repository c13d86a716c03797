# SPDX-License-Identifier: Apache-2.0
"""Versions at which children of unwatched kinds were last applied or compared.

`apply.py` records them; `informers/metadata_poll.py` compares them with listed metadata to find drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from mizzen_operator.api import labels
from mizzen_operator.kube.store import ObjectName

UNWATCHED = ("PodDisruptionBudget", "NetworkPolicy", "RoleBinding", "ServiceAccount")
"""Unwatched kinds that the operator may list; it may not list Secrets and ConfigMaps."""


class AppliedVersion(NamedTuple):
    """A child as it was last applied; `version` changes with every edit."""

    uid: str
    version: str
    service: str
    """Name of the owning service; empty for children of a shared gateway."""

    @property
    def labels(self) -> dict[str, str]:
        """Label by which the controller finds the owner of the child."""
        return {labels.SERVICE: self.service} if self.service else {labels.GATEWAY_LABEL: labels.SHARED}


class _Labels(msgspec.Struct):
    service: str = msgspec.field(name=labels.SERVICE, default="")


class _ChildMetadata(msgspec.Struct, rename="camel"):
    name: str
    namespace: str
    uid: str
    resource_version: str
    generation: int = 0
    labels: _Labels = msgspec.field(default_factory=_Labels)

    def read(self) -> tuple[ObjectName, AppliedVersion]:
        """Return the child's name and version.

        The version is the child's generation, which status updates leave unchanged; or, if it has no
        generation, its resourceVersion.
        """
        version = str(self.generation) if self.generation else self.resource_version
        return ObjectName(self.namespace, self.name), AppliedVersion(self.uid, version, self.labels.service)


class _ListedChild(msgspec.Struct):
    metadata: _ChildMetadata


class _ChildPage(msgspec.Struct):
    items: list[_ListedChild] | None = None


_decode = msgspec.json.Decoder(_ChildPage).decode  # a quarter of the cost of decoding everything


class UnwatchedChildren:
    """Applied versions of all unwatched children, by kind and name: about 200 bytes each."""

    def __init__(self) -> None:
        self._applied: dict[str, dict[ObjectName, AppliedVersion]] = {kind: {} for kind in UNWATCHED}

    def record_applied(self, body: Mapping[str, Any]) -> None:
        """Record the version of an object that matches its manifest; ignore kinds not in `UNWATCHED`."""
        if body["kind"] in self._applied:
            name, child = msgspec.convert(body["metadata"], _ChildMetadata).read()
            self._applied[body["kind"]][name] = child

    def uid(self, kind: str, namespace: str, name: str) -> str:
        """Return the uid of an object as last applied; empty if it was never applied or has drifted."""
        child = self._applied[kind].get(ObjectName(namespace, name))
        return child.uid if child is not None else ""

    def record_deleted(self, kind: str, namespace: str, name: str) -> None:
        """Forget an object that is no longer wanted."""
        self._applied.get(kind, {}).pop(ObjectName(namespace, name), None)

    def pop_drifted(self, kind: str, pages: Iterable[bytes]) -> list[tuple[ObjectName, AppliedVersion]]:
        """Return the objects that were edited or deleted since they were applied, and forget them.

        Args:
            kind: kind of the objects.
            pages: pages of a list of the metadata of all objects of the kind, as JSON.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: a page is not a list of objects.
        """
        listed = dict(item.metadata.read() for page in pages for item in _decode(page).items or ())
        applied = self._applied[kind]
        drifted = [(name, child) for name, child in applied.items() if listed.get(name) != child]
        for name, _ in drifted:
            del applied[name]
        return drifted
