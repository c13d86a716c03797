"""A real Kubernetes control plane of local processes: etcd, kube-apiserver, controller-manager, scheduler.

Everything listens on one loopback address of the cluster's own, with certificates of its own and RBAC on.
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
from mizzen_local.addresses import Addresses, claim, free_port
from mizzen_local.errors import LocalError
from mizzen_local.pki import KUBELET_CLIENT, Authority, Pair, write_kubeconfig
from mizzen_local.process import Process, Registry

# The endpoint controllers are left out: EndpointSlices refuse loopback addresses, so the proxy follows pods.
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
    "persistentvolumeclaim-protection-controller",  # else claims, and their namespaces, never end
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
GARBAGE_PERCENT = "300"
"""Go's programs collect garbage when so much more than what lives was made: a sixth of their time less."""


class StartError(LocalError):
    """A part of the cluster did not start; the message says which, why, and where its log is."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """A running control plane.

    Attributes:
        folder: its state, logs and certificates.
        kubeconfig: path of the administrator's kubeconfig.
        server: URL of the API server.
        addresses: the loopback addresses that it claimed.
        node_kubeconfig: path of the kubeconfig of the one node, in group `system:nodes`.
        assets: folder of the programs (kubectl among them).
        authority: path of the authority's certificate, PEM.
    """

    folder: Path
    kubeconfig: Path
    server: str
    addresses: Addresses
    node_kubeconfig: Path
    assets: Path
    authority: Path

    def stop(self) -> None:
        """End its processes; the files stay. What it held is lost once the folder is removed."""
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
        controllers: controllers of kube-controller-manager; without any, it is not started.
        scheduler: whether to start kube-scheduler.
        apiserver_options: more options of kube-apiserver.
        timeout: seconds until the start counts as failed.
        report: gets a line of progress at a time.

    Raises:
        StartError: something did not start; everything that did has ended.
        mizzen_local.assets.AssetError: the programs were not found.
    """
    programs = assets.find(report=report)
    addresses, mark = claim()
    try:
        start = _Start(folder.resolve(), programs, addresses, time.monotonic() + timeout)
        start.apiserver_options = tuple(apiserver_options)
        try:
            return start.run(controllers, scheduler, mark.fileno())
        except BaseException:
            process.stop(reversed(start.registry.read()), grace=0)
            raise
    finally:
        mark.close()


class _Start:
    """One start, from certificates to the last part."""

    def __init__(self, folder: Path, programs: Path, addresses: Addresses, deadline: float) -> None:
        self.folder = folder
        self.programs = programs
        self.addresses = addresses
        self.deadline = deadline
        self.apiserver_options: tuple[str, ...] = ()
        self.registry = Registry(folder / "processes.json")
        host = addresses.host
        self.client_port = free_port(host)
        self.peer_port = free_port(host, frozenset({self.client_port}))
        self.api_port = free_port(host, frozenset({self.client_port, self.peer_port}))
        self.server = f"https://{host}:{self.api_port}"

    def run(self, controllers: Sequence[str], scheduler: bool, claimed: int) -> ControlPlane:
        authority = Authority(self.folder / "pki")
        etcd = authority.issue("etcd", "etcd", hosts=[self.addresses.host])
        tokens = authority.signing_pair("service-accounts")
        admin = self.identity(authority, "kubeconfig", "admin", ["system:masters"])
        self.etcd(authority.pair, etcd, claimed)
        self.apiserver(authority, etcd, tokens)
        self.wait_ready(authority, admin)
        if controllers:
            self.controller_manager(authority, tokens, controllers)
        if scheduler:
            self.scheduler(authority)
        node = self.identity(authority, "node.kubeconfig", f"system:node:{NODE}", ["system:nodes"])
        authority.issue("kubelet", f"system:node:{NODE}", ["system:nodes"], hosts=[self.addresses.host, NODE])
        return ControlPlane(
            self.folder,
            admin,
            self.server,
            self.addresses,
            node,
            self.programs,
            authority.pair.certificate,
        )

    def identity(self, authority: Authority, file: str, user: str, groups: Sequence[str] = ()) -> Path:
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
                env={"GOGC": GARBAGE_PERCENT, **os.environ},
                pass_fds=pass_fds,
            )
        )

    def etcd(self, authority: Pair, pair: Pair, claimed: int) -> None:
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
        self.launch("etcd", arguments, [claimed])

    def apiserver(self, authority: Authority, etcd: Pair, tokens: Pair) -> None:
        host = self.addresses.host
        first_service = str(self.addresses.services[1])
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
                # The node is there before its lifecycle controller would lift the taint.
                "--disable-admission-plugins=TaintNodesByCondition",
                "--allow-privileged=true",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-signing-key-file={tokens.key}",
                f"--service-account-key-file={tokens.certificate}",
                f"--service-cluster-ip-range={self.addresses.services}",
                *self.apiserver_options,
            ],
        )

    def controller_manager(self, authority: Authority, tokens: Pair, controllers: Sequence[str]) -> None:
        config = self.identity(authority, "controller-manager.kubeconfig", "system:kube-controller-manager")
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

    def scheduler(self, authority: Authority) -> None:
        config = self.identity(authority, "scheduler.kubeconfig", "system:kube-scheduler")
        self.launch("kube-scheduler", [f"--kubeconfig={config}", "--secure-port=0", "--leader-elect=false"])

    def wait_ready(self, authority: Authority, admin: Path) -> None:
        """Wait for /readyz of the API server, and name a part that ended meanwhile."""
        context = ssl.create_default_context(cafile=str(authority.pair.certificate))
        pair = Pair(self.folder / "pki/admin.crt", self.folder / "pki/admin.key")
        context.load_cert_chain(pair.certificate, pair.key)
        answer = "no answer"
        while time.monotonic() < self.deadline:
            for part in self.registry.read():
                process.reap(part.pid)
                if not part.alive():
                    raise StartError(f"{part.name} ended at its start; {log_hint(self.folder, part.name)}")
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
    """Where a part's log is, and how it ends."""
    path = folder / "logs" / f"{name}.log"
    try:
        tail = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        tail = []
    return "\n  ".join([f"its log is {path}", *tail])
