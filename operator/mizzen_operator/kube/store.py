# SPDX-License-Identifier: Apache-2.0
"""In-memory store of watched objects, fed by watch events, lists, and the responses to our own writes.

An object is stored as JSON without managed fields, which takes a tenth of the memory of dictionaries, and
decoded at each read, so that readers may change their copy. Versions older than the stored one, or than the
object's deletion, are ignored: events and responses may arrive in any order. A list reveals deletions that
were missed, and stays correct if older events arrive after it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from mizzen_operator.api import labels

INDEXED_LABELS = (labels.SERVICE, labels.GATEWAY_LABEL)
"""Labels with an index, so that a lookup does not scan the namespace."""
MAX_REMEMBERED_DELETIONS = 4096
"""Number of deleted objects whose late events and responses are still recognized."""


class ObjectName(NamedTuple):
    """Namespace and name of an object."""

    namespace: str
    name: str


class ObjectVersion(NamedTuple):
    """Uid and resourceVersion of an object."""

    uid: str
    version: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in the store; `data` is its JSON."""

    uid: str
    version: int
    labels: Mapping[str, str]
    data: bytes
    notified_version: int
    """Version up to which `on_change` was called for foreign changes.

    The response to one of our writes may contain foreign changes whose events have not arrived yet.
    """
    own_versions: tuple[int, ...] = ()
    """Versions after `notified_version` that our own writes produced."""


