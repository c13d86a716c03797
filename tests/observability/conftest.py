# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: Prometheus' programs, and one recorded run of a cluster under load and faults."""

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
from alert_rules import render_rules
from manifests import BROKEN, NAME
from observed import ObservedCluster, Prometheus, eventually, run_load_and_faults, run_steady_load

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RecordedRun:
    """A run of load and faults, from `began` to `ended` in Unix seconds, that Prometheus has recorded.

    `codes` counts the responses of the gateway by HTTP status.
    """

    prometheus: Prometheus
    began: float
    ended: float
    codes: dict[int, int]


def plot(prometheus: Prometheus, began: float, ended: float, folder: str) -> None:
    """Plot the dashboards for the documentation."""
    script = [sys.executable, str(ROOT / "scripts/plot_dashboards.py"), prometheus.url]
    window = ["--start", str(began), "--end", str(ended), "--out", folder]
    environment = {**os.environ, "SERVICE": NAME}
    subprocess.run([*script, *window], check=True, timeout=300, env=environment)


@pytest.fixture(scope="session")
def prometheus_programs() -> Path:
    return programs.find()


@pytest.fixture(scope="session")
def recorded_run(
    prometheus_programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RecordedRun]:
    """Run load and faults, and yield the recorded run while the cluster and Prometheus are still running."""
    observed = ObservedCluster(tmp_path_factory.mktemp("cluster"))
    try:
        rules = render_rules(tmp_path_factory.mktemp("rules"))
        folder = tmp_path_factory.mktemp("prometheus") / "run"
        prometheus = Prometheus(prometheus_programs, folder, observed.cluster.state.kubeconfig, rules)
        try:
            began = time.time()
            observed.deploy()
            eventually(lambda: observed.conditions(BROKEN).get("Failed"), "the broken service has failed")
            if os.environ.get("PLOTS"):
                plot(prometheus, *run_steady_load(observed), os.environ["PLOTS"])
            load = run_load_and_faults(observed, prometheus)
            # Range queries have steps of 1 s; some steps must lie after the last change of a metric.
            time.sleep(3)
            ended = time.time()
            yield RecordedRun(prometheus, began, ended, load.codes)
        finally:
            prometheus.close()
    finally:
        observed.close()
