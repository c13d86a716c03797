# SPDX-License-Identifier: Apache-2.0
"""Starts a real Kubernetes control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

All of them are local processes. etcd and kube-apiserver listen on the cluster's own loopback address, with
certificates of the cluster's own certificate authority; RBAC is on.
"""

from __future__ import annotations

import http.client
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mizzen_local import assets, process
from mizzen_local.addresses import Addresses, claim_addresses, find_free_port
from mizzen_local.errors import LocalError
from mizzen_local.pki import KUBELET_CLIENT, CertificateAuthority, KeyPair, write_kubeconfig
from mizzen_local.process import Process, Registry

# No endpoint controllers: EndpointSlices reject loopback addresses, so `network.py` watches pods instead.
CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "cronjob-controller",
    "daemonset-controller",
    "deployment-controller",
    "disruption-controller",
    "garbage-collector-controller",
    "horizontal-pod-autoscaler-controller",
    "job-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    # otherwise deleted claims, and their namespaces, would never go away
    "persistentvolumeclaim-protection-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "statefulset-controller",
    "taint-eviction-controller",
    "ttl-after-finished-controller",
    "validatingadmissionpolicy-status-controller",
)
NODE = "mizzen-local"
GOGC = "300"
"""Value of the environment variable GOGC for the Go programs.

With 300 instead of Go's default of 100, the programs use a sixth less CPU time.
"""


class StartError(LocalError):
    """A process of the cluster did not start; the message names the process and its log, and says why."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane.

    Attributes:
        folder: folder of the state, logs and certificates.
        kubeconfig: path of the administrator's kubeconfig.
        server: URL of the API server.
        addresses: loopback addresses of the cluster.
        node_kubeconfig: path of the node's kubeconfig; its user is in the group `system:nodes`.
        assets: folder of the programs, including kubectl.
        authority: path of the cluster's CA certificate, PEM.
    """

    folder: Path
    kubeconfig: Path
    server: str
    addresses: Addresses
    node_kubeconfig: Path
    assets: Path
    authority: Path

    def stop(self) -> None:
        """Kill the control plane's processes, but keep its files."""
        process.stop(reversed(Registry(self.folder / "processes.json").read()), grace=0)


def start_control_plane(
    folder: Path,
    *,
    controllers: Sequence[str] = CONTROLLERS,
    scheduler: bool = True,
    apiserver_options: Sequence[str] = (),
    timeout: float = 60.0,
    report: Callable[[str], None] = lambda line: None,
) -> ControlPlane:
    """Start a control plane with its state in `folder`, and return when it is ready.

    Args:
        folder: an existing folder, without a running control plane.
        controllers: controllers that kube-controller-manager runs; if empty, it is not started.
        scheduler: whether to start kube-scheduler.
        apiserver_options: additional options of kube-apiserver.
        timeout: seconds until the start counts as failed.
        report: called with each line of progress.

    Raises:
        StartError: a process did not start; the others have been stopped.
        mizzen_local.assets.AssetError: the programs could be neither found nor obtained.
    """
    programs = assets.find_programs(report=report)
    addresses, claim_socket = claim_addresses()
    try:
        start = _ControlPlaneStarter(folder.resolve(), programs, addresses, time.monotonic() + timeout)
        start.apiserver_options = tuple(apiserver_options)
        try:
            return start.run(controllers, scheduler, claim_socket.fileno())
        except BaseException:
            process.stop(reversed(start.registry.read()), grace=0)
            raise
    finally:
        claim_socket.close()


