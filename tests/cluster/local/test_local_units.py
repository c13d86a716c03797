# SPDX-License-Identifier: Apache-2.0
"""The parts of mizzen-local that need no cluster."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from mizzen_local import assets, build, downloads, process
from mizzen_local.addresses import Addresses, claim_addresses, find_free_port
from mizzen_local.network import Backend, select_backends
from mizzen_local.node.environment import PathMap, expand_references, parse_quantity
from mizzen_local.node.images import UnknownImageError, image_command
from mizzen_local.node.names import PodNames
from mizzen_local.pki import CertificateAuthority


@pytest.fixture
def places() -> PathMap:
    return PathMap({"/keys": Path("/pod/keys"), "/keys/deep": Path("/pod/deep"), "/opt/models": Path("/m")})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/keys", "/pod/keys"),
        ("/keys/a", "/pod/keys/a"),
        ("/keys/deep/a", "/pod/deep/a"),
        ("/keysmith", "/keysmith"),
        ("--keys=/keys/a", "--keys=/pod/keys/a"),
        ("file:///opt/models/demo", "file:///m/demo"),
        ("--model=file:///opt/models/demo", "--model=file:///m/demo"),
        ("say /keys", "say /keys"),
        ("/else/keys", "/else/keys"),
        ("a=b=/keys", "a=b=/keys"),
    ],
)
def test_paths_in_the_container_are_rewritten_to_paths_on_this_machine(
    places: PathMap, text: str, wanted: str
) -> None:
    assert places.rewrite(text) == wanted


def test_without_mounts_no_path_is_rewritten() -> None:
    assert PathMap({}).rewrite("/keys") == "/keys"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A", "$A"),
    ],
)
def test_references_in_arguments_expand_as_in_kubernetes(text: str, wanted: str) -> None:
    assert expand_references(text, {"A": "1", "B": "2"}) == wanted


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("500m", 0.5), ("4Gi", 4 * 2**30), ("1k", 1e3), ("1e3", 1e3)]
)
def test_a_quantity_is_parsed(text: str, value: float) -> None:
    assert parse_quantity(text) == value


def test_the_error_names_an_invalid_quantity() -> None:
    with pytest.raises(ValueError, match="4Gib"):
        parse_quantity("4Gib")


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("mizzen/engine", "mizzen"),
        ("mizzen/engine:1", "mizzen"),
        ("localhost:5000/x/mizzen/gateway:dev", "mizzen"),
        ("images.example.org/mizzen/operator@sha256:00", "mizzen-operator"),
    ],
)
def test_an_image_maps_to_its_program(image: str, program: str) -> None:
    assert image_command(image) == [str(Path(sys.prefix) / "bin" / program)]


@pytest.mark.parametrize("image", ["engine", "nginx:1", "mizzen/engineer", "notmizzen/engine"])
def test_the_error_for_an_unknown_image_names_a_known_one(image: str) -> None:
    with pytest.raises(UnknownImageError, match="mizzen/operator"):
        image_command(image)


def pod(uid: str, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "metadata": {"uid": uid, "namespace": "a", "labels": {"app": "x"}},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 80}]}]},
        "status": {
            "podIP": f"127.97.0.{uid}",
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    for path, value in changes.items():
        part, _, key = path.partition("__")
        base[part] = {**base[part], key: value}
    return base


SERVICE = {"metadata": {"namespace": "a"}, "spec": {"selector": {"app": "x"}}}
PORT = {"port": 8000, "targetPort": "http"}


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {backend.uid for backend in select_backends(SERVICE, PORT, pods)}


def test_ready_pods_of_the_selector_are_backends() -> None:
    unready = [{"type": "Ready", "status": "False"}]
    pods = [
        pod("1"),
        pod("2", status__conditions=unready),
        pod("3", metadata__labels={"app": "y"}),
        pod("4", metadata__namespace="b"),
        pod("5", metadata__deletionTimestamp="now"),
        pod("6", status__phase="Succeeded"),
        pod("7", status__podIP=""),
        pod("8", spec__containers=[{"ports": []}]),
    ]
    assert select_backends(SERVICE, PORT, pods) == [Backend("1", "127.97.0.1", 80)]


def test_terminating_pods_are_backends_only_if_there_is_no_other() -> None:
    leaving = pod("1", metadata__deletionTimestamp="now")
    assert uids([leaving]) == {"1"}
    assert uids([leaving, pod("2")]) == {"2"}


def test_a_service_without_selector_has_no_backends() -> None:
    assert select_backends({**SERVICE, "spec": {"selector": {}}}, PORT, [pod("1")]) == []


@given(st.integers(0, 63), st.integers(0, 63))
def test_address_ranges_of_clusters_do_not_overlap(index: int, other: int) -> None:
    first, second = Addresses(index), Addresses(other)
    taken = {first.host, *(first.pod_address(number) for number in range(1020))}
    assert len(taken) == 1021
    assert (index == other) == bool(taken & {second.host, second.pod_address(0), second.pod_address(1019)})
    assert (index == other) == first.service_range.overlaps(second.service_range)


def test_concurrent_claims_get_different_addresses() -> None:
    claims = [claim_addresses() for _ in range(8)]
    try:
        assert len({addresses.index for addresses, _ in claims}) == 8
    finally:
        for _, mark in claims:
            mark.close()


def test_a_port_that_is_reported_free_can_be_bound() -> None:
    with socket.socket() as taken:
        port = find_free_port("127.0.0.1")
        taken.bind(("127.0.0.1", port))


def test_certificates_name_their_users_and_hosts(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path / "pki")
    pair = authority.issue("server", "system:node:n", ["system:nodes"], ["localhost", "127.97.0.1"])
    certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    root = x509.load_pem_x509_certificate(authority.pair.certificate.read_bytes())
    certificate.verify_directly_issued_by(root)
    assert certificate.subject.rfc4514_string() == "CN=system:node:n,O=system:nodes"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.97.0.1"]
    assert pair.key.stat().st_mode & 0o077 == 0


def test_the_error_for_missing_programs_lists_where_they_were_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBE_ASSETS_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no Go
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no downloads
    with pytest.raises(assets.AssetError) as failure:
        assets.find_programs()
    message = str(failure.value)
    assert f"KUBE_ASSETS_DIR ({tmp_path / 'nothing'}): without etcd, kube-apiserver" in message
    assert f"the cache ({assets.cache_folder()})" in message
    assert "the official releases: https://" in message
    assert "there is no Go" in message
    assert not list((tmp_path / "mizzen-local/assets").glob("*.new"))


@pytest.mark.parametrize("command", ["demo", "up", "assets"])
def test_a_command_says_first_that_it_may_build_kubernetes_and_how_long_that_takes(
    command: str, tmp_path: Path
) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "KUBE_ASSETS_DIR"},
        "MIZZEN_LOCAL_DIR": str(tmp_path / "cluster"),
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": str(tmp_path),  # no Go
        "https_proxy": "http://127.0.0.1:9",  # no downloads
    }
    done = subprocess.run(
        [sys.executable, "-m", "mizzen_local.cli", command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    notice, failure = done.stderr.split("the official releases: ", 1)
    assert "Kubernetes 1.36.3 and etcd 3.7.3 are not on this machine yet" in notice
    assert "build from their Go modules, which needs Go and takes about five minutes on two cores" in notice
    assert "there is no Go" in failure


def test_programs_in_the_cache_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBE_ASSETS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = assets.cache_folder()
    folder.mkdir(parents=True)
    for name in assets.PROGRAMS:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    assert assets.find_programs() == folder.resolve()


def test_a_download_with_another_checksum_is_rejected() -> None:
    data = b"program"
    digest = hashlib.sha256(data).hexdigest()
    downloads.verify_checksum("https://example.com/x", data, digest)
    with pytest.raises(downloads.DownloadError, match=r"published is missing$"):
        downloads.verify_checksum("https://example.com/x", data, "")
    pinned = next(iter(downloads.PINNED))
    with pytest.raises(downloads.DownloadError, match="pinned"):
        downloads.verify_checksum(pinned, data, digest)


def test_a_checksum_is_found_in_a_list() -> None:
    sums = "aa  etcd-v1-linux-amd64.tar.gz\nbb *etcd-v1-linux-arm64.tar.gz\n"
    assert downloads.find_checksum(sums, "etcd-v1-linux-arm64.tar.gz") == "bb"
    assert downloads.find_checksum(sums, "etcd-v1-windows-amd64.zip") == ""


def test_staged_modules_are_found_in_kubernetes_go_mod() -> None:
    text = """
