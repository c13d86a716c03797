"""Conditions of a service: what is there, in words for whoever reads a status."""

from __future__ import annotations

from dataclasses import replace

from mizzen_operator.api import labels
from mizzen_operator.model_cache.progress import Download
from mizzen_operator.pods.container_state import UNSCHEDULABLE
from mizzen_operator.resources.gateway_spec import LABELLED_VOLUME
from mizzen_operator.status.inputs import Facts
from mizzen_operator.status.missing_refs import engine_needs, explained
from mizzen_operator.status.pod_conditions import (
    Condition,
    available,
    failing_gateway,
    gateway_ready,
    of,
    scheduled,
)

TYPES = frozenset(
    {
        "Ready",
        "Available",
        "Progressing",
        "Scheduled",
        "GatewayReady",
        "Failed",
        "ModelCached",
        "Conflict",
        "ScalingActive",
        "KeysRotating",
        "ApiKeysInForce",
    }
)
"""Conditions that are the operator's."""


def conditions(facts: Facts) -> list[Condition]:
    """All conditions, Ready first."""
    gateway = _gateway_ready(facts)
    failed = _failed(facts, gateway)
    progressing = _progressing(facts, gateway, failed)
    scheduled = _scheduled(facts)
    conflict = _conflict(facts)
    return [
        _ready(facts, gateway, failed, progressing, scheduled),
        _available(facts),
        progressing,
        scheduled,
        gateway,
        failed,
        *([_cached(facts.download)] if facts.download is not None else []),
        *([conflict] if conflict is not None else []),
        *([_scaling(facts)] if facts.service.autoscaling is not None else []),
        *_keys_rotating(facts),
        *_api_keys(facts),
    ]


def _ready(
    facts: Facts, gateway: Condition, failed: Condition, progressing: Condition, scheduled: Condition
) -> Condition:
    """True when the spec as it is now is in force."""
    if failed.status:
        return Condition("Ready", False, failed.reason, failed.message)
    if gateway.reason in _GATEWAY_TROUBLE and not facts.service.suspend:
        return Condition("Ready", False, gateway.reason, gateway.message)
    waits = progressing.status or progressing.reason == _OVERDUE
    if waits and scheduled.reason == UNSCHEDULABLE:
        return Condition("Ready", False, scheduled.reason, scheduled.message)
    if progressing.status or progressing.reason in _STANDSTILLS:
        return Condition("Ready", False, progressing.reason, progressing.message)
    if facts.service.suspend:
        return Condition("Ready", False, "Suspended", "set spec.suspend to false to serve again")
    if not gateway.status:
        return Condition("Ready", False, gateway.reason, gateway.message)
    if facts.taken:
        return Condition("Ready", False, "NameConflict", _names_taken(facts))
    if facts.api_keys is not None and facts.api_keys.problem:
        return Condition("Ready", False, "ApiKeysUnusable", _unusable(facts.api_keys.problem))
    if facts.service.groups == 0:
        words = "spec.replicas is 0; a request waits for a group, and gets 503 when none comes"
        return Condition("Ready", True, "ScaledToZero", words)
    if facts.stay:
        return Condition("Ready", True, progressing.reason, progressing.message)
    return Condition("Ready", True, "AllGroupsServing", of(len(facts.current), facts.service.groups, "serve"))


_GATEWAY_TROUBLE = ("GatewayFailing", "GatewayRejected")
_OVERDUE = "ProgressDeadlineExceeded"
_STANDSTILLS = ("Paused", _OVERDUE)


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


def _api_keys(facts: Facts) -> list[Condition]:
    """Whether the gateway accepts the API keys that the Secrets hold; nothing where it does not say."""
    told = facts.api_keys
    if told is None:
        return []
    if told.problem:
        return [Condition("ApiKeysInForce", False, "ApiKeysUnusable", _unusable(told.problem))]
    if not told.in_force:
        words = "the Secrets with API keys hold no key, so every request is 401: add one to them"
        return [Condition("ApiKeysInForce", False, "NoApiKeys", words)]
    return [Condition("ApiKeysInForce", True, "KeysRead", f"{told.in_force} API keys are accepted")]


def _unusable(problem: str) -> str:
    return (
        f"the API keys cannot be read, and those before stay in force: {problem}; mend the Secret, whose "
        "name is the folder's"
    )


def _available(facts: Facts) -> Condition:
    """True when a request would succeed now."""
    if facts.service.suspend:
        return Condition("Available", False, "Suspended", "every request gets 503")
    found = available(facts.gateways, facts.groups, asleep=not facts.service.groups)
    if found.status and facts.service.model.served_name in facts.taken:
        return Condition("Available", False, "NameConflict", _names_taken(facts))
    return found


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
    found = scheduled(facts.groups, facts.service.groups)
    if found.reason == UNSCHEDULABLE:
        return replace(found, message=explained(found.message, engine_needs(facts.service)))
    if found.status and facts.fit is not None:
        return replace(found, message=f"{found.message}; {facts.fit.words}")
    return found


def _gateway_ready(facts: Facts) -> Condition:
    secrets = [*facts.gateway.api_keys, *filter(None, [facts.gateway.tls_secret])]
    found = gateway_ready(facts.deployment, facts.gateways, facts.gateway.replicas, secrets)
    return replace(found, message=found.message + _lacks_keys(facts)) if found.status else found


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


def _failed(facts: Facts, gateway: Condition) -> Condition:
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
        words = explained(first.message, engine_needs(facts.service)) or "it gave no reason"
        return Condition("Failed", True, first.reason or "Ended", f"{first.name}: {words}")
    if facts.absent:
        return Condition("Failed", True, "ReferenceMissing", "; ".join(one.words for one in facts.absent))
    if gateway.reason == "GatewayRejected" and not facts.service.suspend:
        return Condition("Failed", True, "GatewayRejected", gateway.message)
    pod = failing_gateway(facts.gateways)
    if gateway.reason == "GatewayFailing" and pod is not None and not facts.service.suspend:
        return Condition("Failed", True, "GatewayFailing", pod.words)
    return Condition("Failed", False, "AsExpected", "nothing stands in the way")
