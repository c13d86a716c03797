# SPDX-License-Identifier: Apache-2.0
"""Runs a real Prometheus that scrapes the pods of a local cluster."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from dcgm import DcgmStandIn
from kubernetes.client import CoreV1Api
from kubernetes.config import new_client_from_config
from waiting import eventually


class Prometheus:
    """A Prometheus process that evaluates rule files and scrapes the product's pods every second."""

    def __init__(self, programs: Path, folder: Path, kubeconfig: Path, rules: Sequence[Path]) -> None:
        folder.mkdir()
        self.targets = Targets(kubeconfig, folder / "targets.json")
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration(self.targets.file, rules)))
        subprocess.run([programs / "promtool", "check", "config", config], check=True, capture_output=True)
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    programs / "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stderr=log,
            )
        port = eventually(self._port, "Prometheus listens")
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=f"{self.url}/api/v1", timeout=60, trust_env=False)
        eventually(self._answers, "Prometheus answers")

    def _port(self) -> int | None:
        if self.process.poll() is not None:
            raise AssertionError(self.log.read_text())
        with suppress(psutil.Error):
            for connection in psutil.Process(self.process.pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    return connection.laddr.port
        return None

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return self._http.get("/query", params={"query": "1"}).status_code == 200
        return False

    def close(self) -> None:
        self.targets.close()
        self._http.close()
        self.process.terminate()
        self.process.wait(30)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Run an instant query, and return its series."""
        return self._get("/query", query=expr)

    def over(self, expr: str, start: float, end: float, step: float = 1.0) -> list[dict[str, Any]]:
        """Run a range query, and return its series; `start` and `end` are Unix times, `step` is seconds."""
        return self._get("/query_range", query=expr, start=start, end=end, step=step)

    def values(self, label: str, metric: str) -> list[str]:
        """Return the values that a label has in the series of a metric."""
        answer = self._http.get(f"/label/{label}/values", params={"match[]": metric})
        return answer.json()["data"]

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their `health`."""
        groups = self._http.get("/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        answer = self._http.post(path, data=parameters).json()
        if answer["status"] != "success":
            raise AssertionError(f"{parameters['query']}: {answer['error']}")
        return answer["data"]["result"]


def configuration(targets: Path, rules: Sequence[Path]) -> dict[str, Any]:
    """Return Prometheus' configuration; a file lists the targets, because Debian's build cannot find pods."""
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "2s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": "pods", "honor_labels": True, "file_sd_configs": [{"files": [str(targets)]}]}
        ],
    }


class Targets:
    """Writes Prometheus' file of targets: pods with the ports and labels of the chart's monitors."""

    def __init__(self, kubeconfig: Path, file: Path) -> None:
        self.file = file
        self._engines: tuple[tuple[str, str], ...] = ()
        self._dcgm = DcgmStandIn(lambda: self._engines)
        self._api = CoreV1Api(new_client_from_config(str(kubeconfig)))
        self._stop = threading.Event()
        file.write_text("[]")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._dcgm.close()

    def _run(self) -> None:
        last = ""
        while not self._stop.wait(0.5):
            with suppress(Exception):  # the cluster may be starting or stopping
                listed = json.loads(
                    self._api.list_pod_for_all_namespaces(_preload_content=False, _request_timeout=10).data
                )
                entries = [entry for pod in listed["items"] for entry in scrape_targets(pod)]
                named = [entry["labels"] for entry in entries if entry["labels"]["job"] == "engine"]
                self._engines = tuple((labels["namespace"], labels["pod"]) for labels in named)
                exporter = {
                    "targets": [self._dcgm.address],
                    "labels": {"job": "dcgm", "pod": "dcgm-exporter"},
                }
                targets = json.dumps([*entries, exporter])
                if targets != last:
                    new = self.file.with_suffix(".new")
                    new.write_text(targets)
                    new.rename(self.file)
                    last = targets


def scrape_targets(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a pod's scrape target and labels; empty unless the pod runs and is part of the product."""
    meta, labels = pod["metadata"], pod["metadata"].get("labels", {})
    component = labels.get("mizzen.dev/component") or labels.get("app.kubernetes.io/component")
    port = {"engine": "http", "gateway": "admin", "operator": "http"}.get(component)
    address = pod["status"].get("podIP")
    numbers = [
        entry["containerPort"]
        for container in pod["spec"]["containers"]
        for entry in container.get("ports", ())
        if entry.get("name") == port
    ]
    if not (address and numbers and pod["status"]["phase"] == "Running"):
        return []
    named = {"job": component, "namespace": meta["namespace"], "pod": meta["name"]}
    if "mizzen.dev/service" in labels:
        named["service"] = labels["mizzen.dev/service"]
    return [{"targets": [f"{address}:{numbers[0]}"], "labels": named}]