class _ControlPlaneStarter:
    """Starts one control plane: issues its certificates, then launches its processes in order."""

    def __init__(self, folder: Path, programs: Path, addresses: Addresses, deadline: float) -> None:
        self.folder = folder
        self.programs = programs
        self.addresses = addresses
        self.deadline = deadline
        self.apiserver_options: tuple[str, ...] = ()
        self.registry = Registry(folder / "processes.json")
        host = addresses.host
        self.client_port = find_free_port(host)
        self.peer_port = find_free_port(host, frozenset({self.client_port}))
        self.api_port = find_free_port(host, frozenset({self.client_port, self.peer_port}))
        self.server = f"https://{host}:{self.api_port}"

    def run(self, controllers: Sequence[str], scheduler: bool, claim_fd: int) -> ControlPlane:
        authority = CertificateAuthority(self.folder / "pki")
        etcd = authority.issue("etcd", "etcd", hosts=[self.addresses.host])
        tokens = authority.signing_pair("service-accounts")
        admin = self.issue_kubeconfig(authority, "kubeconfig", "admin", ["system:masters"])
        self.etcd(authority.pair, etcd, claim_fd)
        self.apiserver(authority, etcd, tokens)
        self.wait_apiserver_ready(authority, admin)
        if controllers:
            self.controller_manager(authority, tokens, controllers)
        if scheduler:
            self.scheduler(authority)
        node = self.issue_kubeconfig(authority, "node.kubeconfig", f"system:node:{NODE}", ["system:nodes"])
        authority.issue("kubelet", f"system:node:{NODE}", ["system:nodes"], hosts=[self.addresses.host, NODE])
        return ControlPlane(
            folder=self.folder,
            kubeconfig=admin,
            server=self.server,
            addresses=self.addresses,
            node_kubeconfig=node,
            assets=self.programs,
            authority=authority.pair.certificate,
        )

    def issue_kubeconfig(
        self, authority: CertificateAuthority, file: str, user: str, groups: Sequence[str] = ()
    ) -> Path:
        pair = authority.issue(user.replace(":", "-"), user, groups)
        return write_kubeconfig(
            self.folder / file,
            server=self.server,
            authority=authority.pair.certificate,
            user=user,
            pair=pair,
        )

    def launch(self, name: str, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> Process:
        return self.registry.add(
            process.start(
                name,
                [str(self.programs / name), *arguments],
                log=self.folder / "logs" / f"{name}.log",
                folder=self.folder,
                env={"GOGC": GOGC, **os.environ},
                pass_fds=pass_fds,
            )
        )

    def etcd(self, authority: KeyPair, pair: KeyPair, claim_fd: int) -> None:
        client = f"https://{self.addresses.host}:{self.client_port}"
        peer = f"https://{self.addresses.host}:{self.peer_port}"
        arguments = [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--log-level=warn",
            "--unsafe-no-fsync",
        ]
        for side in ("", "peer-"):
            arguments += [
                f"--{side}cert-file={pair.certificate}",
                f"--{side}key-file={pair.key}",
                f"--{side}trusted-ca-file={authority.certificate}",
                f"--{side}client-cert-auth",
            ]
        self.launch("etcd", arguments, [claim_fd])

    def apiserver(self, authority: CertificateAuthority, etcd: KeyPair, tokens: KeyPair) -> None:
        host = self.addresses.host
        first_service = str(self.addresses.service_range[1])
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        pair = authority.issue("apiserver", "kube-apiserver", hosts=[*names, host, first_service])
        ca = authority.pair.certificate
        client = authority.issue("apiserver-kubelet-client", KUBELET_CLIENT)
        self.launch(
            "kube-apiserver",
            [
                f"--etcd-servers=https://{host}:{self.client_port}",
                f"--etcd-cafile={ca}",
                f"--etcd-certfile={etcd.certificate}",
                f"--etcd-keyfile={etcd.key}",
                f"--bind-address={host}",
                f"--advertise-address={host}",
                f"--secure-port={self.api_port}",
                "--endpoint-reconciler-type=none",
                f"--tls-cert-file={pair.certificate}",
                f"--tls-private-key-file={pair.key}",
                f"--client-ca-file={ca}",
                f"--kubelet-certificate-authority={ca}",
                f"--kubelet-client-certificate={client.certificate}",
                f"--kubelet-client-key={client.key}",
                "--kubelet-preferred-address-types=InternalIP",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                # Otherwise a new node is tainted until the node lifecycle controller sees that it is ready.
                "--disable-admission-plugins=TaintNodesByCondition",
                "--allow-privileged=true",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-signing-key-file={tokens.key}",
                f"--service-account-key-file={tokens.certificate}",
                f"--service-cluster-ip-range={self.addresses.service_range}",
                *self.apiserver_options,
            ],
        )

    def controller_manager(
        self, authority: CertificateAuthority, tokens: KeyPair, controllers: Sequence[str]
    ) -> None:
        config = self.issue_kubeconfig(
            authority, "controller-manager.kubeconfig", "system:kube-controller-manager"
        )
        self.launch(
            "kube-controller-manager",
            [
                f"--kubeconfig={config}",
                f"--controllers={','.join(controllers)}",
                "--secure-port=0",
                "--leader-elect=false",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={tokens.key}",
                f"--root-ca-file={authority.pair.certificate}",
            ],
        )

    def scheduler(self, authority: CertificateAuthority) -> None:
        config = self.issue_kubeconfig(authority, "scheduler.kubeconfig", "system:kube-scheduler")
        self.launch("kube-scheduler", [f"--kubeconfig={config}", "--secure-port=0", "--leader-elect=false"])

    def wait_apiserver_ready(self, authority: CertificateAuthority, admin: Path) -> None:
        """Wait until the API server is ready.

        Raises:
            StartError: a process ended, or the deadline has passed.
        """
        context = ssl.create_default_context(cafile=str(authority.pair.certificate))
        pair = KeyPair(self.folder / "pki/admin.crt", self.folder / "pki/admin.key")
        context.load_cert_chain(pair.certificate, pair.key)
        answer = "no response"
        while time.monotonic() < self.deadline:
            for part in self.registry.read():
                process.reap(part.pid)
                if not part.alive():
                    raise StartError(f"{part.name} ended while starting; {log_hint(self.folder, part.name)}")
            connection = http.client.HTTPSConnection(
                self.addresses.host, self.api_port, timeout=5, context=context
            )
            try:
                connection.request("GET", "/readyz")
                response = connection.getresponse()
                answer = response.read(2000).decode(errors="replace")
                if response.status == 200:
                    return
            except OSError as error:
                answer = str(error)
            finally:
                connection.close()
            time.sleep(0.05)
        hint = log_hint(self.folder, "kube-apiserver")
        raise StartError(f"kube-apiserver was not ready in time ({answer.strip()}); {hint}")


def log_hint(folder: Path, name: str, lines: int = 8) -> str:
    """Return a text with the path and the last lines of a process's log, for an error message."""
    path = folder / "logs" / f"{name}.log"
    try:
        tail = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        tail = []
    return "\n  ".join([f"its log is {path}", *tail])
