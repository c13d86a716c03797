"""The planner: a table of its rules, and a state machine that does to a service whatever can happen to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mizzen_operator.observe import Group, rests
from mizzen_operator.plan import MAX_SURGE, CreateGroup, DeleteGroup, Wanted, plan


def pod(text: str) -> Group:
    """`A0-1 serving`: revision A, group 0, incarnation 1, and what it is.

    starting: never ready; ready: its engine is, no gateway has seen it; serving; lost: served, is not ready
    now; unheard: served and is ready, but not every gateway routes to it; broken: crashes; ending; ended;
    resting: ended a moment ago, before it served.
    """
    name, state = text.split()
    number, _, incarnation = name[1:].partition("-")
    served = state in ("serving", "lost", "unheard")
    return Group(
        name=f"demo-{name[0]}-{number}-{incarnation}",
        uid=name,
        group=int(number),
        revision=name[0],
        incarnation=int(incarnation),
        terminating=state == "ending",
        ended=state in ("ended", "resting"),
        resting=state == "resting",
        containers_ready=state in ("ready", "serving", "unheard"),
        was_routable=served,
        routable=state in ("serving", "unheard"),
        reason="CrashLoopBackOff" if state == "broken" else "",
    )


# the case; wanted groups and revision; what is there; what is done
CASES: list[tuple[str, tuple[int, str], list[str], list[str]]] = [
    ("nothing is there", (2, "A"), [], ["+demo-A-0-0", "+demo-A-1-0"]),
    ("all is well", (2, "A"), ["A0-0 serving", "A1-0 serving"], []),
    ("groups start", (2, "A"), ["A0-0 starting", "A1-0 ready"], []),
    ("scale up", (3, "A"), ["A0-0 serving"], ["+demo-A-1-0", "+demo-A-2-0"]),
    ("scale down takes the highest", (1, "A"), ["A0-0 serving", "A1-0 serving"], ["-A1-0"]),
    ("scale down takes what does not serve", (1, "A"), ["A0-0 starting", "A1-0 serving"], ["-A0-0"]),
    (
        "scale down takes what crashes first",
        (2, "A"),
        ["A0-0 ready", "A1-0 broken", "A2-0 serving"],
        ["-A1-0"],
    ),
    ("suspend", (0, "A"), ["A0-0 serving", "B1-0 serving"], ["-A0-0", "-B1-0"]),
    ("a pod is being deleted", (1, "A"), ["A0-0 ending"], ["+demo-A-0-1"]),
    ("and its replacement too", (1, "A"), ["A0-0 ending", "A0-1 ending"], ["+demo-A-0-2"]),
    ("a pod has ended", (1, "A"), ["A0-0 ended"], ["-A0-0", "+demo-A-0-1"]),
    ("a pod has ended at once", (2, "A"), ["A0-3 resting", "A1-0 serving"], []),
    ("only what is missing rests", (1, "A"), ["A0-0 resting", "A0-1 resting"], ["-A0-0"]),
    ("what ended at once keeps its place alone", (2, "A"), ["A0-0 resting"], ["+demo-A-1-0"]),
    ("nothing rests that is not wanted", (0, "A"), ["A0-0 resting"], ["-A0-0"]),
    ("nothing of an old revision rests", (1, "B"), ["A0-0 resting"], ["-A0-0", "+demo-B-0-0"]),
    ("a new revision that ends at once", (1, "B"), ["A0-0 serving", "B1-2 resting"], []),
    ("a pod of a gap is replaced", (2, "A"), ["A0-0 ending", "A1-0 serving"], ["+demo-A-0-1"]),
    ("a rollout begins with one more", (2, "B"), ["A0-0 serving", "A1-0 serving"], ["+demo-B-2-0"]),
    ("the new one starts", (1, "B"), ["A0-0 serving", "B1-0 starting"], []),
    ("the new one is ready, nobody routes to it", (1, "B"), ["A0-0 serving", "B1-0 ready"], []),
    ("the new one serves", (1, "B"), ["A0-0 serving", "B1-0 serving"], ["-A0-0"]),
    (
        "one of two is replaced",
        (2, "B"),
        ["A0-0 serving", "A1-0 serving", "B2-0 serving"],
        ["-A1-0"],
    ),
    ("the next one follows", (2, "B"), ["A0-0 serving", "A1-0 ending", "B2-0 serving"], ["+demo-B-1-0"]),
    ("the new one crashes", (1, "B"), ["A0-0 serving", "B1-0 broken"], []),
    ("the old one is lost for now", (1, "B"), ["A0-0 lost", "B1-0 starting"], []),
    ("the old one is unheard for now", (1, "B"), ["A0-0 unheard", "B1-0 starting"], []),
    ("no gateway answers", (1, "B"), ["A0-0 unheard", "B1-0 unheard"], []),
    ("a revert", (1, "A"), ["A0-0 serving", "B1-0 broken"], ["-B1-0"]),
    (
        "a third revision",
        (1, "C"),
        ["A0-0 serving", "B1-0 broken"],
        ["-B1-0", "+demo-C-1-0"],
    ),
    ("old ones that never served go first", (1, "B"), ["A0-0 starting"], ["-A0-0", "+demo-B-0-0"]),
    (
        "scale up in a rollout",
        (3, "B"),
        ["A0-0 serving", "B1-0 starting"],
        ["+demo-B-2-0", "+demo-B-3-0"],
    ),
    (
        "scale down in a rollout",
        (1, "B"),
        ["A0-0 serving", "A1-0 serving", "A2-0 serving", "B3-0 starting"],
        ["-A2-0", "-A1-0"],
    ),
]


def act(wanted: tuple[int, str], there: list[str], taken: frozenset[str] = frozenset()) -> list[str]:
    groups = [pod(text) for text in there]
    serving = frozenset(text.split()[0] for text in there if text.endswith(" serving"))
    actions = plan(Wanted("demo", *wanted), groups, serving, taken)
    return [f"+{a.name}" if isinstance(a, CreateGroup) else f"-{a.uid}" for a in actions]


@pytest.mark.parametrize(("wanted", "there", "done"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_rule(wanted: tuple[int, str], there: list[str], done: list[str]) -> None:
    assert act(wanted, there) == done


def test_a_name_that_is_taken_is_passed_over() -> None:
    taken = frozenset({"demo-A-0-0", "demo-A-0-1"})
    assert act((1, "A"), [], taken) == ["+demo-A-0-2"]


def test_what_gateways_say_of_a_pod_that_is_not_ready_counts_for_nothing() -> None:
    old, new = pod("A0-0 serving"), replace(pod("B1-0 serving"), containers_ready=False)
    assert plan(Wanted("demo", 1, "B"), [old, new], frozenset({"A0-0", "B1-0"})) == []


@pytest.mark.parametrize(
    ("incarnation", "age", "expected"),
    [(0, 1, True), (0, 3, False), (3, 15, True), (3, 17, False), (500, 119, True), (500, 121, False)],
)
def test_the_rest_doubles_up_to_a_limit(incarnation: int, age: float, expected: bool) -> None:
    now = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
    assert rests(f"{now - timedelta(seconds=age):%Y-%m-%dT%H:%M:%SZ}", incarnation, now) is expected


@dataclass
class Pod:
    """A pod of the state machine."""

    group: Group
    acknowledged: bool = False


class Rollouts(RuleBasedStateMachine):
    """Specs change, pods start, serve, fail, are deleted and vanish, and the planner is asked at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = Wanted("demo", 1, "a")
        self.pods: dict[str, Pod] = {}
        self.names: set[str] = set()
        self.count = 0

    def serving(self) -> frozenset[str]:
        return frozenset(
            p.group.uid
            for p in self.pods.values()
            if p.acknowledged and p.group.containers_ready and p.group.live
        )

    def look(self) -> bool:
        """One look of the operator; whether it did anything."""
        groups = [p.group for p in self.pods.values()]
        serving, live = self.serving(), sum(group.live for group in groups)
        actions = plan(self.wanted, groups, serving, frozenset(self.pods))
        assert actions == plan(self.wanted, list(reversed(groups)), serving, frozenset(self.pods))
        for action in actions:
            if isinstance(action, CreateGroup):
                assert action.name not in self.pods, "no name twice"
                self.count += 1
                uid = f"uid-{self.count}"
                self.pods[action.name] = Pod(
                    Group(action.name, uid, action.group, action.revision, action.incarnation)
                )
            else:
                assert isinstance(action, DeleteGroup)
                self.change(action.name, terminating=True)
        assert len(self.serving()) >= min(len(serving), self.wanted.groups), "no gap by our own doing"
        now = [p.group for p in self.pods.values() if p.group.live]
        assert len(now) <= max(live, self.wanted.groups + MAX_SURGE), "no more than one surplus group"
        assert len({group.group for group in now}) == len(now), "no number twice"
        return bool(actions)

    def change(self, name: str, **changes: object) -> None:
        self.pods[name].group = replace(self.pods[name].group, **changes)

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.pods)))

    @initialize(groups=st.integers(1, 4))
    def come_up(self, groups: int) -> None:
        self.wanted = replace(self.wanted, groups=groups)
        self.go_well(2)

    @rule(looks=st.integers(1, 4))
    def go_well(self, looks: int) -> None:
        """Time passes, and every pod does what it should."""
        for _ in range(looks):
            self.look()
            self.advance()

    def advance(self) -> None:
        for name in list(self.pods):
            if self.pods[name].group.terminating:
                del self.pods[name]
                continue
            self.change(name, containers_ready=True, reason="")
            self.acknowledge(name)

    @rule(groups=st.integers(0, 5))
    def scale(self, groups: int) -> None:
        self.wanted = replace(self.wanted, groups=groups)

    @rule(revision=st.sampled_from("abc"))
    def change_spec(self, revision: str) -> None:
        self.wanted = replace(self.wanted, revision=revision)

    @rule()
    def reconcile(self) -> None:
        self.look()

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def become_ready(self, data: st.DataObject) -> None:
        self.change(self.pick(data), containers_ready=True, reason="")

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def be_acknowledged(self, data: st.DataObject) -> None:
        self.acknowledge(self.pick(data))

    def acknowledge(self, name: str) -> None:
        if self.pods[name].group.containers_ready:
            self.pods[name].acknowledged = True
            self.change(name, routable=True, was_routable=True)

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def be_unheard(self, data: st.DataObject) -> None:
        self.pods[self.pick(data)].acknowledged = False

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.change(self.pick(data), containers_ready=False, routable=False, reason="CrashLoopBackOff")

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), ended=st.booleans())
    def be_deleted_or_evicted(self, data: st.DataObject, ended: bool) -> None:
        name = self.pick(data)
        self.change(name, **{"ended" if ended else "terminating": True})

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        name = self.pick(data)
        if self.pods[name].group.terminating:
            del self.pods[name]

    @invariant()
    def names_are_valid(self) -> None:
        assert all(len(name) <= 63 for name in self.pods)

    def teardown(self) -> None:
        """Whatever happened, once all goes well the service comes to what its spec says, and stays there."""
        for _ in range(60):
            acted = self.look()
            self.advance()
            if not acted and not self.look():
                break
        live = [p.group for p in self.pods.values()]
        assert [group.revision for group in live] == [self.wanted.revision] * self.wanted.groups
        assert len(self.serving()) == self.wanted.groups


Rollouts.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestRollouts = Rollouts.TestCase
