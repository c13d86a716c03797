# SPDX-License-Identifier: Apache-2.0
"""Helpers for objects of any kind: timestamps, owners, conditions, digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def timestamp(time: datetime) -> str:
    """Return a time as Kubernetes writes it, in whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_owned_by(body: Mapping[str, Any], uid: str) -> bool:
    """Return whether the owner that controls an object has this uid."""
    references = body["metadata"].get("ownerReferences", [])
    return any(reference.get("controller") and reference["uid"] == uid for reference in references)


def is_condition_true(status: Mapping[str, Any], condition: str) -> bool:
    """Return whether a condition of a status is true."""
    return any(
        entry["type"] == condition and entry["status"] == "True" for entry in status.get("conditions", [])
    )


def digest(value: Any) -> str:
    """Return a short hash of a JSON value; equal values have equal hashes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
