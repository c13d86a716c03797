"""The engine's pods: a group is one, or a leading one and others that its ranks are spread over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mizzen_operator import labels
from mizzen_operator.api import Availability, InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.render.meta import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    digest,
    field_env,
    keys_volume,
    liveness_probe,
    metadata,
    probe,
    stamped,
    tolerations,
)
from mizzen_operator.render.model import cache_place, model_mounts, model_path, node_fetch, pod_volumes

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


def engine_image(service: InferenceService, config: OperatorConfig) -> str:
    """The engine's image in force."""
    return service.engine.image or config.engine_image


def revision(service: InferenceService, config: OperatorConfig) -> str:
    """Name of what the groups should run: eight hexadecimal digits, equal for equal specs.

    It covers the fields of the spec that reach the engine and the image in force, not how this release
    renders them. Empty values are left out, so that a newer CRD may add fields without replacing groups.
    """
    model = replace(service.model, aliases=())
    fields = {
        "image": engine_image(service, config),
        "tensor": service.tensor,
        "podTemplate": service.pod_template,
        "spread": service.availability.spread_key,
        **({"pods": service.pods} if service.pods > 1 else {}),
        **({"topology": service.topology_key} if service.topology_key else {}),
        **{
            name: asdict(part)
            for name, part in (
                ("model", model),
                ("accelerator", service.accelerator),
                ("engine", replace(service.engine, image="")),
                ("lifecycle", service.lifecycle),
            )
        },
    }
    del fields["lifecycle"]["max_group_restarts"]
    if service.access.cached:
        fields["place"] = cache_place(service)
    for part, defaults in _LATER_FIELDS.items():
        for name, default in defaults.items():
            if fields[part][name] == default:
                del fields[part][name]
    if fields["spread"] == Availability().spread_key:
        del fields["spread"]
    return digest(_pruned(fields))[:8]


_LATER_FIELDS: dict[str, dict[str, Any]] = {
    "engine": {
        "kv_cache_dtype": "Auto",
        "overlap_scheduling": "Enabled",
        "cuda_graph": "Auto",
        "cuda_graph_max_batch": 512,
    },
}
"""Fields that came after the first release, with their defaults: they must not replace groups by coming."""


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        pruned = {key: _pruned(item) for key, item in value.items()}
        return {key: item for key, item in pruned.items() if item not in ({}, [], "", None)}
    if isinstance(value, (list, tuple)):
        return [_pruned(item) for item in value]
    return value


def arguments(service: InferenceService, name: str, place: Place) -> list[str]:
    """Arguments of `mizzen`, each option and value an item of its own."""
    engine, model = service.engine, service.model
    options = {
        "model": model_path(service),
        "served-name": model.served_name,
        "device": engine.device.lower(),
        "dtype": model.dtype.lower(),
        "context-length": model.context_length,
        "tensor": service.tensor,
        "max-running-requests": engine.max_running_requests,
        "memory-fraction": engine.memory_fraction,
        "prefill-chunk-tokens": engine.prefill_chunk_tokens,
        "max-step-milliseconds": engine.max_step_milliseconds,
        "page-size": engine.page_size,
        "prefix-cache": engine.prefix_cache.lower(),
        "attention-prefill": _attention(engine.attention_prefill),
        "attention-decode": _attention(engine.attention_decode),
        "kv-cache-dtype": engine.kv_cache_dtype.lower(),
        "steps-in-flight": 2 if engine.overlap_scheduling == "Enabled" else 1,
        "cuda-graph": "auto" if engine.cuda_graph == "Auto" else "off",
        "cuda-graph-max-batch": engine.cuda_graph_max_batch,
        "revision": name,
        "engine-id": "$(POD_NAME)",
        "wire-bind": f"tcp://$(POD_IP):{labels.WIRE_PORT}",
        "keys": labels.KEYS_FOLDER,
        "http-host": "$(POD_IP)",
        "http-port": labels.ENGINE_HTTP_PORT,
        "termination-message": labels.TERMINATION_MESSAGE,
        "startup-timeout-seconds": service.lifecycle.startup_timeout,
        "drain-timeout-seconds": service.lifecycle.drain_timeout,
        **_nodes(service, place),
    }
    given = [(f"--{option}", str(value)) for option, value in options.items() if value not in (None, "")]
    return ["engine", *(item for pair in given for item in pair), *engine.extra_args]


def _nodes(service: InferenceService, place: Place) -> dict[str, Any]:
    """How the pods of a group find one another."""
    if service.pods == 1:
        return {}
    leader = labels.leader_address(service.name, service.namespace, place.leader)
    return {
        "nodes": service.pods,
        "node-rank": place.rank,
        "leader-address": leader if place.rank else "",
        "ranks-address": "$(POD_IP)",
        "ranks-port": labels.RANKS_PORT,
    }


def _attention(backend: str) -> str:
    return "flashinfer-fa3" if backend == "FlashInferFA3" else backend.lower()


@dataclass(frozen=True, slots=True)
class Place:
    """Which pod of which group one is.

    Attributes:
        leader: name of the group's leading pod.
        rank: 0 of the leading one.
    """

    revision: str
    group: int
    incarnation: int
    leader: str
    rank: int = 0

    @property
    def name(self) -> str:
        """Name of the pod."""
        return labels.worker_name(self.leader, self.rank) if self.rank else self.leader

    @property
    def labels(self) -> dict[str, str]:
        """Labels that all pods of the group have, and no others."""
        return {
            labels.GROUP_INDEX: str(self.group),
            labels.REVISION: self.revision,
            labels.INCARNATION: str(self.incarnation),
        }


def engine_pods(
    service: InferenceService, config: OperatorConfig, *, revision: str, group: int, incarnation: int
) -> list[dict[str, Any]]:
    """The pods of a group, the leading one first."""
    leader = labels.pod_name(service.name, revision, group, incarnation)
    places = [Place(revision, group, incarnation, leader, rank) for rank in range(service.pods)]
    return [_engine_pod(service, config, place) for place in places]


def ranks_service(service: InferenceService) -> dict[str, Any]:
    """The headless Service of groups of several pods: their names resolve before they are ready."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, labels.ranks_service(service.name), labels.ENGINE),
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
        "subdomain": labels.ranks_service(service.name),
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
        keys_volume(labels.engine_keys(service.name)),
        {"name": "mizzen-shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": "mizzen-tmp", "emptyDir": {}},
    ]
    volumes += pod_volumes(service)
    return [*volumes, *service.pod_template["volumes"]]
