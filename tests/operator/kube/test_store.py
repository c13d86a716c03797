"""What is held of the API server's objects: never older than what was seen, and found by label."""

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


class Told(list[tuple[str, str]]):
    """What the cache said has changed."""

    def __call__(self, kind: str, name: ObjectName, labels: Any) -> None:
        self.append((name.name, labels.get(SERVICE, "")))


def test_older_news_are_left_out_and_the_ended_do_not_return() -> None:
    told = Told()
    cache = ObjectStore("Pod", told)
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
    assert told == [("one", ""), ("one", ""), ("one", "")]


def test_what_others_changed_before_a_write_of_ours_is_told_when_its_event_comes_later() -> None:
    """The answer holds the others' change too, so that the event is no newer than what is held."""
    told = Told()
    cache, one = ObjectStore("Pod", told), ObjectName("a", "one")
    cache.put_event(body("one", 1))
    for version in (3, 5):  # 2 and 4 are others' changes
        cache.begin_write(one)
        cache.end_write(one, cache.put_write_response(body("one", version)))
    assert len(told) == 1
    expected = {2: 2, 3: 2, 4: 3, 5: 3, 6: 4}
    for version, number in expected.items():
        cache.put_event(body("one", version))
        assert len(told) == number, version
    cache.put_event(body("one", 4))
    assert len(told) == 4
    assert cache.get(one)["spec"] == {"version": 6}  # type: ignore[index]


def test_what_loses_its_label_and_has_it_again_is_held_again() -> None:
    """Watched are objects with a label: without it, the watch says that an object is deleted."""
    told = Told()
    cache, one = ObjectStore("Pod", told), ObjectName("a", "one")
    cache.put_event(body("one", 5))
    cache.remove_deleted(body("one", 6))
    assert cache.get(one) is None
    cache.put_write_response(body("one", 7))  # our own apply may be what puts it back
    assert cache.get(one)["spec"] == {"version": 7}  # type: ignore[index]
    cache.apply_list({}, 9)
    cache.put_event(body("one", 8))
    assert cache.get(one) is None
    cache.put_event(body("one", 10))
    assert cache.get(one)["spec"] == {"version": 10}  # type: ignore[index]
    cache.mark_deleted(one, "uid of one")  # by the API server's own word, for good
    cache.put_event(body("one", 11))
    assert cache.get(one) is None


def test_what_a_list_shows_of_others_changes_below_our_own_is_told() -> None:
    """The watch was cut before their event came, and a list shows the answer's version alone."""
    told = Told()
    cache, one = ObjectStore("Pod", told), ObjectName("a", "one")
    cache.put_event(body("one", 1))
    cache.begin_write(one)
    cache.end_write(one, cache.put_write_response(body("one", 3)))  # 2 was another's
    assert len(told) == 1
    listed = {one: ObjectVersion("uid of one", 3)}
    cache.apply_list(listed, 4)
    assert len(told) == 2
    cache.put_event(body("one", 3))
    cache.apply_list(listed, 5)
    assert len(told) == 2


def test_an_object_that_changes_hands_is_told_of_to_both() -> None:
    told = Told()
    cache = ObjectStore("Pod", told)
    cache.put_event(body("one", 1, labels={SERVICE: "old"}))
    cache.put_event(body("one", 2, labels={SERVICE: "old", "x": "y"}))
    assert told == [("one", "old")] * 2
    cache.put_event(body("one", 3, labels={SERVICE: "new"}))
    assert told[2:] == [("one", "new"), ("one", "old")]


def test_what_is_read_may_be_changed() -> None:
    cache = ObjectStore("Pod", Told())
    cache.put_event(body("one", 1))
    for found in (cache.get(ObjectName("a", "one")), *cache.list("a")):
        assert found is not None
        found["spec"]["version"] = 7
    assert cache.list()[0]["spec"] == {"version": 1}


