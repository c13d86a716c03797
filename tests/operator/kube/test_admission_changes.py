# SPDX-License-Identifier: Apache-2.0
"""Changes by admission plugins are left as they are, and edits by others are not reverted without end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen_operator.api import labels
from mizzen_operator.kube import admission_changes
from mizzen_operator.kube.admission_changes import AdmissionChanges, Differences
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.drift import changed_fields, covers, extra_fields
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.metrics import Metrics
from one_object import OneObject


def deployment(**container: Any) -> dict[str, Any]:
    meta = {"name": "x", "namespace": "a", "annotations": {labels.APPLIED_HASH: "1"}}
    spec = {"containers": [{"name": "gateway", "image": "i", **container}]}
    return {"kind": "Deployment", "metadata": meta, "spec": {"template": {"spec": spec}}}


PATH = "spec.template.spec.containers.gateway"


@pytest.mark.parametrize(
    ("live", "changed", "extra"),
    [
        ({}, [], []),
        ({"args": ["a"]}, [], [f"{PATH}.args"]),
        ({"image": "j"}, [f"{PATH}.image"], []),
        ({"image": "j", "command": ["c"]}, [f"{PATH}.image"], [f"{PATH}.command"]),
    ],
)
def test_differences_are_named_by_path(live: dict[str, Any], changed: list[str], extra: list[str]) -> None:
    assert list(changed_fields(deployment(**live), deployment())) == changed
    assert list(extra_fields(deployment(**live), deployment())) == extra


JSON = st.recursive(
    st.none() | st.integers(0, 2) | st.sampled_from("ab"),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["name", "limits", "x"]), below)
    ),
    max_leaves=8,
)


@given(live=JSON, wanted=JSON)
def test_fields_have_changed_exactly_if_the_manifest_is_not_covered(live: Any, wanted: Any) -> None:
    assert (not changed_fields(live, wanted)) == covers(live, wanted)


def test_others_edits_are_corrected_at_once_but_not_without_end() -> None:
    now = 0.0
    changes = AdmissionChanges(lambda: now)
    edits = 0
    for second in range(3600):
        now = float(second)
        found = Differences("1", {"spec.replicas": str(second)}, {})
        assert not changes.is_left("u", found)
        if changes.may_correct("u", "1"):
            assert changes.record("u", Differences("1", {}, {})) == []
            edits += 1
        assert edits >= min(second + 1, admission_changes.CORRECTIONS_AT_ONCE)
    assert edits == pytest.approx(admission_changes.CORRECTIONS_AT_ONCE + 60, abs=2)
    assert changes.may_correct("u", "2"), "a new manifest does not wait"
    assert changes.may_correct("v", "1"), "other objects do not wait"


class Restoring(OneObject):
    """Fake API server with an admission plugin that overwrites the image."""

    async def apply(self, manifest: dict[str, Any], *, new: bool = False) -> dict[str, Any]:
        stored = json.loads(json.dumps(await super().apply(manifest, new=new)))
        stored["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/i"
        self.stored = stored
        return stored


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_field_that_an_admission_plugin_overwrites_is_written_once_and_reported_once(
    fresh: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Restoring()
    applier = Applier(server, Metrics(), UnwatchedChildren())  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        await applier.apply([deployment()], {}, {}, lambda live: None, assume_absent=fresh)
    writes = [request for request in server.requests if request == "apply"]
    assert (len(writes), server.requests.count("make")) == ((0, 3) if fresh else (1, 0))
    assert [record.getMessage() for record in caplog.records] == [
        "a/x: fields of Deployment that an admission plugin or the API server changes stay as they are: "
        f"{PATH}.image"
    ]
    assert server.stored is not None
    server.stored["spec"]["template"]["spec"]["containers"][0]["image"] = "edited"
    await applier.apply([deployment()], {}, {}, lambda live: None)
    assert server.stored["spec"]["template"]["spec"]["containers"][0]["image"] == "mirror/i"
    await applier.apply([deployment(args=["a"])], {}, {}, lambda live: None)
    assert server.requests[-1] == "apply", "a changed manifest is applied"
    assert len(caplog.records) == 1
