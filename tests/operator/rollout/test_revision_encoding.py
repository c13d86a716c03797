# SPDX-License-Identifier: Apache-2.0
"""ControllerRevisions accept every patch, so that the garbage collector can remove their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen_operator.kube.go_json import go_json, has_sorted_keys

pytestmark = CONTROL_PLANE
VALUE = '<&> \u2028 \t\b\x7f é 😀 "\\'
"""Value of an environment variable; Go and Python write some of its characters differently in JSON."""
STRATEGIC = "application/strategic-merge-patch+json"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"b": 1, "a": {"d": None, "c": True}}, '{"a":{"c":true,"d":null},"b":1}'),
        (["<a>&", "\u2028\u2029", "é😀"], r'["\u003ca\u003e\u0026","\u2028\u2029","é😀"]'),
        ([1.0, -0.0, 0.1, 1e-5, 1.5e-7, 1e16, 1e21], "[1,0,0.1,0.00001,1.5e-7,10000000000000000,1e+21]"),
    ],
)
def test_json_is_written_as_go_writes_it(value: Any, written: str) -> None:
    assert go_json(value).decode() == written


def test_unsorted_keys_are_detected() -> None:
    assert has_sorted_keys({"a": [{"b": 1, "c": 2}], "d": {}})
    assert not has_sorted_keys({"a": [{"c": 1, "b": 2}]})


class Orphans:
    """One service, and its ControllerRevisions in the API server."""

    def __init__(self, api: Any, namespace: str, minimal: Callable[..., Any], eventually: Any) -> None:
        self.api, self.namespace, self.eventually = api, namespace, eventually
        env = [{"name": "GREETING", "value": VALUE}]
        body = minimal(engine={"device": "CPU"}, gateway={"replicas": 1}, podTemplate={"env": env})
        body["metadata"]["namespace"] = namespace
        api.create(body)

    def revisions(self) -> list[dict[str, Any]]:
        return self.api.list("ControllerRevision", self.namespace, "mizzen.dev/service=demo")

    def rejected_patches(self) -> list[str]:
        """Patch all revisions; return the revision and the patch type of each rejected patch."""
        rejected = []
        for revision in self.revisions():
            for kind in (STRATEGIC, "application/merge-patch+json"):
                try:
                    self.patch(revision, kind)
                except Exception as error:
                    assert "field is immutable" in str(error)
                    rejected.append(f"{revision['metadata']['name']}: {kind}")
        return rejected

    def patch(self, revision: dict[str, Any], kind: str) -> None:
        name, body = revision["metadata"]["name"], {"revision": revision["revision"]}
        self.api.patch("ControllerRevision", self.namespace, name, body, content_type=kind)

    def write_unsorted(self, revision: dict[str, Any]) -> None:
        """Recreate a revision as earlier releases wrote it, with unsorted keys."""
        data = {name: revision["data"][name] for name in ("spec", "image")}
        self.api.delete("ControllerRevision", self.namespace, revision["metadata"]["name"])
        meta = {
            name: revision["metadata"][name] for name in ("name", "namespace", "labels", "ownerReferences")
        }
        self.api.create(
            {"apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": revision["revision"]}
            | {"metadata": meta, "data": data}
        )


@pytest.fixture
def orphans(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Orphans]:
    yield Orphans(api, namespace, minimal, eventually)
    api.delete("InferenceService", namespace, "demo", propagationPolicy="Background")


def test_a_service_can_be_deleted_without_its_children(orphans: Orphans) -> None:
    """When a deletion orphans the children, the garbage collector patches every ControllerRevision.

    Revisions that an earlier release wrote accept the patch once the operator has rewritten them.
    """
    [first] = orphans.eventually(orphans.revisions, 60, "the revision is recorded")
    assert orphans.rejected_patches() == []
    orphans.write_unsorted(first)
    assert orphans.rejected_patches() == [f"{first['metadata']['name']}: {STRATEGIC}"], (
        "the unsorted revision rejects strategic patches"
    )
    orphans.api.patch("InferenceService", orphans.namespace, "demo", {"spec": {"engine": {"pageSize": 32}}})
    orphans.eventually(
        lambda: len(orphans.revisions()) == 2 and not orphans.rejected_patches(),
        60,
        "all revisions accept patches",
    )
    [same] = [
        revision
        for revision in orphans.revisions()
        if revision["metadata"]["name"] == first["metadata"]["name"]
    ]
    assert (same["data"], same["revision"]) == (first["data"], 1)
    assert same["metadata"]["labels"] == first["metadata"]["labels"]
    orphans.api.delete("InferenceService", orphans.namespace, "demo", propagationPolicy="Orphan")
    orphans.eventually(
        lambda: orphans.api.find("InferenceService", orphans.namespace, "demo") is None,
        60,
        "the service is deleted",
    )
    assert all("ownerReferences" not in revision["metadata"] for revision in orphans.revisions())
