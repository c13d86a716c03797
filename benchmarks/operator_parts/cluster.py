# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of the benchmark: control plane, simulated node and operators."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from mizzen_local.addresses import find_free_port
from mizzen_local.controlplane import ControlPlane, start_control_plane
from mizzen_local.pki import write_token_kubeconfig
from mizzen_operator.chart import operator_manifests
from operator_parts.api import APPLY, Api, ApiError

ROOT = Path(__file__).parents[2]
SYSTEM = "mizzen-system"
IMAGES = {"images": {"registry": "registry.example.com"}}
"""Values of the chart; nothing is pulled from the registry."""
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/mizzen-operator"
SERVICES = "/apis/mizzen.dev/v1alpha1/namespaces/{}/inferenceservices"
CLUSTER_PATHS = {
    "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/rolebindings",
}
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}
NOT_COUNTED = ("leases", "tokenreviews", "subjectaccessreviews", "selfsubjectreviews")


@dataclass(slots=True)
class OperatorProcess:
    """A running operator process."""

    process: subprocess.Popen[bytes]
    identity: str
    log: Path
    usage: psutil.Process = field(init=False)

    def __post_init__(self) -> None:
        self.usage = psutil.Process(self.process.pid)

    def cpu_seconds(self) -> float:
        """Return the user and system CPU seconds that the operator has used since its start."""
        times = self.usage.cpu_times()
        return times.user + times.system

    def rss_mb(self) -> float:
        """Return the operator's resident memory in MB (millions of bytes)."""
        return self.usage.memory_info().rss / 1e6

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the operator, and wait until it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(30)


class Cluster:
    """Control plane, simulated node and operators of a run."""

    def __init__(self, folder: Path, core: int) -> None:
        self._folder = folder
        self._core = core
        self._count = 0
        policy = folder / "audit-policy.yaml"
        policy.write_text(yaml.safe_dump(AUDIT_POLICY))
        self._audit = folder / "audit.log"
        options = [f"--audit-policy-file={policy}", f"--audit-log-path={self._audit}"]
        self.plane: ControlPlane = start_control_plane(
            folder, controllers=(), scheduler=False, apiserver_options=options
        )
        self.api = Api(self.plane.server, folder, "benchmark-client")
        self._node: subprocess.Popen[bytes] | None = None
        self.operators: list[OperatorProcess] = []

    async def prepare(self, namespaces: list[str]) -> None:
        """Install the CRD and the operator's RBAC, and create namespaces with default ServiceAccounts."""
        crd = yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())
        await self._apply(crd, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
        for name in (SYSTEM, *namespaces):
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await self._apply(body, "/api/v1/namespaces")
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            await self._apply(account, f"/api/v1/namespaces/{name}/serviceaccounts")
        for manifest in operator_manifests(ROOT / "charts/mizzen", IMAGES, SYSTEM, "mizzen"):
            if manifest["kind"] in CLUSTER_PATHS:
                await self._apply(manifest, CLUSTER_PATHS[manifest["kind"]])
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        path = f"{CLUSTER_PATHS['ServiceAccount']}/mizzen-operator/token"
        token = self._folder / "operator.token"
        token.write_text((await self.api.request("POST", path, request))["status"]["token"])
        self._kubeconfig = write_token_kubeconfig(
            self._folder / "operator.kubeconfig",
            server=self.plane.server,
            authority=self.plane.authority,
            namespace=SYSTEM,
            token_file=token,
        )
        for _ in range(600):
            if await self._accepts_services():
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the API server does not accept InferenceServices")

    async def _accepts_services(self) -> bool:
        try:
            body = service("probe", "default")
            await self.api.request("POST", SERVICES.format("default"), body, dryRun="All")
        except ApiError:
            return False
        return True

    async def _apply(self, body: dict[str, Any], path: str) -> None:
        where = f"{path}/{body['metadata']['name']}"
        await self.api.request("PATCH", where, body, APPLY, fieldManager="benchmark", force="true")

    def start_node(self) -> None:
        """Start the simulated node, and wait until it is ready.

        Raises:
            RuntimeError: the node's process ended before it was ready.
        """
        script = str(Path(__file__).with_name("node.py"))
        command = [sys.executable, script, self.plane.server, str(self._folder)]
        self._node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._node.stdout is None or self._node.stdout.readline().strip() != b"ready":
            raise RuntimeError("the simulated node did not start")

    def start_operator(self, *options: str, identity: str = "") -> OperatorProcess:
        """Start an operator on the CPU core for operators; `options` are added to its command line."""
        self._count += 1
        identity = identity or f"operator-{self._count}"
        host = self.plane.addresses.host
        log = self._folder / f"operator-{self._count}.log"
        command = [
            sys.executable,
            *("-m", "mizzen_operator.main"),
            *("--identity", identity),
            *("--lease-namespace", SYSTEM),
            *("--health-host", host),
            *("--health-port", str(find_free_port(host))),
            *options,
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env={**os.environ, "KUBECONFIG": str(self._kubeconfig)}, stdout=out, stderr=out
            )
        os.sched_setaffinity(process.pid, {self._core})
        started = OperatorProcess(process, identity, log)
        self.operators.append(started)
        return started

    def check(self) -> None:
        """Check that the newest operator is still running.

        Raises:
            RuntimeError: the operator has ended; the message contains the end of its log.
        """
        newest = self.operators[-1]
        if newest.process.poll() is not None:
            raise RuntimeError(f"the operator has ended: {newest.log.read_text()[-600:]}")

    async def leader(self) -> str:
        """Return the identity of the operator that holds the Lease; an empty string if no operator does."""
        try:
            return (await self.api.request("GET", LEASE))["spec"].get("holderIdentity", "")
        except ApiError:
            return ""

    def audited(self, since: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the operators' writes from the audit log, starting at byte `since`; skip writes of Leases."""
        with self._audit.open("rb") as log:
            log.seek(since)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                event = json.loads(line)
                ours = event["userAgent"].startswith("mizzen-operator")
                if ours and event["objectRef"].get("resource") not in NOT_COUNTED:
                    yield event

    def audit_size(self) -> int:
        """Return the size of the audit log in bytes."""
        return self._audit.stat().st_size

    async def close(self) -> None:
        """Stop all processes."""
        for operator in self.operators:
            operator.end(signal.SIGKILL)
        if self._node is not None:
            self._node.terminate()
            self._node.wait(30)
        await self.api.close()
        self.plane.stop()


def service(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """Return a minimal InferenceService: one group on a CPU, one gateway, and the fields of `spec`."""
    return {
        "apiVersion": "mizzen.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"source": "file:///opt/mizzen/models/demo"},
            "engine": {"device": "CPU"},
            "gateway": {"replicas": 1},
            **spec,
        },
    }
