"""One cluster and one Prometheus for all tests of the folder that ask for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import programs
from observed import BROKEN, Prometheus, World, eventually, live_through

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Past:
    """What a service has lived through, as Prometheus saw it."""

    prometheus: Prometheus
    began: float
    ended: float
    codes: dict[int, int]


def plot(prometheus: Prometheus, began: float, ended: float, folder: str) -> None:
    """Make the pictures of the documentation."""
    script = [sys.executable, str(ROOT / "scripts/plot_dashboards.py"), prometheus.url]
    window = ["--start", str(began), "--end", str(ended), "--out", folder]
    subprocess.run([*script, *window], check=True, timeout=300)


@pytest.fixture(scope="session")
def prometheus_programs() -> Path:
    return programs.find()


@pytest.fixture(scope="session")
def past(prometheus_programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    """Load and faults are over; Prometheus knows them, and the cluster still runs."""
    world = World(tmp_path_factory.mktemp("cluster"))
    try:
        rules = sorted((ROOT / "charts/mizzen/alerts").glob("*.yaml"))
        folder = tmp_path_factory.mktemp("prometheus") / "run"
        prometheus = Prometheus(prometheus_programs, folder, world.cluster.state.kubeconfig, rules)
        try:
            began = time.time()
            world.deploy()
            eventually(lambda: world.conditions(BROKEN).get("Failed"), "the other service has failed")
            load = live_through(world, prometheus)
            # Queries over time see steps of a second: what an instant has shown last shall be seen by some.
            time.sleep(3)
            ended = time.time()
            if os.environ.get("PLOTS"):
                plot(prometheus, began, ended, os.environ["PLOTS"])
            yield Past(prometheus, began, ended, load.codes)
        finally:
            prometheus.close()
    finally:
        world.close()
