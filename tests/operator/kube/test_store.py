# SPDX-License-Identifier: Apache-2.0
"""The store of the API server's objects never goes back to an older version, and finds objects by label."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mizzen_operator.kube.store import ObjectName, ObjectStore, ObjectVersion

SERVICE, GATEWAY = "mizzen.dev/service", "mizzen.dev/gateway"


def body(name: str, version: int, uid: str = "", labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "a",
            "uid": uid or f"uid of {name}",
            "resourceVersion": str(version),
            "labels": labels or {},
            "managedFields": [{"manager": "x"}],
        },
        "spec": {"version": version},
    }


class RecordedChanges(list[tuple[str, str]]):
    """The changes that a store has reported, as pairs of the object's name and its service's name."""

    def __call__(self, kind: str, name: ObjectName, labels: Any) -> None:
        self.append((name.name, labels.get(SERVICE, "")))


def test_older_events_are_ignored_and_deleted_objects_do_not_return() -> None:
    changes = RecordedChanges()
    cache = ObjectStore("Pod", changes)
    cache.put_event(body("one", 5))
    cache.put_event(body("one", 4))
    assert cache.get(ObjectName("a", "one"))["spec"] == {"version": 5}  # type: ignore[index]
    assert "managedFields" not in cache.get(ObjectName("a", "one"))["metadata"]  # type: ignore[index]
    cache.remove_deleted(body("one", 6))
    cache.put_event(body("one", 6))
    cache.put_write_response(body("one", 5))
    assert cache.get(ObjectName("a", "one")) is None
    cache.put_event(body("one", 9, uid="another"))
    assert cache.get(ObjectName("a", "one"))["metadata"]["uid"] == "another"  # type: ignore[index]
    cache.remove_deleted(body("one", 10, uid="uid of one"))
    assert len(cache) == 1
    assert changes == [("one", ""), ("one", ""), ("one", "")]


def test_a_foreign_change_before_an_own_write_is_reported_when_its_event_comes() -> None:
    """The response to the operator's write already contains the foreign change.

    So the event of the foreign change, which arrives later, has an older version than the stored object.
    """
    changes = RecordedChanges()
    cache, one = ObjectStore("Pod", changes), ObjectName("a", "one")
    cache.put_event(body("one", 1))
    for version in (3, 5):  # 2 and 4 are foreign changes
        cache.begin_write(one)
        cache.end_write(one, cache.put_write_response(body("one", version)))
    assert len(changes) == 1
    expected = {2: 2, 3: 2, 4: 3, 5: 3, 6: 4}
    for version, number in expected.items():
        cache.put_event(body("one", version))
        assert len(changes) == number, version
    cache.put_event(body("one", 4))
    assert len(changes) == 4
    assert cache.get(one)["spec"] == {"version": 6}  # type: ignore[index]


def test_an_object_that_regains_its_label_is_stored_again() -> None:
    """Watches select objects by label: when an object loses the label, the watch reports it as deleted."""
    changes = RecordedChanges()
    cache, one = ObjectStore("Pod", changes), ObjectName("a", "one")
    cache.put_event(body("one", 5))
    cache.remove_deleted(body("one", 6))
    assert cache.get(one) is None
    cache.put_write_response(body("one", 7))  # an apply by the operator may restore the label
    assert cache.get(one)["spec"] == {"version": 7}  # type: ignore[index]
    cache.apply_list({}, 9)
    cache.put_event(body("one", 8))
    assert cache.get(one) is None
    cache.put_event(body("one", 10))
    assert cache.get(one)["spec"] == {"version": 10}  # type: ignore[index]
    cache.mark_deleted(one, "uid of one")  # the response to a deletion is final
    cache.put_event(body("one", 11))
    assert cache.get(one) is None


def test_a_list_reports_foreign_changes_before_an_own_write() -> None:
    """The watch was cut before it reported the foreign change; the list shows only the later own write."""
    changes = RecordedChanges()
    cache, one = ObjectStore("Pod", changes), ObjectName("a", "one")
    cache.put_event(body("one", 1))
    cache.begin_write(one)
    cache.end_write(one, cache.put_write_response(body("one", 3)))  # 2 is a foreign change
    assert len(changes) == 1
    listed = {one: ObjectVersion("uid of one", 3)}
    cache.apply_list(listed, 4)
    assert len(changes) == 2
    cache.put_event(body("one", 3))
    cache.apply_list(listed, 5)
    assert len(changes) == 2


def test_a_change_of_the_service_label_is_reported_for_both_services() -> None:
    changes = RecordedChanges()
    cache = ObjectStore("Pod", changes)
    cache.put_event(body("one", 1, labels={SERVICE: "old"}))
    cache.put_event(body("one", 2, labels={SERVICE: "old", "x": "y"}))
    assert changes == [("one", "old")] * 2
    cache.put_event(body("one", 3, labels={SERVICE: "new"}))
    assert changes[2:] == [("one", "new"), ("one", "old")]


def test_a_returned_object_is_a_copy() -> None:
    cache = ObjectStore("Pod", RecordedChanges())
    cache.put_event(body("one", 1))
    for copy in (cache.get(ObjectName("a", "one")), *cache.list("a")):
        assert copy is not None
        copy["spec"]["version"] = 7
    assert cache.list()[0]["spec"] == {"version": 1}


def test_an_own_write_is_not_reported_whether_its_event_or_its_response_comes_first() -> None:
    changes = RecordedChanges()
    cache = ObjectStore("Pod", changes)
    one = ObjectName("a", "one")
    cache.begin_write(one)
    cache.put_event(body("one", 5))
    cache.end_write(one, cache.put_write_response(body("one", 5)))
    cache.begin_write(one)
    cache.end_write(one, cache.put_write_response(body("one", 6)))
    cache.put_event(body("one", 6))
    assert not changes
    cache.begin_write(one)
    cache.put_event(body("one", 7))
    cache.put_event(body("one", 8))
    assert not changes
    cache.end_write(one, cache.put_write_response(body("one", 8)))
    assert changes == [("one", "")]  # 7 is a foreign change
    cache.begin_write(one)
    cache.put_event(body("one", 9))
    cache.end_write(one, None)
    assert len(changes) == 2
    cache.begin_write(one)
    cache.end_write(one, cache.put_write_response(body("one", 10)), notify=True)
    assert len(changes) == 3


def test_an_object_missing_in_a_list_is_removed_whatever_events_are_pending() -> None:
    changes = RecordedChanges()
    cache = ObjectStore("Pod", changes)
    cache.apply_list({}, 3)
    cache.put_event(body("one", 5))
    listed = {
        ObjectName("a", "two"): ObjectVersion("uid of two", 6),
        ObjectName("a", "three"): ObjectVersion("uid of three", 7),
    }
    cache.apply_list(listed, 9)  # the watch was cut, so no event reported the deletion of `one`
    assert cache.get(ObjectName("a", "one")) is None
    cache.put_event(body("late", 8))  # received before the list, and handled only now
    assert len(cache) == 0 and not cache.synced
    cache.put_event(body("two", 4))
    cache.put_event(body("three", 7))
    assert not cache.synced
    cache.put_event(body("two", 6))
    assert cache.synced and len(cache) == 2
    cache.put_event(body("new", 10))
    assert changes == [("one", ""), ("one", ""), ("two", ""), ("three", ""), ("two", ""), ("new", "")]


class ListsAndEvents(RuleBasedStateMachine):
    """A server whose watch is sometimes cut, and a queue of received events for each object.

    Even if events are lost or late, the store ends up with the same objects as the server.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.server: dict[str, dict[str, Any]] = {}
        self.sent: list[tuple[str, dict[str, Any]]] = []
        """Events that the server has sent but that have not arrived; they are lost if the watch is cut."""
        self.queued: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        """Received events that have not been handled yet: one queue per object, by uid."""
        self.cache = ObjectStore("Pod", RecordedChanges())
        self.uids = 0

    @initialize()
    def list_first(self) -> None:
        self.cut_and_list()

    @rule(name=st.sampled_from("xyz"), service=st.sampled_from(["s", "t", ""]), own=st.booleans())
    def write(self, name: str, service: str, own: bool) -> None:
        self.version += 1
        if name not in self.server:
            self.uids += 1
        uid = self.server[name]["metadata"]["uid"] if name in self.server else f"u{self.uids}"
        new = body(name, self.version, uid, {SERVICE: service} if service else {GATEWAY: "shared"})
        self.server[name] = new
        self.sent.append(("MODIFIED", new))
        if own:
            self.cache.begin_write(ObjectName("a", name))
            self.cache.end_write(ObjectName("a", name), self.cache.put_write_response(new))

    @rule(name=st.sampled_from("xyz"), own=st.booleans())
    def delete(self, name: str, own: bool) -> None:
        if name in self.server:
            self.version += 1
            old = self.server.pop(name)["metadata"]
            self.sent.append(("DELETED", body(name, self.version, old["uid"], old["labels"])))
            if own:
                self.cache.mark_deleted(ObjectName("a", name), old["uid"])

    @rule(number=st.integers(1, 4))
    def deliver(self, number: int) -> None:
        for event in self.sent[:number]:
            self.queued.setdefault(event[1]["metadata"]["uid"], []).append(event)
        del self.sent[:number]

    @rule(data=st.data())
    def handle_queued(self, data: st.DataObject) -> None:
        """Handle all queued events of one randomly chosen object, in order."""
        if self.queued:
            for kind, event in self.queued.pop(data.draw(st.sampled_from(sorted(self.queued)))):
                (self.cache.remove_deleted if kind == "DELETED" else self.cache.put_event)(event)

    @rule()
    def cut_and_list(self) -> None:
        """Cut the watch: the events in transit are lost, and a list replaces them."""
        self.sent.clear()
        self.cache.apply_list(self.listed_versions(), self.version)
        for obj in self.server.values():
            self.queued.setdefault(obj["metadata"]["uid"], []).append((None, obj))  # type: ignore[arg-type]

    @rule()
    def list_during_watch(self) -> None:
        """Apply a list while the watch continues."""
        self.cache.apply_list(self.listed_versions(), self.version)

    def listed_versions(self) -> dict[ObjectName, ObjectVersion]:
        return {
            ObjectName("a", name): ObjectVersion(
                obj["metadata"]["uid"], int(obj["metadata"]["resourceVersion"])
            )
            for name, obj in self.server.items()
        }

    @invariant()
    def store_equals_server_once_all_events_are_handled(self) -> None:
        if not self.sent and not self.queued:
            assert self.cache.is_up_to_date(self.listed_versions(), self.version)
            assert self.cache.synced
        if self.cache.is_up_to_date(self.listed_versions(), self.version):
            for selector in (f"{SERVICE}=s", f"{SERVICE}=t", f"{GATEWAY}=shared", GATEWAY, ""):
                key, _, value = selector.partition("=")
                wanted = {
                    name
                    for name, obj in self.server.items()
                    if not key
                    or (key in (labels := obj["metadata"]["labels"]) and value in ("", labels[key]))
                }
                for namespace in ("a", ""):
                    listed = self.cache.list(namespace, selector)
                    assert [obj["metadata"]["name"] for obj in listed] == sorted(wanted)
                assert self.cache.list("b", selector) == []


TestListsAndEvents = ListsAndEvents.TestCase
