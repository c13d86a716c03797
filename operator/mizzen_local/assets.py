# SPDX-License-Identifier: Apache-2.0
"""Finds the programs of the control plane; downloads or builds them if they are missing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from mizzen_local.build import BuildError, build
from mizzen_local.downloads import DownloadError, download
from mizzen_local.errors import LocalError

KUBERNETES, ETCD = "1.36.3", "3.7.3"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NOTICE = (
    f"Kubernetes {KUBERNETES} and etcd {ETCD} are not on this machine yet; they are now fetched, once:",
    "  first download about 300 MiB from dl.k8s.io and github.com",
    "  if that fails, build from their Go modules, which needs Go and takes about five minutes on two cores",
    "  to use programs that you already have, set KUBE_ASSETS_DIR to their folder",
)
"""Lines of progress that are reported before the programs are downloaded or built."""
Report = Callable[[str], None]


class AssetError(LocalError):
    """The programs could be neither found nor obtained; the message lists the attempts."""


def cache_folder() -> Path:
    """Return the folder that caches the programs for all clusters of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mizzen-local" / "assets" / KUBERNETES


def missing_programs(folder: Path) -> list[str]:
    """Return the names of the programs that a folder lacks."""
    return [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]


def find_programs(*, report: Report = lambda line: None) -> Path:
    """Return a folder that contains all programs: KUBE_ASSETS_DIR, or else the cache.

    If the cache lacks programs, they are downloaded into it, or built if the download fails.

    Args:
        report: called with each line of progress.

    Raises:
        AssetError: no folder has all programs, and download and build failed; the message lists the attempts.
    """
    tried: list[str] = []
    configured = os.environ.get("KUBE_ASSETS_DIR")
    if not configured:
        tried.append("KUBE_ASSETS_DIR: not set")
    elif absent := missing_programs(Path(configured)):
        tried.append(f"KUBE_ASSETS_DIR ({configured}): without {', '.join(absent)}")
    else:
        return Path(configured).resolve()
    cache = cache_folder()
    if not missing_programs(cache):
        return cache.resolve()
    tried.append(f"the cache ({cache}): without {', '.join(missing_programs(cache))}")
    with _lock_cache(cache, report):
        if not missing_programs(cache):  # another process has filled it meanwhile
            return cache.resolve()
        for line in NOTICE:
            report(line)
        for method, provide, error in (
            ("the official releases", download, DownloadError),
            ("a build from Go modules", build, BuildError),
        ):
            try:
                _fill_cache(cache, provide, report)
                return cache.resolve()
            except error as failure:
                report(f"{method}: {failure}")
                tried.append(f"{method}: {failure}")
    raise AssetError("\n  ".join(["etcd and Kubernetes were not found; tried", *tried]))


def _fill_cache(cache: Path, provide: Callable[..., None], report: Report) -> None:
    """Fill the cache atomically, so that other processes never see a cache with only some of the programs."""
    work = cache.with_suffix(".new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        provide(work, kubernetes=KUBERNETES, etcd=ETCD, report=report)
        shutil.rmtree(cache, ignore_errors=True)
        work.rename(cache)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _lock_cache(cache: Path, report: Report) -> Iterator[None]:
    """Wait for the cache's lock and hold it; only one process of this user may fill the cache at a time."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another mizzen-local is fetching the programs; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
