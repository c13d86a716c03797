"""The engine's pods: a group is one, or a leading one and others that its ranks are spread over."""

from __future__ import annotations

from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_args import arguments
from mizzen_operator.resources.group_member import Place
from mizzen_operator.resources.fetch_job import model_mounts, node_fetch, pod_volumes
from mizzen_operator.resources.metadata import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    field_env,
    keys_volume,
    liveness_probe,
    metadata,
    probe,
    stamped,
    tolerations,
)
from mizzen_operator.resources.revision_hash import engine_image

CLAIM = "accelerator"
DEREGISTER_SECONDS = 1
"""A group that goes still takes requests this long: gateways leave it out meanwhile, before it drains."""
STARTUP_MARGIN_SECONDS = 30
"""The engine ends itself, with a reason, before the probe would end it without one."""
GRACE_MARGIN_SECONDS = 30
ZONE = "topology.kubernetes.io/zone"
KUEUE_QUEUE, KUEUE_GROUP = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"
KUEUE_COUNT = "kueue.x-k8s.io/pod-group-total-count"
_SCHEDULING = "DuringSchedulingIgnoredDuringExecution"
_PLAIN_FIELDS = ("serviceAccountName", "priorityClassName", "schedulerName", "runtimeClassName", "affinity")


def engine_pods(
    service: InferenceService, config: OperatorConfig, *, revision: str, group: int, incarnation: int
) -> list[dict[str, Any]]:
    """The pods of a group, the leading one first."""
    leader = child_names.leader_pod(service.name, revision, group, incarnation)
    places = [Place(revision, group, incarnation, leader, rank) for rank in range(service.pods)]
    return [_engine_pod(service, config, place) for place in places]


def ranks_service(service: InferenceService) -> dict[str, Any]:
    """The headless Service of groups of several pods: their names resolve before they are ready."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, child_names.ranks_service(service.name), labels.ENGINE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.SERVICE: service.name, labels.COMPONENT: labels.ENGINE},
            "ports": [{"name": "ranks", "port": labels.RANKS_PORT, "protocol": "TCP"}],
        },
    }
    return stamped(manifest)


def _engine_pod(service: InferenceService, config: OperatorConfig, place: Place) -> dict[str, Any]:
    overlay = service.pod_template
    annotations = dict(overlay["annotations"])
    more = {
        **overlay["labels"],
        **({labels.GATEWAY_LABEL: labels.SHARED} if service.shared else {}),
        **place.labels,
        labels.RANK: str(place.rank),
    }
    if service.pods > 1:
        more[labels.PODS] = str(service.pods)
        if KUEUE_QUEUE in more:  # which admits such pods all at once
            more[KUEUE_GROUP] = place.leader
            annotations[KUEUE_COUNT] = str(service.pods)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(service, place.name, labels.ENGINE, more_labels=more, annotations=annotations),
        "spec": _pod_spec(service, config, place),
    }


def _pod_spec(service: InferenceService, config: OperatorConfig, place: Place) -> dict[str, Any]:
    overlay = service.pod_template
    plain = {field: overlay[field] for field in _PLAIN_FIELDS if overlay.get(field)}
    secrets = list(overlay["imagePullSecrets"])
    selector = dict(service.accelerator.node_selector)
    return {
        **plain,
        **({"imagePullSecrets": secrets} if secrets else {}),
        "tolerations": tolerations(overlay["tolerations"]),
        **({"nodeSelector": selector} if selector else {}),
        **_spread(service, place),
        **_together(service, place),
        **_claims(service),
        # Of several pods none starts again alone: they meet once, and the group is made anew.
        "restartPolicy": "Always" if service.pods == 1 else "Never",
        "terminationGracePeriodSeconds": service.lifecycle.drain_timeout + GRACE_MARGIN_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        **({} if place.rank else {"readinessGates": [{"conditionType": gate} for gate in _gates(service)]}),
        **node_fetch(service, config),
        "containers": [_container(service, config, place)],
        "volumes": _volumes(service),
    }


def _gates(service: InferenceService) -> list[str]:
    """What must be true of a pod before it is ready."""
    return [labels.ROUTABLE, *([labels.VERIFIED] if service.rollout.verification is not None else [])]


def _together(service: InferenceService, place: Place) -> dict[str, Any]:
    """A group's pods near one another, and with names that resolve."""
    if service.pods == 1:
        return {}
    term = {
        "labelSelector": {"matchLabels": {labels.SERVICE: service.name, **place.labels}},
        "topologyKey": service.topology_key or ZONE,
    }
    affinity = dict(service.pod_template.get("affinity") or {})
    given = dict(affinity.get("podAffinity") or {})
    hard, soft = f"required{_SCHEDULING}", f"preferred{_SCHEDULING}"
    if service.topology_key:
        given[hard] = [*given.get(hard, []), term]
    else:
        given[soft] = [*given.get(soft, []), {"weight": 100, "podAffinityTerm": term}]
    return {
        "affinity": {**affinity, "podAffinity": given},
        "hostname": place.name,
        "subdomain": child_names.ranks_service(service.name),
    }


