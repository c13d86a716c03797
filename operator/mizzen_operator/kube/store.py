"""Objects of the API server as they were seen last, by a watch or in the answer to one of our own writes.

An object is held as JSON without its managed fields, which takes a tenth of the memory of dictionaries, and
is decoded at each read: a reader may change what it gets. What is older than what is held, or than its end,
is left out, so events and answers may arrive in any order. A list tells what has ended unseen, also when
events from before it arrive after it.
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
"""Labels by which objects are found without looking at all of a namespace."""
MAX_REMEMBERED_DELETIONS = 4096
"""Ended objects whose late answers are recognized."""


class ObjectName(NamedTuple):
    """Namespace and name of an object."""

    namespace: str
    name: str


class ObjectVersion(NamedTuple):
    """Which object has a name, and its resourceVersion."""

    uid: str
    version: int


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of the cache."""

    uid: str
    version: int
    labels: Mapping[str, str]
    data: bytes
    notified_version: int
    """Version up to which changes by others were told of: an answer may hold some whose events come later."""
    own_versions: tuple[int, ...] = ()
    """Versions after it that are our own writes'."""


OnChange = Callable[[str, ObjectName, Mapping[str, str]], None]
"""Gets the kind, name and labels of an object that is another than before."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class ObjectStore:
    """All objects of one kind."""

    def __init__(self, kind: str, on_change: OnChange) -> None:
        self.kind = kind
        self.list_count = 0
        """How often the objects were listed."""
        self._on_change = on_change
        self._objects: dict[ObjectName, StoredObject] = {}
        self._namespaces: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._by_label: defaultdict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
        self._deleted: OrderedDict[str, int] = OrderedDict()
        """Up to which version the object of a uid has ended: a label by which it is watched may come back."""
        self._list_version = 0
        self._pending: dict[str, int] = {}
        """Versions, by uid, of what a list has named and no event has brought yet."""
        self._writes_in_flight: dict[ObjectName, list[int]] = {}
        self._updated = asyncio.Event()

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def synced(self) -> bool:
        """Whether the objects were listed, and all that were are held."""
        return self.list_count > 0 and not self._pending

    def get(self, name: ObjectName) -> dict[str, Any] | None:
        """An object; None when there is none."""
        stored = self._objects.get(name)
        return None if stored is None else _decode(stored.data)

    def list(self, namespace: str = "", selector: str = "") -> list[dict[str, Any]]:
        """Objects of a namespace, or of all, whose labels match `a=b,c=d` (or `a` alone), by name."""
        wanted = [
            (key, value) for key, _, value in (part.partition("=") for part in selector.split(",") if part)
        ]
        names = sorted(self._candidates(namespace, wanted))
        return [
            _decode(stored.data) for name in names if _matches((stored := self._objects[name]).labels, wanted)
        ]

    def is_up_to_date(self, listed: Mapping[ObjectName, ObjectVersion], version: int) -> bool:
        """Whether the cache is at least as new as a list.

        Args:
            listed: uid and version of every object of the list.
            version: of the list.
        """
        if any(self._is_behind(name, uid, at) for name, (uid, at) in listed.items()):
            return False
        return all(name in listed or stored.version > version for name, stored in self._objects.items())

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds that depends on this cache alone."""
        while not condition():
            self._updated.clear()
            await self._updated.wait()

    def put_event(self, body: Mapping[str, Any]) -> None:
        """Take an object as an event shows it, unless what is held is as new."""
        name, uid, version = _identity(body)
        if self._is_newer(name, uid, version):
            before = self._objects.get(name)
            self._insert(name, uid, version, body)
            self._notify(name, version, body["metadata"].get("labels") or {})
            if before is not None and _owner_labels(before.labels) != _owner_labels(
                self._objects[name].labels
            ):
                self._on_change(self.kind, name, before.labels)  # whose it was has one less
        elif self._note_late_event(name, uid, version):
            self._notify(name, version, body["metadata"].get("labels") or {})

    def put_fresh(self, body: Mapping[str, Any]) -> None:
        """Take an object as the API server reads it now, also at the version that is held.

        The CRD may be another since: what is stored is the same, and no event tells of it.
        """
        name, uid, version = _identity(body)
        stored = self._objects.get(name)
        if stored is not None and (stored.uid, stored.version) == (uid, version):
            self._objects[name] = replace(stored, data=_encode_object(body))
        else:
            self.put_event(body)

    def put_write_response(self, body: Mapping[str, Any]) -> int:
        """Take the answer to a write of ours, which is no news; returns its version."""
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
        """Take the end of an object, as a DELETED event shows it."""
        self.mark_deleted(*_identity(body))

    def mark_deleted(self, name: ObjectName, uid: str, version: int = sys.maxsize) -> None:
        """Take the end of the object of a uid, or of its being watched: up to a version, or for good."""
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
        """Take a whole list: what is held, not in the list and no newer than it has ended meanwhile.

        Args:
            listed: every object of the list; events bring, later or before, what is not held as new.
            version: of the list.
        """
        for name, stored in list(self._objects.items()):
            if name not in listed and stored.version <= version:
                self.mark_deleted(name, stored.uid, version)
            elif stored.own_versions:
                # Changes by others from before our own writes are told by no event any more.
                self._objects[name] = replace(stored, notified_version=stored.version, own_versions=())
                self._on_change(self.kind, name, stored.labels)
        self._list_version = max(self._list_version, version)
        self._pending = {uid: at for name, (uid, at) in listed.items() if self._is_behind(name, uid, at)}
        self.list_count += 1
        self._updated.set()

    def begin_write(self, name: ObjectName) -> None:
        """Tell that a write of ours is under way: its own event, if it is first, is no news."""
        self._writes_in_flight.setdefault(name, [])

    def end_write(self, name: ObjectName, version: int | None, *, notify: bool = False) -> None:
        """Tell how the write ended; events of others that came meanwhile are told now.

        Args:
            name: of the object.
            version: the object's version by the answer; None when there is none.
            notify: tell of the write itself too.
        """
        events = self._writes_in_flight.pop(name, [])
        stored = self._objects.get(name)
        if stored is not None and (notify or any(event != version for event in events)):
            self._on_change(self.kind, name, stored.labels)

    def _note_late_event(self, name: ObjectName, uid: str, version: int) -> bool:
        """Whether an event is of a change by others that the answer to a write of ours came before."""
        stored = self._objects.get(name)
        if stored is None or stored.uid != uid or not stored.notified_version < version <= stored.version:
            return False
        own = tuple(one for one in stored.own_versions if one > version)
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
        return known or version > self._list_version  # else it had ended by the time of the list

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
    """What labels say of whose an object is."""
    return tuple(given.get(key) for key in INDEXED_LABELS)


def _identity(body: Mapping[str, Any]) -> tuple[ObjectName, str, int]:
    meta = body["metadata"]
    return ObjectName(meta["namespace"], meta["name"]), meta["uid"], int(meta["resourceVersion"])


def _encode_object(body: Mapping[str, Any]) -> bytes:
    """An object as it is held."""
    meta = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    return _encode({**body, "metadata": meta})


def _remove_from_index(index: dict[Any, dict[str, None]], key: Any, name: str) -> None:
    index[key].pop(name, None)
    if not index[key]:
        del index[key]


def _matches(given: Mapping[str, str], wanted: list[tuple[str, str]]) -> bool:
    return all(key in given and value in ("", given[key]) for key, value in wanted)
