"""Applies manifests that differ from what is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels
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
    """The refusal for an object that is not ours; `service` is the one that needs its name."""
    what = f"{live.get('kind', 'object')} {live['metadata']['name']}"
    other = _owner_service(live)
    if other and other == service:
        message = f"{what} is left of a service {other} that was deleted, and goes as soon as that has gone"
        return Refused("NameTaken", message)
    if other:  # it needs the object, and makes it again: one of the two cannot be here
        return Refused(
            "NameTaken",
            f"{what} belongs to InferenceService {other}, which has a child of that name, too: leave it, for "
            "that service needs it, and apply this one under another name, or in another namespace",
        )
    return Refused("NameTaken", f"{what} belongs to something else: delete or rename it")


def _owner_service(live: Mapping[str, Any]) -> str:
    """Name of the service whose child an object is; empty where it is none's."""
    references = live["metadata"].get("ownerReferences", [])
    owners = [one for one in references if one["kind"] == labels.KIND and one.get("controller")]
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
        """Apply what differs; returns the Deployment among them as it is now.

        Args:
            manifests: stamped with their hashes.
            observed: objects that were read already, by kind; the others are read unless `digests` knows them.
            digests: hashes by kind and name of what was applied; brought up to date.
            require_ownership: raises when an object that is there is not ours.
            assume_absent: nothing of ours can be there yet: all is made without a look for what is there.

        Raises:
            Refused: as `require_ownership` says.
            KubeError: the API server failed or found a manifest invalid.
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
        """Apply a child that no watch follows, where it differs; returns its uid. As `apply`."""
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
        """Apply what differs, or remove it where it is not wanted; as `apply`.

        Args:
            manifests, digests, require: as for `apply`.
            wanted: whether they are to be there.
            assume_absent: as for `apply`; nothing that is not wanted is looked for either.
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
        """An object that was not there before; None where one of its name is there, whoever's it is.

        None as well where a release of Kubernetes may refuse a version of what is not there: the usual way
        then meets the same error if it has another cause.
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
        """Delete a binding of another role than it should bind, for it cannot be given another one.

        Nothing goes before the API server has said that this operator may bind the role that is wanted.
        """
        meta = manifest["metadata"]
        try:
            await self._kube.dry_run_create(manifest)
        except KubeError as error:
            if error.code != 409:  # its name is taken, and nothing else is wrong
                raise
        ref, role = ObjectRef(manifest["kind"], meta["namespace"], meta["name"]), live["roleRef"]["name"]
        logger.info("%s/%s: bind another role than %s", ref.namespace, ref.name, role)
        self._metrics.actions.labels(f"Delete{ref.kind}").inc()
        await self._kube.delete(ref, live["metadata"]["uid"])

    async def _remove_foreign_edits(
        self, manifest: dict[str, Any], live: Mapping[str, Any], digests: dict[tuple[str, str], str]
    ) -> Mapping[str, Any]:
        """Take away what others have added; what comes back at once is the API server's, and is left.

        Admission may add it, or an API server that fills in more than those that are known.
        """
        patch = drift_patch(live, manifest)
        if patch is None:
            return live
        kind, meta = manifest["kind"], manifest["metadata"]
        left = (f"{kind} left as it is", meta["name"])
        if digests.get(left) == _patch_digest(patch):
            return live
        logger.info("%s/%s: take from %s what was added by hand", meta["namespace"], meta["name"], kind)
        self._metrics.actions.labels(f"Correct{kind}").inc()
        ref = ObjectRef(kind, meta["namespace"], meta["name"])
        await self._kube.patch(ref, patch)
        after = await self._kube.get(ref) or live
        remains = drift_patch(after, manifest)
        if remains is not None:
            logger.warning(
                "%s/%s: what was added to %s comes back at once: it is left",
                meta["namespace"],
                meta["name"],
                kind,
            )
            digests[left] = _patch_digest(remains)
        return after


def _role_differs(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    return "roleRef" in manifest and live.get("roleRef") != manifest["roleRef"]


def _patch_digest(patch: Mapping[str, Any]) -> str:
    """A hash of what a patch changes, of whichever version."""
    return digest({key: value for key, value in patch.items() if key != "metadata"})
