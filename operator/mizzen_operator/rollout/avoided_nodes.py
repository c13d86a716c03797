# SPDX-License-Identifier: Apache-2.0
"""Nodes on which engines of a service lost their device repeatedly; its new groups avoid these nodes. Pure.

A node advertises a broken GPU until an administrator intervenes, so the scheduler would choose the node again
and again.
Only losses of the service itself count: no service can influence where the pods of another one run. A node is
avoided for at most an hour after its last loss (`FAILURE_WINDOW`), and at most `MAX_NODES` nodes are avoided.
If a group then fits on no node for `PENDING_SECONDS`, the nodes may be used again: a device that may be
broken is better than none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.state import GroupFailure

LOSSES = 2
"""Number of losses within an hour after which a node is avoided."""
MAX_NODES = 3
"""Maximum number of nodes that a service avoids: those of the most recent losses."""
PENDING_SECONDS = 120.0
"""Time for which a group may be unschedulable before the nodes that it avoids may be used again."""


def find_avoided_nodes(failures: Sequence[GroupFailure]) -> tuple[str, ...]:
    """Return the names of the nodes that new groups avoid, sorted.

    Args:
        failures: the failures within the last hour, oldest first.
    """
    nodes = [failure.node for failure in failures if failure.node]
    latest_first = dict.fromkeys(reversed(nodes))
    counts = Counter(nodes)
    return tuple(sorted([node for node in latest_first if counts[node] >= LOSSES][:MAX_NODES]))


def forget_losses_if_pending(
    failures: Sequence[GroupFailure], groups: Sequence[Group]
) -> tuple[GroupFailure, ...]:
    """Return the failures without the nodes that keep a group from being scheduled.

    Args:
        failures: the failures within the last hour.
        groups: the observed groups.
    """
    waiting = [group for group in groups if _is_pending(group) and group.age >= PENDING_SECONDS]
    usable = {node for group in waiting for node in group.avoided_nodes}
    return tuple(replace(failure, node="") if failure.node in usable else failure for failure in failures)


def end_needless_waits(groups: Sequence[Group], avoided: Sequence[str]) -> list[Group]:
    """Return the groups; a group that waits because of a node that may be used again counts as ended.

    The affinity of a pod cannot be changed, so the planner replaces such a group.

    Args:
        groups: the observed groups.
        avoided: nodes that new groups avoid.
    """
    return [
        replace(group, ended=True)
        if _is_pending(group) and set(group.avoided_nodes) - set(avoided)
        else group
        for group in groups
    ]


def _is_pending(group: Group) -> bool:
    return group.live and bool(group.unschedulable)
