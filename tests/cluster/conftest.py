# SPDX-License-Identifier: Apache-2.0
"""Real clusters for tests: one for all tests of a pytest worker, and more on demand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen_local.cluster import Cluster
from mizzen_local.urls import service_url
from pod_security import RESTRICTED

sys.path.insert(0, str(Path(__file__).parent))  # helper modules of this folder

from local_node_kit import Space

from snippets import shell_script


class LocalCluster:
    """A `mizzen-local` cluster with its kubectl, logs and command line."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder
        self.cluster = Cluster(folder)
        self.kubeconfig = self.cluster.state.kubeconfig

    def up(self, *, operator: bool = True, gpus: int = 8) -> LocalCluster:
        self.cluster.up(gpus=gpus, operator=operator, report=lambda line: print(line, file=sys.stderr))
        return self

    def restrict(self, namespace: str) -> None:
        """Label a namespace so that it admits only restricted pods."""
        self.kubectl("label", "namespace", namespace, *(f"{name}={v}" for name, v in RESTRICTED.items()))

    def make_namespace(self, name: str) -> None:
        """Create a namespace that admits only restricted pods."""
        self.kubectl("create", "namespace", name)
        self.restrict(name)

    def down(self) -> None:
        self.cluster.down()

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl()(*arguments, stdin=stdin)

    def get(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(item) for item in objects))

    def url(self, service: str, namespace: str = "default") -> str:
        return service_url(self.cluster.kubectl(), service, namespace)

    def logs(self, pod: str) -> str:
        paths = sorted(
            (self.dir / "logs/pods").glob(f"*_{pod}_*/*/*.log"), key=lambda path: path.stat().st_mtime
        )
        return "".join(path.read_text() for path in paths)

    def run(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the command line `mizzen-local` on this cluster."""
        command = [sys.executable, "-m", "mizzen_local.cli", *arguments]
        environment = {**os.environ, "MIZZEN_LOCAL_DIR": str(self.dir)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def run_script(self, block: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run the commands of a block of the documentation on this cluster, in a folder."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "MIZZEN_LOCAL_DIR": str(self.dir), "PATH": path}
        command = ["bash", "-euo", "pipefail", "-c", shell_script(block)]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Start a cluster with the CRD and the operator; its namespace `default` admits only restricted pods."""
    local = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        local.up().restrict("default")
        yield local
    finally:
        local.down()


@pytest.fixture
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], LocalCluster]]:
    """Return a function that makes clusters without starting them; they are stopped after the test."""
    clusters: list[LocalCluster] = []

    def make() -> LocalCluster:
        clusters.append(LocalCluster(tmp_path_factory.mktemp("cluster")))
        return clusters[-1]

    yield make
    for local in clusters:
        local.down()


@pytest.fixture
def space(cluster: Any) -> Iterator[Space]:
    space = Space(cluster)
    yield space
    cluster.kubectl("delete", "namespace", space.name, "--wait=false")