def test_an_own_write_is_no_news_whichever_way_it_is_heard_first() -> None:
    told = Told()
    cache = ObjectStore("Pod", told)
    one = ObjectName("a", "one")
    cache.begin_write(one)
    cache.put_event(body("one", 5))
    cache.end_write(one, cache.put_write_response(body("one", 5)))
    cache.begin_write(one)
    cache.end_write(one, cache.put_write_response(body("one", 6)))
    cache.put_event(body("one", 6))
    assert not told
    cache.begin_write(one)
    cache.put_event(body("one", 7))
    cache.put_event(body("one", 8))
    assert not told
    cache.end_write(one, cache.put_write_response(body("one", 8)))
    assert told == [("one", "")]  # somebody else wrote 7
    cache.begin_write(one)
    cache.put_event(body("one", 9))
    cache.end_write(one, None)
    assert len(told) == 2
    cache.begin_write(one)
    cache.end_write(one, cache.put_write_response(body("one", 10)), notify=True)
    assert len(told) == 3


def test_what_a_list_lacks_has_ended_whatever_is_still_on_its_way() -> None:
    told = Told()
    cache = ObjectStore("Pod", told)
    cache.apply_list({}, 3)
    cache.put_event(body("one", 5))
    listed = {
        ObjectName("a", "two"): ObjectVersion("uid of two", 6),
        ObjectName("a", "three"): ObjectVersion("uid of three", 7),
    }
    cache.apply_list(listed, 9)  # the watch was cut: nobody told that `one` had ended
    assert cache.get(ObjectName("a", "one")) is None
    cache.put_event(body("late", 8))  # was heard before, and is handled only now
    assert len(cache) == 0 and not cache.synced
    cache.put_event(body("two", 4))
    cache.put_event(body("three", 7))
    assert not cache.synced
    cache.put_event(body("two", 6))
    assert cache.synced and len(cache) == 2
    cache.put_event(body("new", 10))
    assert told == [("one", ""), ("one", ""), ("two", ""), ("three", ""), ("two", ""), ("new", "")]


class ListsAndEvents(RuleBasedStateMachine):
    """A server whose watch is cut at times, and queues, one for each object, in which what was heard waits.

    Whatever was lost or late, the cache ends up as the server.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.server: dict[str, dict[str, Any]] = {}
        self.sent: list[tuple[str, dict[str, Any]]] = []
        """Events that a cut would lose."""
        self.heard: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        """Events that wait in the queues of their objects, by uid."""
        self.cache = ObjectStore("Pod", Told())
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
    def hear(self, number: int) -> None:
        for event in self.sent[:number]:
            self.heard.setdefault(event[1]["metadata"]["uid"], []).append(event)
        del self.sent[:number]

    @rule(data=st.data())
    def handle(self, data: st.DataObject) -> None:
        """The events of one object, in their order, before or after those of others."""
        if self.heard:
            for kind, event in self.heard.pop(data.draw(st.sampled_from(sorted(self.heard)))):
                (self.cache.remove_deleted if kind == "DELETED" else self.cache.put_event)(event)

    @rule()
    def cut_and_list(self) -> None:
        """The watch broke for good: a list takes the place of the events that were under way."""
        self.sent.clear()
        self.cache.apply_list(self.there(), self.version)
        for one in self.server.values():
            self.heard.setdefault(one["metadata"]["uid"], []).append((None, one))  # type: ignore[arg-type]

    @rule()
    def compare(self) -> None:
        """A list of ours while the watch goes on."""
        self.cache.apply_list(self.there(), self.version)

    def there(self) -> dict[ObjectName, ObjectVersion]:
        return {
            ObjectName("a", name): ObjectVersion(
                one["metadata"]["uid"], int(one["metadata"]["resourceVersion"])
            )
            for name, one in self.server.items()
        }

    @invariant()
    def it_is_the_server_once_all_is_handled(self) -> None:
        if not self.sent and not self.heard:
            assert self.cache.is_up_to_date(self.there(), self.version)
            assert self.cache.synced
        if self.cache.is_up_to_date(self.there(), self.version):
            for selector in (f"{SERVICE}=s", f"{SERVICE}=t", f"{GATEWAY}=shared", GATEWAY, ""):
                key, _, value = selector.partition("=")
                wanted = {
                    name
                    for name, one in self.server.items()
                    if not key or (key in (found := one["metadata"]["labels"]) and value in ("", found[key]))
                }
                for namespace in ("a", ""):
                    found = self.cache.list(namespace, selector)
                    assert [one["metadata"]["name"] for one in found] == sorted(wanted)
                assert self.cache.list("b", selector) == []


TestListsAndEvents = ListsAndEvents.TestCase
