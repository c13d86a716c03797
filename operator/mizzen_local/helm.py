# SPDX-License-Identifier: Apache-2.0
"""Finds, downloads or builds Helm, for tests of the chart; no cluster needs it."""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from mizzen_local.assets import AssetError, cache_folder
from mizzen_local.downloads import ARCHITECTURES, DownloadError, fetch_file, verify_checksum

HELM = "4.3.0"
Report = Callable[[str], None]


def find_helm(*, report: Report = lambda line: None) -> Path:
    """Return the path of Helm 4, from KUBE_ASSETS_DIR, the PATH or the cache.

    If Helm is not found there, it is downloaded into the cache, or built if the download fails.

    Args:
        report: called with each line of progress.

    Raises:
        AssetError: Helm was not found, and both download and build failed; the message lists the attempts.
    """
    configured = os.environ.get("KUBE_ASSETS_DIR")
    candidates = [Path(configured) / "helm"] if configured else []
    candidates += [Path(found)] if (found := shutil.which("helm")) else []
    cached = cache_folder().parent / f"helm-{HELM}"
    for path in [*candidates, cached]:
        if os.access(path, os.X_OK) and (path == cached or _is_helm_4(path)):
            return path.resolve()
    cached.parent.mkdir(parents=True, exist_ok=True)
    tried: list[str] = []
    with tempfile.TemporaryDirectory(prefix="helm-", dir=cached.parent) as work:
        for method, provide in (("the official release", _download), ("a build from its Go module", _build)):
            try:
                provide(Path(work) / "helm", report).replace(cached)
            except DownloadError as failure:
                report(f"{method}: {failure}")
                tried.append(f"{method}: {failure}")
            else:
                return cached.resolve()
    raise AssetError("\n  ".join(["Helm 4 was not found; tried KUBE_ASSETS_DIR, the PATH", *tried]))


def _is_helm_4(path: Path) -> bool:
    run = subprocess.run([path, "version", "--short"], capture_output=True, text=True, check=False)
    return run.returncode == 0 and run.stdout.startswith("v4.")


def _download(target: Path, report: Report) -> Path:
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise DownloadError(f"there are no releases for {platform.machine()}")
    url = f"https://get.helm.sh/helm-v{HELM}-linux-{architecture}.tar.gz"
    published = fetch_file(f"{url}.sha256sum", report=None).decode().split()
    data = fetch_file(url, report=report)
    verify_checksum(url, data, published[0] if published else "")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile(f"linux-{architecture}/helm")
        if member is None:
            raise DownloadError(f"{url} does not contain helm")
        target.write_bytes(member.read())
    target.chmod(0o755)
    return target


def _build(target: Path, report: Report) -> Path:
    go = shutil.which("go")
    if go is None:
        raise DownloadError("there is no Go on the PATH (https://go.dev/dl)")
    report("building Helm from its Go module; about two minutes on two cores, once")
    settings = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOBIN": str(target.parent)}
    version = f"-ldflags=-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM}"
    run = subprocess.run(
        [go, "install", "-trimpath", version, f"helm.sh/helm/v4/cmd/helm@v{HELM}"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise DownloadError(f"go install: {run.stderr.strip()[-2000:]}")
    return target
