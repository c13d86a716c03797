# SPDX-License-Identifier: Apache-2.0
"""Finds foreign edits to children, in fields that only the operator may set. Pure.

Server-side apply leaves alone all fields that a manifest does not name, because others may own them. But the
operator owns selectors, policy rules and pod templates entirely. One merge patch, which leaves the object
valid, removes extra fields in them; `apply.py` sends it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from mizzen_operator.api.field_errors import join_path
from mizzen_operator.kube.objects import digest

_OWNED_PATHS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "ConfigMap": (("data",),),
    "Deployment": (("spec",),),
    "NetworkPolicy": (("spec",),),
    "PodDisruptionBudget": (("spec",),),
    "RoleBinding": (("subjects",),),
    "Service": (("spec", "selector"), ("spec", "ports")),
}
"""Paths that the operator owns entirely, by kind. Clouds and users may add other fields to Services."""

_SHARED_FIELDS: Mapping[str, frozenset[str]] = {
    # `kubectl rollout restart` annotates `metadata`; the API server copies `serviceAccountName`.
    "Deployment": frozenset({"metadata", "serviceAccount"}),
    "Service": frozenset({"nodePort", "appProtocol"}),
}
"""Fields within the owned paths that others set too."""

_API_DEFAULTS: Mapping[str, Any] = {
    "creationTimestamp": None,
    "dnsPolicy": "ClusterFirst",
    "progressDeadlineSeconds": 600,
    "resources": {},
    "restartPolicy": "Always",
    "schedulerName": "default-scheduler",
    "successThreshold": 1,
    "terminationMessagePath": "/dev/termination-log",
}
"""Defaults of the API server. A default that is not listed is removed once; it stays when it comes back."""

_QUANTITY_FIELDS = frozenset({"limits", "requests"})
"""Fields that map resources to quantities. The API server stores 1000m as 1, and 1024Mi as 1Gi."""


def covers(live: Any, wanted: Any) -> bool:
    """Return whether `live` contains everything in `wanted`; it may contain more, such as defaults."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live
            and (
                covers(live[key], value) or (key in _QUANTITY_FIELDS and _quantities_match(live[key], value))
            )
            for key, value in wanted.items()
        )
    if isinstance(wanted, (list, tuple)):
        if wanted and not _contains_objects(wanted):
            return live == list(wanted)  # the order of plain values matters, for example of arguments
        return isinstance(live, list) and all(
            any(covers(item, value) for item in (*live[place : place + 1], *live))
            for place, value in enumerate(wanted)  # try the same position first
        )
    return live == wanted


def _quantities_match(live: Any, wanted: Any) -> bool:
    """Return whether `live` has every quantity of `wanted`, possibly in another notation."""
    if not (isinstance(live, Mapping) and isinstance(wanted, Mapping)):
        return False
    try:
        return all(
            resource in live and _stored_thousandths(live[resource]) == _stored_thousandths(amount)
            for resource, amount in wanted.items()
        )
    except (ValueError, ArithmeticError):
        return False


def _stored_thousandths(amount: str | int | float) -> int:
    """Return a quantity in thousandths; finer amounts are rounded up, as the API server does."""
    return math.ceil(parse_quantity(amount) * 1000)


