# SPDX-License-Identifier: Apache-2.0
"""Applies the manifest of each child whose live object differs from it, and removes foreign edits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels, reasons
from mizzen_operator.kube.admission_changes import AdmissionChanges, compare
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.drift import covers, drift_patch
from mizzen_operator.kube.errors import KubeError, Refused
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics

logger = logging.getLogger(__name__)

_ABSENT = "absent"


def name_taken_error(live: Mapping[str, Any], service: str = "") -> Refused:
    """Return the error for a live object that has a needed name but is not ours.

    Args:
        live: the object.
        service: name of the service that needs the object's name; empty for a shared gateway.
    """
    label = f"{live.get('kind', 'object')} {live['metadata']['name']}"
    other = _owner_service(live)
    if other and other == service:
        message = f"{label} is left over from a deleted service {other}, and will be garbage collected"
        return Refused(reasons.NAME_TAKEN, message)
    if other:  # that service would create the object again, so the two cannot coexist
        return Refused(
            reasons.NAME_TAKEN,
            f"{label} belongs to InferenceService {other}, which has a child of that name, too: leave it, "
            "because that service needs it, and apply this one under another name, or in another namespace",
        )
    return Refused(reasons.NAME_TAKEN, f"{label} belongs to something else: delete or rename it")


def _owner_service(live: Mapping[str, Any]) -> str:
    """Return the name of the service that controls an object; empty if none does."""
    references = live["metadata"].get("ownerReferences", [])
    owners = [owner for owner in references if owner["kind"] == labels.KIND and owner.get("controller")]
    return owners[0]["name"] if owners else ""


class Applier:
    """Applies manifests server-side; each carries its own hash in the annotation `mizzen.dev/applied`."""

    def __init__(self, kube: KubeClient, metrics: Metrics, children: UnwatchedChildren) -> None:
        self._kube = kube
        self._metrics = metrics
        self._children = children
        self._changes = AdmissionChanges()

    async def apply(
        self,
        manifests: Sequence[dict[str, Any]],
        observed: Mapping[str, Mapping[str, Any] | None],
        digests: dict[tuple[str, str], str],
        require_ownership: Callable[[Mapping[str, Any]], None],
        *,
        assume_absent: bool = False,
    ) -> Mapping[str, Any]:
        """Apply the manifests that differ from the live objects.

        Return the live Deployment; {} if no manifest of a Deployment was compared with its live object.

        Args:
            manifests: manifests with their hashes as an annotation.
            observed: live objects that were read already, by kind; None if absent. An object of another
                kind is read, unless `digests` has its manifest's hash.
            digests: hash of each applied manifest, by kind and name; updated in place.
            require_ownership: function that raises if a live object is not ours.
            assume_absent: create the objects without reading them first, because none can exist yet.

        Raises:
            Refused: a live object is not ours; raised by `require_ownership`.
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
                live = await self._apply_one(manifest, before, require_ownership)
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
        """Apply a child of an unwatched kind if it differs from its manifest, and return its uid.

        Args:
            manifest: manifest with its hash as an annotation.
            digests: hash of each applied manifest, by kind and name; updated in place.
            require_ownership: function that raises if the live object is not ours.
            assume_absent: create the object without reading it first, because it cannot exist yet.

        Raises:
            Refused: the live object is not ours; raised by `require_ownership`.
            KubeError: the API server failed, or rejected the manifest.
        """
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
        """Apply the manifests that differ from the live objects; if the objects are not wanted, delete them.

        Args:
            manifests: manifests with their hashes as an annotation.
            digests: hash of each applied manifest, by kind and name; updated in place.
            require_ownership: function that raises if a live object is not ours.
            wanted: whether the objects should exist.
            assume_absent: do not read the objects first, because none can exist yet.

        Raises:
            Refused: a live object is not ours; raised by `require_ownership`.
            KubeError: the API server failed, or rejected a manifest.
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
        """Create an object; return None if an object with its name exists, even one that is not ours.

        It also returns None if the API server does not accept a resourceVersion for an absent object, which
        may happen with other releases of Kubernetes. The caller then reads and applies the object. If the
        error has another cause, it occurs again when the object is applied.
        """
        try:
            live = await self._kube.apply(manifest, new=True)
        except KubeError as error:
            if error.code not in (400, 404, 409, 422):
                raise
            return None
        self._metrics.actions.labels(f"Apply{manifest['kind']}").inc()
        return self._record(manifest, live)

    async def _apply_one(
        self,
        manifest: dict[str, Any],
        live: Mapping[str, Any] | None,
        require_ownership: Callable[[Mapping[str, Any]], None],
    ) -> Mapping[str, Any]:
        if live is not None:
            require_ownership(live)
            if _role_differs(live, manifest):
                await self._delete_binding(manifest, live)
                live = None
        if live is None:
            return self._record(manifest, await self._write(manifest))
        uid, found = live["metadata"]["uid"], compare(live, manifest)
        settled = not found.paths or self._changes.is_left(uid, found)
        if settled or not self._changes.may_correct(uid, found.applied):
            return live
        if not self._changes.is_extra_left(uid, found):
            live = await self._remove_foreign_edits(manifest, live)
        if not covers(live, manifest):
            live = await self._write(manifest)
        return self._record(manifest, live)

    async def _write(self, manifest: dict[str, Any]) -> Mapping[str, Any]:
        self._metrics.actions.labels(f"Apply{manifest['kind']}").inc()
        return await self._kube.apply(manifest)

    def _record(self, manifest: Mapping[str, Any], live: Mapping[str, Any]) -> Mapping[str, Any]:
        """Record how an object that was just written differs from its manifest, and return the object."""
        left = compare(live, manifest)
        new = self._changes.record(live["metadata"]["uid"], left)
        if new:  # fields that we do not set may also be defaults of the API server
            level = logging.WARNING if left.changed.keys() & new else logging.INFO
            name = f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
            text = "%s: fields of %s that an admission plugin or the API server changes stay as they are: %s"
            logger.log(level, text, name, manifest["kind"], ", ".join(new))
        return live

    async def _delete_binding(self, manifest: dict[str, Any], live: Mapping[str, Any]) -> None:
        """Delete a binding that has another role than its manifest: a binding's role cannot be changed.

        A dry run first makes sure that the operator may bind the wanted role.
        """
        meta = manifest["metadata"]
        try:
            await self._kube.dry_run_create(manifest)
        except KubeError as error:
            if error.code != 409:  # 409: the binding exists; the API server found no other fault
                raise
        ref, role = ObjectRef(manifest["kind"], meta["namespace"], meta["name"]), live["roleRef"]["name"]
        logger.info("%s/%s: replacing the binding of role %s", ref.namespace, ref.name, role)
        self._metrics.actions.labels(f"Delete{ref.kind}").inc()
        await self._kube.delete(ref, live["metadata"]["uid"])

    async def _remove_foreign_edits(
        self, manifest: dict[str, Any], live: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Remove fields that others added to an object, and return the object."""
        patch = drift_patch(live, manifest)
        if patch is None:
            return live
        kind, meta = manifest["kind"], manifest["metadata"]
        logger.info("%s/%s: removing fields that others added to %s", meta["namespace"], meta["name"], kind)
        self._metrics.actions.labels(f"Correct{kind}").inc()
        ref = ObjectRef(kind, meta["namespace"], meta["name"])
        await self._kube.patch(ref, patch)
        return await self._kube.get(ref) or live


def _role_differs(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    return "roleRef" in manifest and live.get("roleRef") != manifest["roleRef"]
