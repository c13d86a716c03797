# SPDX-License-Identifier: Apache-2.0
"""Operator processes with the permissions that the chart gives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chart_manifests import IMAGES
from mizzen_local.addresses import find_free_port
from mizzen_local.controlplane import ControlPlane
from mizzen_local.pki import write_token_kubeconfig
from mizzen_operator.chart import operator_manifests
from pod_security import RESTRICTED

ROOT = Path(__file__).parents[2]
SYSTEM = "mizzen-system"


class Operators:
    """Operator processes with the permissions of the chart's ServiceAccount."""

    def __init__(self, api: Any, plane: ControlPlane, folder: Path) -> None:
        self._api, self._plane, self._folder = api, plane, folder
        self._running: list[tuple[subprocess.Popen[bytes], str, int]] = []
        self._count = 0
        self.expected_errors: set[str] = set()
        """Namespaces in which tests provoke errors of the operator."""

    def install(self) -> None:
        """Apply the chart's manifests except the Deployment; get a token of the operator's account."""
        paths = {
            "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
            "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/roles",
            "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/rolebindings",
        }
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": SYSTEM, "labels": RESTRICTED},
        }
        self._api.apply_any(namespace, "/api/v1/namespaces")
        for manifest in operator_manifests(ROOT / "charts/mizzen", IMAGES, SYSTEM, "mizzen"):
            if manifest["kind"] in paths:
                self._api.apply_any(manifest, paths[manifest["kind"]])
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        account = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/mizzen-operator/token"
        token = self._folder / "operator.token"
        token.write_text(self._api.request("POST", account, request)["status"]["token"])
        self.kubeconfig = self._config("operator.kubeconfig", self._plane.server)

    def _config(self, name: str, server: str) -> Path:
        return write_token_kubeconfig(
            self._folder / name,
            server=server,
            authority=self._plane.authority,
            namespace=SYSTEM,
            token_file=self._folder / "operator.token",
        )

    def start(self, *options: str, server: str = "") -> str:
        """Start another operator and return its identity; `server` replaces the address of the API server."""
        self._count += 1
        identity, port = f"operator-{self._count}", find_free_port(self._plane.addresses.host)
        command = [sys.executable, "-m", "mizzen_operator.main"]
        fixed = {
            "identity": identity,
            "lease-namespace": SYSTEM,
            "health-host": self._plane.addresses.host,
            "health-port": str(port),
            "recheck-seconds": "1",
        }
        arguments = [item for name, value in fixed.items() for item in (f"--{name}", value)]
        config = self._config(f"{identity}.kubeconfig", server) if server else self.kubeconfig
        with (self._folder / f"{identity}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments, *options],
                stdout=log,
                stderr=log,
                env={**os.environ, "KUBECONFIG": str(config)},
            )
        self._running.append((process, identity, port))
        return identity

    def leader(self) -> str:
        """Return the identity of the replica that holds the Lease; empty if no replica holds it."""
        lease = self._api.find("Lease", SYSTEM, "mizzen-operator")
        return lease["spec"].get("holderIdentity", "") if lease else ""

    def leads(self) -> bool:
        """Return whether one of the running processes leads."""
        return self.leader() in {identity for process, identity, _ in self._running if process.poll() is None}

    def kill(self, identity: str, number: int = signal.SIGKILL) -> int:
        """Send a signal (by default SIGKILL) to a process; wait until it ends, and return its exit code."""
        process = next(p for p, name, _ in self._running if name == identity)
        process.send_signal(number)
        code = process.wait(60)
        self._running = [entry for entry in self._running if entry[1] != identity]
        return code

    def answers(self, identity: str) -> bool:
        """Return whether a process is up, that is, whether it leads or waits for the Lease."""
        try:
            return self.http(identity, "/healthz") == "ok\n"
        except OSError:
            return False

    def http(self, identity: str, path: str) -> str:
        port = next(port for _, name, port in self._running if name == identity)
        url = f"http://{self._plane.addresses.host}:{port}{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("operator-*.log")))

    def stop(self, wait: Callable[..., Any]) -> None:
        for process, _, _ in self._running:
            process.terminate()
        wait(lambda: all(process.poll() is not None for process, _, _ in self._running))
