# SPDX-License-Identifier: Apache-2.0
"""A service and its groups in a simulated cluster, for the state machine of `rollout_machine.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from mizzen_operator.api.types import (
    Accelerator,
    Admission,
    Engine,
    Gateway,
    InferenceService,
    Lifecycle,
    Model,
)
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.pods.group import Group, GroupPod
from mizzen_operator.rollout.actions import CreateGroup, DeleteGroup
from mizzen_operator.rollout.spec_identity import has_failed_verification, verification_id

NOW = datetime(2026, 1, 1, tzinfo=UTC)

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
class SimulatedGroup:
    """One group of the simulated cluster.

    Attributes:
        group: the group's fields that follow from its leading pod; `observe` adds the fields that follow from
            all pods.
        pods: the existing pods, by rank.
        acknowledged: whether every gateway routes to the group.
    """

    group: Group
    pods: dict[int, GroupPod]
    acknowledged: bool = False

    def observe(self) -> Group:
        """Return the group as the operator sees it."""
        pods = tuple(self.pods[rank] for rank in sorted(self.pods))
        terminating = any(pod.terminating for pod in pods)
        if self.group.size == 1:
            return replace(self.group, terminating=terminating)
        complete = len(pods) == self.group.size
        return replace(
            self.group,
            members=pods,
            terminating=terminating,
            incomplete=0 not in self.pods or (self.group.was_routable and not complete),
            containers_ready=self.group.containers_ready and complete,
        )


@dataclass
class Cluster:
    """A simulated cluster: a service, its groups, and the faults that are injected into them.

    Attributes:
        service: the service, with the status that was written last.
        revision: the revision of its spec.
        simulated: its groups, by name.
        recorded: revisions that have a ControllerRevision, so that groups of them can be restored.
        sizes: number of pods in a group of each revision.
        created: number of pods created so far.
        now: simulated time; each reconcile advances it.
        failing_prompts: revisions that give wrong answers to golden prompts.
        misrouted: UIDs of groups that gateways claim to route to although these groups await verification.
        broken: revisions whose groups fail forever, as if their model had been deleted.
        mismatched: revisions whose engines speak a protocol that no gateway speaks.
    """

    service: InferenceService = BASE
    revision: str = "a"
    simulated: dict[str, SimulatedGroup] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    sizes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys("abc", 1))
    created: int = 0
    now: datetime = NOW
    failing_prompts: set[str] = field(default_factory=set)
    misrouted: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    mismatched: set[str] = field(default_factory=set)

    @property
    def groups(self) -> list[Group]:
        """All groups as the operator sees them; it notices protocol mismatches of ready groups only."""
        observed = [simulated.observe() for simulated in self.simulated.values()]
        return [
            replace(group, protocol_mismatch=group.containers_ready and group.revision in self.mismatched)
            for group in observed
        ]

    @property
    def live(self) -> list[Group]:
        """Groups that are neither terminating, ended nor incomplete."""
        return [group for group in self.groups if group.live]

    @property
    def verification_id(self) -> str:
        """Identifier of the golden prompts; empty if the spec has no golden prompts."""
        return verification_id(self.service)

    def serving(self) -> frozenset[str]:
        """Return the UIDs of the live, ready and verified groups that every gateway routes to."""
        return frozenset(
            simulated.group.uid
            for simulated in self.simulated.values()
            if simulated.acknowledged and not simulated.group.awaiting_verification
            if (group := simulated.observe()).containers_ready and group.live
        )

    def count_may_serve(self) -> int:
        """Count live groups that serve, or that served before and will again once all gateways know them."""
        serving = self.serving()

        def may_serve_again(group: Group) -> bool:
            working = group.was_routable and group.routable and group.containers_ready
            return working and not (group.awaiting_verification or group.protocol_mismatch)

        return sum(group.uid in serving or may_serve_again(group) for group in self.live)

    def count_duplicates(self) -> int:
        """Count surplus live groups with the same index and revision; only stale observations cause them."""
        return len(self.live) - len({(group.index, group.revision) for group in self.live})

    def verify(self, name: str, *, unlucky: bool = False) -> None:
        """Send the golden prompts to a group that awaits verification.

        An `unlucky` group gives a wrong answer although its revision gives right ones.
        """
        group = self.simulated[name].observe()
        can_answer = group.live and group.containers_ready and group.awaiting_verification
        if not can_answer or group.revision != self.revision or group.revision in self.mismatched:
            return
        verification = self.verification_id
        known_to_fail = group.failed_verification == verification or has_failed_verification(
            self.service, self.revision
        )
        if verification and known_to_fail:
            return
        if verification and (unlucky or group.revision in self.failing_prompts):
            self.change(name, failed_verification=verification, verification_error="wrong")
        else:
            self.change(
                name,
                awaiting_verification=False,
                verified=True,
                failed_verification="",
                verification_error="",
            )

    def change(self, name: str, **changes: object) -> None:
        """Change fields of a group."""
        self.simulated[name].group = replace(self.simulated[name].group, **changes)

    def create(self, action: CreateGroup, max_pods: int) -> bool:
        """Create at most `max_pods` of an action's pods; return False if one of them exists already."""
        size = self.sizes[action.revision]
        for rank in (action.ranks or range(size))[:max_pods]:
            self.created += 1
            uid, name = f"uid-{self.created}", f"{action.name}-{rank}" if rank else action.name
            simulated = self.simulated.get(action.name)
            if simulated is None:
                group = Group(
                    name=action.name,
                    uid=uid,
                    index=action.index,
                    revision=action.revision,
                    attempt=action.attempt,
                    size=size,
                    awaiting_verification=bool(self.verification_id) and action.revision == self.revision,
                    created=timestamp(self.now),
                )
                simulated = self.simulated[action.name] = SimulatedGroup(group, {})
            if rank in simulated.pods:
                return False
            simulated.pods[rank] = GroupPod(name, uid, rank)
        return True

    def delete(self, action: DeleteGroup) -> None:
        """Begin to delete those of an action's pods that still exist."""
        simulated = self.simulated.get(action.name)
        for rank, pod in list(simulated.pods.items()) if simulated else []:
            if (pod.name, pod.uid) in action.pods:
                self.terminate(action.name, rank)

    def terminate(self, name: str, rank: int) -> None:
        """Begin to delete one pod of a group."""
        pods = self.simulated[name].pods
        pods[rank] = replace(pods[rank], terminating=True)

    def remove(self, name: str, rank: int) -> None:
        """Remove one pod of a group; if it was the last pod, remove the group as well."""
        del self.simulated[name].pods[rank]
        if not self.simulated[name].pods:
            del self.simulated[name]

    def acknowledge(self, name: str) -> None:
        """Let every gateway route to a group if it is ready, verified, and speaks the gateways' protocol."""
        group = self.simulated[name].observe()
        if (
            group.containers_ready
            and not group.awaiting_verification
            and group.revision not in self.mismatched
        ):
            self.simulated[name].acknowledged = True
            self.change(name, routable=True, was_routable=True)
