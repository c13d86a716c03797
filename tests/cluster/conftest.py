"""Real clusters for tests: one for the session, shared by all tests of a worker, and more on demand."""

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


class LocalCluster:
    """A cluster as tests use it."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder
        self.cluster = Cluster(folder)
        self.kubeconfig = self.cluster.state.kubeconfig

    def up(self, *, operator: bool = True, gpus: int = 8) -> LocalCluster:
        self.cluster.up(gpus=gpus, operator=operator, report=lambda line: print(line, file=sys.stderr))
        return self

    def restrict(self, namespace: str) -> None:
        """Have a namespace take restricted pods alone."""
        self.kubectl("label", "namespace", namespace, *(f"{name}={v}" for name, v in RESTRICTED.items()))

    def make_namespace(self, name: str) -> None:
        """Make a namespace that takes restricted pods alone."""
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


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster with the CRD and the operator; `default` takes restricted pods alone, whatever makes them."""
    local = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        local.up().restrict("default")
        yield local
    finally:
        local.down()


@pytest.fixture
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], LocalCluster]]:
    """Make clusters that are not up yet; they are down after the test."""
    made: list[LocalCluster] = []

    def make() -> LocalCluster:
        made.append(LocalCluster(tmp_path_factory.mktemp("cluster")))
        return made[-1]

    yield make
    for local in made:
        local.down()


@pytest.fixture
def space(cluster: Any) -> Iterator[Space]:
    made = Space(cluster)
    yield made
    cluster.kubectl("delete", "namespace", made.name, "--wait=false")
