"""Applies the manifests of children that differ from the live objects, and removes foreign edits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels, reasons
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.drift import covers, drift_patch
from mizzen_operator.kube.errors import KubeError, Refused
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.kube.objects import digest
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics

logger = logging.getLogger(__name__)

_ABSENT = "absent"


def name_taken_error(live: Mapping[str, Any], service: str = "") -> Refused:
    """Return the error for a live object that is not ours; `service` is the service that needs its name."""
    what = f"{live.get('kind', 'object')} {live['metadata']['name']}"
    other = _owner_service(live)
    if other and other == service:
        message = f"{what} is left over from a deleted service {other}, and goes as soon as that has gone"
        return Refused(reasons.NAME_TAKEN, message)
    if other:  # that service would create the object again, so the two cannot coexist
        return Refused(
            reasons.NAME_TAKEN,
            f"{what} belongs to InferenceService {other}, which has a child of that name, too: leave it, "
            "because that service needs it, and apply this one under another name, or in another namespace",
        )
    return Refused(reasons.NAME_TAKEN, f"{what} belongs to something else: delete or rename it")


def _owner_service(live: Mapping[str, Any]) -> str:
    """Return the name of the service that controls an object; empty if none does."""
    references = live["metadata"].get("ownerReferences", [])
    owners = [owner for owner in references if owner["kind"] == labels.KIND and owner.get("controller")]
    return owners[0]["name"] if owners else ""


class Applier:
    """Server-side apply of manifests that carry their own hash."""

    def __init__(self, kube: KubeClient, metrics: Metrics, children: UnwatchedChildren) -> None:
        self._kube = kube
        self._metrics = metrics
        self._children = children

    async def apply(
        self,
        manifests: Sequence[dict[str, Any]],
        observed: Mapping[str, Mapping[str, Any] | None],
        digests: dict[tuple[str, str], str],
        require_ownership: Callable[[Mapping[str, Any]], None],
        *,
        assume_absent: bool = False,
    ) -> Mapping[str, Any]:
        """Apply the manifests that differ from the live objects; return the live Deployment among them.

        Args:
            manifests: manifests with their hashes as an annotation.
            observed: objects that were read already, by kind. Others are read unless `digests` has their
                hash.
            digests: hashes of applied manifests by kind and name; updated.
            require_ownership: raises if a live object is not ours.
            assume_absent: create the objects without reading first, because none of ours can exist.

        Raises:
            Refused: raised by `require_ownership`.
            KubeError: the API server failed, or rejected a manifest.
        """
        deployment: Mapping[str, Any] = {}
        for manifest in manifests:
            kind, meta = manifest["kind"], manifest["metadata"]
            name, applied = (kind, meta["name"]), meta["annotations"][labels.APPLIED_HASH]
            if kind not in observed and digests.get(name) == applied:
                continue
            before = observed.get(kind)
            live = await self._create_if_absent(manifest) if assume_absent and before is None else None
            if live is None:
                if before is None:
                    before = await self._kube.get(ObjectRef(kind, meta["namespace"], meta["name"]), live=True)
                live = await self._apply_one(manifest, before, digests, require_ownership)
            digests[name] = applied
            self._children.record_applied(live)
            if kind == "Deployment":
                deployment = live
        return deployment

    async def apply_and_get_uid(
        self,
        manifest: dict[str, Any],
        digests: dict[tuple[str, str], str],
        require_ownership: Callable[[Mapping[str, Any]], None],
        *,
        assume_absent: bool = False,
    ) -> str:
        """Apply an unwatched child if it differs; return its uid. For arguments and errors see `apply`."""
        kind, meta = manifest["kind"], manifest["metadata"]
        if not self._children.uid(kind, meta["namespace"], meta["name"]):
            digests.pop((kind, meta["name"]), None)
        await self.apply([manifest], {}, digests, require_ownership, assume_absent=assume_absent)
        return self._children.uid(kind, meta["namespace"], meta["name"])

    async def apply_or_delete(
        self,
        manifests: Sequence[dict[str, Any]],
        digests: dict[tuple[str, str], str],
        require_ownership: Callable[[Mapping[str, Any]], None],
        *,
        wanted: bool,
        assume_absent: bool = False,
    ) -> None:
        """Apply the manifests that differ, or delete the objects if they are not wanted.

        Args:
            manifests, digests, require_ownership: as for `apply`.
            wanted: whether the objects should exist.
            assume_absent: as for `apply`; unwanted objects are not looked up either.
        """
        if wanted:
            await self.apply(manifests, {}, digests, require_ownership, assume_absent=assume_absent)
            return
        for manifest in manifests:
            kind, meta = manifest["kind"], manifest["metadata"]
            if digests.get((kind, meta["name"])) == _ABSENT:
                continue
            ref = ObjectRef(kind, meta["namespace"], meta["name"])
            live = None if assume_absent else await self._kube.get(ref)
            if live is not None and labels.APPLIED_HASH in live["metadata"].get("annotations", {}):
                require_ownership(live)
                self._metrics.actions.labels(f"Delete{kind}").inc()
                await self._kube.delete(ref, live["metadata"]["uid"])
            digests[(kind, meta["name"])] = _ABSENT
            self._children.record_deleted(kind, meta["namespace"], meta["name"])

    async def _create_if_absent(self, manifest: dict[str, Any]) -> Mapping[str, Any] | None:
        """Create an object; return None if one of its name exists, even a foreign one.

        It also returns None if the API server does not accept a resourceVersion for an absent object, which
        may happen with other releases of Kubernetes. The caller's second attempt meets the same error if it
        has another cause.
        """
        try:
            live = await self._kube.apply(manifest, new=True)
        except KubeError as error:
            if error.code not in (400, 404, 409, 422):
                raise
            return None
        self._metrics.actions.labels(f"Apply{manifest['kind']}").inc()
        return live

    async def _apply_one(
        self,
        manifest: dict[str, Any],
        live: Mapping[str, Any] | None,
        digests: dict[tuple[str, str], str],
        require_ownership: Callable[[Mapping[str, Any]], None],
    ) -> Mapping[str, Any]:
        if live is not None:
            require_ownership(live)
            if _role_differs(live, manifest):
                await self._delete_binding(manifest, live)
                live = None
        if live is not None:
            live = await self._remove_foreign_edits(manifest, live, digests)
            applied = live["metadata"].get("annotations", {}).get(labels.APPLIED_HASH)
            if applied == manifest["metadata"]["annotations"][labels.APPLIED_HASH] and covers(live, manifest):
                return live
        self._metrics.actions.labels(f"Apply{manifest['kind']}").inc()
        return await self._kube.apply(manifest)

    async def _delete_binding(self, manifest: dict[str, Any], live: Mapping[str, Any]) -> None:
        """Delete a binding whose role differs, because a binding's role cannot be changed.

        A dry run first makes sure that the operator may bind the wanted role.
        """
        meta = manifest["metadata"]
        try:
            await self._kube.dry_run_create(manifest)
        except KubeError as error:
            if error.code != 409:  # only the name is taken
                raise
        ref, role = ObjectRef(manifest["kind"], meta["namespace"], meta["name"]), live["roleRef"]["name"]
        logger.info("%s/%s: replacing the binding of role %s", ref.namespace, ref.name, role)
        self._metrics.actions.labels(f"Delete{ref.kind}").inc()
        await self._kube.delete(ref, live["metadata"]["uid"])

    async def _remove_foreign_edits(
        self, manifest: dict[str, Any], live: Mapping[str, Any], digests: dict[tuple[str, str], str]
    ) -> Mapping[str, Any]:
        """Remove fields that others added; leave fields that come back at once.

        Admission webhooks may add them, or an API server with defaults that `drift.py` does not list.
        """
        patch = drift_patch(live, manifest)
        if patch is None:
            return live
        kind, meta = manifest["kind"], manifest["metadata"]
        left = (f"{kind} left as it is", meta["name"])
        if digests.get(left) == _patch_digest(patch):
            return live
        logger.info("%s/%s: removing foreign fields from %s", meta["namespace"], meta["name"], kind)
        self._metrics.actions.labels(f"Correct{kind}").inc()
        ref = ObjectRef(kind, meta["namespace"], meta["name"])
        await self._kube.patch(ref, patch)
        after = await self._kube.get(ref) or live
        remains = drift_patch(after, manifest)
        if remains is not None:
            logger.warning(
                "%s/%s: foreign fields of %s come back at once; leaving them",
                meta["namespace"],
                meta["name"],
                kind,
            )
            digests[left] = _patch_digest(remains)
        return after


def _role_differs(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    return "roleRef" in manifest and live.get("roleRef") != manifest["roleRef"]


def _patch_digest(patch: Mapping[str, Any]) -> str:
    """Return a hash of the changes in a patch, whatever version it is for."""
    return digest({key: value for key, value in patch.items() if key != "metadata"})
