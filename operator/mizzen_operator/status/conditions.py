# SPDX-License-Identifier: Apache-2.0
"""Builds all conditions of a service whose spec is valid, in the order in which the status lists them.

To add a condition, write a function for it here, and call the function in `build_conditions`. Also add the
condition's type and reasons to api/reasons.py, and a section to docs/conditions.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mizzen_operator.api import labels, reasons
from mizzen_operator.model_cache.progress import Download
from mizzen_operator.resources.gateway_spec import LABELLED_VOLUME
from mizzen_operator.rollout.avoided_nodes import LOSSES
from mizzen_operator.status.image_pull import explain_image_pull
from mizzen_operator.status.inputs import StatusInputs
from mizzen_operator.status.missing_refs import engine_refs, explain_missing_ref
from mizzen_operator.status.pod_conditions import (
    Condition,
    available_condition,
    find_failing_gateway,
    format_count,
    gateway_ready_condition,
    scheduled_condition,
)
from mizzen_operator.status.unschedulable import explain_unschedulable

_GATEWAY_FAULTS = (reasons.GATEWAY_FAILING, reasons.GATEWAY_REJECTED)
"""If GatewayReady has one of these reasons, Ready is False with the same reason."""
_STALLED = (reasons.PAUSED, reasons.PROGRESS_DEADLINE_EXCEEDED)
"""Reasons with which Progressing is False although the rollout is incomplete."""


def build_conditions(inputs: StatusInputs) -> list[Condition]:
    """Return all conditions, Ready first."""
    gateway, scheduled = _gateway_ready(inputs), _scheduled(inputs)
    failed = _failed(inputs, gateway, scheduled)
    progressing = _progressing(inputs, gateway, failed)
    conflict = _conflict(inputs)
    return [
        _ready(inputs, gateway, failed, progressing, scheduled),
        _available(inputs),
        progressing,
        scheduled,
        gateway,
        failed,
        *([_model_cached(inputs.download)] if inputs.download is not None else []),
        *([conflict] if conflict is not None else []),
        *([_scaling_active(inputs)] if inputs.service.autoscaling is not None else []),
        *_keys_rotating(inputs),
        *_api_keys_in_force(inputs),
    ]


def _ready(
    inputs: StatusInputs,
    gateway: Condition,
    failed: Condition,
    progressing: Condition,
    scheduled: Condition,
) -> Condition:
    """Return Ready: True if the current spec is in force."""

    def not_ready(cause: Condition) -> Condition:
        return Condition(reasons.READY, False, cause.reason, cause.message)

    if failed.status:
        return not_ready(failed)
    if gateway.reason in _GATEWAY_FAULTS and not inputs.service.suspend:
        return not_ready(gateway)
    incomplete = progressing.status or progressing.reason == reasons.PROGRESS_DEADLINE_EXCEEDED
    if incomplete and scheduled.reason == reasons.UNSCHEDULABLE:
        return not_ready(scheduled)
    if progressing.status or progressing.reason in _STALLED:
        return not_ready(progressing)
    if inputs.service.suspend:
        message = "set spec.suspend to false to serve again"
        return Condition(reasons.READY, False, reasons.SUSPENDED, message)
    if not gateway.status:
        return not_ready(gateway)
    if inputs.taken_names:
        return Condition(reasons.READY, False, reasons.NAME_CONFLICT, _describe_taken_names(inputs))
    if inputs.api_keys is not None and inputs.api_keys.problem:
        message = _describe_unusable_api_keys(inputs.api_keys.problem)
        return Condition(reasons.READY, False, reasons.API_KEYS_UNUSABLE, message)
    if inputs.service.groups == 0:
        message = "spec.replicas is 0; a request waits for a group, and gets 503 if none comes"
        return Condition(reasons.READY, True, reasons.SCALED_TO_ZERO, message)
    if inputs.keep_old:
        return Condition(reasons.READY, True, progressing.reason, progressing.message)
    message = format_count(len(inputs.updated), inputs.service.groups, "serve")
    return Condition(reasons.READY, True, reasons.ALL_GROUPS_SERVING, message)


def _available(inputs: StatusInputs) -> Condition:
    """Return Available: True if a request would succeed now."""
    if inputs.service.suspend:
        message = "every request gets 503"
        return Condition(reasons.AVAILABLE, False, reasons.SUSPENDED, message)
    condition = available_condition(inputs.gateways, inputs.groups, scaled_to_zero=not inputs.service.groups)
    if condition.status and inputs.service.model.served_name in inputs.taken_names:
        return Condition(reasons.AVAILABLE, False, reasons.NAME_CONFLICT, _describe_taken_names(inputs))
    return condition


def _progressing(inputs: StatusInputs, gateway: Condition, failed: Condition) -> Condition:
    """Return Progressing: True while the operator is still bringing the spec into force."""

    def progress(reason: str, message: str) -> Condition:
        return Condition(reasons.PROGRESSING, True, reason, message)

    if failed.status:
        return Condition(reasons.PROGRESSING, False, failed.reason, failed.message)
    if inputs.download is not None and not inputs.download.cached_time and not inputs.service.suspend:
        message = (
            "the model is downloaded first: the condition ModelCached says how far it is or what it waits for"
        )
        return progress(reasons.DOWNLOADING, message)
    wanted, keep_old = inputs.service.groups, inputs.keep_old
    serving = sum(group.revision == inputs.revision for group in inputs.routed)
    counts = f"{serving} of {wanted} groups of revision {inputs.revision} serve"
    old = len(inputs.live) - len(inputs.updated)
    incomplete = serving < wanted - keep_old or old > keep_old
    stable = inputs.rollout.stable_revision
    paused = inputs.service.rollout.paused and stable not in ("", inputs.revision)
    if paused and incomplete:
        message = f"{counts}; {old} of older revisions stay until spec.rollout.paused is false"
        return Condition(reasons.PROGRESSING, False, reasons.PAUSED, message)
    if inputs.overdue:
        limit = inputs.service.rollout.progress_deadline
        message = f"{counts}; {old} of older revisions are left, and there was no progress for {limit} s"
        return Condition(reasons.PROGRESSING, False, reasons.PROGRESS_DEADLINE_EXCEEDED, message)
    if old > keep_old:
        return progress(reasons.REPLACING_GROUPS, f"{counts}; {old} of older revisions are left")
    if len(inputs.live) > wanted:
        return progress(reasons.REMOVING_GROUPS, f"{len(inputs.live)} groups exist, {wanted} are wanted")
    if serving < wanted - keep_old or old < keep_old:
        return progress(reasons.STARTING_GROUPS, "; ".join(filter(None, (counts, inputs.volume_wait))))
    if not gateway.status:
        return progress(reasons.STARTING_GATEWAY, gateway.message)
    if keep_old:
        message = f"{counts}; {old} of revision {stable} are kept by spec.rollout.partition"
        return Condition(reasons.PROGRESSING, False, reasons.PARTITION_REACHED, message)
    return Condition(reasons.PROGRESSING, False, reasons.SETTLED, "nothing is left to do")


def _scheduled(inputs: StatusInputs) -> Condition:
    """Return Scheduled: True if every wanted and every live group has a node."""
    if inputs.memory_fit is not None and not inputs.memory_fit.fits:
        return Condition(reasons.SCHEDULED, False, reasons.WILL_NOT_FIT, inputs.memory_fit.message)
    condition = scheduled_condition(inputs.groups, inputs.service.groups)
    if inputs.avoided_nodes:
        nodes = ", ".join(inputs.avoided_nodes)
        note = f"new groups are not placed on {nodes}, where engines lost their GPU {LOSSES} times"
        condition = replace(condition, message=f"{condition.message}; {note} within an hour")
    if condition.reason == reasons.UNSCHEDULABLE:
        explained = explain_missing_ref(condition.message, engine_refs(inputs.service))
        explained = explain_unschedulable(inputs.service, explained)
        message = "; ".join(filter(None, (explained, inputs.volume_wait)))
        return replace(condition, message=message)
    if condition.status and inputs.memory_fit is not None:
        return replace(condition, message=f"{condition.message}; {inputs.memory_fit.message}")
    return condition


def _gateway_ready(inputs: StatusInputs) -> Condition:
    """Return GatewayReady: True if all gateway pods are ready and up to date."""
    secrets = [*inputs.gateway.api_keys, *filter(None, [inputs.gateway.tls_secret])]
    condition = gateway_ready_condition(inputs.deployment, inputs.gateways, inputs.gateway.replicas, secrets)
    if not condition.status:
        return condition
    return replace(condition, message=condition.message + _describe_missing_api_keys(inputs))


def _failed(inputs: StatusInputs, gateway: Condition, scheduled: Condition) -> Condition:
    """Return Failed: True if the spec cannot come into force until it, or the cluster, is changed."""
    if inputs.failure is not None:
        return Condition(reasons.FAILED, True, inputs.failure.reason, inputs.failure.message)
    if inputs.memory_fit is not None and not inputs.memory_fit.fits:
        return Condition(reasons.FAILED, True, reasons.WILL_NOT_FIT, inputs.memory_fit.message)
    if inputs.download is not None and inputs.download.error:
        return Condition(reasons.FAILED, True, reasons.DOWNLOAD_FAILED, inputs.download.describe())
    abandoned = inputs.rollout.abandoned
    if abandoned is not None:
        return Condition(reasons.FAILED, True, abandoned.reason, abandoned.message)
    backing_off = [
        group for group in inputs.groups if group.backing_off and group.revision == inputs.revision
    ]
    failing = [group for group in (*inputs.updated, *backing_off) if group.failing]
    if failing:
        first = min(failing, key=lambda group: group.name)
        message = explain_missing_ref(first.message, engine_refs(inputs.service))
        message = explain_image_pull(inputs.service, inputs.engine_image, first.reason, message)
        message = message or "no reason was reported"
        return Condition(reasons.FAILED, True, first.reason or reasons.ENDED, f"{first.name}: {message}")
    if inputs.missing_refs:
        message = "; ".join(ref.message for ref in inputs.missing_refs)
        return Condition(reasons.FAILED, True, reasons.REFERENCE_MISSING, message)
    if gateway.reason == reasons.GATEWAY_REJECTED and not inputs.service.suspend:
        return Condition(reasons.FAILED, True, reasons.GATEWAY_REJECTED, gateway.message)
    pod = find_failing_gateway(inputs.gateways)
    if gateway.reason == reasons.GATEWAY_FAILING and pod is not None and not inputs.service.suspend:
        return Condition(reasons.FAILED, True, reasons.GATEWAY_FAILING, pod.description)
    message = "nothing blocks the spec"
    if scheduled.reason == reasons.UNSCHEDULABLE:
        message = "the spec is accepted, but no node fits a pod: see the condition Scheduled"
    return Condition(reasons.FAILED, False, reasons.AS_EXPECTED, message)


def _model_cached(download: Download) -> Condition:
    """Return ModelCached: True if the model is complete in the cache from which engines read it."""
    if download.cached_time:
        return Condition(reasons.MODEL_CACHED, True, reasons.REVISION_PINNED, download.describe())
    reason = reasons.DOWNLOAD_FAILED if download.error else reasons.DOWNLOADING
    return Condition(reasons.MODEL_CACHED, False, reason, download.describe())


def _conflict(inputs: StatusInputs) -> Condition | None:
    """Return Conflict: True if a model name or gateway setting of an older service takes precedence.

    Returns None if the gateway is dedicated.
    """
    if inputs.sharing is None:
        return None
    if inputs.taken_names:
        return Condition(reasons.CONFLICT, True, reasons.NAME_CONFLICT, _describe_taken_names(inputs))
    differences = inputs.sharing.overridden_fields(inputs.service)
    if differences:
        message = (
            f"InferenceService {inputs.sharing.oldest.name} is the oldest that shares the gateway, so its "
            f"spec.gateway is in force; that of this service differs in {', '.join(differences)}: change it "
            "there, or make both equal"
        )
        return Condition(reasons.CONFLICT, True, reasons.GATEWAY_SETTINGS_DIFFER, message)
    count = len(inputs.sharing.services)
    message = f"{count} services share the gateway" if count > 1 else "no other service shares the gateway"
    return Condition(reasons.CONFLICT, False, reasons.NO_CONFLICT, message)


def _scaling_active(inputs: StatusInputs) -> Condition:
    """Return ScalingActive: True if the operator writes spec.replicas."""
    if inputs.competing_hpa:
        message = (
            f"HorizontalPodAutoscaler {inputs.competing_hpa} scales this service too, so spec.autoscaling "
            "does nothing: remove one of the two"
        )
        return Condition(reasons.SCALING_ACTIVE, False, reasons.ANOTHER_AUTOSCALER, message)
    if inputs.service.suspend:
        message = "a suspended service is not scaled"
        return Condition(reasons.SCALING_ACTIVE, False, reasons.SUSPENDED, message)
    message = "the operator writes spec.replicas"
    return Condition(reasons.SCALING_ACTIVE, True, reasons.AUTOSCALING, message)


def _keys_rotating(inputs: StatusInputs) -> list[Condition]:
    """Return KeysRotating: True while two generations of keys are accepted; [] before the first rotation."""
    keys, rotation = inputs.keys, inputs.rotation
    if keys is None:
        return []
    if rotation is not None and rotation.waiting_for:
        message = f"both generations of keys are accepted; waiting for {rotation.waiting_for}"
        return [Condition(reasons.KEYS_ROTATING, True, reasons.NEXT_KEYS_PUBLISHED, message)]
    if rotation is not None:
        message = "all pods use the next keys only"
        return [Condition(reasons.KEYS_ROTATING, True, reasons.DROPPING_FORMER_KEYS, message)]
    if keys.immutable_secret:
        message = (
            f"Secret {keys.immutable_secret} was created as immutable by an older release: at a quiet time, "
            "delete the three Secrets of the service, and then its pods"
        )
        return [Condition(reasons.KEYS_ROTATING, False, reasons.SECRET_IMMUTABLE, message)]
    if not keys.engine.generation:
        return []
    message = f"only the keys of generation {keys.engine.generation} are in use"
    return [Condition(reasons.KEYS_ROTATING, False, reasons.KEYS_ROTATED, message)]


def _api_keys_in_force(inputs: StatusInputs) -> list[Condition]:
    """Return ApiKeysInForce: True if the gateway accepts the Secrets' API keys; [] if no gateway reports."""
    report = inputs.api_keys
    if report is None:
        return []
    if report.problem:
        message = _describe_unusable_api_keys(report.problem)
        return [Condition(reasons.API_KEYS_IN_FORCE, False, reasons.API_KEYS_UNUSABLE, message)]
    if not report.in_force:
        message = "the Secrets with API keys hold no key, so every request gets 401: add one to them"
        return [Condition(reasons.API_KEYS_IN_FORCE, False, reasons.NO_API_KEYS, message)]
    message = f"{report.in_force} API keys are accepted"
    return [Condition(reasons.API_KEYS_IN_FORCE, True, reasons.KEYS_READ, message)]


def _describe_unusable_api_keys(problem: str) -> str:
    return (
        f"the API keys cannot be read, and the previous ones stay in force: {problem}; correct the Secret, "
        "which has the folder's name"
    )


def _describe_missing_api_keys(inputs: StatusInputs) -> str:
    """Return a warning if every request gets 401 because no Secret has the gateway's label; else ''."""
    if inputs.gateway.api_keys or not inputs.gateway.keys_from_label:
        return ""
    volumes = inputs.deployment["spec"]["template"]["spec"]["volumes"]
    if any(volume["name"].startswith(LABELLED_VOLUME) for volume in volumes):
        return ""
    label = f"{labels.API_KEYS}={inputs.deployment['metadata']['name']}"
    return f"; every request gets 401 because no Secret has the label {label}"


def _describe_taken_names(inputs: StatusInputs) -> str:
    taken: Mapping[str, str] = inputs.taken_names
    names = ", ".join(f"{name!r} belongs to InferenceService {owner}" for name, owner in taken.items())
    return (
        f"409: {names}, which is older and gets all requests for it: choose another spec.model.servedName, "
        "or remove the name from spec.model.aliases"
    )
