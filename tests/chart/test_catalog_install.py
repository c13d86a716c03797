# SPDX-License-Identifier: Apache-2.0
"""Entries of the catalog are installed, changed, disabled and uninstalled on a real API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chart_manifests import ROOT
from mizzen_local.kubectl import Kubectl

CHART = ROOT / "charts/mizzen-models"


@pytest.mark.cluster
@pytest.mark.xdist_group("chart")
@pytest.mark.usefixtures("crd")
def test_entries_are_enabled_changed_and_disabled(
    helm: Any, kubectl: Kubectl, make_namespace: Callable[[str], str]
) -> None:
    home = make_namespace("models")
    run = replace(helm, given={})

    def list_services() -> dict[str, dict[str, Any]]:
        items = json.loads(kubectl("get", "infsvc", "--namespace", home, "-o", "json"))["items"]
        return {item["metadata"]["name"]: item["spec"] for item in items}

    def upgrade(*settings: str) -> None:
        values = [part for setting in settings for part in ("--set", setting)]
        run("upgrade", "models", CHART, "--namespace", home, "--reset-then-reuse-values", *values)

    run("install", "models", CHART, "--namespace", home, "--set", "catalog.qwen3-32b-h100.enabled=true")
    [service] = list_services().values()
    assert (service["parallelism"]["tensor"], service["replicas"]) == (2, 1)
    assert service["model"]["cache"]["accessMode"] == "ReadWriteOnce"  # a default of the CRD
    kubectl("scale", "infsvc/qwen3-32b-h100", "--namespace", home, "--replicas=3")
    upgrade("catalog.phi-4-l40s.enabled=true", "catalog.qwen3-32b-h100.spec.engine.kvCacheDtype=FP8")
    services = list_services()
    assert set(services) == {"phi-4-l40s", "qwen3-32b-h100"}
    assert services["qwen3-32b-h100"]["engine"]["kvCacheDtype"] == "FP8"
    assert services["qwen3-32b-h100"]["replicas"] == 3  # an upgrade keeps the number set by kubectl scale
    upgrade("catalog.qwen3-32b-h100.enabled=false")
    assert set(list_services()) == {"phi-4-l40s"}
    run("uninstall", "models", "--namespace", home)
    assert list_services() == {}
