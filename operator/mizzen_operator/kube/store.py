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

INDEXED = (labels.SERVICE, labels.GATEWAY_LABEL)
"""Labels by which objects are found without looking at all of a namespace."""
REMEMBERED_ENDS = 4096
"""Ended objects whose late answers are recognized."""


class ObjectName(NamedTuple):
    """Namespace and name of an object."""

    namespace: str
    name: str


class Version(NamedTuple):
    """Which object has a name, and its resourceVersion."""

    uid: str
    version: int


@dataclass(frozen=True, slots=True)
class Held:
    """One object of the cache."""

    uid: str
    version: int
    labels: Mapping[str, str]
    data: bytes
    told: int
    """Version up to which changes by others were told of: an answer may hold some whose events come later."""
    own: tuple[int, ...] = ()
    """Versions after it that are our own writes'."""


Changed = Callable[[str, ObjectName, Mapping[str, str]], None]
"""Gets the kind, name and labels of an object that is another than before."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Cache:
    """All objects of one kind."""

    def __init__(self, kind: str, on_change: Changed) -> None:
        self.kind = kind
        self.listings = 0
        """How often the objects were listed."""
        self._on_change = on_change
        self._objects: dict[ObjectName, Held] = {}
        self._namespaces: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._by_label: defaultdict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Up to which version the object of a uid has ended: a label by which it is watched may come back."""
        self._listed = 0
        self._awaited: dict[str, int] = {}
        """Versions, by uid, of what a list has named and no event has brought yet."""
        self._writing: dict[ObjectName, list[int]] = {}
        self._stirred = asyncio.Event()

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def synced(self) -> bool:
        """Whether the objects were listed, and all that were are held."""
        return self.listings > 0 and not self._awaited

    def get(self, name: ObjectName) -> dict[str, Any] | None:
        """An object; None when there is none."""
        held = self._objects.get(name)
        return None if held is None else _decode(held.data)

    def list(self, namespace: str = "", selector: str = "") -> list[dict[str, Any]]:
        """Objects of a namespace, or of all, whose labels match `a=b,c=d` (or `a` alone), by name."""
        wanted = [
            (key, value) for key, _, value in (part.partition("=") for part in selector.split(",") if part)
        ]
        names = sorted(self._candidates(namespace, wanted))
        return [
            _decode(held.data) for name in names if _matches((held := self._objects[name]).labels, wanted)
        ]

    def reflects(self, there: Mapping[ObjectName, Version], version: int) -> bool:
        """Whether the cache is at least as new as a list.

        Args:
            there: uid and version of every object of the list.
            version: of the list.
        """
        if any(self._lacks(name, uid, at) for name, (uid, at) in there.items()):
            return False
        return all(name in there or held.version > version for name, held in self._objects.items())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds that depends on this cache alone."""
        while not condition():
            self._stirred.clear()
            await self._stirred.wait()

    def put(self, body: Mapping[str, Any]) -> None:
        """Take an object as an event shows it, unless what is held is as new."""
        name, uid, version = _identity(body)
        if self._is_news(name, uid, version):
            before = self._objects.get(name)
            self._hold(name, uid, version, body)
            self._tell(name, version, body["metadata"].get("labels") or {})
            if before is not None and _owners(before.labels) != _owners(self._objects[name].labels):
                self._on_change(self.kind, name, before.labels)  # whose it was has one less
        elif self._was_overtaken(name, uid, version):
            self._tell(name, version, body["metadata"].get("labels") or {})

    def reread(self, body: Mapping[str, Any]) -> None:
        """Take an object as the API server reads it now, also at the version that is held.

        The CRD may be another since: what is stored is the same, and no event tells of it.
        """
        name, uid, version = _identity(body)
        held = self._objects.get(name)
        if held is not None and (held.uid, held.version) == (uid, version):
            self._objects[name] = replace(held, data=_plain(body))
        else:
            self.put(body)

    def put_answer(self, body: Mapping[str, Any]) -> int:
        """Take the answer to a write of ours, which is no news; returns its version."""
        name, uid, version = _identity(body)
        if self._is_news(name, uid, version):
            before = self._objects.get(name)
            self._hold(name, uid, version, body)
            if before is not None and before.uid == uid:
                own = (*before.own, version)
                self._objects[name] = replace(self._objects[name], told=before.told, own=own)
        return version

    def remove(self, body: Mapping[str, Any]) -> None:
        """Take the end of an object, as a DELETED event shows it."""
        self.end(*_identity(body))

    def end(self, name: ObjectName, uid: str, version: int = sys.maxsize) -> None:
        """Take the end of the object of a uid, or of its being watched: up to a version, or for good."""
        self._stirred.set()
        self._awaited.pop(uid, None)
        self._ended[uid] = version
        self._ended.move_to_end(uid)
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        held = self._objects.get(name)
        if held is not None and held.uid == uid:
            self._drop(name, held)
            self._on_change(self.kind, name, held.labels)

    def listed(self, there: Mapping[ObjectName, Version], version: int) -> None:
        """Take a whole list: what is held, not in the list and no newer than it has ended meanwhile.

        Args:
            there: every object of the list; events bring, later or before, what is not held as new.
            version: of the list.
        """
        for name, held in list(self._objects.items()):
            if name not in there and held.version <= version:
                self.end(name, held.uid, version)
            elif held.own:
                # Changes by others from before our own writes are told by no event any more.
                self._objects[name] = replace(held, told=held.version, own=())
                self._on_change(self.kind, name, held.labels)
        self._listed = max(self._listed, version)
        self._awaited = {uid: at for name, (uid, at) in there.items() if self._lacks(name, uid, at)}
        self.listings += 1
        self._stirred.set()

    def begin_write(self, name: ObjectName) -> None:
        """Tell that a write of ours is under way: its own event, if it is first, is no news."""
        self._writing.setdefault(name, [])

    def end_write(self, name: ObjectName, version: int | None, *, tell: bool = False) -> None:
        """Tell how the write ended; events of others that came meanwhile are told now.

        Args:
            name: of the object.
            version: the object's version by the answer; None when there is none.
            tell: tell of the write itself too.
        """
        events = self._writing.pop(name, [])
        held = self._objects.get(name)
        if held is not None and (tell or any(event != version for event in events)):
            self._on_change(self.kind, name, held.labels)

    def _was_overtaken(self, name: ObjectName, uid: str, version: int) -> bool:
        """Whether an event is of a change by others that the answer to a write of ours came before."""
        held = self._objects.get(name)
        if held is None or held.uid != uid or not held.told < version <= held.version:
            return False
        own = tuple(one for one in held.own if one > version)
        self._objects[name] = replace(held, told=version, own=own)
        return version not in held.own

    def _lacks(self, name: ObjectName, uid: str, version: int) -> bool:
        held = self._objects.get(name)
        return self._ended.get(uid, -1) < version and (held is None or held.version < version)

    def _is_news(self, name: ObjectName, uid: str, version: int) -> bool:
        if not self._lacks(name, uid, version):
            return False
        held = self._objects.get(name)
        known = (held is not None and held.uid == uid) or uid in self._awaited
        return known or version > self._listed  # else it had ended by the time of the list

    def _tell(self, name: ObjectName, version: int, given: Mapping[str, str]) -> None:
        if name in self._writing:
            self._writing[name].append(version)
        else:
            self._on_change(self.kind, name, given)

    def _hold(self, name: ObjectName, uid: str, version: int, body: Mapping[str, Any]) -> None:
        held = Held(uid, version, body["metadata"].get("labels") or {}, _plain(body), version)
        if version >= self._awaited.get(uid, version + 1):
            del self._awaited[uid]
        before = self._objects.get(name)
        if before is not None:
            self._drop(name, before)
        self._objects[name] = held
        self._stirred.set()
        self._namespaces[name.namespace][name.name] = None
        for key in INDEXED:
            if key in held.labels:
                self._by_label[name.namespace, key, held.labels[key]][name.name] = None

    def _drop(self, name: ObjectName, held: Held) -> None:
        self._stirred.set()
        del self._objects[name]
        _discard(self._namespaces, name.namespace, name.name)
        for key in INDEXED:
            if key in held.labels:
                _discard(self._by_label, (name.namespace, key, held.labels[key]), name.name)

    def _candidates(self, namespace: str, wanted: list[tuple[str, str]]) -> Iterator[ObjectName]:
        if not namespace:
            yield from self._objects
            return
        found = self._namespaces.get(namespace, {})
        for key, value in wanted:
            if key in INDEXED and value:
                found = self._by_label.get((namespace, key, value), {})
                break
        for name in found:
            yield ObjectName(namespace, name)


def _owners(given: Mapping[str, str]) -> tuple[str | None, ...]:
    """What labels say of whose an object is."""
    return tuple(given.get(key) for key in INDEXED)


def _identity(body: Mapping[str, Any]) -> tuple[ObjectName, str, int]:
    meta = body["metadata"]
    return ObjectName(meta["namespace"], meta["name"]), meta["uid"], int(meta["resourceVersion"])


def _plain(body: Mapping[str, Any]) -> bytes:
    """An object as it is held."""
    meta = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    return _encode({**body, "metadata": meta})


def _discard(index: dict[Any, dict[str, None]], key: Any, name: str) -> None:
    index[key].pop(name, None)
    if not index[key]:
        del index[key]


def _matches(given: Mapping[str, str], wanted: list[tuple[str, str]]) -> bool:
    return all(key in given and value in ("", given[key]) for key, value in wanted)