OnChange = Callable[[str, ObjectName, Mapping[str, str]], None]
"""Callback with kind, name and labels of an object that has changed."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class ObjectStore:
    """Store of all watched objects of one kind."""

    def __init__(self, kind: str, on_change: OnChange) -> None:
        self.kind = kind
        self.list_count = 0
        """Number of lists that were applied."""
        self._on_change = on_change
        self._objects: dict[ObjectName, StoredObject] = {}
        self._namespaces: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._by_label: defaultdict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
        self._deleted: OrderedDict[str, int] = OrderedDict()
        """Version up to which a deleted object is ignored, by uid.

        A later version is stored, because an object that lost its watched label may regain it.
        """
        self._list_version = 0
        self._pending: dict[str, int] = {}
        """Versions, by uid, that a list has named but that no event has delivered yet."""
        self._writes_in_flight: dict[ObjectName, list[int]] = {}
        self._updated = asyncio.Event()

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def synced(self) -> bool:
        """Whether a list was applied and all of its objects have arrived."""
        return self.list_count > 0 and not self._pending

    def get(self, name: ObjectName) -> dict[str, Any] | None:
        """Return a copy of an object; None if it is not stored."""
        stored = self._objects.get(name)
        return None if stored is None else _decode(stored.data)

    def list(self, namespace: str = "", selector: str = "") -> list[dict[str, Any]]:
        """Return the objects that match a label selector, sorted by namespace and name.

        Args:
            namespace: namespace of the objects; all namespaces if it is empty.
            selector: selector such as `a=b,c`, where `c` requires a label with any value.
        """
        wanted = [
            (key, value) for key, _, value in (part.partition("=") for part in selector.split(",") if part)
        ]
        names = sorted(self._candidates(namespace, wanted))
        return [
            _decode(stored.data) for name in names if _matches((stored := self._objects[name]).labels, wanted)
        ]

    def is_up_to_date(self, listed: Mapping[ObjectName, ObjectVersion], version: int) -> bool:
        """Return whether the store is at least as new as a list.

        Args:
            listed: uid and version of each object of the list.
            version: resourceVersion of the list.
        """
        if any(self._is_behind(name, uid, at) for name, (uid, at) in listed.items()):
            return False
        return all(name in listed or stored.version > version for name, stored in self._objects.items())

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` returns True; it must depend on this store only."""
        while not condition():
            self._updated.clear()
            await self._updated.wait()

    def put_event(self, body: Mapping[str, Any]) -> None:
        """Store an object from a watch event, unless this version or a newer one is stored."""
        name, uid, version = _identity(body)
        if self._is_newer(name, uid, version):
            before = self._objects.get(name)
            self._insert(name, uid, version, body)
            self._notify(name, version, body["metadata"].get("labels") or {})
            if before is not None and _owner_labels(before.labels) != _owner_labels(
                self._objects[name].labels
            ):
                self._on_change(self.kind, name, before.labels)  # the previous owner has lost a child
        elif self._note_late_event(name, uid, version):
            self._notify(name, version, body["metadata"].get("labels") or {})

    def put_fresh(self, body: Mapping[str, Any]) -> None:
        """Store an object that was just read, even if the stored one has the same version.

        After a change of the CRD, the API server may return other defaults for the same version, and sends no
        event.
        """
        name, uid, version = _identity(body)
        stored = self._objects.get(name)
        if stored is not None and (stored.uid, stored.version) == (uid, version):
            self._objects[name] = replace(stored, data=_encode_object(body))
        else:
            self.put_event(body)

    def put_write_response(self, body: Mapping[str, Any]) -> int:
        """Store the response to one of our writes without calling `on_change`; return its version."""
        name, uid, version = _identity(body)
        if self._is_newer(name, uid, version):
            before = self._objects.get(name)
            self._insert(name, uid, version, body)
            if before is not None and before.uid == uid:
                own = (*before.own_versions, version)
                self._objects[name] = replace(
                    self._objects[name], notified_version=before.notified_version, own_versions=own
                )
        return version

    def remove_deleted(self, body: Mapping[str, Any]) -> None:
        """Remove the object of a DELETED event."""
        self.mark_deleted(*_identity(body))

    def mark_deleted(self, name: ObjectName, uid: str, version: int = sys.maxsize) -> None:
        """Remove an object that was deleted or is no longer watched; ignore its versions up to `version`."""
        self._updated.set()
        self._pending.pop(uid, None)
        self._deleted[uid] = version
        self._deleted.move_to_end(uid)
        if len(self._deleted) > MAX_REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        stored = self._objects.get(name)
        if stored is not None and stored.uid == uid:
            self._drop(name, stored)
            self._on_change(self.kind, name, stored.labels)

    def apply_list(self, listed: Mapping[ObjectName, ObjectVersion], version: int) -> None:
        """Apply a complete list: remove stored objects that are neither in the list nor newer than it.

        Args:
            listed: uid and version of each object of the list; events deliver the objects themselves, before
                or after this call.
            version: resourceVersion of the list.
        """
        for name, stored in list(self._objects.items()):
            if name not in listed and stored.version <= version:
                self.mark_deleted(name, stored.uid, version)
            elif stored.own_versions:
                # The watch starts at the list: no event reports foreign changes before our own writes.
                self._objects[name] = replace(stored, notified_version=stored.version, own_versions=())
                self._on_change(self.kind, name, stored.labels)
        self._list_version = max(self._list_version, version)
        self._pending = {uid: at for name, (uid, at) in listed.items() if self._is_behind(name, uid, at)}
        self.list_count += 1
        self._updated.set()

    def begin_write(self, name: ObjectName) -> None:
        """Record that a write is in flight.

        The event of the write may arrive before the response, and must not call `on_change`.
        """
        self._writes_in_flight.setdefault(name, [])

    def end_write(self, name: ObjectName, version: int | None, *, notify: bool = False) -> None:
        """Record the end of a write; call `on_change` if foreign events arrived during the write.

        Args:
            name: name of the object.
            version: version of the object in the response; None if the response holds no object.
            notify: call `on_change` for the write itself, too.
        """
        events = self._writes_in_flight.pop(name, [])
        stored = self._objects.get(name)
        if stored is not None and (notify or any(event != version for event in events)):
            self._on_change(self.kind, name, stored.labels)

    def _note_late_event(self, name: ObjectName, uid: str, version: int) -> bool:
        """Record an event that is not newer than the stored object; return whether it is a foreign change.

        The response to one of our writes may already have contained that change.
        """
        stored = self._objects.get(name)
        if stored is None or stored.uid != uid or not stored.notified_version < version <= stored.version:
            return False
        own = tuple(later for later in stored.own_versions if later > version)
        self._objects[name] = replace(stored, notified_version=version, own_versions=own)
        return version not in stored.own_versions

    def _is_behind(self, name: ObjectName, uid: str, version: int) -> bool:
        stored = self._objects.get(name)
        return self._deleted.get(uid, -1) < version and (stored is None or stored.version < version)

    def _is_newer(self, name: ObjectName, uid: str, version: int) -> bool:
        if not self._is_behind(name, uid, version):
            return False
        stored = self._objects.get(name)
        known = (stored is not None and stored.uid == uid) or uid in self._pending
        return known or version > self._list_version  # otherwise the object was deleted before the list

    def _notify(self, name: ObjectName, version: int, given: Mapping[str, str]) -> None:
        if name in self._writes_in_flight:
            self._writes_in_flight[name].append(version)
        else:
            self._on_change(self.kind, name, given)

    def _insert(self, name: ObjectName, uid: str, version: int, body: Mapping[str, Any]) -> None:
        stored = StoredObject(
            uid, version, body["metadata"].get("labels") or {}, _encode_object(body), version
        )
        if version >= self._pending.get(uid, version + 1):
            del self._pending[uid]
        before = self._objects.get(name)
        if before is not None:
            self._drop(name, before)
        self._objects[name] = stored
        self._updated.set()
        self._namespaces[name.namespace][name.name] = None
        for key in INDEXED_LABELS:
            if key in stored.labels:
                self._by_label[name.namespace, key, stored.labels[key]][name.name] = None

    def _drop(self, name: ObjectName, stored: StoredObject) -> None:
        self._updated.set()
        del self._objects[name]
        _remove_from_index(self._namespaces, name.namespace, name.name)
        for key in INDEXED_LABELS:
            if key in stored.labels:
                _remove_from_index(self._by_label, (name.namespace, key, stored.labels[key]), name.name)

    def _candidates(self, namespace: str, wanted: list[tuple[str, str]]) -> Iterator[ObjectName]:
        if not namespace:
            yield from self._objects
            return
        candidates = self._namespaces.get(namespace, {})
        for key, value in wanted:
            if key in INDEXED_LABELS and value:
                candidates = self._by_label.get((namespace, key, value), {})
                break
        for name in candidates:
            yield ObjectName(namespace, name)


def _owner_labels(given: Mapping[str, str]) -> tuple[str | None, ...]:
    """Return the labels that name an object's owner."""
    return tuple(given.get(key) for key in INDEXED_LABELS)


def _identity(body: Mapping[str, Any]) -> tuple[ObjectName, str, int]:
    meta = body["metadata"]
    return ObjectName(meta["namespace"], meta["name"]), meta["uid"], int(meta["resourceVersion"])


def _encode_object(body: Mapping[str, Any]) -> bytes:
    """Encode an object without its managed fields."""
    meta = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    return _encode({**body, "metadata": meta})


def _remove_from_index(index: dict[Any, dict[str, None]], key: Any, name: str) -> None:
    index[key].pop(name, None)
    if not index[key]:
        del index[key]


def _matches(given: Mapping[str, str], wanted: list[tuple[str, str]]) -> bool:
    return all(key in given and value in ("", given[key]) for key, value in wanted)
