"""Where the programs of the control plane come from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mizzen_local.errors import LocalError

KUBERNETES, ETCD = "1.36.3", "3.7.3"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")


class AssetError(LocalError):
    """The programs were not found anywhere; the message says what was tried."""


def cache_folder() -> Path:
    """The folder that programs are kept in, for every cluster of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mizzen-local" / "assets" / KUBERNETES


def missing(folder: Path) -> list[str]:
    """The programs that a folder does not hold."""
    return [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]


def find(*, report: Callable[[str], None] = lambda line: None) -> Path:
    """The folder that holds all programs.

    Raises:
        AssetError: no way led to them; says what was tried.
    """
    tried: list[str] = []
    given = os.environ.get("KUBE_ASSETS_DIR")
    for folder, name in ((Path(given) if given else None, "KUBE_ASSETS_DIR"), (cache_folder(), "the cache")):
        if folder is None:
            tried.append(f"{name}: not set")
        elif lacking := missing(folder):
            tried.append(f"{name} ({folder}): without {', '.join(lacking)}")
        else:
            return folder.resolve()
    raise AssetError("\n  ".join(["etcd and Kubernetes were not found; tried", *tried]))