def drift_patch(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the merge patch that removes foreign fields from an object; None if it has no such fields.

    Args:
        live: the object as the API server holds it.
        manifest: the manifest that was applied, or is about to be applied.
    """
    patch: dict[str, Any] = {}
    for path in _OWNED_PATHS.get(manifest["kind"], ()):
        live_value, wanted = _get_path(live, path), _get_path(manifest, path)
        shared_fields = _SHARED_FIELDS.get(manifest["kind"], frozenset())
        if live_value is not None and _extra_fields(live_value, wanted, shared_fields, ""):
            _set_path(patch, path, _merge_value(live_value, wanted, shared_fields))
    if not patch:
        return None
    return {**patch, "metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}}


def extra_fields(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each field, by path, that others added within the paths that the operator owns."""
    shared_fields = _SHARED_FIELDS.get(manifest["kind"], frozenset())
    found: dict[str, str] = {}
    for path in _OWNED_PATHS.get(manifest["kind"], ()):
        live_value = _get_path(live, path)
        if live_value is not None:
            found |= _extra_fields(live_value, _get_path(manifest, path), shared_fields, ".".join(path))
    return found


def changed_fields(live: Any, wanted: Any, path: str = "") -> dict[str, str]:
    """Return a digest of the live value of each field of `wanted` that `live` does not contain, by path.

    The result is empty if and only if `covers(live, wanted)`. A missing field has the digest of None.
    """
    if covers(live, wanted):
        return {}
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        found: dict[str, str] = {}
        for key, value in wanted.items():
            below, quantities = join_path(path, key), key in _QUANTITY_FIELDS
            if not (quantities and key in live and _quantities_match(live[key], value)):
                found |= changed_fields(live.get(key), value, below)
        if found:
            return found
    if isinstance(wanted, list) and isinstance(live, list) and _contains_objects(wanted):
        pairs = _match_items(live, wanted)
        unmatched = [
            at for at, value in enumerate(wanted) if not any(value is item for item in pairs.values())
        ]
        found = {join_path(path, _item_label(wanted[at], at)): digest(None) for at in unmatched}
        for at, value in pairs.items():
            found |= changed_fields(live[at], value, join_path(path, _item_label(value, at)))
        if found:
            return found
    return {path: digest(live)}


def _extra_fields(live: Any, wanted: Any, shared_fields: frozenset[str], path: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        for key, value in live.items():
            if _is_extra(key, value, wanted, shared_fields):
                found[join_path(path, key)] = digest(value)
            elif key in wanted and key not in shared_fields:
                found |= _extra_fields(value, wanted[key], shared_fields, join_path(path, key))
    if isinstance(wanted, list) and isinstance(live, list) and (_contains_objects(wanted) or not wanted):
        pairs = _match_items(live, wanted)
        for at, value in enumerate(live):
            below = join_path(path, _item_label(value, at))
            if at not in pairs:
                found[below] = digest(value)
            else:
                found |= _extra_fields(value, pairs[at], shared_fields, below)
    return found


def _item_label(item: Any, place: int) -> str:
    """Return the name of a list's item, or its place if it has no name, for a path."""
    return str(item["name"]) if isinstance(item, Mapping) and "name" in item else str(place)


def _match_items(live: Sequence[Any], wanted: Sequence[Any]) -> dict[int, Any]:
    """Match wanted items to items of a live list, by name or content.

    Return each matched wanted item by the index of its live item.
    """
    pairs: dict[int, Any] = {}
    for place, value in enumerate(wanted):
        places = [place, *range(len(live))] if place < len(live) else range(len(live))
        free = [at for at in places if at not in pairs]
        matching = [at for at in free if _same_name(live[at], value) or covers(live[at], value)]
        if matching:
            pairs[matching[0]] = value
    return pairs


def _same_name(live: Any, wanted: Any) -> bool:
    if not (isinstance(live, Mapping) and isinstance(wanted, Mapping) and "name" in wanted):
        return False
    return live.get("name") == wanted["name"] and live.get("mountPath") == wanted.get("mountPath")


def _merge_value(live: Any, wanted: Any, shared_fields: frozenset[str]) -> Any:
    """Return the merge-patch value that removes the extra fields of `live`; a list is replaced as a whole."""
    if not (isinstance(wanted, Mapping) and isinstance(live, Mapping)):
        return wanted
    extra = {key: None for key, value in live.items() if _is_extra(key, value, wanted, shared_fields)}
    ours = {
        key: _merge_value(live.get(key), value, shared_fields)
        for key, value in wanted.items()
        if key not in shared_fields
    }
    return {**ours, **extra}


def _is_extra(key: str, value: Any, wanted: Mapping[str, Any], shared_fields: frozenset[str]) -> bool:
    filled_in = key in _API_DEFAULTS and _API_DEFAULTS[key] == value
    return key not in wanted and key not in shared_fields and not filled_in


def _contains_objects(value: Sequence[Any]) -> bool:
    return any(isinstance(item, (Mapping, list)) for item in value)


def _get_path(body: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = body
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _set_path(patch: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        patch = patch.setdefault(key, {})
    patch[path[-1]] = value
