# SPDX-License-Identifier: Apache-2.0
"""Helpers to find manifests in a rendered chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


CHART = ROOT / "charts/mizzen"


REGISTRY = "registry.example.com/team"


IMAGES = {"images": {"registry": REGISTRY}}
"""Values with the registry, which the chart requires; nothing is pulled from it."""


Manifests = list[dict[str, Any]]


def of(manifests: Manifests, kind: str, name: str = "") -> dict[str, Any]:
    """Return the only manifest of a kind; with `name`, the only one of that kind and name."""
    [manifest] = [m for m in manifests if m["kind"] == kind and name in ("", m["metadata"]["name"])]
    return manifest


def operator(manifests: Manifests) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the operator's pod template and container."""
    template = of(manifests, "Deployment")["spec"]["template"]
    return template, template["spec"]["containers"][0]
