"""What is held of the API server's objects: never older than what was seen, and found by label."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mizzen_operator.cache import Cache, Name

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


def raw(*arguments: Any, **options: Any) -> bytes:
    return json.dumps(body(*arguments, **options)).encode()


class Told(list[tuple[str, str]]):
    """What the cache said has changed."""

    def __call__(self, kind: str, name: Name, labels: Any) -> None:
        self.append((name.name, labels.get(SERVICE, "")))


def test_older_news_are_left_out_and_the_ended_do_not_return() -> None:
    told = Told()
    cache = Cache("Pod", told)
    cache.put(raw("one", 5))
    cache.put(raw("one", 4))
    assert cache.get(Name("a", "one"))["spec"] == {"version": 5}  # type: ignore[index]
    assert "managedFields" not in cache.get(Name("a", "one"))["metadata"]  # type: ignore[index]
    cache.remove(raw("one", 6))
    cache.put(raw("one", 7))
    cache.put_answer(body("one", 8))
    assert cache.get(Name("a", "one")) is None
    cache.put(raw("one", 9, uid="another"))
    assert cache.get(Name("a", "one"))["metadata"]["uid"] == "another"  # type: ignore[index]
    cache.remove(raw("one", 10, uid="uid of one"))
    assert len(cache) == 1
    assert told == [("one", ""), ("one", ""), ("one", "")]


def test_what_is_read_may_be_changed() -> None:
    cache = Cache("Pod", Told())
    cache.put(raw("one", 1))
    for found in (cache.get(Name("a", "one")), *cache.list("a")):
        assert found is not None
        found["spec"]["version"] = 7
    assert cache.list()[0]["spec"] == {"version": 1}


def test_an_own_write_is_no_news_whichever_way_it_is_heard_first() -> None:
    told = Told()
    cache = Cache("Pod", told)
    one = Name("a", "one")
    cache.begin_write(one)
    cache.put(raw("one", 5))
    cache.end_write(one, cache.put_answer(body("one", 5)))
    cache.begin_write(one)
    cache.end_write(one, cache.put_answer(body("one", 6)))
    cache.put(raw("one", 6))
    assert not told
    cache.begin_write(one)
    cache.put(raw("one", 7))
    cache.put(raw("one", 8))
    assert not told
    cache.end_write(one, cache.put_answer(body("one", 8)))
    assert told == [("one", "")]  # somebody else wrote 7
    cache.begin_write(one)
    cache.put(raw("one", 9))
    cache.end_write(one, None)
    assert len(told) == 2
    cache.begin_write(one)
    cache.end_write(one, cache.put_answer(body("one", 10)), tell=True)
    assert len(told) == 3


class ListsAndEvents(RuleBasedStateMachine):
    """A server whose events come late, and lists that come in between: the cache ends up as the server."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.server: dict[str, dict[str, Any]] = {}
        self.late: list[tuple[str, bytes]] = []
        self.cache = Cache("Pod", Told())
        self.uids = 0

    @initialize()
    def list_first(self) -> None:
        self.list()

    @rule(name=st.sampled_from("xyz"), service=st.sampled_from(["s", "t", ""]), own=st.booleans())
    def write(self, name: str, service: str, own: bool) -> None:
        self.version += 1
        if name not in self.server:
            self.uids += 1
        uid = self.server[name]["metadata"]["uid"] if name in self.server else f"u{self.uids}"
        new = body(name, self.version, uid, {SERVICE: service} if service else {GATEWAY: "shared"})
        self.server[name] = new
        self.late.append(("MODIFIED", json.dumps(new).encode()))
        if own:
            self.cache.begin_write(Name("a", name))
            self.cache.end_write(Name("a", name), self.cache.put_answer(new))

    @rule(name=st.sampled_from("xyz"), own=st.booleans())
    def delete(self, name: str, own: bool) -> None:
        if name in self.server:
            self.version += 1
            gone = self.server.pop(name)
            gone["metadata"]["resourceVersion"] = str(self.version)
            self.late.append(("DELETED", json.dumps(gone).encode()))
            if own:
                self.cache.end(Name("a", name), gone["metadata"]["uid"])

    @rule(number=st.integers(1, 4))
    def hear(self, number: int) -> None:
        for kind, data in self.late[:number]:
            (self.cache.remove if kind == "DELETED" else self.cache.put)(data)
        del self.late[:number]

    @rule()
    def list(self) -> None:
        """The watch broke: a list takes the place of the events that were under way."""
        self.late.clear()
        for one in self.server.values():
            self.cache.put(json.dumps(one).encode())
        self.cache.listed([Name("a", name) for name in self.server], self.version)

    @invariant()
    def it_is_the_server_once_all_is_heard(self) -> None:
        there = {
            Name("a", name): (one["metadata"]["uid"], int(one["metadata"]["resourceVersion"]))
            for name, one in self.server.items()
        }
        if not self.late:
            assert self.cache.reflects(there, self.version)
        if self.cache.reflects(there, self.version):
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
