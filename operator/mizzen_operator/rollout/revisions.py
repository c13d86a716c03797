# SPDX-License-Identifier: Apache-2.0
"""Records each revision of a service as a ControllerRevision, so that groups of old revisions can be created.

A record contains the fields of the spec that reach the engine, and the engine image. Its name contains the
name of the revision, so a spec that is applied again uses its old record. Only the number of a record ever
changes: the record with the highest number is the newest.

The API server rejects a patch that changes the bytes of `data`. When it handles any patch, for example if the
garbage collector removes an owner, it re-encodes `data` as Go does. So `data` is written as Go would write
it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.parse import InvalidServiceError, parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.apply import name_taken_error
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import Refused
from mizzen_operator.kube.go_json import go_json, has_sorted_keys
from mizzen_operator.kube.objects import is_owned_by
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.metadata import metadata
from mizzen_operator.resources.revision_hash import engine_image

logger = logging.getLogger(__name__)

KIND = "ControllerRevision"
_TYPE = {"apiVersion": "apps/v1", "kind": KIND}
_PARTS = ("parallelism", "accelerator", "engine", "podTemplate")


@dataclass(frozen=True, slots=True)
class _Record:
    """Number of a ControllerRevision, and its uid; the uid is empty until the object has been read back."""

    number: int
    uid: str = ""


class Revisions:
    """Creates, reads and deletes the ControllerRevisions of all services; lists them once per service."""

    def __init__(self, kube: KubeClient, config: OperatorConfig, metrics: Metrics) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._recorded: dict[ServiceKey, tuple[str, dict[str, _Record]]] = {}
        """Uid of each service, and its records by revision."""

    def forget(self, key: ServiceKey) -> None:
        """Drop the cached records of a service."""
        self._recorded.pop(key, None)

    async def sync(self, service: InferenceService, revision: str, used: Collection[str]) -> frozenset[str]:
        """Record the current spec as the newest revision; return the names of all recorded revisions.

        Args:
            service: the service.
            revision: name of the spec's revision.
            used: names of revisions whose records are kept, however old they are.

        Raises:
            Refused: a ControllerRevision with the required name exists, but does not belong to the service.
            KubeError: the API server failed.
        """
        key = ServiceKey(service.namespace, service.name)
        uid, records = self._recorded.get(key, ("", {}))
        if uid == service.uid and _newest(records) == revision:
            return frozenset(records)
        if uid != service.uid and not service.status and await self._create(service, revision, 1):
            self._recorded[key] = (service.uid, {revision: _Record(1)})
            return frozenset({revision})
        records = await self._list(service)
        number = max((record.number for record in records.values()), default=0) + 1
        if revision not in records:
            created = await self._create(service, revision, number)
            # An existing object may be the service's own, if the response to its creation was lost.
            if not created and revision not in await self._list(service):
                name = child_names.controller_revision(service.name, revision)
                raise name_taken_error({"kind": KIND, "metadata": {"name": name}})
            records[revision] = _Record(number)
        elif _newest(records) != revision:
            self._metrics.actions.labels("PatchControllerRevision").inc()
            await self._kube.patch(self._ref(service, revision), {"revision": number})
            records[revision] = _Record(number, records[revision].uid)
        await self._prune(service, records, {revision, *used})
        self._recorded[key] = (service.uid, records)
        return frozenset(records)

    async def restore(self, service: InferenceService, revision: str) -> InferenceService:
        """Return the service with the spec of a revision; fields that do not reach engines keep their values.

        Raises:
            Refused: the revision is not recorded, or this release cannot read the record.
            KubeError: the API server failed.
        """
        body = await self._kube.get(self._ref(service, revision))
        if body is None:
            self.forget(ServiceKey(service.namespace, service.name))
            raise Refused(reasons.REVISION_LOST, f"the ControllerRevision of revision {revision} is gone")
        try:
            return restore_service(service, body["data"])
        except (InvalidServiceError, KeyError, TypeError) as error:
            _, records = self._recorded.get(ServiceKey(service.namespace, service.name), ("", {}))
            records.pop(revision, None)  # so that the next reconcile does not try to restore it
            raise Refused(
                reasons.REVISION_UNREADABLE, f"revision {revision} cannot be created again: {error}"
            ) from error

    def _ref(self, service: InferenceService, revision: str) -> ObjectRef:
        return ObjectRef(KIND, service.namespace, child_names.controller_revision(service.name, revision))

    async def _list(self, service: InferenceService) -> dict[str, _Record]:
        listed = await self._bodies(service)
        if stale := [body for body in listed if not has_sorted_keys(body["data"])]:
            for body in stale:
                await self._rewrite(body)
            listed = await self._bodies(service)
        return {
            body["metadata"]["labels"][labels.REVISION]: _Record(body["revision"], body["metadata"]["uid"])
            for body in listed
        }

    async def _bodies(self, service: InferenceService) -> list[dict[str, Any]]:
        listed = await self._kube.list(ObjectRef(KIND, service.namespace), f"{labels.SERVICE}={service.name}")
        return [
            body
            for body in listed
            if is_owned_by(body, service.uid) and labels.REVISION in body["metadata"]["labels"]
        ]

    async def _rewrite(self, body: Mapping[str, Any]) -> None:
        """Delete and recreate a record whose data an earlier release wrote in another order.

        If the operator stops between delete and create, the record of the current spec is created again from
        the spec. Any other record is lost until the spec returns to its revision.
        """
        meta = body["metadata"]
        ref = ObjectRef(KIND, meta["namespace"], meta["name"])
        logger.info(
            "%s/%s: recreating the ControllerRevision so that it can be patched", ref.namespace, ref.name
        )
        if await self._kube.delete(ref, meta["uid"]):
            kept = {name: meta[name] for name in ("name", "namespace", "labels", "ownerReferences")}
            await self._post({**_TYPE, "metadata": kept, "data": body["data"], "revision": body["revision"]})

    async def _create(self, service: InferenceService, revision: str, number: int) -> bool:
        return await self._post(controller_revision(service, self._config, revision, number))

    async def _post(self, body: Mapping[str, Any]) -> bool:
        created = await self._kube.create({**body, "data": msgspec.Raw(go_json(body["data"]))})
        if created:
            self._metrics.actions.labels("CreateControllerRevision").inc()
        return created

    async def _prune(self, service: InferenceService, records: dict[str, _Record], used: set[str]) -> None:
        """Delete the oldest unused records beyond `spec.revisionHistoryLimit`."""
        unused = sorted(
            (revision for revision in records if revision not in used),
            key=lambda revision: records[revision].number,
        )
        for revision in unused[: max(0, len(unused) - service.history_limit)]:
            self._metrics.actions.labels("DeleteControllerRevision").inc()
            await self._kube.delete(self._ref(service, revision), records.pop(revision).uid)


def _newest(records: Mapping[str, _Record]) -> str:
    """Return the revision whose record has the highest number; empty if no record exists."""
    return max(records, key=lambda revision: records[revision].number, default="")


def controller_revision(
    service: InferenceService, config: OperatorConfig, revision: str, number: int
) -> dict[str, Any]:
    """Return the manifest of the ControllerRevision for a service's current spec.

    Args:
        service: the service.
        config: options of the operator; they set the engine image if the spec does not.
        revision: name of the spec's revision.
        number: the record's number; the highest is the newest.
    """
    spec = service.spec
    model = {key: value for key, value in spec["model"].items() if key != "aliases"}
    lifecycle = {key: spec["lifecycle"][key] for key in ("startupTimeoutSeconds", "drainTimeoutSeconds")}
    data = {
        "image": engine_image(service, config),
        "spec": {
            **{part: spec[part] for part in _PARTS},
            "model": model,
            "lifecycle": lifecycle,
            "availability": {"spreadTopologyKey": service.availability.spread_key},
        },
    }
    name = child_names.controller_revision(service.name, revision)
    return {
        **_TYPE,
        "metadata": metadata(service, name, labels.ENGINE, more_labels={labels.REVISION: revision}),
        "data": data,
        "revision": number,
    }


def restore_service(service: InferenceService, data: Mapping[str, Any]) -> InferenceService:
    """Return a service with the spec fields of a ControllerRevision; other fields keep their values.

    Args:
        service: the service with its current spec.
        data: `data` of the ControllerRevision.

    Raises:
        InvalidServiceError: a recorded field does not match the CRD.
        KeyError: `data` was not written by this operator.
    """
    spec = dict(service.spec)
    for part, saved in data["spec"].items():
        current = {key: value for key, value in spec[part].items() if key not in _OPTIONAL.get(part, ())}
        spec[part] = {**current, **saved}
    spec["engine"] = {**spec["engine"], "image": data["image"]}
    meta = {
        "name": service.name,
        "namespace": service.namespace,
        "uid": service.uid,
        "generation": service.generation,
        "creationTimestamp": service.created,
    }
    restored = parse_service({"metadata": meta, "spec": spec, "status": service.status})
    return replace(restored, rotate_keys=service.rotate_keys)


_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "model": ("servedName", "contextLength", "implementation", "credentialsSecretRef", "endpoint"),
    "parallelism": ("expert", "topologyKey"),
    "accelerator": ("memory", "perPod", "profile", "resourceClaimTemplateName"),
    "engine": ("image", "quantization"),
    "podTemplate": (
        "serviceAccountName",
        "priorityClassName",
        "schedulerName",
        "runtimeClassName",
        "affinity",
    ),
}
"""Fields without a default: if the recorded spec lacks one of them, its current value is removed."""
