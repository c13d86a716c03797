# SPDX-License-Identifier: Apache-2.0
"""The folder with a cluster's state: its paths, settings, process registry and lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mizzen_local.errors import LocalError
from mizzen_local.process import Process, Registry

PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "node")
LOCK = "lock"


def cluster_folder() -> Path:
    """Return the cluster's folder: MIZZEN_LOCAL_DIR, or else a folder in the user's cache."""
    configured = os.environ.get("MIZZEN_LOCAL_DIR")
    if configured:
        return Path(configured).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mizzen-local" / "cluster"


class BusyError(LocalError):
    """Another mizzen-local process holds the lock of the cluster."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings with which the cluster was started; `up` stores them for other commands.

    Attributes:
        server: URL of the API server.
        assets: folder of the programs.
        index: index of the cluster's address ranges.
        gpus: number of GPUs that the node offers.
        pod_server: URL at which pods reach the API server.
    """

    server: str
    assets: str
    index: int
    gpus: int
    pod_server: str


class ClusterState:
    """The folder with the state of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def registry(self) -> Registry:
        """Registry of the cluster's processes."""
        return Registry(self.folder / "processes.json")

    @property
    def logs(self) -> Path:
        """Folder of all logs."""
        return self.folder / "logs"

    def processes(self) -> list[Process]:
        """Return the registered processes of the cluster, running or ended."""
        return self.registry.read()

    def status(self) -> Literal["up", "broken", "down"]:
        """Return `up` if all processes run, `down` if neither processes nor settings exist, else `broken`."""
        alive = {process.name for process in self.processes() if process.alive()}
        if alive >= set(PARTS) and self._settings_file.exists():
            return "up"
        return "broken" if alive or self._settings_file.exists() else "down"

    @property
    def _settings_file(self) -> Path:
        return self.folder / "cluster.json"

    def read_settings(self) -> ClusterSettings:
        """Read the settings with which the cluster was started.

        Raises:
            FileNotFoundError: the cluster is down, so no settings are stored.
        """
        return ClusterSettings(**json.loads(self._settings_file.read_text()))

    def write_settings(self, settings: ClusterSettings) -> None:
        """Store the settings for other commands."""
        self._settings_file.write_text(json.dumps(asdict(settings), indent=1))

    def create_folder(self) -> None:
        """Create the folder if it does not exist yet; only its owner can read it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the cluster's lock; on exit, remove the folder if only the lock file is left.

        Raises:
            BusyError: another process holds the lock.
        """
        path = self.folder / LOCK
        while True:
            self.create_folder()
            with path.open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise BusyError(f"another mizzen-local is using {self.folder}; try again") from None
                if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    continue  # the previous holder removed this file, so locking it excludes no other process
                try:
                    yield
                finally:
                    if not [entry for entry in self.folder.iterdir() if entry != path]:
                        path.unlink()
                        self.folder.rmdir()
                return

    def remove_files(self, *, keep_logs: bool = False) -> None:
        """Delete the files that a cluster creates, and no others; with `keep_logs`, the logs are kept too."""
        ours = ("etcd", "pki", "pods", "processes.json", "processes.new", "cluster.json", "kubectl-cache")
        configs = ("kubeconfig", "node.kubeconfig", "controller-manager.kubeconfig", "scheduler.kubeconfig")
        for name in (*ours, *configs, *(() if keep_logs else ("logs",))):
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
