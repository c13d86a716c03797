# SPDX-License-Identifier: Apache-2.0
"""Determines the stable revision of a service, and the number of old groups that a rollout keeps.

The stable revision is the last one that served with all its groups: a failed rollout goes back to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.group import Group


def next_stable_revision(
    service: InferenceService,
    current: str,
    revision: str,
    live: Sequence[Group],
    serving: int,
) -> str:
    """Return the stable revision after an observation; empty if no revision has served.

    The spec's revision becomes stable once all wanted groups serve and no other revision has live groups. It
    also becomes stable if no groups exist and none are wanted, unless the spec has golden prompts or a
    `partition`: then the revision must serve first.

    If the stable revision has no groups left but another revision has served, that other revision becomes the
    stable one. The same applies if the status does not name a stable revision, because it was lost or written
    by an old release.

    Args:
        service: the service.
        current: the stable revision so far; empty if no revision is stable yet.
        revision: revision of the spec.
        live: the service's live groups, of all revisions.
        serving: number of groups of `revision` that serve.
    """
    if service.rollout.paused and current:
        return current
    outdated = [group for group in live if group.revision != revision]
    on_trial = service.rollout.verification is not None or service.rollout.partition > 0
    if not live and service.groups == 0 and not on_trial:
        return revision
    if serving >= service.groups > 0 and not outdated:
        return revision
    served = Counter(group.revision for group in outdated if group.was_routable)
    if current and (not served or any(group.revision == current for group in live)):
        return current
    return max(served, key=lambda name: (served[name], name), default="")


def count_old_to_keep(service: InferenceService, stable: str, revision: str) -> int:
    """Return the number of groups of older revisions to keep, according to `spec.rollout.partition`.

    Args:
        service: the service.
        stable: the stable revision; if it is empty, no old groups are kept.
        revision: revision of the spec.
    """
    return min(service.rollout.partition, service.groups) if stable not in ("", revision) else 0
