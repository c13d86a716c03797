"""A service and its groups in a simulated cluster, for `rollout_machine.py`."""

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
from mizzen_operator.kube.objects import stamp
from mizzen_operator.pods.group import Group, Member
from mizzen_operator.rollout import planner, progress

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
        return progress.verification_name(self.service)

    def verify(self, name: str, *, unlucky: bool = False) -> None:
        """What the operator does with a group that it may ask; `unlucky` is a fault of the one group."""
        group = self.pods[name].seen()
        asks = group.live and group.containers_ready and group.held and group.revision == self.revision
        asks = asks and group.revision not in self.foreign
        if not asks:
            return
        if self.name and (group.refused_by == self.name or progress.refused(self.service, self.revision)):
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
