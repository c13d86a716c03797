"""Builds volumes, paths and the fetch Job of a model's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.objects import digest
from mizzen_operator.resources.metadata import (
    CONTAINER_SECURITY,
    MANAGED_BY,
    POD_SECURITY,
    field_env,
    metadata,
    owner_reference,
)

MODEL_MOUNT = "/mnt/mizzen/model"
MODEL_VOLUME, CREDENTIALS_VOLUME = "mizzen-model", "mizzen-credentials"
CREDENTIALS_FOLDER = "/var/run/mizzen/credentials"
FETCH_RETRIES = 1_000_000
"""The kubelet retries a failed fetch with back-off, until it succeeds or is not wanted any more."""
KEPT_SECONDS = 86_400
RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}


def cache_folder(service: InferenceService) -> str:
    """Return the name of the model's folder in its cache, unique per source as written and endpoint."""
    source = service.model.source
    name = source.partition("://")[2].rstrip("/").rpartition("/")[2].partition("@sha256:")[0]
    readable = re.sub("[^a-z0-9.]+", "-", name.lower()).strip("-.")[:40]
    return f"{readable or 'model'}-{digest([source, service.access.endpoint])[:12]}"


def model_path(service: InferenceService) -> str:
    """Return the path of the model in its pods."""
    source = service.model.source
    if service.access.cached:
        return f"{MODEL_MOUNT}/{cache_folder(service)}"
    if source.startswith("pvc://"):
        inside = source.removeprefix("pvc://").partition("/")[2].strip("/")
        return f"{MODEL_MOUNT}/{inside}" if inside else MODEL_MOUNT
    return source.removeprefix("file://")


def model_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return the volume with the model; empty for file://."""
    source, cache = service.model.source, service.access.cache
    if cache.mode == "HostPath":
        return [{"name": MODEL_VOLUME, "hostPath": {"path": cache.path, "type": "DirectoryOrCreate"}}]
    if cache.mode == "PersistentVolumeClaim":
        # Engines mount it read-only, but not as a read-only volume: fetch and engine may share it on a node.
        return [{"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": cache.claim}}]
    if source.startswith("pvc://"):
        claim = source.removeprefix("pvc://").partition("/")[0]
        return [{"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
    return []


def pod_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return the volumes of an engine's pod for its model."""
    fetches = service.access.cache.mode == "HostPath"
    return [*model_volumes(service), *(credentials_volumes(service) if fetches else [])]


def model_mounts(service: InferenceService) -> list[dict[str, Any]]:
    """Return the read-only mount of the model in engines."""
    if not model_volumes(service):
        return []
    return [{"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT, "readOnly": True}]


def node_fetch(service: InferenceService, config: OperatorConfig) -> dict[str, Any]:
    """Return the init container that fetches the model into a node-local cache; empty for other caches."""
    if service.access.cache.mode != "HostPath":
        return {}
    return {"initContainers": [_container(service, config, progress=False)]}


def credentials_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return the volume with the one key of the user's Secret."""
    if service.access.credentials is None:
        return []
    name, key = service.access.credentials
    source = {"secretName": name, "defaultMode": 0o444, "items": [{"key": key, "path": "credentials"}]}
    return [{"name": CREDENTIALS_VOLUME, "secret": source}]


def cache_location(service: InferenceService) -> str:
    """Return a digest of a folder in a cache; a model that was fetched there is not fetched again."""
    cache = service.access.cache
    return digest([cache_folder(service), cache.mode, cache.claim, cache.path])


def fetch_job(service: InferenceService, config: OperatorConfig) -> dict[str, Any]:
    """Return the Job that fetches a service's model; only the pinned revision does not change its name."""
    overlay = service.pod_template
    selector = dict(service.accelerator.node_selector)
    spec = {
        **({"nodeSelector": selector} if selector else {}),
        **{name: list(overlay[name]) for name in ("tolerations", "imagePullSecrets") if overlay[name]},
        **({"affinity": overlay["affinity"]} if overlay.get("affinity") else {}),
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            **POD_SECURITY,
            "fsGroup": POD_SECURITY["runAsGroup"],
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [_container(service, config, progress=True)],
        "volumes": [*model_volumes(service), *credentials_volumes(service)],
    }
    given = {**MANAGED_BY, labels.SERVICE: service.name, labels.COMPONENT: labels.FETCH}
    unpinned = {**spec, "containers": [_container(service, config, progress=True, pin="")]}
    name = f"{service.name}-fetch-{digest(unpinned)[:8]}"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(service, name, labels.FETCH),
        "spec": {
            "backoffLimit": FETCH_RETRIES,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": given}, "spec": spec},
        },
    }


def fetch_pod(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod as the Job controller creates it, for a dry run: a Job does not say why it has none."""
    meta, template = job["metadata"], job["spec"]["template"]
    made = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-xxxxx",
            "namespace": meta["namespace"],
            "labels": {**template["metadata"]["labels"], labels.JOB_NAME: meta["name"]},
            "ownerReferences": [{**made, "controller": True, "blockOwnerDeletion": False}],
        },
        "spec": template["spec"],
    }


def _container(
    service: InferenceService, config: OperatorConfig, *, progress: bool, pin: str | None = None
) -> dict[str, Any]:
    options = {
        "--to": model_path(service),
        "--endpoint": service.access.endpoint,
        "--credentials": f"{CREDENTIALS_FOLDER}/credentials" if service.access.credentials else "",
        "--pin": resolved_revision(service) if pin is None else pin,
        "--termination-message": labels.TERMINATION_MESSAGE,
        **({"--progress-host": "$(POD_IP)", "--progress-port": str(labels.FETCH_PORT)} if progress else {}),
    }
    arguments = [item for name, value in options.items() if value for item in (name, value)]
    mounts: list[dict[str, Any]] = [{"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT}]
    if service.access.credentials is not None:
        mounts.append({"name": CREDENTIALS_VOLUME, "mountPath": CREDENTIALS_FOLDER, "readOnly": True})
    return {
        "name": "fetch",
        "image": config.gateway_image,
        "imagePullPolicy": config.image_pull_policy,
        "args": ["fetch", service.model.source, *arguments],
        "env": [field_env("POD_IP", "status.podIP")],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": RESOURCES,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }


def resolved_revision(service: InferenceService) -> str:
    """Return the revision that the service's source was resolved to before; empty if it never was."""
    known = service.status.get("model", {})
    return known.get("resolvedRevision", "") if known.get("folder") == cache_folder(service) else ""


def cache_claim(service: InferenceService) -> dict[str, Any] | None:
    """Return the claim that is created if it is missing; None if the user creates it."""
    cache = service.access.cache
    if cache.mode != "PersistentVolumeClaim" or not cache.size:
        return None
    meta: dict[str, Any] = {"name": cache.claim, "namespace": service.namespace, "labels": dict(MANAGED_BY)}
    if cache.when_deleted == "Delete":
        meta["ownerReferences"] = [{**owner_reference(service), "blockOwnerDeletion": False}]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": meta,
        "spec": {
            "accessModes": [cache.access_mode],
            "resources": {"requests": {"storage": cache.size}},
            **({"storageClassName": cache.storage_class} if cache.storage_class else {}),
        },
    }