def _spread(service: InferenceService, place: Place) -> dict[str, Any]:
    """The user's constraints, else groups apart from one another where that is possible."""
    constraints = list(service.pod_template["topologySpreadConstraints"])
    if not constraints and service.availability.spread_key and not place.rank:
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


def _container(service: InferenceService, config: OperatorConfig, place: Place) -> dict[str, Any]:
    startup = service.lifecycle.startup_timeout + STARTUP_MARGIN_SECONDS
    mounts = [
        {"name": "mizzen-keys", "mountPath": labels.KEYS_FOLDER, "readOnly": True},
        {"name": "mizzen-shm", "mountPath": "/dev/shm"},
        {"name": "mizzen-tmp", "mountPath": "/tmp"},
    ]
    mounts += model_mounts(service)
    return {
        "name": "engine",
        "image": engine_image(service, config),
        "imagePullPolicy": config.image_pull_policy,
        "args": arguments(service, place.revision, place),
        "env": [
            field_env("POD_IP", "status.podIP"),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
            *([] if _names(service, "HOME") else [{"name": "HOME", "value": "/tmp"}]),
            *(dict(variable) for variable in service.engine.env),
        ],
        "ports": _ports(service, place),
        "startupProbe": probe("/readyz", "http", 1, startup),
        "readinessProbe": probe("/readyz", "http", 2, 3),
        "livenessProbe": liveness_probe("http"),
        "lifecycle": {"preStop": {"sleep": {"seconds": DEREGISTER_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(service),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*mounts, *service.pod_template["volumeMounts"]],
    }


def _ports(service: InferenceService, place: Place) -> list[dict[str, Any]]:
    """The ports of a pod; gateways go by the one named `wire`, which leading pods alone have."""
    wire = [("wire", labels.WIRE_PORT), ("wire-odd", labels.ODD_WIRE_PORT)]
    ranks = [("ranks", labels.RANKS_PORT)] if service.pods > 1 else []
    named = [*([] if place.rank else [*wire, *ranks]), ("http", labels.ENGINE_HTTP_PORT)]
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in named]


def _names(service: InferenceService, variable: str) -> bool:
    return any(entry["name"] == variable for entry in service.engine.env)


def _resources(service: InferenceService) -> dict[str, Any]:
    given = service.pod_template["resources"]
    resources: dict[str, Any] = {
        kind: dict(given[kind]) for kind in ("requests", "limits") if given.get(kind)
    }
    if service.accelerator.claim_template:
        resources["claims"] = [{"name": CLAIM}]
    elif service.accelerator.per_pod:
        number = str(service.accelerator.per_pod)
        resources.setdefault("limits", {})[service.accelerator.resource_name] = number
        resources.setdefault("requests", {})[service.accelerator.resource_name] = number
    return resources


def _volumes(service: InferenceService) -> list[Any]:
    size = service.pod_template["sharedMemorySizeLimit"]
    volumes: list[Any] = [
        keys_volume(child_names.engine_keys_secret(service.name)),
        {"name": "mizzen-shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": "mizzen-tmp", "emptyDir": {}},
    ]
    volumes += pod_volumes(service)
    return [*volumes, *service.pod_template["volumes"]]
