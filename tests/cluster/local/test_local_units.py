"""The pure parts of mizzen-local."""

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
from mizzen_local.addresses import Addresses, claim, free_port
from mizzen_local.network import Backend, backends
from mizzen_local.node.environment import Places, expand, quantity
from mizzen_local.node.images import UnknownImageError, entry_point
from mizzen_local.node.names import Names
from mizzen_local.pki import Authority


@pytest.fixture
def places() -> Places:
    return Places({"/keys": Path("/pod/keys"), "/keys/deep": Path("/pod/deep"), "/opt/models": Path("/m")})


@pytest.mark.parametrize(
    ("given", "wanted"),
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
def test_paths_of_the_container_become_this_machines(places: Places, given: str, wanted: str) -> None:
    assert places.rewrite(given) == wanted


def test_nothing_to_rewrite_rewrites_nothing() -> None:
    assert Places({}).rewrite("/keys") == "/keys"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A", "$A"),
    ],
)
def test_references_expand_as_in_kubernetes(given: str, wanted: str) -> None:
    assert expand(given, {"A": "1", "B": "2"}) == wanted


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("500m", 0.5), ("4Gi", 4 * 2**30), ("1k", 1e3), ("1e3", 1e3)]
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == value


def test_a_wrong_quantity_is_named() -> None:
    with pytest.raises(ValueError, match="4Gib"):
        quantity("4Gib")


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("mizzen/engine", "mizzen"),
        ("mizzen/engine:1", "mizzen"),
        ("localhost:5000/x/mizzen/gateway:dev", "mizzen"),
        ("images.example.org/mizzen/operator@sha256:00", "mizzen-operator"),
    ],
)
def test_images_map_to_programs(image: str, program: str) -> None:
    assert entry_point(image) == [str(Path(sys.prefix) / "bin" / program)]


@pytest.mark.parametrize("image", ["engine", "nginx:1", "mizzen/engineer", "notmizzen/engine"])
def test_other_images_are_refused_with_what_would_be_right(image: str) -> None:
    with pytest.raises(UnknownImageError, match="mizzen/operator"):
        entry_point(image)


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
    return {backend.uid for backend in backends(SERVICE, PORT, pods)}


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
    assert backends(SERVICE, PORT, pods) == [Backend("1", "127.97.0.1", 80)]


def test_terminating_pods_serve_only_when_no_other_does() -> None:
    leaving = pod("1", metadata__deletionTimestamp="now")
    assert uids([leaving]) == {"1"}
    assert uids([leaving, pod("2")]) == {"2"}


def test_a_service_without_selector_has_no_backends() -> None:
    assert backends({**SERVICE, "spec": {"selector": {}}}, PORT, [pod("1")]) == []


@given(st.integers(0, 63), st.integers(0, 63))
def test_ranges_of_clusters_are_apart(one: int, other: int) -> None:
    first, second = Addresses(one), Addresses(other)
    taken = {first.host, *(first.pod(number) for number in range(1020))}
    assert len(taken) == 1021
    assert (one == other) == bool(taken & {second.host, second.pod(0), second.pod(1019)})
    assert (one == other) == first.services.overlaps(second.services)


def test_a_claim_lasts_as_long_as_its_socket() -> None:
    claims = [claim() for _ in range(8)]
    try:
        assert len({addresses.index for addresses, _ in claims}) == 8
    finally:
        for _, mark in claims:
            mark.close()


def test_a_free_port_is_free() -> None:
    with socket.socket() as taken:
        port = free_port("127.0.0.1")
        taken.bind(("127.0.0.1", port))


