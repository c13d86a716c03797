"""Which children of kinds that no watch follows were compared last, and what they were then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from mizzen_operator.api import labels
from mizzen_operator.kube.store import ObjectName

UNWATCHED = ("PodDisruptionBudget", "NetworkPolicy", "RoleBinding", "ServiceAccount")
"""Of Secrets and ConfigMaps the operator may list nothing."""


class Child(NamedTuple):
    """One child; `edition` is another one once it has been edited."""

    uid: str
    edition: str
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

    def read(self) -> tuple[ObjectName, Child]:
        """Whose metadata it is; an object whose status changes alone has a generation."""
        edition = str(self.generation) if self.generation else self.resource_version
        return ObjectName(self.namespace, self.name), Child(self.uid, edition, self.labels.service)


class _Item(msgspec.Struct):
    metadata: _Metadata


class _Page(msgspec.Struct):
    items: list[_Item] | None = None


_decode = msgspec.json.Decoder(_Page).decode  # a quarter of what it costs to decode all of it


class Children:
    """All of them, by kind and name: about 200 bytes each."""

    def __init__(self) -> None:
        self._known: dict[str, dict[ObjectName, Child]] = {kind: {} for kind in UNWATCHED}

    def compared(self, body: Mapping[str, Any]) -> None:
        """Note that an object is as it should be."""
        if body["kind"] in self._known:
            name, child = msgspec.convert(body["metadata"], _Metadata).read()
            self._known[body["kind"]][name] = child

    def uid(self, kind: str, namespace: str, name: str) -> str:
        """Which object was as it should be when it was compared last; empty when none was, or it strayed."""
        child = self._known[kind].get(ObjectName(namespace, name))
        return child.uid if child is not None else ""

    def removed(self, kind: str, namespace: str, name: str) -> None:
        """Note that an object is not wanted any more."""
        self._known.get(kind, {}).pop(ObjectName(namespace, name), None)

    def strayed(self, kind: str, pages: Iterable[bytes]) -> list[tuple[ObjectName, Child]]:
        """Objects that are not there, or are others than when they were compared; each is named once.

        Args:
            kind: theirs.
            pages: a list of the metadata of all objects of the kind, as JSON.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: it is none.
        """
        found = dict(item.metadata.read() for page in pages for item in _decode(page).items or ())
        known = self._known[kind]
        strayed = [(name, child) for name, child in known.items() if found.get(name) != child]
        for name, _ in strayed:
            del known[name]
        return strayed
