"""The control plane's programs from the official releases.

Kubernetes publishes each program at dl.k8s.io/release/v<version>/bin/linux/<arch>/ with its SHA-256 beside
it, etcd an archive with a SHA256SUMS file at its GitHub release. What is pinned in PINNED must match that;
the other files are held against the sums that the release itself publishes, fetched over HTTPS: that finds
a broken or a swapped download, but rests on the release site. `pin` a sum by adding it to PINNED.
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
CONNECT_SECONDS, CHUNK, MOST_BYTES = 15.0, 1 << 20, 1 << 29
Report = Callable[[str], None]


class DownloadError(Exception):
    """A download failed or is not what it should be."""


def download(folder: Path, *, kubernetes: str, etcd: str, report: Report) -> None:
    """Fetch all programs into a folder.

    Args:
        folder: gets the programs.
        kubernetes, etcd: versions, without v.
        report: gets a line of progress at a time.

    Raises:
        DownloadError: something cannot be had, or has another checksum.
    """
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise DownloadError(f"there are no releases for {platform.machine()}")
    _etcd(folder, etcd, architecture, report)
    base = f"https://dl.k8s.io/release/v{kubernetes}/bin/linux/{architecture}"
    for name in NAMES:
        url = f"{base}/{name}"
        published = fetch(f"{url}.sha256", report=None).decode().split()
        data = fetch(url, report=report)
        check(url, data, published[0] if published else "")
        _write(folder / name, data)


def _etcd(folder: Path, version: str, architecture: str, report: Report) -> None:
    base = f"https://github.com/etcd-io/etcd/releases/download/v{version}"
    name = f"etcd-v{version}-linux-{architecture}"
    sums = fetch(f"{base}/SHA256SUMS", report=None).decode()
    data = fetch(f"{base}/{name}.tar.gz", report=report)
    check(f"{base}/{name}.tar.gz", data, listed(sums, f"{name}.tar.gz"))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile(f"{name}/etcd")
        if member is None:
            raise DownloadError(f"{name}.tar.gz holds no etcd")
        _write(folder / "etcd", member.read())


def listed(sums: str, name: str) -> str:
    """The checksum of a file in the text of a SHA256SUMS file; empty when it is not there."""
    for line in sums.splitlines():
        digest, _, file = line.partition(" ")
        if file.strip().lstrip("*") == name:
            return digest
    return ""


def check(url: str, data: bytes, published: str) -> None:
    """Hold a download against the pinned checksum, and the published one.

    Raises:
        DownloadError: it differs from one, or none was published.
    """
    found = hashlib.sha256(data).hexdigest()
    for kind, wanted in (("pinned", PINNED.get(url, found)), ("published", published.lower())):
        if found != wanted:
            raise DownloadError(f"{url} has SHA-256 {found}, {kind} is {wanted or 'none'}")


def fetch(url: str, *, report: Report | None) -> bytes:
    """Download a file of at most 512 MiB.

    Raises:
        DownloadError: it cannot be had, broke off, or is too large.
    """
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as response:
            total = int(response.headers.get("Content-Length") or 0)
            parts: list[bytes] = []
            size, said = 0, 0
            while part := response.read(CHUNK):
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise DownloadError(f"{url} is larger than {MOST_BYTES >> 20} MiB")
                if report and total and size * 4 // total > said:
                    said = size * 4 // total
                    report(f"downloading {url.rpartition('/')[2]}: {size >> 20} of {total >> 20} MiB")
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise DownloadError(f"{url}: {error}") from error
    if total and size != total:
        raise DownloadError(f"{url} broke off after {size} of {total} bytes")
    return b"".join(parts)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o755)
