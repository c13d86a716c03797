"""Which children of kinds that no watch follows were compared last, and what they were then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from mizzen_operator.api import labels
from mizzen_operator.kube.store import ObjectName

UNWATCHED = ("PodDisruptionBudget", "NetworkPolicy", "RoleBinding", "ServiceAccount")
"""Of Secrets and ConfigMaps the operator may list nothing."""


class AppliedVersion(NamedTuple):
    """One child; `version` is another one once it has been edited."""

    uid: str
    version: str
    service: str
    """Whose it is; empty for what belongs to services that share a gateway."""

    @property
    def labels(self) -> dict[str, str]:
        """The label that says whose it is."""
        return {labels.SERVICE: self.service} if self.service else {labels.GATEWAY_LABEL: labels.SHARED}


class _Labels(msgspec.Struct):
    service: str = msgspec.field(name=labels.SERVICE, default="")


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    namespace: str
    uid: str
    resource_version: str
    generation: int = 0
    labels: _Labels = msgspec.field(default_factory=_Labels)

    def read(self) -> tuple[ObjectName, AppliedVersion]:
        """Whose metadata it is; an object whose status changes alone has a generation."""
        version = str(self.generation) if self.generation else self.resource_version
        return ObjectName(self.namespace, self.name), AppliedVersion(self.uid, version, self.labels.service)


class _Item(msgspec.Struct):
    metadata: _Metadata


class _Page(msgspec.Struct):
    items: list[_Item] | None = None


_decode = msgspec.json.Decoder(_Page).decode  # a quarter of what it costs to decode all of it


class UnwatchedChildren:
    """All of them, by kind and name: about 200 bytes each."""

    def __init__(self) -> None:
        self._applied: dict[str, dict[ObjectName, AppliedVersion]] = {kind: {} for kind in UNWATCHED}

    def record_applied(self, body: Mapping[str, Any]) -> None:
        """Note that an object is as it should be."""
        if body["kind"] in self._applied:
            name, child = msgspec.convert(body["metadata"], _Metadata).read()
            self._applied[body["kind"]][name] = child

    def uid(self, kind: str, namespace: str, name: str) -> str:
        """Which object was as it should be when it was compared last; empty when none was, or it strayed."""
        child = self._applied[kind].get(ObjectName(namespace, name))
        return child.uid if child is not None else ""

    def record_deleted(self, kind: str, namespace: str, name: str) -> None:
        """Note that an object is not wanted any more."""
        self._applied.get(kind, {}).pop(ObjectName(namespace, name), None)

    def pop_drifted(self, kind: str, pages: Iterable[bytes]) -> list[tuple[ObjectName, AppliedVersion]]:
        """Objects that are not there, or are others than when they were compared; each is named once.

        Args:
            kind: theirs.
            pages: a list of the metadata of all objects of the kind, as JSON.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: it is none.
        """
        listed = dict(item.metadata.read() for page in pages for item in _decode(page).items or ())
        known = self._applied[kind]
        drifted = [(name, child) for name, child in known.items() if listed.get(name) != child]
        for name, _ in drifted:
            del known[name]
        return drifted
