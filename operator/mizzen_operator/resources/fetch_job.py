# SPDX-License-Identifier: Apache-2.0
"""Builds the Job that fetches a model, and the volumes and paths of the model in all pods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.objects import digest
from mizzen_operator.resources.metadata import (
    CONTAINER_SECURITY,
    MANAGED_BY,
    POD_SECURITY,
    annotations_member,
    field_env,
    metadata,
    owner_reference,
)

MODEL_MOUNT = "/mnt/mizzen/model"
MODEL_VOLUME, CREDENTIALS_VOLUME = "mizzen-model", "mizzen-credentials"
CREDENTIALS_FOLDER = "/var/run/mizzen/credentials"
FETCH_RETRIES = 1_000_000
"""`backoffLimit` of the Job, practically unlimited: the kubelet retries a failed fetch with back-off."""
KEPT_SECONDS = 86_400
RESOURCES = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}


def cache_folder(service: InferenceService) -> str:
    """Return the name of the model's folder in its cache.

    It contains a hash of the endpoint and of the source as the spec writes it.
    """
    source = service.model.source
    name = source.partition("://")[2].rstrip("/").rpartition("/")[2].partition("@sha256:")[0]
    readable = re.sub("[^a-z0-9.]+", "-", name.lower()).strip("-.")[:40]
    return f"{readable or 'model'}-{digest([source, service.access.endpoint])[:12]}"


def model_path(service: InferenceService) -> str:
    """Return the path of the model in engine and fetch pods."""
    source = service.model.source
    if service.access.cached:
        return f"{MODEL_MOUNT}/{cache_folder(service)}"
    if source.startswith("pvc://"):
        inside = source.removeprefix("pvc://").partition("/")[2].strip("/")
        return f"{MODEL_MOUNT}/{inside}" if inside else MODEL_MOUNT
    return source.removeprefix("file://")


def model_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return a list with the volume that contains the model; empty for a `file://` source."""
    source, cache = service.model.source, service.access.cache
    if cache.mode == "HostPath":
        return [{"name": MODEL_VOLUME, "hostPath": {"path": cache.path, "type": "DirectoryOrCreate"}}]
    if cache.mode == "PersistentVolumeClaim":
        # Engines mount it read-only, but the volume is not: a fetch pod on the same node may share it.
        return [{"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": cache.claim}}]
    if source.startswith("pvc://"):
        claim = source.removeprefix("pvc://").partition("/")[0]
        return [{"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
    return []


def pod_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return the volumes that an engine pod needs for its model."""
    fetches = service.access.cache.mode == "HostPath"
    return [*model_volumes(service), *(credentials_volumes(service) if fetches else [])]


def model_mounts(service: InferenceService) -> list[dict[str, Any]]:
    """Return a list with an engine's read-only mount of the model; empty for a `file://` source."""
    if not model_volumes(service):
        return []
    return [{"name": MODEL_VOLUME, "mountPath": MODEL_MOUNT, "readOnly": True}]


def node_fetch(service: InferenceService, config: OperatorConfig) -> dict[str, Any]:
    """Return the pod field with the init container that fetches the model into a node-local cache.

    It is empty for other caches.
    """
    if service.access.cache.mode != "HostPath":
        return {}
    return {"initContainers": [_container(service, config, progress=False)]}


def credentials_volumes(service: InferenceService) -> list[dict[str, Any]]:
    """Return a list with the volume of the credentials for the model's source; empty if it needs none."""
    if service.access.credentials is None:
        return []
    name, key = service.access.credentials
    source = {"secretName": name, "defaultMode": 0o444, "items": [{"key": key, "path": "credentials"}]}
    return [{"name": CREDENTIALS_VOLUME, "secret": source}]


def cache_location(service: InferenceService) -> str:
    """Return a digest of the cache and of the model's folder in it."""
    cache = service.access.cache
    return digest([cache_folder(service), cache.mode, cache.claim, cache.path])


def fetch_job(service: InferenceService, config: OperatorConfig) -> dict[str, Any]:
    """Return the Job that fetches a service's model.

    Its name contains a hash of its pod spec without the pinned revision, so any other change of the pod spec
    leads to a new Job.
    """
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
    meta = metadata(service, "", labels.FETCH)
    unpinned = {**spec, "containers": [_container(service, config, progress=True, pin="")]}
    name = f"{child_names.child_prefix(service.name)}-fetch-{digest(unpinned)[:8]}"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(service, name, labels.FETCH),
        "spec": {
            "backoffLimit": FETCH_RETRIES,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "metadata": {name: meta[name] for name in ("labels", "annotations") if name in meta},
                "spec": spec,
            },
        },
    }


def fetch_pod(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod that the Job controller would create, for a dry run.

    The status of a Job does not say why the API server rejects its pods; the dry run does.
    """
    meta, template = job["metadata"], job["spec"]["template"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-xxxxx",
            "namespace": meta["namespace"],
            "labels": {**template["metadata"]["labels"], labels.JOB_NAME: meta["name"]},
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": False}],
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
    """Return the revision to which the model's source was resolved; empty if it has not been resolved yet."""
    model = service.status.get("model", {})
    return model.get("resolvedRevision", "") if model.get("folder") == cache_folder(service) else ""


def cache_claim(service: InferenceService) -> dict[str, Any] | None:
    """Return the PersistentVolumeClaim of the cache if the operator creates it; None if the user does."""
    cache = service.access.cache
    if cache.mode != "PersistentVolumeClaim" or not cache.size:
        return None
    meta: dict[str, Any] = {
        "name": cache.claim,
        "namespace": service.namespace,
        "labels": {**service.common.labels, **MANAGED_BY},
        **annotations_member(service.common, {}),
    }
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
