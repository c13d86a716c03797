# SPDX-License-Identifier: Apache-2.0
"""Random rollouts and faults: a Hypothesis state machine of a service, its groups and the operator.

Groups have one pod or several. Specs change; pods start, serve, fail, are evicted and vanish. The operator
is killed between two actions, has its pods rejected, loses a write of the status, or acts on stale groups.
Two invariants hold at every step: no reconcile removes a group that must serve, and no pod is created twice.
Whatever has happened, once the faults stop, the service reaches the state of its spec, with complete groups,
and stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mizzen_operator.api import reasons
from mizzen_operator.api.types import Prompt, Rollout, Verification
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.actions import Action, DeleteGroup
from mizzen_operator.rollout.progress import build_target, update_state
from mizzen_operator.rollout.state import load_state
from rollout_cluster import Cluster

Plan = Callable[..., list[Action]]
UNLIMITED = 1 << 30
MAX_RECONCILES = 80
"""Number of reconciles after which a service must have settled."""


def machine(plan: Plan) -> type[RuleBasedStateMachine]:
    """Return a Hypothesis state machine whose operator uses this planner."""

    class Rollouts(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.cluster = Cluster()
            self.snapshot: list[Group] = []

        def _reconcile(
            self,
            max_actions: int = UNLIMITED,
            *,
            max_pods: int = UNLIMITED,
            stale: bool = False,
            write_status: bool = True,
            reject_pods: bool = False,
        ) -> bool:
            """Reconcile once, and return whether the planner returned any actions.

            Args:
                max_actions: number of actions after which the operator is killed.
                max_pods: the largest number of pods that the operator creates per action.
                stale: plan for the groups in `snapshot` instead of the current groups.
                write_status: write the status at the end, unless the operator was killed.
                reject_pods: the API server rejects every new pod; deletions succeed.
            """
            cluster = self.cluster
            cluster.now += timedelta(seconds=1)
            service = cluster.service
            groups = self.snapshot if stale else cluster.groups
            serving, live, duplicates = cluster.serving(), len(cluster.live), cluster.count_duplicates()
            may_serve = cluster.count_may_serve()
            acknowledged = serving | {
                group.uid
                for group in groups
                if group.awaiting_verification and group.uid in cluster.misrouted
            }
            state = update_state(service, cluster.revision, groups, serving, cluster.now)
            cluster.recorded.add(cluster.revision)
            can_restore = state.stable_revision in cluster.recorded
            target = build_target(service, cluster.revision, state, restorable=can_restore)
            taken = frozenset(group.name for group in groups)
            actions = plan(target, groups, acknowledged, taken)
            assert actions == plan(target, groups[::-1], acknowledged, taken), "the order of groups matters"
            for action in actions[:max_actions]:
                if isinstance(action, DeleteGroup):
                    cluster.delete(action)
                elif not reject_pods:
                    created = cluster.create(action, max_pods)
                    assert created or stale, "a pod was created twice"
            if not stale:
                min_serving = min(len(serving), target.min_available)
                assert len(cluster.serving()) >= min_serving, "a group that must serve was deleted"
                min_may_serve = min(may_serve, target.min_available)
                assert cluster.count_may_serve() >= min_may_serve, "a group that may serve again was deleted"
                limit = max(live, target.groups + target.max_surge)
                assert len(cluster.live) <= limit, "there are more groups than the surge allows"
                assert cluster.count_duplicates() <= duplicates, "an index was used twice"
            if write_status and max_actions >= len(actions):
                status = state.as_status()
                status["groups"] = [{"name": group.name, "restarts": group.restarts} for group in groups]
                cluster.service = replace(service, status=status)
            return bool(actions)

        def _draw_group(self, data: st.DataObject) -> str:
            return data.draw(st.sampled_from(sorted(self.cluster.simulated)))

        def _draw_pod(self, data: st.DataObject) -> tuple[str, int]:
            name = self._draw_group(data)
            return name, data.draw(st.sampled_from(sorted(self.cluster.simulated[name].pods)))

        def _draw_groups(self, data: st.DataObject, every: bool) -> list[str]:
            return list(self.cluster.simulated) if every else [self._draw_group(data)]

        # Time passes.

        @initialize(groups=st.integers(1, 4), sizes=st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 3))
        def create_the_service(self, groups: int, sizes: tuple[int, int, int]) -> None:
            self.cluster.sizes = dict(zip("abc", sizes, strict=True))
            self.scale(groups)
            self.let_time_pass(2)

        @rule(reconciles=st.integers(1, 4))
        def let_time_pass(self, reconciles: int) -> None:
            """Reconcile several times; after each reconcile, pods start, serve or end as they should."""
            for _ in range(reconciles):
                self._reconcile()
                self._advance()

        def _advance(self) -> None:
            cluster = self.cluster
            for name in list(cluster.simulated):
                for rank, pod in list(cluster.simulated[name].pods.items()):
                    if pod.terminating:
                        cluster.remove(name, rank)
                if name not in cluster.simulated:
                    continue
                if cluster.simulated[name].group.ended:
                    cluster.change(name, backing_off=False)
                    continue
                if cluster.simulated[name].group.revision in cluster.broken:
                    cluster.change(name, containers_ready=False, routable=False)
                    continue
                cluster.change(name, containers_ready=True, reason="")
                cluster.verify(name)
                cluster.acknowledge(name)

        # The user changes the service.

        @rule(groups=st.integers(0, 5))
        def scale(self, groups: int) -> None:
            self.cluster.service = replace(self.cluster.service, replicas=groups)

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def change_spec(self, revision: str, edit: int) -> None:
            """Change the spec; a change of `edit` alone needs no new revision."""
            self.cluster.revision = revision
            self.cluster.service = replace(self.cluster.service, spec={"revision": revision, "edit": edit})

        @rule(
            max_surge=st.integers(0, 2),
            max_unavailable=st.integers(0, 2),
            partition=st.sampled_from([0, 0, 0, 1, 2]),
            paused=st.sampled_from([False, False, False, True]),
        )
        def change_rollout(self, max_surge: int, max_unavailable: int, partition: int, paused: bool) -> None:
            verification = self.cluster.service.rollout.verification
            rollout = Rollout(max_surge, max_unavailable, partition, paused, verification=verification)
            self.cluster.service = replace(self.cluster.service, rollout=rollout)

        @rule(expected=st.sampled_from(["", "a", "b"]), on_failure=st.sampled_from(["Rollback", "Pause"]))
        def change_golden_prompts(self, expected: str, on_failure: str) -> None:
            """Add golden prompts, change them, or remove them."""
            prompts = (Prompt("2 + 2 =", expected, 16),)
            verification = Verification(prompts, on_failure, 30) if expected else None
            service = self.cluster.service
            self.cluster.service = replace(
                service,
                spec={**service.spec, "verification": [expected, on_failure]},
                rollout=replace(service.rollout, verification=verification),
            )

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def roll_out_a_revision_that_fails_verification(self, revision: str, edit: int) -> None:
            self.change_golden_prompts("4", "Rollback")
            self.cluster.failing_prompts = {revision}
            self.change_spec(revision, edit)

        # The operator reconciles, with and without faults.

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data(), unlucky=st.booleans())
        def verify_a_group(self, data: st.DataObject, unlucky: bool) -> None:
            self.cluster.verify(self._draw_group(data), unlucky=unlucky)

        @rule()
        def take_a_snapshot(self) -> None:
            """Store the current groups; a later reconcile may act on them as a stale observation."""
            self.snapshot = self.cluster.groups

        @rule()
        def reconcile(self) -> None:
            self._reconcile()

        @rule(actions=st.integers(0, 3), pods=st.integers(1, 3))
        def kill_the_operator_in_a_reconcile(self, actions: int, pods: int) -> None:
            self._reconcile(actions, max_pods=pods, write_status=False)

        @rule()
        def reject_every_pod(self) -> None:
            """Reconcile while the API server rejects all new pods because of a quota or a failing webhook."""
            self._reconcile(reject_pods=True)

        @rule()
        def lose_the_write_of_the_status(self) -> None:
            self._reconcile(write_status=False)

        @rule()
        def reconcile_a_stale_snapshot(self) -> None:
            self._reconcile(stale=True)

        # Engines and gateways change.

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data())
        def become_ready(self, data: st.DataObject) -> None:
            self.cluster.change(self._draw_group(data), containers_ready=True, reason="")

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data())
        def acknowledge_a_group(self, data: st.DataObject) -> None:
            """Let every gateway route to a group.

            If the group is not verified yet, gateways that do not support golden prompts report that they
            route to it anyway.
            """
            name = self._draw_group(data)
            self.cluster.acknowledge(name)
            self.cluster.misrouted = {self.cluster.simulated[name].group.uid}

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data(), every=st.booleans())
        def start_a_gateway(self, data: st.DataObject, every: bool) -> None:
            """Add a gateway that does not route to one of the groups yet; with `every`, to none of them."""
            for name in self._draw_groups(data, every):
                self.cluster.simulated[name].acknowledged = False

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data(), times=st.sampled_from([1, 1, 4]))
        def crash(self, data: st.DataObject, times: int) -> None:
            name = self._draw_group(data)
            restarts = self.cluster.simulated[name].group.restarts + times
            self.cluster.change(
                name, containers_ready=False, routable=False, reason="CrashLoopBackOff", restarts=restarts
            )

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def break_the_revision_and_repair_it(self, revision: str, edit: int) -> None:
            """Break all groups of the current revision for good, then change the spec as a repair would."""
            cluster = self.cluster
            cluster.broken = {cluster.revision}
            for name, simulated in cluster.simulated.items():
                if simulated.group.revision in cluster.broken:
                    cluster.change(name, containers_ready=False, routable=False, reason="Error")
            self.change_spec(revision, edit)

        @rule(revision=st.sampled_from("abc"), edit=st.integers(0, 3))
        def upgrade_the_gateways(self, revision: str, edit: int) -> None:
            """Upgrade the gateways to a protocol that only engines of the new `revision` speak."""
            cluster = self.cluster
            cluster.mismatched = {simulated.group.revision for simulated in cluster.simulated.values()} - {
                revision
            }
            for name, simulated in cluster.simulated.items():
                if simulated.group.revision in cluster.mismatched:
                    simulated.acknowledged = False
                    cluster.change(name, routable=False)
            self.change_spec(revision, edit)

        @rule()
        def roll_the_gateways_back(self) -> None:
            self.cluster.mismatched = set()

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data(), every=st.booleans())
        def stop_routing(self, data: st.DataObject, every: bool) -> None:
            """Let all gateways stop routing to one of the groups; with `every`, to all groups."""
            for name in self._draw_groups(data, every):
                self.cluster.simulated[name].acknowledged = False
                self.cluster.change(name, routable=False)

        # Pods end and vanish.

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data())
        def lose_a_device(self, data: st.DataObject) -> None:
            """End an engine because its device is lost; the kubelet restarts it with the same device."""
            name = self._draw_group(data)
            group = self.cluster.simulated[name].group
            self.cluster.change(
                name,
                containers_ready=False,
                routable=False,
                restarts=group.restarts if group.ended else group.restarts + 1,
                ended=True,
                backing_off=not group.was_routable,
                reason="DeviceLost",
            )

        def _lost_devices(self) -> list[str]:
            simulated = self.cluster.simulated
            return [name for name in sorted(simulated) if simulated[name].group.reason == "DeviceLost"]

        @precondition(lambda self: self._lost_devices())
        @rule(data=st.data())
        def find_a_lost_device_again(self, data: st.DataObject) -> None:
            """Restart an engine that lost its device; it gets a working device before its pod is deleted."""
            name = data.draw(st.sampled_from(self._lost_devices()))
            if self.cluster.simulated[name].group.size == 1:
                self.cluster.change(name, ended=False, backing_off=False, containers_ready=True, reason="")

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data(), ended=st.booleans())
        def delete_or_evict_a_pod(self, data: st.DataObject, ended: bool) -> None:
            name, rank = self._draw_pod(data)
            if ended:
                served = self.cluster.simulated[name].group.was_routable
                self.cluster.change(name, ended=True, backing_off=not served)
            else:
                self.cluster.terminate(name, rank)

        @precondition(lambda self: self.cluster.simulated)
        @rule(data=st.data())
        def remove_a_pod(self, data: st.DataObject) -> None:
            """Remove a terminating pod, or any pod of a multi-pod group, as if its node had been removed."""
            name, rank = self._draw_pod(data)
            simulated = self.cluster.simulated[name]
            if simulated.pods[rank].terminating or simulated.group.size > 1:
                self.cluster.remove(name, rank)

        # At the end, all faults stop.

        def _settle(self) -> None:
            for _ in range(MAX_RECONCILES):
                acted = self._reconcile()
                self._advance()
                if not acted and not self._reconcile():
                    return
            raise AssertionError("the service never comes to rest")

        def _check_failed_verification(self) -> None:
            """Check the settled service if verification failed and its current revision was abandoned."""
            cluster, service = self.cluster, self.cluster.service
            state, verification = load_state(service.status), service.rollout.verification
            if state.abandoned is None or state.abandoned.reason != reasons.VERIFICATION_FAILED:
                return
            for simulated in cluster.simulated.values():
                assert not (simulated.group.routable and simulated.group.awaiting_verification), (
                    "a group serves unverified"
                )
            if verification is not None and verification.on_failure == "Pause":
                return
            updated = [group for group in cluster.groups if group.revision == cluster.revision]
            assert all(group.was_routable for group in updated), "a group that never served is left"
            if state.stable_revision in cluster.recorded - {cluster.revision}:
                assert not updated
                serving, present = len(cluster.serving()), len(cluster.groups)
                assert serving == present == service.groups, "the stable revision does not serve"

        def teardown(self) -> None:
            """Stop all faults, and check that the service reaches the state of its spec."""
            cluster = self.cluster
            cluster.misrouted = set()
            cluster.broken.discard(cluster.revision)
            cluster.mismatched.discard(cluster.revision)
            self._settle()
            if cluster.broken or cluster.mismatched:
                rollout = replace(cluster.service.rollout, partition=0)
                cluster.service = replace(cluster.service, rollout=rollout)
            else:
                self._check_failed_verification()
            # The user changes the spec, so that an abandoned, failed or paused rollout continues.
            cluster.failing_prompts = set()
            cluster.service = replace(
                cluster.service,
                spec={"revision": cluster.revision, "edit": "last"},
                rollout=replace(cluster.service.rollout, paused=False),
            )
            self._settle()
            state = load_state(cluster.service.status)
            groups, keep_old = cluster.service.groups, 0
            if state.stable_revision not in ("", cluster.revision):
                keep_old = min(cluster.service.rollout.partition, groups)
            updated = [group for group in cluster.groups if group.revision == cluster.revision]
            assert len(updated) == groups - keep_old
            assert len(cluster.groups) == groups
            for group in updated:
                ranks = sorted(cluster.simulated[group.name].pods)
                assert ranks == list(range(cluster.sizes[cluster.revision])), "a group is not complete"
            assert len(cluster.serving()) == groups
            assert state.abandoned is None
            assert (state.progress is not None and state.progress.complete) or groups == 0

    return Rollouts
