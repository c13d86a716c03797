# SPDX-License-Identifier: Apache-2.0
"""Downloads the programs of the control plane from the official releases, and verifies their checksums.

Kubernetes publishes each program at dl.k8s.io/release/v<version>/bin/linux/<arch>/, next to its SHA-256. etcd
publishes an archive and a SHA256SUMS file at its GitHub release. Each download must match the published
checksum, which is fetched over HTTPS. This check detects a broken download, but trusts the release site. If
PINNED contains a checksum for the download, the download must match it too, so the site need not be trusted.
"""

from __future__ import annotations

import hashlib
import io
import platform
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NAMES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
PINNED = {
    "https://dl.k8s.io/release/v1.36.3/bin/linux/amd64/kubectl": (
        "ebbd080e7c2e275093b55915722043257eb24004363e20acb3c4d71919f88336"
    ),
}
CONNECT_SECONDS, CHUNK, MAX_BYTES = 15.0, 1 << 20, 1 << 29
Report = Callable[[str], None]


class DownloadError(Exception):
    """A download failed, or the file has the wrong checksum or content."""


def download(folder: Path, *, kubernetes: str, etcd: str, report: Report) -> None:
    """Download all programs.

    Args:
        folder: existing folder for the programs.
        kubernetes: version of Kubernetes, without the leading v.
        etcd: version of etcd, without the leading v.
        report: called with each line of progress.

    Raises:
        DownloadError: a download failed, a checksum differs, or there are no releases for this machine.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise DownloadError(f"there are no releases for {platform.machine()}")
    _download_etcd(folder, etcd, architecture, report)
    base = f"https://dl.k8s.io/release/v{kubernetes}/bin/linux/{architecture}"
    for name in NAMES:
        url = f"{base}/{name}"
        published = fetch_file(f"{url}.sha256", report=None).decode().split()
        data = fetch_file(url, report=report)
        verify_checksum(url, data, published[0] if published else "")
        _write_program(folder / name, data)


def _download_etcd(folder: Path, version: str, architecture: str, report: Report) -> None:
    base = f"https://github.com/etcd-io/etcd/releases/download/v{version}"
    name = f"etcd-v{version}-linux-{architecture}"
    sums = fetch_file(f"{base}/SHA256SUMS", report=None).decode()
    data = fetch_file(f"{base}/{name}.tar.gz", report=report)
    verify_checksum(f"{base}/{name}.tar.gz", data, find_checksum(sums, f"{name}.tar.gz"))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile(f"{name}/etcd")
        if member is None:
            raise DownloadError(f"{name}.tar.gz does not contain etcd")
        _write_program(folder / "etcd", member.read())


def find_checksum(sums: str, name: str) -> str:
    """Return a file's checksum from the text of a SHA256SUMS file; empty if the file is not listed."""
    for line in sums.splitlines():
        digest, _, file = line.partition(" ")
        if file.strip().lstrip("*") == name:
            return digest
    return ""


def verify_checksum(url: str, data: bytes, published: str) -> None:
    """Compare a download with its pinned checksum, if it has one, and with the published checksum.

    Args:
        url: the download's URL, which selects the pinned checksum.
        data: content of the download.
        published: SHA-256 from the release, in hexadecimal; empty if it publishes none.

    Raises:
        DownloadError: a checksum differs, or none was published.
    """
    actual = hashlib.sha256(data).hexdigest()
    for kind, expected in (("pinned", PINNED.get(url, actual)), ("published", published.lower())):
        if actual != expected:
            raise DownloadError(f"{url} has SHA-256 {actual}, {kind} is {expected or 'missing'}")


def fetch_file(url: str, *, report: Report | None) -> bytes:
    """Download a file of at most 512 MiB.

    Args:
        url: the file's URL.
        report: called with a line of progress after each quarter of the file; None for no progress reports.

    Raises:
        DownloadError: the download failed, is incomplete, or is too large.
    """
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as response:
            total = int(response.headers.get("Content-Length") or 0)
            parts: list[bytes] = []
            size, reported_quarters = 0, 0
            while part := response.read(CHUNK):
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise DownloadError(f"{url} is larger than {MAX_BYTES >> 20} MiB")
                if report and total and size * 4 // total > reported_quarters:
                    reported_quarters = size * 4 // total
                    report(f"downloading {url.rpartition('/')[2]}: {size >> 20} of {total >> 20} MiB")
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise DownloadError(f"{url}: {error}") from error
    if total and size != total:
        raise DownloadError(f"{url} ended after {size} of {total} bytes")
    return b"".join(parts)


def _write_program(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o755)
