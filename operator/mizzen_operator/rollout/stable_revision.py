"""The stable revision of a service, and the number of old groups that a rollout keeps.

The stable revision is the one to go back to: the last that served with all its groups.
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
    """Return the stable revision as of now.

    The newest revision becomes stable once it alone serves, or once no group exists and none is wanted. The
    latter proves nothing about a revision that is to be verified, or tried beside another one: it stays to be
    tried. If the stable revision has no groups left but another revision has served, that other revision
    becomes the stable one; so it does if the status was lost, or was written by a release without this field.

    Args:
        service: the service.
        current: the stable revision so far; empty if absent.
        revision: the revision of the spec.
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
    """Return the number of groups of revisions older than `revision` that are to be kept.

    Args:
        service: the service; `spec.rollout.partition` names the number.
        stable: the stable revision; empty if absent, and then nothing is kept.
        revision: the revision of the spec.
    """
    return min(service.rollout.partition, service.groups) if stable not in ("", revision) else 0
