# SPDX-License-Identifier: Apache-2.0
"""Keeps the pods of a group away from nodes on which engines of the service lost their device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def avoid_nodes(affinity: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """Return an affinity that also excludes nodes.

    Args:
        affinity: the affinity of a pod; empty if it has none.
        nodes: names of the nodes.
    """
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    # The API server accepts only one value per requirement on a node's name.
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    terms = (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
    # A node has to match one of the terms, so each term gets the requirements; an empty term matches no node.
    limited = [
        {**term, "matchFields": [*(term.get("matchFields") or []), *excluded]} if term else term
        for term in terms
    ]
    node_affinity[_REQUIRED] = {"nodeSelectorTerms": limited or [{"matchFields": excluded}]}
    return {**affinity, "nodeAffinity": node_affinity}


def avoided_nodes_annotation(nodes: Sequence[str]) -> dict[str, str]:
    """Return the annotation of a pod that avoids nodes; `read_avoided_nodes` is the inverse."""
    return {labels.AVOIDED_NODES: ",".join(nodes)}


def read_avoided_nodes(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the nodes that a pod avoids because engines lost their device there."""
    value = pod["metadata"].get("annotations", {}).get(labels.AVOIDED_NODES, "")
    return tuple(filter(None, value.split(",")))
