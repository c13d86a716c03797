# SPDX-License-Identifier: Apache-2.0
"""Starts and stops a local cluster: control plane, node and, unless omitted, the operator."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mizzen.common.packaged_files import find_packaged
from mizzen_local import process, waits
from mizzen_local.controlplane import ControlPlane, StartError, log_hint, start_control_plane
from mizzen_local.errors import LocalError
from mizzen_local.kubectl import Kubectl
from mizzen_local.node.images import LOCAL_REGISTRY
from mizzen_local.state import ClusterSettings, ClusterState
from mizzen_operator.api.accelerator_profiles import parse_profiles
from mizzen_operator.chart import operator_manifests

CRD = "inferenceservices.mizzen.dev"
NAMESPACE, RELEASE = "mizzen-system", "mizzen"
LOCAL_VALUES = {"operator": {"replicas": 1}, "images": {"registry": LOCAL_REGISTRY}}
"""Values of the operator's chart that differ from its values.yaml in a local cluster."""
READY_SECONDS = 60.0
Report = Callable[[str], None]
StartProxy = Callable[[ControlPlane], str]


class ClusterError(LocalError):
    """The cluster is not in the state that a command requires; the message says what to do."""


def operator_namespace() -> dict[str, Any]:
    """Return the manifest of the operator's namespace."""
    metadata = {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def render_operator(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of the operator.

    Args:
        values: values of its chart, which take precedence over `LOCAL_VALUES`.

    Raises:
        ClusterError: a value is unknown or invalid, or only Helm can render it.
    """
    try:
        local = {name: {**own, **values.get(name, {})} for name, own in LOCAL_VALUES.items()}
        merged = {**values, **local}
        parse_profiles(json.dumps(merged.get("acceleratorProfiles", {})))
        return operator_manifests(find_packaged("charts/mizzen"), merged, NAMESPACE, RELEASE)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"the values of the chart: {error}") from error


class Cluster:
    """A local cluster, whose state is kept in one folder."""

    def __init__(self, folder: Path) -> None:
        self.state = ClusterState(folder)

    def kubectl(self) -> Kubectl:
        """Return the kubectl of this cluster.

        Raises:
            ClusterError: the cluster is not up.
        """
        self.require_up()
        return Kubectl(Path(self.state.read_settings().assets), self.state.kubeconfig)

    def require_up(self) -> None:
        """Check that the cluster is up.

        Raises:
            ClusterError: the cluster is not up; the message says which processes have ended.
        """
        state = self.state.status()
        if state == "broken":
            raise ClusterError(
                f"processes of the cluster in {self.state.folder} have ended "
                f"({', '.join(self.ended_parts())}); run mizzen-local down, then up; "
                f"logs are in {self.state.logs}"
            )
        if state == "down":
            raise ClusterError(f"there is no cluster in {self.state.folder}; mizzen-local up starts one")

    def ended_parts(self) -> list[str]:
        """Return the names of the cluster's processes that have ended."""
        return [item.name for item in self.state.processes() if not item.alive()]

    def up(
        self,
        *,
        gpus: int,
        operator: bool,
        report: Report,
        values: Mapping[str, Any] | None = None,
        start_proxy: StartProxy | None = None,
    ) -> None:
        """Start the cluster; return when the node is ready and the operator, if installed, holds its Lease.

        Args:
            gpus: number of `nvidia.com/gpu` devices that the node offers; they do not have to exist.
            operator: whether to install the CRD and the operator.
            report: called with each line of progress.
            values: values of the operator's chart that differ from `LOCAL_VALUES`.
            start_proxy: starts a proxy between pods and the API server, and returns the proxy's URL.

        Raises:
            ClusterError: the cluster is up already, this machine is not Linux, or a value is invalid.
            StartError: a process did not start; all processes have been stopped, and the logs are kept.
        """
        if sys.platform != "linux":
            raise ClusterError("mizzen-local needs Linux: only there is all of 127.0.0.0/8 loopback")
        manifests = render_operator(values or {}) if operator else []
        with self.state.lock():
            match self.state.status():
                case "up":
                    raise ClusterError(
                        f"the cluster in {self.state.folder} is up already; mizzen-local status shows it, "
                        "mizzen-local down stops it, MIZZEN_LOCAL_DIR selects another folder"
                    )
                case "broken":
                    report("removing the remains of an earlier cluster")
            self._remove(keep_logs=False)
            self.state.create_folder()
            try:
                self._start(gpus, manifests, report, start_proxy)
            except BaseException:
                self._remove(keep_logs=True)
                raise

    def _start(
        self, gpus: int, operator: list[dict[str, Any]], report: Report, front: StartProxy | None
    ) -> None:
        report("starting etcd, kube-apiserver, kube-controller-manager and kube-scheduler")
        plane = start_control_plane(self.state.folder, report=report)
        report("starting the node")
        self._start_node(plane, gpus, front(plane) if front is not None else plane.server)
        kubectl = Kubectl(plane.assets, plane.kubeconfig)
        if operator:
            report("installing the CRD and the operator")
            self._install(kubectl, operator)
        self._wait_node()
        if operator:
            report("waiting for the operator to become leader")
            self._wait_operator(kubectl)

    def _start_node(self, plane: ControlPlane, gpus: int, pod_server: str) -> None:
        settings = ClusterSettings(plane.server, str(plane.assets), plane.addresses.index, gpus, pod_server)
        self.state.write_settings(settings)
        self.restart_node()

    def node_program(self) -> list[str]:
        """Return the command of the node's process, without options."""
        return [sys.executable, "-P", "-m", "mizzen_local.node"]

    def restart_node(self) -> None:
        """Start the node's process, or start it again after it has ended.

        Raises:
            FileNotFoundError: the cluster is not up.
        """
        settings = self.state.read_settings()
        command = [*self.node_program(), "--folder", str(self.state.folder)]
        command += ["--range", str(settings.index), "--gpus", str(settings.gpus)]
        command += ["--pod-server", settings.pod_server]
        log, folder = self.state.logs / "node.log", self.state.folder
        self.state.registry.add(process.start("node", command, log=log, folder=folder))

    def _install(self, kubectl: Kubectl, manifests: list[dict[str, Any]]) -> None:
        crd = find_packaged("crds/inferenceservices.yaml").read_text()
        rest = yaml.safe_dump_all([operator_namespace(), *manifests])
        kubectl("apply", "--server-side", "-f", "-", stdin=f"{crd}\n---\n{rest}")
        kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=30s")

    def _wait_node(self) -> None:
        try:
            asyncio.run(waits.wait_node_ready(self.state.kubeconfig, READY_SECONDS))
        except TimeoutError:
            state = "ended while starting" if "node" in self.ended_parts() else "was not ready in time"
            raise StartError(f"the node {state}; {log_hint(self.state.folder, 'node')}") from None

    def _wait_operator(self, kubectl: Kubectl) -> None:
        """Wait until the operator's Deployment is available and its Lease has a holder."""
        name = f"{RELEASE}-operator"
        try:
            asyncio.run(waits.wait_operator_leads(self.state.kubeconfig, NAMESPACE, name, READY_SECONDS))
        except TimeoutError:
            raise StartError(self._operator_hint(kubectl)) from None

    def _operator_hint(self, kubectl: Kubectl) -> str:
        pods = kubectl("get", "pods,events", "-n", NAMESPACE, "-o", "wide")
        logs = self.state.logs.glob(f"pods/{NAMESPACE}_*/*/*.log")
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return f"the operator did not start within {READY_SECONDS:g} s:\n{pods}"
        tail = "\n  ".join(newest.read_text(errors="replace").splitlines()[-10:])
        return f"the operator did not become leader within {READY_SECONDS:g} s; its log is {newest}\n  {tail}"

    def down(self) -> bool:
        """End all processes and delete all files of the cluster; return whether the cluster existed."""
        if not self.state.folder.exists():
            return False
        with self.state.lock():
            existed = self.state.status() != "down"
            self._remove(keep_logs=False)
            return existed

    def _remove(self, *, keep_logs: bool) -> None:
        parts = self.state.processes()
        # First SIGTERM for the node: it gives its pods a moment to close their outside connections. No other
        # process needs a graceful end.
        process.stop([part for part in parts if part.name == "node"], grace=5.0)
        process.stop(parts, grace=0.0)
        process.kill_marked(f"{self.state.folder}/")
        self.state.remove_files(keep_logs=keep_logs)
