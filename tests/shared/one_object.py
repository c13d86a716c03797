# SPDX-License-Identifier: Apache-2.0
"""A fake API server with one object."""

from __future__ import annotations

from typing import Any

from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef

MADE = {"uid": "u", "resourceVersion": "2", "generation": 1}


class OneObject:
    """Fake API server with at most one object, `stored`; `requests` records the requests."""

    version_error_code = 0
    """Status code of the error about a resourceVersion that `apply(new=True)` raises; 0 for no error."""

    dry_run_error = ""
    """Message with which dry runs are rejected; empty to accept them."""

    def __init__(self, stored: dict[str, Any] | None = None) -> None:
        self.stored = stored
        self.requests: list[str] = []

    async def get(self, ref: ObjectRef, *, live: bool = False) -> dict[str, Any] | None:
        """Read the object."""
        self.requests.append("get")
        return self.stored

    async def apply(self, manifest: dict[str, Any], *, new: bool = False) -> dict[str, Any]:
        """Create the object, or change it."""
        self.requests.append("make" if new else "apply")
        if new and self.version_error_code:
            raise KubeError(self.version_error_code, "Invalid", "resourceVersion: must not be set")
        if new and self.stored is not None:
            raise KubeError(409, "Conflict", "the object has been modified")
        self.stored = {**manifest, "metadata": {**manifest["metadata"], **MADE}}
        return self.stored

    async def dry_run_create(self, manifest: dict[str, Any]) -> None:
        """Dry-run the creation of the object."""
        self.requests.append("check")
        if self.dry_run_error:
            raise KubeError(403, "Forbidden", self.dry_run_error)
        if self.stored is not None:
            raise KubeError(409, "AlreadyExists", "the object already exists")

    async def delete(self, ref: ObjectRef, uid: str) -> bool:
        """Delete the object."""
        self.requests.append(f"delete {uid}")
        self.stored = None
        return True