def test_certificates_name_their_users_and_hosts(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    pair = authority.issue("server", "system:node:n", ["system:nodes"], ["localhost", "127.97.0.1"])
    certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    root = x509.load_pem_x509_certificate(authority.pair.certificate.read_bytes())
    certificate.verify_directly_issued_by(root)
    assert certificate.subject.rfc4514_string() == "CN=system:node:n,O=system:nodes"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.97.0.1"]
    assert pair.key.stat().st_mode & 0o077 == 0


def test_assets_say_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBE_ASSETS_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no Go
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no downloads
    with pytest.raises(assets.AssetError) as failure:
        assets.find()
    said = str(failure.value)
    assert f"KUBE_ASSETS_DIR ({tmp_path / 'nothing'}): without etcd, kube-apiserver" in said
    assert f"the cache ({assets.cache_folder()})" in said
    assert "the official releases: https://" in said
    assert "there is no Go" in said
    assert not list((tmp_path / "mizzen-local/assets").glob("*.new"))


def test_a_full_cache_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBE_ASSETS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = assets.cache_folder()
    folder.mkdir(parents=True)
    for name in assets.PROGRAMS:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    assert assets.find() == folder.resolve()


def test_downloads_are_held_against_their_checksums() -> None:
    data = b"program"
    digest = hashlib.sha256(data).hexdigest()
    downloads.check("https://example.com/x", data, digest)
    with pytest.raises(downloads.DownloadError, match="published is none"):
        downloads.check("https://example.com/x", data, "")
    pinned = next(iter(downloads.PINNED))
    with pytest.raises(downloads.DownloadError, match="pinned"):
        downloads.check(pinned, data, digest)


def test_checksum_lists() -> None:
    sums = "aa  etcd-v1-linux-amd64.tar.gz\nbb *etcd-v1-linux-arm64.tar.gz\n"
    assert downloads.listed(sums, "etcd-v1-linux-arm64.tar.gz") == "bb"
    assert downloads.listed(sums, "etcd-v1-windows-amd64.zip") == ""


def test_staged_modules_of_kubernetes_are_found() -> None:
    text = """
require k8s.io/klog/v2 v2.1.0
replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/kubectl => ./staging/src/k8s.io/kubectl
	example.com/x => ./staging/x
)
"""
    assert build.staged_modules(text) == ["k8s.io/api", "k8s.io/kubectl"]


def test_processes_are_known_by_pid_and_start(tmp_path: Path) -> None:
    one = process.start("one", ["sleep", "60"], log=tmp_path / "log", folder=tmp_path)
    registry = process.Registry(tmp_path / "processes.json")
    registry.add(one)
    try:
        assert registry.read() == [one]
        assert one.alive()
        assert not process.Process("one", one.pid, one.started + 1).alive()
        assert os.getsid(one.pid) == one.pid
        # A caller may be told of a started program before the kernel shows its environment.
        until = time.monotonic() + 30
        while not (found := process.marked(f"{tmp_path}/")) and time.monotonic() < until:
            time.sleep(0.01)
        assert [each.pid for each in found] == [one.pid]
        assert process.marked(f"{tmp_path}/other/") == []
    finally:
        process.stop([one], grace=5)
    assert not one.alive()
    assert not Path(f"/proc/{one.pid}").exists()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    one = process.start("one", command, log=tmp_path / "log", folder=tmp_path)
    while b"ready" not in (tmp_path / "log").read_bytes():
        assert one.alive()
    process.stop([one], grace=0.2)
    assert not one.alive()


def test_marks_reach_processes_in_sessions_of_their_own(tmp_path: Path) -> None:
    command = ["sh", "-c", "setsid sleep 60 & echo ready; exec sleep 60"]
    one = process.start("one", command, log=tmp_path / "log", folder=tmp_path)
    while b"ready" not in (tmp_path / "log").read_bytes():
        assert one.alive()
    assert process.kill_marked(f"{tmp_path}/") == 2
    assert process.marked(f"{tmp_path}/") == []
    process.reap(one.pid)


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


def test_names_of_pods_are_addresses_once_the_pods_are_there() -> None:
    async def run() -> list[str]:
        names, pod = Names(), named("b", "sub")
        await names.add(pod, "127.0.0.2")
        waiting = asyncio.create_task(names.rewrite("tcp://a.sub.ns.svc:1", pod))
        await asyncio.sleep(0)
        await names.add(named("a", "sub"), "127.0.0.3")
        said = [
            await waiting,
            await names.rewrite("a.sub.ns.svc.cluster.local", named("c")),
            await names.rewrite("http://a.sub.ns.svc.example.com x.sub.other.svc demo.ns.svc", pod),
        ]
        names.remove("a")
        return [*said, await names.rewrite("a.sub.ns.svc", named("c"))]

    assert asyncio.run(run()) == [
        "tcp://127.0.0.3:1",
        "127.0.0.3",
        "http://a.sub.ns.svc.example.com x.sub.other.svc demo.ns.svc",
        "a.sub.ns.svc",
    ]
