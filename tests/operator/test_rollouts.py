"""Rollouts under everything that can happen: a state machine of a service, its pods and its operator.

Groups have one pod or several. Specs change, pods start, serve, fail, are evicted and vanish; the operator is
killed between two actions, may make no pod, loses its last write of the status, meets conflicts, or looks at
what was there a while ago. Two things must always hold: no look takes a group away that must serve, and no
pod is made twice. And whatever has happened, once all goes well the service comes to what its spec says,
whole, and stays there.
No mutant of the planner may survive.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import plan_cases
from mizzen_operator import plan as planner
from mizzen_operator import rollout
from mizzen_operator.api import (
    Accelerator,
    Admission,
    Engine,
    Gateway,
    InferenceService,
    Lifecycle,
    Model,
    Prompt,
    Rollout,
    Verification,
)
from mizzen_operator.groups import Group, Member
from mizzen_operator.memory import recall, stamp

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Plan = Callable[..., list[planner.Action]]

BASE = InferenceService(
    name="demo",
    namespace="llm",
    uid="u",
    generation=1,
    deleting=False,
    model=Model("file:///m", "demo", (), "Auto", None),
    replicas=2,
    tensor=1,
    accelerator=Accelerator("nvidia.com/gpu", 1, {}),
    engine=Engine(
        "", "CUDA", 1, "0.9", 1, 1, 16, "Radix", "Auto", "Auto", (), (), "Auto", "Enabled", "Auto", 1
    ),
    pod_template={},
    gateway=Gateway(1, "ClusterIP", 8000, {}, (), "", (), Admission(1, 0, 1, 1)),
    lifecycle=Lifecycle(60, 60, max_group_restarts=3),
    suspend=False,
    status={},
)


@dataclass
class Pod:
    """A group of the simulated cluster: what its leading pod is like, and all of its pods."""

    group: Group
    members: dict[int, Member]
    acknowledged: bool = False

    def seen(self) -> Group:
        """The group as the operator sees it."""
        one, members = self.group, tuple(self.members[rank] for rank in sorted(self.members))
        going = any(member.terminating for member in members)
        if one.size == 1:
            return replace(one, terminating=going)
        whole = len(members) == one.size
        return replace(
            one,
            members=members,
            terminating=going,
            lost=0 not in self.members or (one.was_routable and not whole),
            containers_ready=one.containers_ready and whole,
        )


@dataclass
class Cluster:
    """A service and what is there of it."""

    service: InferenceService = BASE
    revision: str = "a"
    pods: dict[str, Pod] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    sizes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys("abc", 1))
    """Pods of a group of each revision."""
    made: int = 0
    now: datetime = NOW
    wrong: set[str] = field(default_factory=set)
    """Revisions that answer golden prompts wrong."""
    lies: set[str] = field(default_factory=set)
    """Uids that gateways say they route to, though they hold them back."""
    broken: set[str] = field(default_factory=set)
    """Revisions whose groups serve no more, and never will: their model is gone, or their key."""
    foreign: set[str] = field(default_factory=set)
    """Revisions whose engines speak another protocol than all gateways."""

    @property
    def groups(self) -> list[Group]:
        """As the operator sees them: what gateways refuse, it knows of those whose engines are ready."""
        seen = [pod.seen() for pod in self.pods.values()]
        return [replace(one, stranger=one.containers_ready and one.revision in self.foreign) for one in seen]

    @property
    def live(self) -> list[Group]:
        return [group for group in self.groups if group.live]

    def serving(self) -> frozenset[str]:
        """Uids of the pods that every gateway routes to, as the gateways say it now."""
        pods = self.pods.values()
        return frozenset(
            p.group.uid
            for p in pods
            if p.acknowledged and p.seen().containers_ready and p.seen().live and not p.group.held
        )

    def useful(self) -> int:
        """Groups that serve, or may as they are: they have served, and no gateway says that it never will."""
        serving = self.serving()
        return sum(
            one.uid in serving
            or (one.was_routable and one.routable and one.containers_ready and not (one.held or one.stranger))
            for one in self.live
        )

    @property
    def name(self) -> str:
        """Of the golden prompts."""
        return rollout.verification_name(self.service)

    def verify(self, name: str, *, unlucky: bool = False) -> None:
        """What the operator does with a group that it may ask; `unlucky` is a fault of the one group."""
        group = self.pods[name].seen()
        asks = group.live and group.containers_ready and group.held and group.revision == self.revision
        asks = asks and group.revision not in self.foreign
        if not asks:
            return
        if self.name and (group.refused_by == self.name or rollout.refused(self.service, self.revision)):
            return
        if self.name and (unlucky or group.revision in self.wrong):
            self.change(name, refused_by=self.name, refusal="wrong")
        else:
            self.change(name, held=False, verified=True, refused_by="", refusal="")

    def doubles(self) -> int:
        """Groups whose number another one of their revision has; only a look at what was makes some."""
        return len(self.live) - len({(group.group, group.revision) for group in self.live})

    def change(self, name: str, **changes: object) -> None:
        self.pods[name].group = replace(self.pods[name].group, **changes)

    def create(self, action: planner.CreateGroup, most: int) -> bool:
        """Make the pods of an action, at most so many; whether none of them was there."""
        size = self.sizes[action.revision]
        for rank in (action.ranks or range(size))[:most]:
            self.made += 1
            uid, name = f"uid-{self.made}", f"{action.name}-{rank}" if rank else action.name
            pod = self.pods.get(action.name)
            if pod is None:
                one = Group(action.name, uid, action.group, action.revision, action.incarnation, size=size)
                held = bool(self.name) and action.revision == self.revision
                pod = Pod(replace(one, held=held, created=stamp(self.now)), {})
                self.pods[action.name] = pod
            if rank in pod.members:
                return False
            pod.members[rank] = Member(name, uid, rank)
        return True

    def delete(self, action: planner.DeleteGroup) -> None:
        pod = self.pods.get(action.name)
        for rank, member in list(pod.members.items()) if pod else []:
            if (member.name, member.uid) in action.pods:
                self.terminate(action.name, rank)

    def terminate(self, name: str, rank: int) -> None:
        members = self.pods[name].members
        members[rank] = replace(members[rank], terminating=True)

    def remove(self, name: str, rank: int) -> None:
        del self.pods[name].members[rank]
        if not self.pods[name].members:
            del self.pods[name]

    def acknowledge(self, name: str) -> None:
        one = self.pods[name].seen()
        if one.containers_ready and not one.held and one.revision not in self.foreign:
            self.pods[name].acknowledged = True
            self.change(name, routable=True, was_routable=True)


def machine(plan: Plan) -> type[RuleBasedStateMachine]:
    """The state machine with a planner."""

    class Rollouts(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.cluster = Cluster()
            self.snapshot: list[Group] = []

        def look(
            self,
            stop_after: int = 1 << 30,
            *,
            most: int = 1 << 30,
            stale: bool = False,
            keep_status: bool = True,
            refused: bool = False,
        ) -> bool:
            """One look, which makes so many pods of a group at most; whether it did anything.

            Where pods are `refused`, it does the rest of its plan.
            """
            it = self.cluster
            it.now += timedelta(seconds=1)
            service = it.service
            groups = self.snapshot if stale else it.groups
            serving, live, doubles = it.serving(), len(it.live), it.doubles()
            useful = it.useful()
            said = serving | {group.uid for group in groups if group.held and group.uid in it.lies}
            memory = rollout.learn(service, it.revision, groups, serving, it.now)
            it.recorded.add(it.revision)
            wanted = rollout.wanted(service, it.revision, memory, restorable=memory.current in it.recorded)
            taken = frozenset(group.name for group in groups)
            actions = plan(wanted, groups, said, taken)
            assert actions == plan(wanted, groups[::-1], said, taken), "the order of pods is no input"
            for action in actions[:stop_after]:
                if isinstance(action, planner.DeleteGroup):
                    it.delete(action)
                elif not refused:
                    made = it.create(action, most)
                    assert made or stale, "no name twice"
            if not stale:
                enough = min(len(serving), wanted.enough)
                assert len(it.serving()) >= enough, "no gap by our own doing"
                assert it.useful() >= min(useful, wanted.enough), "nor of what some gateway may route to"
                limit = max(live, wanted.groups + wanted.surge)
                assert len(it.live) <= limit, "no more than the surge"
                assert it.doubles() <= doubles, "no number twice"
            if keep_status and stop_after >= len(actions):
                status = memory.as_status()
                status["groups"] = [{"name": g.name, "restarts": g.restarts} for g in groups]
                it.service = replace(service, status=status)
            return bool(actions)

        def pick(self, data: st.DataObject) -> str:
            return data.draw(st.sampled_from(sorted(self.cluster.pods)))

        def pick_pod(self, data: st.DataObject) -> tuple[str, int]:
            name = self.pick(data)
            return name, data.draw(st.sampled_from(sorted(self.cluster.pods[name].members)))

        @initialize(groups=st.integers(1, 4), sizes=st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 3))
        def come_up(self, groups: int, sizes: tuple[int, int, int]) -> None:
            self.cluster.sizes = dict(zip("abc", sizes, strict=True))
            self.scale(groups)
            self.go_well(2)

        @rule(looks=st.integers(1, 4))
        def go_well(self, looks: int) -> None:
            """Time passes, and every pod does what it should."""
            for _ in range(looks):
                self.look()
                self.advance()

        def advance(self) -> None:
            it = self.cluster
            for name in list(it.pods):
                for rank, member in list(it.pods[name].members.items()):
                    if member.terminating:
                        it.remove(name, rank)
                if name not in it.pods:
                    continue
                if it.pods[name].group.ended:
                    it.change(name, resting=False)
                    continue
                if it.pods[name].group.revision in it.broken:
                    it.change(name, containers_ready=False, routable=False)
                    continue
                it.change(name, containers_ready=True, reason="")
                it.verify(name)
                it.acknowledge(name)

        @rule(groups=st.integers(0, 5))
        def scale(self, groups: int) -> None:
            self.cluster.service = replace(self.cluster.service, replicas=groups)

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def change_spec(self, revision: str, edit: int) -> None:
            it = self.cluster
            it.revision = revision
            it.service = replace(it.service, spec={"revision": revision, "edit": edit})

        @rule(
            surge=st.integers(0, 2),
            unavailable=st.integers(0, 2),
            partition=st.sampled_from([0, 0, 0, 1, 2]),
            paused=st.sampled_from([False, False, False, True]),
        )
        def change_rollout(self, surge: int, unavailable: int, partition: int, paused: bool) -> None:
            verification = self.cluster.service.rollout.verification
            given = Rollout(surge, unavailable, partition, paused, verification=verification)
            self.cluster.service = replace(self.cluster.service, rollout=given)

        @rule(expected=st.sampled_from(["", "a", "b"]), on_failure=st.sampled_from(["Rollback", "Pause"]))
        def ask_golden_prompts(self, expected: str, on_failure: str) -> None:
            """From now on, or others, or none any more."""
            prompts = (Prompt("2 + 2 =", expected, 16),)
            given = Verification(prompts, on_failure, 30) if expected else None
            service = self.cluster.service
            spec = {**service.spec, "verification": [expected, on_failure]}
            it = replace(service, spec=spec, rollout=replace(service.rollout, verification=given))
            self.cluster.service = it

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def roll_out_what_answers_wrong(self, revision: str, edit: int) -> None:
            self.ask_golden_prompts("4", "Rollback")
            self.cluster.wrong = {revision}
            self.change_spec(revision, edit)

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data(), unlucky=st.booleans())
        def be_verified(self, data: st.DataObject, unlucky: bool) -> None:
            self.cluster.verify(self.pick(data), unlucky=unlucky)

        @rule()
        def remember(self) -> None:
            """From here on a stale look may see what is there now."""
            self.snapshot = self.cluster.groups

        @rule()
        def reconcile(self) -> None:
            self.look()

        @rule(after=st.integers(0, 3), most=st.integers(1, 3))
        def be_killed_in_a_look(self, after: int, most: int) -> None:
            self.look(stop_after=after, most=most, keep_status=False)

        @rule()
        def be_refused_every_pod(self) -> None:
            """By a quota, or by a webhook that fails."""
            self.look(refused=True)

        @rule()
        def lose_the_write_of_the_status(self) -> None:
            self.look(keep_status=False)

        @rule()
        def look_at_what_was(self) -> None:
            self.look(stale=True)

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data())
        def become_ready(self, data: st.DataObject) -> None:
            self.cluster.change(self.pick(data), containers_ready=True, reason="")

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data())
        def be_acknowledged(self, data: st.DataObject) -> None:
            """Or said to be, by a gateway that knows nothing of golden prompts."""
            name = self.pick(data)
            self.cluster.acknowledge(name)
            self.cluster.lies = {self.cluster.pods[name].group.uid}

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data(), every=st.booleans())
        def be_unheard(self, data: st.DataObject, every: bool) -> None:
            """By one of the gateways, which does not know one group yet, or none."""
            for name in list(self.cluster.pods) if every else [self.pick(data)]:
                self.cluster.pods[name].acknowledged = False

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data(), times=st.sampled_from([1, 1, 4]))
        def crash(self, data: st.DataObject, times: int) -> None:
            name = self.pick(data)
            restarts = self.cluster.pods[name].group.restarts + times
            self.cluster.change(
                name, containers_ready=False, routable=False, reason="CrashLoopBackOff", restarts=restarts
            )

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def break_for_good_and_be_mended(self, revision: str, edit: int) -> None:
            """All groups of the revision that the spec asks for, until a change of the spec mends it."""
            it = self.cluster
            it.broken = {it.revision}
            for name, pod in it.pods.items():
                if pod.group.revision in it.broken:
                    it.change(name, containers_ready=False, routable=False, reason="Error")
            self.change_spec(revision, edit)

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def be_upgraded(self, revision: str, edit: int) -> None:
            """Gateways of another release, whose protocol the engines that are there do not speak."""
            it = self.cluster
            it.foreign = {pod.group.revision for pod in it.pods.values()} - {revision}
            for name, pod in it.pods.items():
                if pod.group.revision in it.foreign:
                    pod.acknowledged = False
                    it.change(name, routable=False)
            self.change_spec(revision, edit)

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data(), every=st.booleans())
        def be_shut_out(self, data: st.DataObject, every: bool) -> None:
            """Gateways answer that they do not route to it, or any more to none, and its gate closes."""
            for name in list(self.cluster.pods) if every else [self.pick(data)]:
                self.cluster.pods[name].acknowledged = False
                self.cluster.change(name, routable=False)

        @rule()
        def have_the_gateways_of_before(self) -> None:
            self.cluster.foreign = set()

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data())
        def lose_its_device(self, data: st.DataObject) -> None:
            """Its engine ends, and what kubelet starts in its place finds the same device."""
            name = self.pick(data)
            it = self.cluster.pods[name].group
            lost = {"ended": True, "resting": not it.was_routable, "reason": "DeviceLost"}
            restarts = it.restarts if it.ended else it.restarts + 1
            self.cluster.change(name, containers_ready=False, routable=False, restarts=restarts, **lost)

        @precondition(lambda self: any(p.group.reason == "DeviceLost" for p in self.cluster.pods.values()))
        @rule(data=st.data())
        def find_its_device_after_all(self, data: st.DataObject) -> None:
            """Nobody has deleted the pod yet, and the engine was started again in it."""
            pods = self.cluster.pods
            name = data.draw(
                st.sampled_from([n for n in sorted(pods) if pods[n].group.reason == "DeviceLost"])
            )
            if pods[name].group.size == 1:
                self.cluster.change(name, ended=False, resting=False, containers_ready=True, reason="")

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data(), ended=st.booleans())
        def be_deleted_or_evicted(self, data: st.DataObject, ended: bool) -> None:
            """One pod of a group, or the only one."""
            name, rank = self.pick_pod(data)
            if ended:
                self.cluster.change(name, ended=True, resting=not self.cluster.pods[name].group.was_routable)
            else:
                self.cluster.terminate(name, rank)

        @precondition(lambda self: self.cluster.pods)
        @rule(data=st.data())
        def vanish(self, data: st.DataObject) -> None:
            """A pod is gone: one that was being deleted, or one whose node was removed."""
            name, rank = self.pick_pod(data)
            it = self.cluster.pods[name]
            if it.members[rank].terminating or it.group.size > 1:
                self.cluster.remove(name, rank)

        def settle(self) -> None:
            for _ in range(80):
                acted = self.look()
                self.advance()
                if not acted and not self.look():
                    return
            raise AssertionError("it never comes to rest")

        def check_refused(self) -> None:
            """What is at rest after a revision has failed its golden prompts."""
            it, service = self.cluster, self.cluster.service
            memory = recall(service.status)
            found = memory.given_up
            if found is None or found.reason != rollout.VERIFICATION:
                return
            for pod in it.pods.values():
                assert not (pod.group.routable and pod.group.held), "no group serves unverified"
            new = [group for group in it.groups if group.revision == it.revision]
            if (
                service.rollout.verification is not None
                and service.rollout.verification.on_failure == "Pause"
            ):
                return
            assert not [group for group in new if not group.was_routable], "none is left that never served"
            if memory.current in it.recorded - {it.revision}:
                assert len(it.serving()) == len(it.groups) == service.groups, "the one before serves"
                assert not new

        def teardown(self) -> None:
            it = self.cluster
            it.lies = set()
            it.broken.discard(it.revision)
            it.foreign.discard(it.revision)
            self.settle()
            if it.broken or it.foreign:
                it.service = replace(it.service, rollout=replace(it.service.rollout, partition=0))
            else:
                self.check_refused()
            # Whatever was given up, refused or paused: the user lets it go on.
            it.wrong = set()
            it.service = replace(
                it.service,
                spec={"revision": it.revision, "edit": "last"},
                rollout=replace(it.service.rollout, paused=False),
            )
            self.settle()
            memory = recall(it.service.status)
            groups, stay = it.service.groups, 0
            if memory.current not in ("", it.revision):
                stay = min(it.service.rollout.partition, groups)
            new = [group for group in it.groups if group.revision == it.revision]
            assert len(new) == groups - stay
            assert len(it.groups) == groups
            for one in new:
                whole = [rank for rank, _ in sorted(it.pods[one.name].members.items())]
                assert whole == list(range(it.sizes[it.revision])), "no half of a group"
            assert len(it.serving()) == groups
            assert memory.given_up is None
            assert (memory.progress is not None and memory.progress.reached) or groups == 0

    return Rollouts


Rollouts = machine(planner.plan)
TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=150, stateful_step_count=40)

MUTANTS: Mapping[str, tuple[str, str]] = {
    "retires without a look at what is left": ("and (after >= enough or broken or stranger)", ""),
    "waits for what has broken": ("(after >= enough or broken or", "(after >= enough or"),
    "takes all at once that is not ready": ("and known > enough", ""),
    "waits for strangers": ("after >= enough or broken or stranger", "after >= enough or broken"),
    "takes strangers that serve": (
        "return group.stranger and group.uid not in serving",
        "return group.stranger",
    ),
    "takes what only some gateways route to for a stranger": (
        "return group.stranger and group.uid not in serving",
        "return group.containers_ready and group.uid not in serving",
    ),
    "lets strangers stand in for what may come back": (
        "if not _is_stranger(group, serving)]",
        "if True]",
    ),
    "takes others before strangers": ("            not _is_stranger(group, serving),\n", ""),
    "takes what nobody routes to for serving": (
        "if group.uid in serving and group.containers_ready)",
        "if group.containers_ready)",
    ),
    "makes more than the surge": (
        "places = wanted.groups + wanted.surge",
        "places = 1 + wanted.groups + wanted.surge",
    ),
    "supersedes what serves": (
        "if group.was_routable or group.uid in serving]\n    fresh",
        "if False]\n    fresh",
    ),
    "leaves half a group": ("if not group.live and group.left and", "if group.ended and group.left and"),
    "completes nothing": ("[*_completed(kept), *made]", "[*made]"),
    "makes new ones before what is restored": (
        "key=lambda one: one.revision == wanted.revision",
        "key=lambda one: one.revision != wanted.revision",
    ),
    "waits for what no gateway routes to": (
        "not (group.containers_ready and group.routable)",
        "not group.containers_ready",
    ),
    "takes what is ready while its gate is open": (
        "not (group.containers_ready and group.routable)",
        "True",
    ),
    "is kept from going back by a pause": ("(wanted.paused and known)", "wanted.paused"),
    "keeps an ended pod": ('*_deleted(ended, "Ended"),', ""),
    "restores nothing": ("if restorable else 0", "if False else 0"),
    "restores what was given up": ("and not (wanted.stable == wanted.revision and wanted.failed)", ""),
    "trusts a revision that never served": ("if not proven and known:", "if False:"),
    "uses a number twice": ("used = used | {index}", ""),
    "forgets its incarnations": ("max(seen, default=-1) + 1", "0"),
    "goes on when paused": ("if (wanted.paused and known) or (", "if ("),
    "knows no partition": ("aim = min(rest, wanted.groups - partition)", "aim = rest"),
    "retires none": ('*_deleted(replaced, "Replaced"),', ""),
    "tries what was given up": ("or (revision == wanted.revision and index in wanted.given_up)", ""),
    "goes on after what was given up": ("or (wanted.given_up and not proven)", ""),
    "makes anew what rests": ("- len(resting)\n    made", "\n    made"),
    "keeps what answered wrong": ('*_deleted(refused, "Refused"),', ""),
    "goes on with a refused revision": (
        "    if wanted.refused:\n        return _aims_refused",
        "    if False:\n        return _aims_refused",
    ),
    "pauses where it should roll back": (
        "if wanted.refused and wanted.keep_refused else",
        "if wanted.refused else",
    ),
    "lets surplus go without a look": (
        "if stay and (group.was_routable or group.uid in serving)]",
        "if False]",
    ),
}


def mutant(old: str, new: str) -> types.ModuleType:
    """A copy of the planner with one rule broken."""
    source = Path(planner.__file__).read_text()
    assert source.count(old) == 1, f"the planner has changed: {old!r}"
    module = types.ModuleType("mutant_plan")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(old, new), "mutant_plan.py", "exec"), module.__dict__)
    return module


def passes_the_table(plan: Plan) -> bool:
    """Whether a planner does what the table of its rules says."""
    cases = [(wanted, {}, there, done) for _, wanted, there, done in plan_cases.CASES]
    cases += [case[1:] for case in plan_cases.ROLLOUTS]
    for wanted, given, there, done in cases:
        groups = [plan_cases.pod(text) for text in there]
        actions = plan(planner.Wanted("demo", *wanted, **given), groups, plan_cases.serving(there))
        names = [f"+{one.name}" if isinstance(one, planner.CreateGroup) else f"-{one.uid}" for one in actions]
        if names != done:
            return False
    return True


def test_the_planner_passes_the_table() -> None:
    assert passes_the_table(planner.plan)


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_of_the_planner_passes_the_table(name: str) -> None:
    assert not passes_the_table(mutant(*MUTANTS[name]).plan)


@pytest.mark.parametrize(
    "name",
    [
        "retires without a look at what is left",
        "makes more than the surge",
        "supersedes what serves",
        "keeps an ended pod",
        "knows no partition",
        "retires none",
        "waits for what has broken",
        "waits for strangers",
        "takes what only some gateways route to for a stranger",
    ],
)
def test_the_state_machine_finds_what_breaks_its_rules(name: str) -> None:
    chosen = settings(
        max_examples=1500,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine(mutant(*MUTANTS[name]).plan), settings=chosen)
