# SPDX-License-Identifier: Apache-2.0
"""Builds the pods of a group; the group's tensor-parallel ranks are distributed across its pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService, Tracing
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_args import engine_arguments
from mizzen_operator.resources.fetch_job import model_mounts, node_fetch, pod_volumes
from mizzen_operator.resources.group_member import GroupMember
from mizzen_operator.resources.metadata import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    field_env,
    http_probe,
    keys_volume,
    liveness_probe,
    metadata,
    tolerations,
    with_applied_hash,
)
from mizzen_operator.resources.node_avoidance import avoid_nodes, avoided_nodes_annotation
from mizzen_operator.resources.revision_hash import engine_image
from mizzen_operator.resources.tracing import (
    effective_tracing,
    engine_variables,
    headers_mounts,
    headers_volumes,
)

CLAIM = "accelerator"
DEREGISTER_SECONDS = 1
"""Seconds for which a terminating group still accepts requests, while gateways stop routing to it."""
STARTUP_MARGIN_SECONDS = 30
"""Seconds that the startup probe waits beyond the engine's own start-up timeout.

So the engine ends before the kubelet kills it, and can report the reason.
"""
GRACE_MARGIN_SECONDS = 30
ZONE = "topology.kubernetes.io/zone"
KUEUE_QUEUE, KUEUE_GROUP = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"
KUEUE_COUNT = "kueue.x-k8s.io/pod-group-total-count"
_SCHEDULING = "DuringSchedulingIgnoredDuringExecution"
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_COPIED_FIELDS = ("serviceAccountName", "priorityClassName", "schedulerName", "runtimeClassName", "affinity")


def engine_pods(
    service: InferenceService,
    config: OperatorConfig,
    *,
    revision: str,
    group: int,
    attempt: int,
    avoided_nodes: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the pods of a group, the leading pod first.

    Args:
        service: the service.
        config: options of the operator.
        revision: name of the group's revision.
        group: index of the group.
        attempt: number of the attempt to run this index, from 0.
        avoided_nodes: nodes on which the pods must not run. The revision does not depend on them.
    """
    leader = child_names.leader_pod(service.name, revision, group, attempt)
    members = [GroupMember(revision, group, attempt, leader, rank) for rank in range(service.pods)]
    pods = [_engine_pod(service, config, member) for member in members]
    if avoided_nodes:
        for pod in pods:
            pod["metadata"].setdefault("annotations", {}).update(avoided_nodes_annotation(avoided_nodes))
            pod["spec"]["affinity"] = avoid_nodes(pod["spec"].get("affinity") or {}, avoided_nodes)
    return pods


def ranks_service(service: InferenceService) -> dict[str, Any]:
    """Return the headless Service through which the names of pods resolve before the pods are ready."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, child_names.ranks_service(service.name), labels.ENGINE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.SERVICE: service.name, labels.COMPONENT: labels.ENGINE},
            "ports": [
                {
                    "name": "ranks",
                    "port": labels.RANKS_PORT,
                    "protocol": "TCP",
                    "targetPort": labels.RANKS_PORT,
                }
            ],
        },
    }
    return with_applied_hash(manifest)


def _engine_pod(service: InferenceService, config: OperatorConfig, member: GroupMember) -> dict[str, Any]:
    overlay = service.pod_template
    annotations = dict(overlay["annotations"])
    more = {
        **overlay["labels"],
        **({labels.GATEWAY_LABEL: labels.SHARED} if service.shares_gateway else {}),
        **member.labels,
        labels.RANK: str(member.rank),
    }
    if service.pods > 1:
        more[labels.PODS] = str(service.pods)
        if KUEUE_QUEUE in more:  # so that Kueue admits the pods of a group together
            more[KUEUE_GROUP] = member.leader
            annotations[KUEUE_COUNT] = str(service.pods)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(service, member.name, labels.ENGINE, more_labels=more, annotations=annotations),
        "spec": _pod_spec(service, config, member),
    }


def _pod_spec(service: InferenceService, config: OperatorConfig, member: GroupMember) -> dict[str, Any]:
    overlay = service.pod_template
    copied = {field: overlay[field] for field in _COPIED_FIELDS if overlay.get(field)}
    secrets = list(overlay["imagePullSecrets"])
    selector = dict(service.accelerator.node_selector)
    tracing = _tracing(service, config, member)
    return {
        **copied,
        **({"imagePullSecrets": secrets} if secrets else {}),
        "tolerations": tolerations(overlay["tolerations"]),
        **({"nodeSelector": selector} if selector else {}),
        **_spread_constraints(service, member),
        **_affinity(service, member),
        **_claims(service),
        # Ranks of a multi-pod group connect only once, so a pod cannot restart alone: the group is recreated.
        "restartPolicy": "Always" if service.pods == 1 else "Never",
        "terminationGracePeriodSeconds": service.lifecycle.drain_timeout + GRACE_MARGIN_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        **(
            {}
            if member.rank
            else {"readinessGates": [{"conditionType": gate} for gate in _readiness_gates(service)]}
        ),
        **node_fetch(service, config),
        "containers": [_container(service, config, member, tracing)],
        "volumes": _volumes(service, tracing),
    }


def _readiness_gates(service: InferenceService) -> list[str]:
    """Return the readiness gates of a leading pod."""
    return [labels.ROUTABLE, *([labels.VERIFIED] if service.rollout.verification is not None else [])]


def _affinity(service: InferenceService, member: GroupMember) -> dict[str, Any]:
    """Return the pod fields that place a group's pods close together and give them DNS names."""
    if service.pods == 1:
        return {}
    term = {
        "labelSelector": {"matchLabels": {labels.SERVICE: service.name, **member.labels}},
        "topologyKey": service.topology_key or ZONE,
    }
    affinity = dict(service.pod_template.get("affinity") or {})
    pod_affinity = dict(affinity.get("podAffinity") or {})
    hard, soft = f"required{_SCHEDULING}", f"preferred{_SCHEDULING}"
    if service.topology_key:
        pod_affinity[hard] = [*pod_affinity.get(hard, []), term]
    else:
        pod_affinity[soft] = [*pod_affinity.get(soft, []), {"weight": 100, "podAffinityTerm": term}]
    return {
        "affinity": {**affinity, "podAffinity": pod_affinity},
        "hostname": member.name,
        "subdomain": child_names.ranks_service(service.name),
    }


