# SPDX-License-Identifier: Apache-2.0
"""The status shows the format of weights, the division of experts, and images, as engines report them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.model_cache.progress import Download
from mizzen_operator.reconciler.reconcile_service import find_model_property
from mizzen_operator.status.builder import build_status
from service_kit import GOOD, NOW, OLD, SERVING

AWQ = "AWQ: 4-bit integers, groups of 128"
DOWNLOAD = Download(cache_key="k", source="hf://org/model", folder="f", cached_time="2026-01-01T00:00:00Z")


@pytest.mark.parametrize("download", [None, DOWNLOAD])
@pytest.mark.parametrize("quantization", ["", AWQ])
def test_it_stands_beside_the_download_or_alone(download: Download | None, quantization: str) -> None:
    status = build_status(replace(GOOD, download=download, quantization=quantization), NOW)
    wanted = download.as_status() if download is not None else {}
    assert status.get("model", {}) == wanted | ({"quantization": quantization} if quantization else {})
    assert ("model" in status) == bool(download or quantization)


def test_task_is_reported_with_other_properties() -> None:
    assert build_status(replace(GOOD, task="embed"), NOW)["model"] == {"task": "embed"}
    assert "model" not in build_status(GOOD, NOW)


def test_the_number_of_groups_with_different_experts_is_shown() -> None:
    status = build_status(replace(GOOD, quantization=AWQ, expert_groups=2), NOW)
    assert status["model"] == {"quantization": AWQ, "expert": 2}


def test_only_a_model_that_accepts_images_says_so() -> None:
    assert build_status(replace(GOOD, task="generate", images=True), NOW)["model"] == {
        "task": "generate",
        "images": True,
    }
    assert build_status(replace(GOOD, task="generate"), NOW)["model"] == {"task": "generate"}


def found(routing: RoutingState, status: dict[str, Any] | None = None) -> str:
    context: Any = SimpleNamespace(
        groups=[SERVING, OLD],
        revision=SERVING.revision,
        routing=routing,
        service=replace(GOOD.service, status=status or {}),
    )
    return find_model_property(context, context.routing.quantizations, "quantization") or ""


def test_only_groups_of_the_current_revision_count() -> None:
    both = frozenset({SERVING.uid, OLD.uid})
    assert found(RoutingState(routed_by_some=both, quantizations={SERVING.uid: AWQ, OLD.uid: "FP8"})) == AWQ
    assert found(RoutingState(routed_by_some=both, quantizations={OLD.uid: "FP8"})) == ""


def test_the_last_value_of_the_revision_stays_while_no_group_is_routed() -> None:
    status = {"updateRevision": SERVING.revision, "model": {"quantization": AWQ}}
    away = RoutingState(routed_by_some=frozenset({OLD.uid}), quantizations={OLD.uid: "FP8"})
    assert found(away, status) == AWQ
    assert found(away, {**status, "updateRevision": "other"}) == ""
    assert found(away) == ""
