"""ControllerRevisions: what each revision of a service was, so that groups of a former one can be made.

One holds the fields of the spec that reach the engine and the image that was in force. It is never changed
but for its number, which says which came last: a spec that is applied again has its old name again.

The API server takes no patch that changes the bytes of `data`, and writes them anew as Go does when it deals
with one, such as the garbage collector's to let go of it: so they are written in that way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mizzen_operator.api import labels
from mizzen_operator.api.key import Key
from mizzen_operator.api.parse import ApiError, parse
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.apply import Refused, name_taken
from mizzen_operator.kube.client import Kube, Ref
from mizzen_operator.kube.go_json import go_json, in_order
from mizzen_operator.kube.objects import owned
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.metadata import metadata
from mizzen_operator.resources.revision_hash import engine_image

logger = logging.getLogger(__name__)

KIND = "ControllerRevision"
_TYPE = {"apiVersion": "apps/v1", "kind": KIND}
_PARTS = ("parallelism", "accelerator", "engine", "podTemplate")


@dataclass(frozen=True, slots=True)
class _Known:
    """A ControllerRevision: its number, and its uid where it was read back."""

    number: int
    uid: str = ""


class Revisions:
    """The ControllerRevisions of all services, listed once a service and then remembered."""

    def __init__(self, kube: Kube, config: OperatorConfig, metrics: Metrics) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._known: dict[Key, tuple[str, dict[str, _Known]]] = {}
        """With the uid of the service whose they are."""

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a service."""
        self._known.pop(key, None)

    async def sync(self, service: InferenceService, revision: str, used: Collection[str]) -> frozenset[str]:
        """Record what a service should run as the newest of its revisions; returns those that are recorded.

        Args:
            service: their owner.
            revision: name of what it should run.
            used: names of revisions that are kept whatever their age.

        Raises:
            Refused: an object of the name belongs to something else.
            KubeError: the API server failed.
        """
        key = Key(service.namespace, service.name)
        uid, known = self._known.get(key, ("", {}))
        if uid == service.uid and _newest(known) == revision:
            return frozenset(known)
        if uid != service.uid and not service.status and await self._create(service, revision, 1):
            self._known[key] = (service.uid, {revision: _Known(1)})
            return frozenset({revision})
        known = await self._list(service)
        number = max((one.number for one in known.values()), default=0) + 1
        if revision not in known:
            made = await self._create(service, revision, number)
            # One of the name may be ours: of an answer that was lost, and a request that was sent again.
            if not made and revision not in await self._list(service):
                name = labels.controller_revision(service.name, revision)
                raise name_taken({"kind": KIND, "metadata": {"name": name}})
            known[revision] = _Known(number)
        elif _newest(known) != revision:
            self._metrics.actions.labels("PatchControllerRevision").inc()
            await self._kube.patch(self._ref(service, revision), {"revision": number})
            known[revision] = _Known(number, known[revision].uid)
        await self._prune(service, known, {revision, *used})
        self._known[key] = (service.uid, known)
        return frozenset(known)

    async def service_at(self, service: InferenceService, revision: str) -> InferenceService:
        """The service as its spec was at a revision; what reaches no engine is as it is now.

        Raises:
            Refused: the revision is not recorded, or not as this release can read it.
            KubeError: the API server failed.
        """
        body = await self._kube.get(self._ref(service, revision))
        if body is None:
            self.forget(Key(service.namespace, service.name))
            raise Refused("RevisionLost", f"ControllerRevision of revision {revision} is gone")
        try:
            return restored(service, body["data"])
        except (ApiError, KeyError, TypeError) as error:
            _, known = self._known.get(Key(service.namespace, service.name), ("", {}))
            known.pop(revision, None)  # the next look does without it
            raise Refused(
                "RevisionUnreadable", f"revision {revision} cannot be made again: {error}"
            ) from error

    def _ref(self, service: InferenceService, revision: str) -> Ref:
        return Ref(KIND, service.namespace, labels.controller_revision(service.name, revision))

    async def _list(self, service: InferenceService) -> dict[str, _Known]:
        listed = await self._bodies(service)
        if stale := [body for body in listed if not in_order(body["data"])]:
            for body in stale:
                await self._rewrite(body)
            listed = await self._bodies(service)
        return {
            body["metadata"]["labels"][labels.REVISION]: _Known(body["revision"], body["metadata"]["uid"])
            for body in listed
        }

    async def _bodies(self, service: InferenceService) -> list[dict[str, Any]]:
        listed = await self._kube.list(Ref(KIND, service.namespace), f"{labels.SERVICE}={service.name}")
        return [
            body
            for body in listed
            if owned(body, service.uid) and labels.REVISION in body["metadata"]["labels"]
        ]

    async def _rewrite(self, body: Mapping[str, Any]) -> None:
        """Make one anew whose data an earlier release wrote in another order; nothing else of it changes.

        Should the operator end in between, the newest is made of the spec again, and what a rollout leaves
        behind of another comes back as the newest.
        """
        meta = body["metadata"]
        ref = Ref(KIND, meta["namespace"], meta["name"])
        logger.info("%s/%s: written anew, so that it can be patched", ref.namespace, ref.name)
        if await self._kube.delete(ref, meta["uid"]):
            kept = {name: meta[name] for name in ("name", "namespace", "labels", "ownerReferences")}
            await self._post({**_TYPE, "metadata": kept, "data": body["data"], "revision": body["revision"]})

    async def _create(self, service: InferenceService, revision: str, number: int) -> bool:
        return await self._post(manifest(service, self._config, revision, number))

    async def _post(self, body: Mapping[str, Any]) -> bool:
        made = await self._kube.create({**body, "data": msgspec.Raw(go_json(body["data"]))})
        if made:
            self._metrics.actions.labels("CreateControllerRevision").inc()
        return made

    async def _prune(self, service: InferenceService, known: dict[str, _Known], used: set[str]) -> None:
        former = sorted((name for name in known if name not in used), key=lambda name: known[name].number)
        for name in former[: max(0, len(former) - service.history_limit)]:
            self._metrics.actions.labels("DeleteControllerRevision").inc()
            await self._kube.delete(self._ref(service, name), known.pop(name).uid)