require k8s.io/klog/v2 v2.1.0
replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/kubectl => ./staging/src/k8s.io/kubectl
	example.com/x => ./staging/x
)
"""
    assert build.staged_modules(text) == ["k8s.io/api", "k8s.io/kubectl"]


def test_processes_are_identified_by_pid_and_start_time(tmp_path: Path) -> None:
    sleeper = process.start("sleeper", ["sleep", "60"], log=tmp_path / "log", folder=tmp_path)
    registry = process.Registry(tmp_path / "processes.json")
    registry.add(sleeper)
    try:
        assert registry.read() == [sleeper]
        assert sleeper.alive()
        assert not process.Process("sleeper", sleeper.pid, sleeper.started + 1).alive()
        assert os.getsid(sleeper.pid) == sleeper.pid
        # `start` may return before the kernel shows the environment of the new program.
        deadline = time.monotonic() + 30
        while not (marked := process.find_marked(f"{tmp_path}/")) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [running.pid for running in marked] == [sleeper.pid]
        assert process.find_marked(f"{tmp_path}/other/") == []
    finally:
        process.stop([sleeper], grace=5)
    assert not sleeper.alive()
    assert not Path(f"/proc/{sleeper.pid}").exists()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    stubborn = process.start("stubborn", command, log=tmp_path / "log", folder=tmp_path)
    while b"ready" not in (tmp_path / "log").read_bytes():
        assert stubborn.alive()
    process.stop([stubborn], grace=0.2)
    assert not stubborn.alive()


def test_processes_in_another_session_are_found_by_their_mark(tmp_path: Path) -> None:
    command = ["sh", "-c", "setsid sleep 60 & echo ready; exec sleep 60"]
    shell = process.start("shell", command, log=tmp_path / "log", folder=tmp_path)
    while b"ready" not in (tmp_path / "log").read_bytes():
        assert shell.alive()
    assert process.kill_marked(f"{tmp_path}/") == 2
    assert process.find_marked(f"{tmp_path}/") == []
    process.reap(shell.pid)


def test_help_is_quick_and_lists_the_commands() -> None:
    code = (
        "import sys, mizzen_local.cli; print({'kubernetes', 'aiohttp', 'torch', 'httpx'} & set(sys.modules))"
    )
    light = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert light.stdout.strip() == "set()"
    shown = subprocess.run(
        [sys.executable, "-m", "mizzen_local.cli", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("up", "down", "status", "logs", "kubeconfig", "url", "demo"):
        assert f"\n  {command} " in shown.stdout


def named(name: str, subdomain: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": name}, "spec": {"subdomain": subdomain}}


def test_a_pods_dns_name_is_replaced_by_its_address_once_the_pod_exists() -> None:
    async def run() -> list[str]:
        names, pod = PodNames(), named("b", "sub")
        await names.add(pod, "127.0.0.2")
        waiting = asyncio.create_task(names.rewrite("tcp://a.sub.ns.svc:1", pod))
        await asyncio.sleep(0)
        await names.add(named("a", "sub"), "127.0.0.3")
        rewritten = [
            await waiting,
            await names.rewrite("a.sub.ns.svc.cluster.local", named("c")),
            await names.rewrite("http://a.sub.ns.svc.example.com x.sub.other.svc demo.ns.svc", pod),
        ]
        names.remove("a")
        return [*rewritten, await names.rewrite("a.sub.ns.svc", named("c"))]

    assert asyncio.run(run()) == [
        "tcp://127.0.0.3:1",
        "127.0.0.3",
        "http://a.sub.ns.svc.example.com x.sub.other.svc demo.ns.svc",
        "a.sub.ns.svc",
    ]
