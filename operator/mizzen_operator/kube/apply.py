"""Applies manifests that differ from what is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.kube.client import Kube
from mizzen_operator.kube.drift import correction, covers
from mizzen_operator.kube.errors import KubeError, Refused
from mizzen_operator.kube.last_applied import Children
from mizzen_operator.kube.objects import digest
from mizzen_operator.kube.refs import Ref
from mizzen_operator.metrics import Metrics

logger = logging.getLogger(__name__)

_ABSENT = "absent"


def name_taken(live: Mapping[str, Any], service: str = "") -> Refused:
    """The refusal for an object that is not ours; `service` is the one that needs its name."""
    what = f"{live.get('kind', 'object')} {live['metadata']['name']}"
    other = _service_of(live)
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


def _service_of(live: Mapping[str, Any]) -> str:
    """Name of the service whose child an object is; empty where it is none's."""
    references = live["metadata"].get("ownerReferences", [])
    owners = [one for one in references if one["kind"] == labels.KIND and one.get("controller")]
    return owners[0]["name"] if owners else ""


class Applier:
    """Server-side apply of manifests that carry their own hash."""

    def __init__(self, kube: Kube, metrics: Metrics, children: Children) -> None:
        self._kube = kube
        self._metrics = metrics
        self._children = children

    async def apply(
        self,
        manifests: Sequence[dict[str, Any]],
        seen: Mapping[str, Mapping[str, Any] | None],
        digests: dict[tuple[str, str], str],
        require: Callable[[Mapping[str, Any]], None],
        *,
        fresh: bool = False,
    ) -> Mapping[str, Any]:
        """Apply what differs; returns the Deployment among them as it is now.

        Args:
            manifests: stamped with their hashes.
            seen: objects that were read already, by kind; the others are read unless `digests` knows them.
            digests: hashes by kind and name of what was applied; brought up to date.
            require: raises when an object that is there is not ours.
            fresh: nothing of ours can be there yet: all is made without a look for what is there.

        Raises:
            Refused: as `require` says.
            KubeError: the API server failed or found a manifest invalid.
        """
        deployment: Mapping[str, Any] = {}
        for manifest in manifests:
            kind, meta = manifest["kind"], manifest["metadata"]
            name, applied = (kind, meta["name"]), meta["annotations"][labels.APPLIED]
            if kind not in seen and digests.get(name) == applied:
                continue
            before = seen.get(kind)
            live = await self._made(manifest) if fresh and before is None else None
            if live is None:
                if before is None:
                    before = await self._kube.get(Ref(kind, meta["namespace"], meta["name"]), live=True)
                live = await self._one(manifest, before, digests, require)
            digests[name] = applied
            self._children.compared(live)
            if kind == "Deployment":
                deployment = live
        return deployment

    async def identity(
        self,
        manifest: dict[str, Any],
        digests: dict[tuple[str, str], str],
        require: Callable[[Mapping[str, Any]], None],
        *,
        fresh: bool = False,
    ) -> str:
        """Apply a child that no watch follows, where it differs; returns its uid. As `apply`."""
        kind, meta = manifest["kind"], manifest["metadata"]
        if not self._children.uid(kind, meta["namespace"], meta["name"]):
            digests.pop((kind, meta["name"]), None)
        await self.apply([manifest], {}, digests, require, fresh=fresh)
        return self._children.uid(kind, meta["namespace"], meta["name"])

    async def keep(
        self,
        manifests: Sequence[dict[str, Any]],
        digests: dict[tuple[str, str], str],
        require: Callable[[Mapping[str, Any]], None],
        *,
        wanted: bool,
        fresh: bool = False,
    ) -> None:
        """Apply what differs, or remove it where it is not wanted; as `apply`.

        Args:
            manifests, digests, require: as for `apply`.
            wanted: whether they are to be there.
            fresh: as for `apply`; nothing that is not wanted is looked for either.
        """
        if wanted:
            await self.apply(manifests, {}, digests, require, fresh=fresh)
            return
        for manifest in manifests:
            kind, meta = manifest["kind"], manifest["metadata"]
            if digests.get((kind, meta["name"])) == _ABSENT:
                continue
            ref = Ref(kind, meta["namespace"], meta["name"])
            live = None if fresh else await self._kube.get(ref)
            if live is not None and labels.APPLIED in live["metadata"].get("annotations", {}):
                require(live)
                self._metrics.actions.labels(f"Delete{kind}").inc()
                await self._kube.delete(ref, live["metadata"]["uid"])
            digests[(kind, meta["name"])] = _ABSENT
            self._children.removed(kind, meta["namespace"], meta["name"])

    async def _made(self, manifest: dict[str, Any]) -> Mapping[str, Any] | None:
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

    async def _one(
        self,
        manifest: dict[str, Any],
        live: Mapping[str, Any] | None,
        digests: dict[tuple[str, str], str],
        require: Callable[[Mapping[str, Any]], None],
    ) -> Mapping[str, Any]:
        if live is not None:
            require(live)
            if _binds_another_role(live, manifest):
                await self._unbind(manifest, live)
                live = None
        if live is not None:
            live = await self._corrected(manifest, live, digests)
            applied = live["metadata"].get("annotations", {}).get(labels.APPLIED)
            if applied == manifest["metadata"]["annotations"][labels.APPLIED] and covers(live, manifest):
                return live
        self._metrics.actions.labels(f"Apply{manifest['kind']}").inc()
        return await self._kube.apply(manifest)

    async def _unbind(self, manifest: dict[str, Any], live: Mapping[str, Any]) -> None:
        """Delete a binding of another role than it should bind, for it cannot be given another one.

        Nothing goes before the API server has said that this operator may bind the role that is wanted.
        """
        meta = manifest["metadata"]
        try:
            await self._kube.check(manifest)
        except KubeError as error:
            if error.code != 409:  # its name is taken, and nothing else is wrong
                raise
        ref, role = Ref(manifest["kind"], meta["namespace"], meta["name"]), live["roleRef"]["name"]
        logger.info("%s/%s: bind another role than %s", ref.namespace, ref.name, role)
        self._metrics.actions.labels(f"Delete{ref.kind}").inc()
        await self._kube.delete(ref, live["metadata"]["uid"])

    async def _corrected(
        self, manifest: dict[str, Any], live: Mapping[str, Any], digests: dict[tuple[str, str], str]
    ) -> Mapping[str, Any]:
        """Take away what others have added; what comes back at once is the API server's, and is left.

        Admission may add it, or an API server that fills in more than those that are known.
        """
        patch = correction(live, manifest)
        if patch is None:
            return live
        kind, meta = manifest["kind"], manifest["metadata"]
        left = (f"{kind} left as it is", meta["name"])
        if digests.get(left) == _what(patch):
            return live
        logger.info("%s/%s: take from %s what was added by hand", meta["namespace"], meta["name"], kind)
        self._metrics.actions.labels(f"Correct{kind}").inc()
        ref = Ref(kind, meta["namespace"], meta["name"])
        await self._kube.patch(ref, patch)
        after = await self._kube.get(ref) or live
        remains = correction(after, manifest)
        if remains is not None:
            logger.warning(
                "%s/%s: what was added to %s comes back at once: it is left",
                meta["namespace"],
                meta["name"],
                kind,
            )
            digests[left] = _what(remains)
        return after


def _binds_another_role(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    return "roleRef" in manifest and live.get("roleRef") != manifest["roleRef"]


def _what(patch: Mapping[str, Any]) -> str:
    """A hash of what a patch changes, of whichever version."""
    return digest({key: value for key, value in patch.items() if key != "metadata"})
