"""What is there → the status that says so. Written only when it differs from the one that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mizzen_operator import labels
from mizzen_operator.api import Gateway, InferenceService
from mizzen_operator.fit import Fit
from mizzen_operator.keys import Keys, Rotation
from mizzen_operator.models import Download
from mizzen_operator.observe import GatewayPod, Group
from mizzen_operator.render.gateway import LABELLED_VOLUME
from mizzen_operator.rollout import VERIFICATION, Memory, stamp
from mizzen_operator.shared import Sharing

MAX_GROUPS = 64
MAX_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the operator could not do its part."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a status says.

    Attributes:
        revision: what the groups should run.
        groups: the service's pods, with the readiness gates as they are now.
        deployment: the gateway's Deployment as it is now; empty when there is none.
        failure: what kept the operator from its work, if anything did.
        sharing: who shares the service's gateway with it; None when it has its own, or nobody knows yet.
        memory: what the status remembers of the rollout.
        overdue: the rollout has got nowhere for too long.
        last_scale: what the operator's autoscaler did last; empty when this process has not scaled it.
        rival: the HorizontalPodAutoscaler that scales it too.
        keys: the service's keys; None when nobody knows yet.
        rotation: how far a rotation of keys is; None while there is none.
        fit: whether the model may fit into the GPUs; None when nobody says how large they are.
        download: how far the model is; None where it is not fetched.
    """

    service: InferenceService
    revision: str
    engine_image: str
    groups: Sequence[Group]
    gateways: Sequence[GatewayPod]
    deployment: Mapping[str, Any]
    failure: Failure | None = None
    sharing: Sharing | None = None
    memory: Memory = field(default_factory=Memory)
    overdue: bool = False
    last_scale: Mapping[str, Any] = field(default_factory=dict)
    rival: str = ""
    keys: Keys | None = None
    rotation: Rotation | None = None
    fit: Fit | None = None
    download: Download | None = None

    @property
    def gateway(self) -> Gateway:
        """The settings of its gateway that are in force."""
        return self.sharing.first.gateway if self.sharing is not None else self.service.gateway

    @property
    def taken(self) -> Mapping[str, str]:
        """Names of its model that belong to other services: name to the other's name."""
        return self.sharing.taken.get(self.service.name, {}) if self.sharing is not None else {}

    @property
    def live(self) -> list[Group]:
        """Groups that are there to stay."""
        return [group for group in self.groups if group.live]

    @property
    def stay(self) -> int:
        """Groups that shall stay at the old revision."""
        if self.memory.current in ("", self.revision):
            return 0
        return min(self.service.rollout.partition, self.service.groups)

    @property
    def current(self) -> list[Group]:
        """Live groups of the wanted revision."""
        return [group for group in self.live if group.revision == self.revision]

    @property
    def routable(self) -> list[Group]:
        """Live groups that get requests now."""
        return [group for group in self.live if group.routable and group.containers_ready]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; `status` is True, False or Unknown as a string."""

    type: str
    status: bool
    reason: str
    message: str


def build(facts: Facts, now: datetime) -> dict[str, Any]:
    """The whole status; equal to the one that is there when nothing changed."""
    service = facts.service
    before = {entry["type"]: entry for entry in service.status.get("conditions", [])}
    last_scale = facts.last_scale or service.status.get("lastScale")
    return {
        "observedGeneration": service.generation,
        "replicas": len(facts.live),
        "readyReplicas": sum(group.containers_ready for group in facts.live),
        "updatedReplicas": len(facts.current),
        "availableReplicas": len(facts.routable),
        "selector": f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.ENGINE},{labels.RANK}=0",
        "url": url(service, facts.gateway),
        **facts.memory.as_status(),
        **({"model": facts.download.as_status()} if facts.download is not None else {}),
        **({"lastScale": dict(last_scale)} if last_scale else {}),
        "updateRevision": facts.revision,
        "servedName": service.model.served_name,
        "perPod": service.accelerator.per_pod,
        **({"podsPerGroup": service.pods} if service.pods > 1 else {}),
        "engineImage": facts.engine_image,
        "groups": _groups(facts.groups),
        "conditions": [
            _entry(condition, before.get(condition.type, {}), service.generation, now)
            for condition in conditions(facts)
        ],
    }


def _of(some: int, every: int, what: str) -> str:
    return f"{some} of {every} groups {what}"


def url(service: InferenceService, gateway: Gateway) -> str:
    """Base URL of the service inside the cluster."""
    name = labels.SHARED_NAME if service.shared else labels.gateway_name(service.name)
    scheme = "https" if gateway.tls_secret else "http"
    return f"{scheme}://{name}.{service.namespace}.svc:{gateway.port}/v1"


def conditions(facts: Facts) -> list[Condition]:
    """All conditions, Ready first."""
    gateway = _gateway_ready(facts)
    failed = _failed(facts)
    progressing = _progressing(facts, gateway, failed)
    conflict = _conflict(facts)
    return [
        _ready(facts, gateway, failed, progressing),
        _available(facts),
        progressing,
        _scheduled(facts),
        gateway,
        failed,
        *([_cached(facts.download)] if facts.download is not None else []),
        *([conflict] if conflict is not None else []),
        *([_scaling(facts)] if facts.service.autoscaling is not None else []),
        *_keys_rotating(facts),
    ]


def _ready(facts: Facts, gateway: Condition, failed: Condition, progressing: Condition) -> Condition:
    """True when the spec as it is now is in force."""
    if failed.status:
        return Condition("Ready", False, failed.reason, failed.message)
    if progressing.status or progressing.reason in _STANDSTILLS:
        return Condition("Ready", False, progressing.reason, progressing.message)
    if facts.service.suspend:
        return Condition("Ready", False, "Suspended", "set spec.suspend to false to serve again")
    if not gateway.status:
        return Condition("Ready", False, gateway.reason, gateway.message)
    if facts.taken:
        return Condition("Ready", False, "NameConflict", _names_taken(facts))
    if facts.service.groups == 0:
        words = "spec.replicas is 0; a request waits for a group, and gets 503 when none comes"
        return Condition("Ready", True, "ScaledToZero", words)
    if facts.stay:
        return Condition("Ready", True, progressing.reason, progressing.message)
    return Condition(
        "Ready", True, "AllGroupsServing", _of(len(facts.current), facts.service.groups, "serve")
    )


_STANDSTILLS = ("Paused", "ProgressDeadlineExceeded")


def _scaling(facts: Facts) -> Condition:
    """Whether the operator writes spec.replicas."""
    if facts.rival:
        words = (
            f"HorizontalPodAutoscaler {facts.rival} scales this service too, so spec.autoscaling does "
            "nothing: remove the one or the other"
        )
        return Condition("ScalingActive", False, "AnotherAutoscaler", words)
    if facts.service.suspend:
        return Condition("ScalingActive", False, "Suspended", "a suspended service is not scaled")
    return Condition("ScalingActive", True, "Autoscaling", "the operator writes spec.replicas")


def _keys_rotating(facts: Facts) -> list[Condition]:
    """Whether two generations of keys are accepted; nothing for a service whose keys are its first."""
    keys, there = facts.keys, facts.rotation
    if keys is None:
        return []
    if there is not None and there.waits:
        words = f"both generations of keys are accepted; waits for {there.waits}"
        return [Condition("KeysRotating", True, "NextKeysPublished", words)]
    if there is not None:
        return [Condition("KeysRotating", True, "DroppingFormerKeys", "all use the next keys alone")]
    if keys.frozen:
        words = (
            f"Secret {keys.frozen} was made by an older release so that it never changes: delete the three "
            "Secrets of the service at a quiet time, and then its pods"
        )
        return [Condition("KeysRotating", False, "SecretImmutable", words)]
    if not keys.engine.generation:
        return []
    words = f"the keys of generation {keys.engine.generation} are in use alone"
    return [Condition("KeysRotating", False, "KeysRotated", words)]


def _available(facts: Facts) -> Condition:
    """True when a request would succeed now."""
    if facts.service.suspend:
        return Condition("Available", False, "Suspended", "every request gets 503")
    if not any(pod.ready for pod in facts.gateways):
        return Condition("Available", False, "NoGatewayReady", "no gateway takes requests")
    if not any(pod.ready and pod.answers for pod in facts.gateways):
        return Condition("Available", False, "NoGatewayAnswers", "every gateway that is ready hangs")
    if not facts.routable:
        reason = "NoGroupServes" if facts.service.groups else "ScaledToZero"
        return Condition("Available", False, reason, "no group takes requests")
    if facts.service.model.served_name in facts.taken:
        return Condition("Available", False, "NameConflict", _names_taken(facts))
    return Condition("Available", True, "Serving", "a request is answered")


def _progressing(facts: Facts, gateway: Condition, failed: Condition) -> Condition:
    def progress(reason: str, message: str) -> Condition:
        return Condition("Progressing", True, reason, message)

    if failed.status:
        return Condition("Progressing", False, failed.reason, failed.message)
    if facts.download is not None and not facts.download.cached and not facts.service.suspend:
        return progress("Downloading", "the model is fetched first: status.model says how far it is")
    wanted, current = facts.service.groups, facts.current
    serving = [group for group in facts.routable if group.revision == facts.revision]
    counts = f"{len(serving)} of {wanted} groups of revision {facts.revision} serve"
    old = len(facts.live) - len(current)
    short = len(serving) < wanted - facts.stay or old > facts.stay
    paused = facts.service.rollout.paused and facts.memory.current not in ("", facts.revision)
    if paused and short:
        words = f"{counts}; {old} of older revisions stay until spec.rollout.paused is false"
        return Condition("Progressing", False, "Paused", words)
    if facts.overdue:
        limit = facts.service.rollout.progress_deadline
        words = f"{counts}; {old} of older revisions are left, and nothing got further for {limit} s"
        return Condition("Progressing", False, "ProgressDeadlineExceeded", words)
    if old > facts.stay:
        return progress("ReplacingGroups", f"{counts}; {old} of older revisions are left")
    if len(facts.live) > wanted:
        return progress("RemovingGroups", f"{len(facts.live)} groups are there, {wanted} are wanted")
    if len(serving) < wanted - facts.stay or old < facts.stay:
        return progress("StartingGroups", counts)
    if not gateway.status:
        return progress("StartingGateway", gateway.message)
    if facts.stay:
        words = f"{counts}; {old} of revision {facts.memory.current} stay by spec.rollout.partition"
        return Condition("Progressing", False, "PartitionReached", words)
    return Condition("Progressing", False, "Settled", "nothing is left to do")


def _cached(download: Download) -> Condition:
    """Whether the model is where the engines read it."""
    if download.cached:
        return Condition("ModelCached", True, "RevisionPinned", download.words())
    reason = "DownloadFailed" if download.failed else "Downloading"
    return Condition("ModelCached", False, reason, download.words())


def _scheduled(facts: Facts) -> Condition:
    if facts.fit is not None and not facts.fit.fits:
        return Condition("Scheduled", False, "WillNotFit", facts.fit.words)
    for group in facts.live:
        if group.unschedulable:
            return Condition("Scheduled", False, "Unschedulable", f"{group.name}: {group.unschedulable}")
    placed = sum(bool(group.node) for group in facts.live)
    if placed < len(facts.live):
        message = _of(placed, len(facts.live), "have a node")
        return Condition("Scheduled", False, "Pending", message)
    words = _of(placed, placed, "have a node")
    if facts.fit is not None:
        words += f"; {facts.fit.words}"
    return Condition("Scheduled", True, "AllGroupsHaveNodes", words)


def _gateway_ready(facts: Facts) -> Condition:
    def not_ready(reason: str, message: str) -> Condition:
        return Condition("GatewayReady", False, reason, message)

    if not facts.deployment:
        return not_ready("GatewayMissing", "the gateway's Deployment is not there")
    meta, status = facts.deployment["metadata"], facts.deployment.get("status", {})
    wanted = facts.gateway.replicas
    updated, ready = status.get("updatedReplicas", 0), status.get("readyReplicas", 0)
    if status.get("observedGeneration", 0) < meta.get("generation", 0):
        return not_ready("GatewayRollingOut", "the gateway's Deployment has changed")
    if updated < wanted or ready < wanted or status.get("replicas", 0) > wanted:
        trouble = next((pod for pod in facts.gateways if pod.reason and not pod.ready), None)
        if trouble is not None:
            return not_ready("GatewayFailing", f"{trouble.name}: {trouble.reason}: {trouble.message}")
        counts = f"{ready} of {wanted} gateway pods are ready, {updated} are up to date"
        secrets = [*facts.gateway.api_keys, *filter(None, [facts.gateway.tls_secret])]
        if secrets:  # a pod says nothing while one is missing
            counts += f"; they need the Secrets {', '.join(secrets)} of spec.gateway"
        return not_ready("GatewayRollingOut" if updated < wanted else "GatewayNotReady", counts)
    hangs = next((pod.name for pod in facts.gateways if pod.ready and not pod.answers), "")
    if hangs:
        return not_ready("GatewayHangs", f"{hangs} does not answer, though Kubernetes still calls it ready")
    words = f"{ready} of {wanted} gateway pods are ready{_lacks_keys(facts)}"
    return Condition("GatewayReady", True, "AllReplicasReady", words)


def _lacks_keys(facts: Facts) -> str:
    """Says so when the gateway is closed to all because nothing has its label."""
    if facts.gateway.api_keys or not facts.gateway.keys_from_label:
        return ""
    volumes = facts.deployment["spec"]["template"]["spec"]["volumes"]
    if any(volume["name"].startswith(LABELLED_VOLUME) for volume in volumes):
        return ""
    label = f"{labels.API_KEYS}={facts.deployment['metadata']['name']}"
    return f"; every request is 401, for no Secret has the label {label}"


def _conflict(facts: Facts) -> Condition | None:
    """True when other services that share the gateway have what this one asks for; None without others."""
    if facts.sharing is None:
        return None
    if facts.taken:
        return Condition("Conflict", True, "NameConflict", _names_taken(facts))
    differ = facts.sharing.differences(facts.service)
    if differ:
        first = facts.sharing.first.name
        words = (
            f"InferenceService {first} is the oldest that shares the gateway, so its spec.gateway is in "
            f"force; this one's differs in {', '.join(differ)}: change it there, or make both alike"
        )
        return Condition("Conflict", True, "GatewaySettingsDiffer", words)
    number = len(facts.sharing.services)
    words = f"{number} services share the gateway" if number > 1 else "no other service shares the gateway"
    return Condition("Conflict", False, "NoConflict", words)


def _names_taken(facts: Facts) -> str:
    names = ", ".join(f"{name!r} belongs to InferenceService {owner}" for name, owner in facts.taken.items())
    return (
        f"409: {names}, which is older, and requests for it go there: choose another spec.model.servedName "
        "or remove it from spec.model.aliases"
    )


def _failed(facts: Facts) -> Condition:
    """True when the newest spec cannot come into force without a change."""
    if facts.failure is not None:
        return Condition("Failed", True, facts.failure.reason, facts.failure.message)
    if facts.fit is not None and not facts.fit.fits:
        return Condition("Failed", True, "WillNotFit", facts.fit.words)
    if facts.download is not None and facts.download.failed:
        return Condition("Failed", True, "DownloadFailed", facts.download.words())
    given_up = facts.memory.given_up
    if given_up is not None:
        return Condition("Failed", True, given_up.reason, given_up.message)
    resting = [group for group in facts.groups if group.resting and group.revision == facts.revision]
    failing = [group for group in (*facts.current, *resting) if group.failing]
    if failing:
        first = min(failing, key=lambda group: group.name)
        words = first.message or "it gave no reason"
        return Condition("Failed", True, first.reason or "Ended", f"{first.name}: {words}")
    return Condition("Failed", False, "AsExpected", "nothing stands in the way")


def _entry(condition: Condition, before: Mapping[str, Any], generation: int, now: datetime) -> dict[str, Any]:
    status = "True" if condition.status else "False"
    same = before.get("status") == status
    return {
        "type": condition.type,
        "status": status,
        "reason": condition.reason,
        "message": condition.message[:MAX_MESSAGE],
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if same else stamp(now),
    }


_WORST_FIRST = ("Failed", "Pending", "Starting", "Connecting", "Verifying", "Draining", "Serving")


def _state(group: Group) -> str:
    if group.terminating or group.lost:
        return "Draining"
    if group.failing:
        return "Failed"
    if group.held and group.refused_by:
        return "Failed"
    if group.containers_ready:
        return "Serving" if group.routable else "Verifying" if group.held else "Connecting"
    return "Starting" if group.node else "Pending"


def _groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for group in groups:
        entry: dict[str, Any] = {
            "name": group.name,
            "group": group.group,
            "revision": group.revision,
            "state": _state(group),
            "restarts": group.restarts,
            "since": group.created,
            "node": group.node,
            "reason": group.reason or (VERIFICATION if group.refused_by else ""),
            "message": (group.message or group.refusal or group.unschedulable)[:MAX_MESSAGE],
        }
        if group.size > 1:
            entry["pods"] = [
                {"name": one.name, "ready": one.ready, **({"node": one.node} if one.node else {})}
                for one in group.members
            ]
        entries.append({key: value for key, value in entry.items() if value != ""})
    entries.sort(key=lambda entry: (_WORST_FIRST.index(entry["state"]), entry["name"]))
    return entries[:MAX_GROUPS]
