# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the chart's tests: Helm, one cluster without Mizzen, and stand-ins for third-party CRDs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_manifests import IMAGES
from mizzen_local import helm as helm_program
from mizzen_local.cluster import Cluster
from mizzen_local.kubectl import Kubectl
from pod_security import RESTRICTED

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/mizzen"
CATALOG = ROOT / "charts/mizzen-models"
STAND_INS = Path(__file__).parent / "crds"
RENDERING = {"install", "template", "upgrade"}
LONGEST_SECONDS = 240


class HelmError(Exception):
    """A Helm command failed; the message is its standard error."""


@dataclass(frozen=True)
class Helm:
    """Helm with a configuration of its own; without a kubeconfig it reaches no cluster.

    Commands that render a chart get the values `given`, by default `images.registry`, which the operator's
    chart requires; their own values take precedence.
    """

    program: Path
    home: Path
    kubeconfig: Path | None = None
    chart: Path = CHART
    given: dict[str, Any] = field(default_factory=lambda: IMAGES)

    def __call__(self, *arguments: str | Path) -> str:
        """Run Helm and return its standard output.

        Raises:
            HelmError: the command failed.
        """
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HELM_")},
            **{f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
            "KUBECONFIG": str(self.kubeconfig or self.home / "none"),
        }
        verb, *rest = arguments
        if verb in RENDERING:
            given = self.home / "given.yaml"
            given.write_text(yaml.safe_dump(self.given))
            rest = ["--values", given, *rest]
        run = subprocess.run(
            [self.program, verb, *rest],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
        if run.returncode:
            raise HelmError(run.stderr)
        return run.stdout

    def template(self, values: dict[str, Any] | None = None, *arguments: str) -> list[dict[str, Any]]:
        """Return the manifests of `chart`, rendered as release `sail` in namespace `harbour`."""
        command = ["template", "sail", str(self.chart), "--namespace", "harbour", *arguments]
        if values:
            file = self.home / "values.yaml"
            file.write_text(yaml.safe_dump(values))
            command += ["--values", str(file)]
        return [document for document in yaml.safe_load_all(self(*command)) if document]


@pytest.fixture(scope="session")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    return Helm(helm_program.find_helm(), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm for the catalog's chart, without a cluster."""
    home = tmp_path_factory.mktemp("catalog")
    return Helm(helm_program.find_helm(), home, chart=CATALOG, given={})


@pytest.fixture(scope="session")
def catalog_services(catalog: Helm) -> dict[str, dict[str, Any]]:
    """All InferenceServices of the catalog by name, rendered together."""
    names = yaml.safe_load((CATALOG / "values.yaml").read_text())["catalog"]
    manifests = catalog.template({"catalog": {name: {"enabled": True} for name in names}})
    return {manifest["metadata"]["name"]: manifest for manifest in manifests}


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster without the CRD and the operator."""
    cluster = Cluster(tmp_path_factory.mktemp("chart"))
    try:
        cluster.up(gpus=8, operator=False, report=lambda line: print(line, file=sys.stderr))
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def kubectl(bare: Cluster) -> Kubectl:
    return bare.kubectl()


@pytest.fixture(scope="session")
def helm(bare: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm for the cluster of the tests."""
    return Helm(helm_program.find_helm(), tmp_path_factory.mktemp("helm"), bare.state.kubeconfig)


@pytest.fixture
def make_namespace(kubectl: Kubectl) -> Iterator[Callable[[str], str]]:
    """Return a function that creates restricted namespaces; they are deleted after the test."""
    names: list[str] = []

    def make(name: str) -> str:
        names.append(name)
        kubectl("create", "namespace", name)
        kubectl("label", "namespace", name, *(f"{key}={value}" for key, value in RESTRICTED.items()))
        return name

    yield make
    for name in names:
        kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def no_crd(kubectl: Kubectl) -> None:
    """Delete the CRD that an earlier test has left."""
    kubectl("delete", "crd", "inferenceservices.mizzen.dev", "--ignore-not-found", "--wait")


@pytest.fixture
def crd(kubectl: Kubectl) -> None:
    """Apply the CRD of the repository."""
    path = str(ROOT / "crds/inferenceservices.yaml")
    kubectl("apply", "--server-side", "--force-conflicts", "-f", path)
    kubectl("wait", "--for=condition=Established", "-f", path, "--timeout=60s")


@pytest.fixture(scope="session")
def stand_ins(kubectl: Kubectl) -> None:
    """Apply stand-ins for third-party CRDs, with the fields that the chart and the examples use."""
    kubectl("apply", "--server-side", "-f", str(STAND_INS))
    kubectl("wait", "--for=condition=Established", "-f", str(STAND_INS), "--timeout=60s")


@pytest.fixture(scope="session")
def dry_run(kubectl: Kubectl) -> Callable[..., list[str]]:
    """Return a function that dry-runs manifests strictly on the server; it returns kubectl's output lines."""

    def apply(text: str, *arguments: str) -> list[str]:
        command = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
        return kubectl(*command, *arguments, "-f", "-", stdin=text).splitlines()

    return apply
