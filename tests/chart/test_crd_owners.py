# SPDX-License-Identifier: Apache-2.0
"""Helm and kubectl apply the CRD in turn, in either order, with the documented commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mizzen_local.kubectl import Kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("chart"),
    pytest.mark.usefixtures("no_crd"),
]
ROOT = Path(__file__).parents[2]
CRD = "inferenceservices.mizzen.dev"
EDITION = "{.spec.versions[0].schema.openAPIV3Schema.description}"


def edition(folder: Path, number: int) -> tuple[Path, Path]:
    """Return a copy of the chart whose CRD has another description, and the path of the CRD."""
    chart = folder / f"chart-{number}"
    shutil.copytree(ROOT / "charts/mizzen", chart)
    crd = yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] = f"edition {number}"
    path = chart / "files/crd/inferenceservices.yaml"
    path.write_text(yaml.safe_dump(crd, sort_keys=False))
    return chart, path


@pytest.mark.parametrize("first", ["helm", "kubectl"])
def test_helm_and_kubectl_apply_the_crd_in_turn(
    helm: Any, kubectl: Kubectl, make_namespace: Callable[[str], str], tmp_path: Path, first: str
) -> None:
    home = make_namespace(f"turns-{first}")
    here = ("--namespace", home, "--set", "operator.replicas=1")
    for number in range(4):
        chart, path = edition(tmp_path, number)
        if (number % 2 == 0) == (first == "kubectl"):
            kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
        elif number < 2:
            helm("upgrade", "--install", "turns", chart, *here, "--take-ownership", "--force-conflicts")
        else:
            helm("upgrade", "turns", chart, *here, "--reset-then-reuse-values", "--force-conflicts")
        assert kubectl("get", "crd", CRD, "-o", f"jsonpath={EDITION}") == f"edition {number}"
    kept = kubectl("get", "crd", CRD, "-o", r"jsonpath={.metadata.annotations.helm\.sh/resource-policy}")
    assert kept == "keep"
    helm("uninstall", "turns", "--namespace", home)
    assert kubectl("get", "crd", CRD, "-o", "name")
    kubectl("delete", "clusterrole", "turns-gateway")
