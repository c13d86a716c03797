"""An API server of one object."""

from __future__ import annotations

from typing import Any

from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef

MADE = {"uid": "u", "resourceVersion": "2", "generation": 1}


class OneObject:
    """Stands in for the API server: one object, and the requests for it."""

    refuses_versions = 0
    """Code of its answer to a version of an object that does not exist; 0 to accept it."""

    forbids = ""
    """Message with which it rejects a dry run; empty to accept it."""

    def __init__(self, there: dict[str, Any] | None = None) -> None:
        self.there = there
        self.requests: list[str] = []

    async def get(self, ref: ObjectRef, *, live: bool = False) -> dict[str, Any] | None:
        """Read the object."""
        self.requests.append("get")
        return self.there

    async def apply(self, manifest: dict[str, Any], *, new: bool = False) -> dict[str, Any]:
        """Make the object, or change it."""
        self.requests.append("make" if new else "apply")
        if new and self.refuses_versions:
            raise KubeError(self.refuses_versions, "Invalid", "resourceVersion: must not be set")
        if new and self.there is not None:
            raise KubeError(409, "Conflict", "the object has been modified")
        self.there = {**manifest, "metadata": {**manifest["metadata"], **MADE}}
        return self.there

    async def dry_run_create(self, manifest: dict[str, Any]) -> None:
        """Dry-run the creation of the object."""
        self.requests.append("check")
        if self.forbids:
            raise KubeError(403, "Forbidden", self.forbids)
        if self.there is not None:
            raise KubeError(409, "AlreadyExists", "the object already exists")

    async def delete(self, ref: ObjectRef, uid: str) -> bool:
        """Delete the object."""
        self.requests.append(f"delete {uid}")
        self.there = None
        return True
