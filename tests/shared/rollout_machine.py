"""Rollouts under everything that can happen: a state machine of a service, its pods and its operator.

Groups have one pod or several. Specs change, pods start, serve, fail, are evicted and vanish; the operator is
killed between two actions, may make no pod, loses its last write of the status, meets conflicts, or looks at
what was there a while ago. Two things must always hold: no look takes a group away that must serve, and no
pod is made twice. And whatever has happened, once all goes well the service comes to what its spec says,
whole, and stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mizzen_operator.api.types import Prompt, Rollout, Verification
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout import planner, progress
from mizzen_operator.rollout.state import recall
from rollout_cluster import Cluster

Plan = Callable[..., list[planner.Action]]


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
            memory = progress.learn(service, it.revision, groups, serving, it.now)
            it.recorded.add(it.revision)
            wanted = progress.wanted(service, it.revision, memory, restorable=memory.current in it.recorded)
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
            if found is None or found.reason != progress.VERIFICATION:
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
