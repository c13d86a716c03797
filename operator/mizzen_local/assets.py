"""Locates or fetches the control plane's programs."""

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
Report = Callable[[str], None]


class AssetError(LocalError):
    """The programs were not found anywhere; the message says what was tried."""


def cache_folder() -> Path:
    """The folder that programs are kept in, for every cluster of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mizzen-local" / "assets" / KUBERNETES


def missing(folder: Path) -> list[str]:
    """The programs that a folder does not hold."""
    return [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]


def find(*, report: Report = lambda line: None) -> Path:
    """The folder that holds all programs: KUBE_ASSETS_DIR, the cache, else downloaded or built into it.

    Args:
        report: gets a line of progress at a time.

    Raises:
        AssetError: no way led to them; says what was tried.
    """
    tried: list[str] = []
    given = os.environ.get("KUBE_ASSETS_DIR")
    if not given:
        tried.append("KUBE_ASSETS_DIR: not set")
    elif lacking := missing(Path(given)):
        tried.append(f"KUBE_ASSETS_DIR ({given}): without {', '.join(lacking)}")
    else:
        return Path(given).resolve()
    cache = cache_folder()
    if not missing(cache):
        return cache.resolve()
    tried.append(f"the cache ({cache}): without {', '.join(missing(cache))}")
    with _lock(cache, report):
        if not missing(cache):  # another one has filled it meanwhile
            return cache.resolve()
        for way, make, error in (
            ("the official releases", download, DownloadError),
            ("a build from Go modules", build, BuildError),
        ):
            try:
                _fill(cache, make, report)
                return cache.resolve()
            except error as failure:
                report(f"{way}: {failure}")
                tried.append(f"{way}: {failure}")
    raise AssetError("\n  ".join(["etcd and Kubernetes were not found; tried", *tried]))


def _fill(cache: Path, make: Callable[..., None], report: Report) -> None:
    """Fill the cache in one step, so that it is never seen half full."""
    work = cache.with_suffix(".new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        make(work, kubernetes=KUBERNETES, etcd=ETCD, report=report)
        shutil.rmtree(cache, ignore_errors=True)
        work.rename(cache)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _lock(cache: Path, report: Report) -> Iterator[None]:
    """Let one process of this user at a time fill the cache; the others wait."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another mizzen-local fetches the programs; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
