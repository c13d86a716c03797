"""A whole local cluster: bring it up, take it down."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from mizzen_local import process, waits
from mizzen_local.controlplane import ControlPlane, StartError, log_hint, start_control_plane
from mizzen_local.errors import LocalError
from mizzen_local.kubectl import Kubectl
from mizzen_local.node.images import REPOSITORY
from mizzen_local.state import ClusterState, Facts
from mizzen_operator.chart import operator_manifests

CRD = "inferenceservices.mizzen.dev"
NAMESPACE, RELEASE = "mizzen-system", "mizzen"
READY_SECONDS = 60.0
Report = Callable[[str], None]
Front = Callable[[ControlPlane], str]


class ClusterError(LocalError):
    """The cluster is not in the state that a command needs; the message says what to do."""


class Cluster:
    """The cluster of one folder."""

    def __init__(self, folder: Path) -> None:
        self.state = ClusterState(folder)

    def kubectl(self) -> Kubectl:
        """kubectl for it.

        Raises:
            ClusterError: it is not up.
        """
        self.require()
        return Kubectl(Path(self.state.facts().assets), self.state.kubeconfig)

    def require(self) -> None:
        """Check that it is up.

        Raises:
            ClusterError: it is not.
        """
        state = self.state.state()
        if state == "broken":
            raise ClusterError(
                f"the cluster in {self.state.folder} has lost parts ({', '.join(self.dead())}); "
                f"mizzen-local down, then up; logs are in {self.state.logs}"
            )
        if state == "down":
            raise ClusterError(f"there is no cluster in {self.state.folder}; mizzen-local up starts one")

    def dead(self) -> list[str]:
        """Names of the parts that have ended."""
        return [item.name for item in self.state.processes() if not item.alive()]

    def up(self, *, gpus: int, operator: bool, report: Report, front: Front | None = None) -> None:
        """Start everything; returns when the CRD is established and the operator runs and leads.

        Args:
            gpus: how many nvidia.com/gpu the node offers; numbers only.
            operator: whether to install the CRD and the operator.
            report: gets a line of progress at a time.
            front: puts something between pods and the API server, and returns its URL.

        Raises:
            ClusterError: it is up already, or this machine cannot run one.
            StartError: a part did not start; nothing runs then, and its log is kept.
        """
        if sys.platform != "linux":
            raise ClusterError("mizzen-local needs Linux: only there all of 127.0.0.0/8 is loopback")
        with self.state.lock():
            match self.state.state():
                case "up":
                    raise ClusterError(
                        f"the cluster in {self.state.folder} is up already; mizzen-local status shows it, "
                        "mizzen-local down stops it, MIZZEN_LOCAL_DIR names another one"
                    )
                case "broken":
                    report("removing what an earlier cluster left")
            self._remove(keep_logs=False)
            self.state.make()
            try:
                self._start(gpus, operator, report, front)
            except BaseException:
                self._remove(keep_logs=True)
                raise

    def _start(self, gpus: int, operator: bool, report: Report, front: Front | None) -> None:
        report("starting etcd, kube-apiserver, kube-controller-manager and kube-scheduler")
        plane = start_control_plane(self.state.folder, report=report)
        report("starting the node")
        self._start_node(plane, gpus, front(plane) if front is not None else plane.server)
        kubectl = Kubectl(plane.assets, plane.kubeconfig)
        if operator:
            report("installing the CRD and the operator")
            self._install(kubectl)
        self._wait_node()
        if operator:
            report("waiting for the operator to lead")
            self._wait_operator(kubectl)

    def _start_node(self, plane: ControlPlane, gpus: int, pod_server: str) -> None:
        facts = Facts(plane.server, str(plane.assets), plane.addresses.index, gpus, pod_server)
        self.state.write_facts(facts)
        self.restart_node()

    def restart_node(self) -> None:
        """Start the node's process again, after it has ended.

        Raises:
            FileNotFoundError: the cluster is not up.
        """
        facts = self.state.facts()
        command = [sys.executable, "-m", "mizzen_local.node"]
        command += ["--folder", str(self.state.folder)]
        command += ["--range", str(facts.index), "--gpus", str(facts.gpus)]
        command += ["--pod-server", facts.pod_server]
        log, folder = self.state.logs / "node.log", self.state.folder
        self.state.registry.add(process.start("node", command, log=log, folder=folder))

    def _install(self, kubectl: Kubectl) -> None:
        crd = (REPOSITORY / "crds" / "inferenceservices.yaml").read_text()
        values = {"operator": {"replicas": 1}}
        manifests = operator_manifests(REPOSITORY / "charts" / "mizzen", values, NAMESPACE, RELEASE)
        metadata = {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        rest = yaml.safe_dump_all([namespace, *manifests])
        kubectl("apply", "--server-side", "-f", "-", stdin=f"{crd}\n---\n{rest}")
        kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=30s")

    def _wait_node(self) -> None:
        try:
            asyncio.run(waits.node_ready(self.state.kubeconfig, READY_SECONDS))
        except TimeoutError:
            state = "ended at its start" if "node" in self.dead() else "was not ready in time"
            raise StartError(f"the node {state}; {log_hint(self.state.folder, 'node')}") from None

    def _wait_operator(self, kubectl: Kubectl) -> None:
        """Wait until the operator's Deployment is available and its Lease has a holder."""
        name = f"{RELEASE}-operator"
        try:
            asyncio.run(waits.operator_leads(self.state.kubeconfig, NAMESPACE, name, READY_SECONDS))
        except TimeoutError:
            raise StartError(self._operator_hint(kubectl)) from None

    def _operator_hint(self, kubectl: Kubectl) -> str:
        pods = kubectl("get", "pods,events", "-n", NAMESPACE, "-o", "wide")
        logs = self.state.logs.glob(f"pods/{NAMESPACE}_*/*/*.log")
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return f"the operator did not start within {READY_SECONDS:g} s:\n{pods}"
        tail = "\n  ".join(newest.read_text(errors="replace").splitlines()[-10:])
        return f"the operator did not lead within {READY_SECONDS:g} s; its log is {newest}\n  {tail}"

    def down(self) -> bool:
        """End every process and remove every file of the cluster; False when there was none."""
        if not self.state.folder.exists():
            return False
        with self.state.lock():
            there = self.state.state() != "down"
            self._remove(keep_logs=False)
            return there

    def _remove(self, *, keep_logs: bool) -> None:
        parts = self.state.processes()
        # The node ends its pods first, with a moment for what they hold outside; the rest has nothing to say.
        process.stop([part for part in parts if part.name == "node"], grace=5.0)
        process.stop(parts, grace=0.0)
        process.kill_marked(f"{self.state.folder}/")
        self.state.clear(keep_logs=keep_logs)