def _newest(known: Mapping[str, _Known]) -> str:
    return max(known, key=lambda name: known[name].number, default="")


def manifest(service: InferenceService, config: OperatorConfig, revision: str, number: int) -> dict[str, Any]:
    """The ControllerRevision of a service's spec as it is now."""
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
    name = labels.controller_revision(service.name, revision)
    more = {labels.REVISION: revision}
    return {
        **_TYPE,
        "metadata": metadata(service, name, labels.ENGINE, more_labels=more),
        "data": data,
        "revision": number,
    }


def restored(service: InferenceService, data: Mapping[str, Any]) -> InferenceService:
    """A service as a ControllerRevision holds it. Fields that it does not know are as they are now.

    Raises:
        ApiError: a field is not as the CRD wants it.
        KeyError: the data are not a ControllerRevision's of ours.
    """
    spec = dict(service.spec)
    for part, saved in data["spec"].items():
        below = {key: value for key, value in spec[part].items() if key not in _OPTIONAL.get(part, ())}
        spec[part] = {**below, **saved}
    spec["engine"] = {**spec["engine"], "image": data["image"]}
    meta = {
        "name": service.name,
        "namespace": service.namespace,
        "uid": service.uid,
        "generation": service.generation,
        "creationTimestamp": service.created,
    }
    return parse({"metadata": meta, "spec": spec, "status": service.status})


_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "model": ("servedName", "contextLength", "credentialsSecretRef", "endpoint"),
    "parallelism": ("topologyKey",),
    "accelerator": ("perPod", "resourceClaimTemplateName"),
    "engine": ("image",),
    "podTemplate": (
        "serviceAccountName",
        "priorityClassName",
        "schedulerName",
        "runtimeClassName",
        "affinity",
    ),
}
"""Fields without a default: where the saved spec lacks one, it had none."""
