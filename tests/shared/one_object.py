"""An API server of one object."""

from __future__ import annotations

from typing import Any

from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef

MADE = {"uid": "u", "resourceVersion": "2", "generation": 1}


class OneObject:
    """What stands for the API server: one object, and what was asked."""

    refuses_versions = 0
    """With what code it answers to the version of an object that is not there, if it does."""

    forbids = ""
    """Why it would not take an object, if it would not."""

    def __init__(self, there: dict[str, Any] | None = None) -> None:
        self.there = there
        self.asked: list[str] = []

    async def get(self, ref: ObjectRef, *, live: bool = False) -> dict[str, Any] | None:
        """Read the object."""
        self.asked.append("get")
        return self.there

    async def apply(self, manifest: dict[str, Any], *, new: bool = False) -> dict[str, Any]:
        """Make the object, or change it."""
        self.asked.append("make" if new else "apply")
        if new and self.refuses_versions:
            raise KubeError(self.refuses_versions, "Invalid", "resourceVersion: must not be set")
        if new and self.there is not None:
            raise KubeError(409, "Conflict", "the object has been modified")
        self.there = {**manifest, "metadata": {**manifest["metadata"], **MADE}}
        return self.there

    async def dry_run_create(self, manifest: dict[str, Any]) -> None:
        """Ask whether the object would be taken."""
        self.asked.append("check")
        if self.forbids:
            raise KubeError(403, "Forbidden", self.forbids)
        if self.there is not None:
            raise KubeError(409, "AlreadyExists", "the object is there already")

    async def delete(self, ref: ObjectRef, uid: str) -> bool:
        """Delete the object."""
        self.asked.append(f"delete {uid}")
        self.there = None
        return True
