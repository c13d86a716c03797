"""The folder with a cluster's state on this machine, and its lock."""

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
    """The cluster's folder: MIZZEN_LOCAL_DIR, or one in the user's cache folder."""
    given = os.environ.get("MIZZEN_LOCAL_DIR")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mizzen-local" / "cluster"


class BusyError(LocalError):
    """Another mizzen-local works on the same cluster."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Settings that `up` chose, for the other commands.

    Attributes:
        server: URL of the API server.
        assets: folder of the programs.
        index: the cluster's address range.
        gpus: how many GPUs the node offers.
        pod_server: URL of the API server as pods reach it.
    """

    server: str
    assets: str
    index: int
    gpus: int
    pod_server: str


class ClusterState:
    """The folder of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def registry(self) -> Registry:
        """The cluster's processes."""
        return Registry(self.folder / "processes.json")

    @property
    def logs(self) -> Path:
        """Folder of all logs."""
        return self.folder / "logs"

    def processes(self) -> list[Process]:
        """The processes that the cluster started, whether or not they still run."""
        return self.registry.read()

    def state(self) -> Literal["up", "broken", "down"]:
        """`up` when all parts run, `down` when none does and nothing is left, `broken` otherwise."""
        alive = {process.name for process in self.processes() if process.alive()}
        if alive >= set(PARTS) and self._facts_file.exists():
            return "up"
        return "broken" if alive or self._facts_file.exists() else "down"

    @property
    def _facts_file(self) -> Path:
        return self.folder / "cluster.json"

    def facts(self) -> Facts:
        """Settings that `up` chose.

        Raises:
            FileNotFoundError: the cluster is not up.
        """
        return Facts(**json.loads(self._facts_file.read_text()))

    def write_facts(self, facts: Facts) -> None:
        """Remember what `up` decided."""
        self._facts_file.write_text(json.dumps(asdict(facts), indent=1))

    def make(self) -> None:
        """Make the folder; only its owner may look into it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the cluster for one command.

        Raises:
            BusyError: another command holds it.
        """
        path = self.folder / LOCK
        while True:
            self.make()
            with path.open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise BusyError(f"another mizzen-local is at work on {self.folder}; try again") from None
                if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    continue  # the one before has removed the file; a lock on it keeps nobody out
                try:
                    yield
                finally:
                    if not [entry for entry in self.folder.iterdir() if entry != path]:
                        path.unlink()
                        self.folder.rmdir()
                return

    def clear(self, *, keep_logs: bool = False) -> None:
        """Remove all files of a cluster; the lock removes the folder when nothing of others is in it."""
        ours = ("etcd", "pki", "pods", "processes.json", "processes.new", "cluster.json", "kubectl-cache")
        configs = ("kubeconfig", "node.kubeconfig", "controller-manager.kubeconfig", "scheduler.kubeconfig")
        for name in (*ours, *configs, *(() if keep_logs else ("logs",))):
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