def _spread_constraints(service: InferenceService, member: GroupMember) -> dict[str, Any]:
    """Return the user's topology spread constraints, or else one that spreads groups where possible."""
    constraints = list(service.pod_template["topologySpreadConstraints"])
    if not constraints and service.availability.spread_key and not member.rank:
        selector = {labels.SERVICE: service.name, labels.COMPONENT: labels.ENGINE}
        if service.pods > 1:
            selector[labels.RANK] = "0"
        constraint = {
            "maxSkew": 1,
            "topologyKey": service.availability.spread_key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
        }
        constraints.append(constraint)
    return {"topologySpreadConstraints": constraints} if constraints else {}


def _claims(service: InferenceService) -> dict[str, Any]:
    template = service.accelerator.claim_template
    if not template:
        return {}
    return {"resourceClaims": [{"name": CLAIM, "resourceClaimTemplateName": template}]}


def _container(
    service: InferenceService, config: OperatorConfig, member: GroupMember, tracing: Tracing
) -> dict[str, Any]:
    startup = service.lifecycle.startup_timeout + STARTUP_MARGIN_SECONDS
    traced = engine_variables(tracing, service.name, member.group)
    mounts = [
        {"name": "mizzen-keys", "mountPath": labels.KEYS_FOLDER, "readOnly": True},
        {"name": "mizzen-shm", "mountPath": "/dev/shm"},
        {"name": "mizzen-tmp", "mountPath": "/tmp"},
    ]
    mounts += [*model_mounts(service), *headers_mounts(tracing)]
    return {
        "name": "engine",
        "image": engine_image(service, config),
        "imagePullPolicy": config.image_pull_policy,
        "args": engine_arguments(service, member.revision, member),
        "env": [
            field_env("POD_IP", "status.podIP"),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
            *([] if _sets_variable(service, "HOME") else [{"name": "HOME", "value": "/tmp"}]),
            *(variable for variable in traced if not _sets_variable(service, variable["name"])),
            *(dict(variable) for variable in service.engine.env),
        ],
        "ports": _ports(service, member),
        "startupProbe": http_probe("/readyz", "http", 1, startup),
        "readinessProbe": http_probe("/readyz", "http", 2, 3),
        "livenessProbe": liveness_probe("http"),
        "lifecycle": {"preStop": {"sleep": {"seconds": DEREGISTER_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(service),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*mounts, *service.pod_template["volumeMounts"]],
    }


def _tracing(service: InferenceService, config: OperatorConfig, member: GroupMember) -> Tracing:
    """Return a pod's tracing; only leading pods trace requests.

    If the service's own variables choose the collector, it does not get the headers for another collector.
    """
    tracing = Tracing() if member.rank else effective_tracing(service.tracing, config)
    if any(_sets_variable(service, name) for name in _ENDPOINT_VARIABLES):
        return replace(tracing, headers_secret=None)
    return tracing


def _ports(service: InferenceService, member: GroupMember) -> list[dict[str, Any]]:
    """Return the ports of a pod; only leading pods have the port `wire`, which gateways connect to."""
    wire = [("wire", labels.WIRE_PORT), ("wire-odd", labels.ODD_WIRE_PORT)]
    ranks = [("ranks", labels.RANKS_PORT)] if service.pods > 1 else []
    named = [*([] if member.rank else [*wire, *ranks]), ("http", labels.ENGINE_HTTP_PORT)]
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in named]


def _sets_variable(service: InferenceService, variable: str) -> bool:
    return any(entry["name"] == variable for entry in service.engine.env)


def _resources(service: InferenceService) -> dict[str, Any]:
    overlay = service.pod_template["resources"]
    resources: dict[str, Any] = {
        kind: dict(overlay[kind]) for kind in ("requests", "limits") if overlay.get(kind)
    }
    if service.accelerator.claim_template:
        resources["claims"] = [{"name": CLAIM}]
    elif service.accelerator.per_pod:
        number = str(service.accelerator.per_pod)
        resources.setdefault("limits", {})[service.accelerator.resource_name] = number
        resources.setdefault("requests", {})[service.accelerator.resource_name] = number
    return resources


def _volumes(service: InferenceService, tracing: Tracing) -> list[Any]:
    size = service.pod_template["sharedMemorySizeLimit"]
    volumes: list[Any] = [
        keys_volume(child_names.engine_keys_secret(service.name)),
        {"name": "mizzen-shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": "mizzen-tmp", "emptyDir": {}},
    ]
    volumes += [*pod_volumes(service), *headers_volumes(tracing)]
    return [*volumes, *service.pod_template["volumes"]]
