"""The ranks of one model: how they meet, exchange values at start-up, and disconnect.

They meet at a rendezvous, a file that all can write (in one pod) or a TCP address of rank 0 (between pods),
which carries a few values at start-up. Steps exchange only tensors.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mizzen.parallel.collectives import Collectives, GlooCollectives

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
LOOPBACK = "127.0.0.1"
"""Address at which the ranks of one pod exchange sums on the CPU: gloo has no authentication."""
ENVIRONMENT = {
    # The supervisor of the ranks ends them, not NCCL.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A program that exits during NVLink multicast can leave GPUs that others share in a broken state.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Variables that NCCL and PyTorch read when a group forms on CUDA; variables that are already set are
kept."""


class RanksFailed(RuntimeError):
    """The ranks of a model cannot work together; the message says which, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """This rank's index, device and rendezvous."""

    rank: int
    size: int
    rendezvous: str
    """file:///path, or tcp://host:port/name of rank 0; the name distinguishes groups."""
    device: torch.device
    timeout_seconds: float = 600.0
    """Time that ranks wait for each other at start-up."""
    all_reduce: str = "auto"
    """All-reduce method on CUDA; see `mizzen.parallel.cuda_collectives`."""
    address: str = ""
    """This pod's address, at which the other pods reach it; only set if ranks are in several pods."""


FailureCheck = Callable[[], None]
"""Raises if another rank is known to have failed, so that no rank waits for it."""


def open_store(config: RankConfig) -> dist.Store:
    """Open the rendezvous.

    Raises:
        ValueError: the rendezvous has neither form.
    """
    url, timeout = urlsplit(config.rendezvous), timedelta(seconds=config.timeout_seconds)
    if url.scheme == "file" and url.path:
        store: dist.Store = dist.FileStore(url.path, config.size)
    elif url.scheme == "tcp" and url.hostname and url.port:
        store = _tcp_store(config, url.hostname, url.port, timeout)
        store = dist.PrefixStore(url.path.strip("/"), store)
    else:
        raise ValueError(f"a rendezvous is file:///path or tcp://host:port, not {config.rendezvous!r}")
    store.set_timeout(timeout)
    return store


def _tcp_store(config: RankConfig, host: str, port: int, timeout: timedelta) -> dist.Store:
    """Connect to rank 0's store; rank 0 listens only on that address, whereas torch would listen on all."""
    if config.rank:
        return dist.TCPStore(host, port, config.size, False, timeout, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        text = f"cannot listen on {host}:{port}, where ranks meet: {error.strerror}"
        raise OSError(f"{text} (it is --ranks-port and two more)") from error
    return dist.TCPStore(
        host,
        port,
        config.size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )


class RankGroup:
    """This rank and the others. Call `close` once nothing is in flight."""

    joined_on_cuda: ClassVar[bool] = False
    """Whether this process was in a group on CUDA."""

    def __init__(self, config: RankConfig, check: FailureCheck = lambda: None) -> None:
        """Meet the other ranks.

        Raises:
            RanksFailed: another rank did not come in time.
            ValueError: the rendezvous is not a valid address.
        """
        self.config = config
        self.rank, self.size = config.rank, config.size
        self._failure_check = check
        self._exchanges = 0
        self._store = open_store(config)
        self.exchange("here", str(os.getpid()))
        self.collectives: Collectives = self._join()

    def exchange(self, topic: str, value: str) -> list[str]:
        """Send a value to all ranks and return the values of all, by rank; every rank calls it, in the same
        order.

        Raises:
            RanksFailed: a rank did not answer in time.
        """
        self._exchanges += 1
        keys = [f"{self._exchanges}/{topic}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], value)
        deadline = time.monotonic() + self.config.timeout_seconds
        while not self._store.check(keys):
            self._failure_check()
            if time.monotonic() > deadline:
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RanksFailed(
                    f"ranks {late} did not say {topic!r} within {self.config.timeout_seconds:g} s at start-up"
                )
            time.sleep(POLL_SECONDS)
        return [self._store.get(key).decode() for key in keys]

    def barrier(self, topic: str) -> None:
        """Wait until all ranks are here, at start-up.

        Raises:
            RanksFailed: a rank did not come in time.
        """
        self.exchange(topic, "")

    def close(self) -> None:
        """Leave the group, whose other ranks may have exited; no graph that contains a collective may be
        left."""
        self.collectives.close()
        if self.config.device.type == "cuda" and dist.is_initialized():
            distributed_c10d._abort_process_group()  # destroying the group would wait for the other ranks

    def _join(self) -> Collectives:
        config, store = self.config, dist.PrefixStore("group", self._store)
        timeout = timedelta(seconds=config.timeout_seconds)
        if config.device.type == "cpu":
            return GlooCollectives(_gloo(config, store, timeout))
        torch.cuda.set_device(config.device)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Symmetric memory finds groups by name, which only the default group and its children have.
        dist.init_process_group(
            "nccl",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=config.device,
        )
        world = dist.group.WORLD
        if world is None:
            raise RanksFailed("torch.distributed made no process group")
        from mizzen.parallel.cuda_collectives import CudaCollectives

        first = not RankGroup.joined_on_cuda
        RankGroup.joined_on_cuda = True
        return CudaCollectives(world, config.device, config.all_reduce, first=first)


def _gloo(config: RankConfig, store: dist.Store, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Join the ranks over gloo: at the pod's address, or on loopback, where no other pod can connect."""
    address = config.address or (LOOPBACK if config.rendezvous.startswith("file:") else "")
    if not address:
        return dist.ProcessGroupGloo(store, config.rank, config.size, timeout)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, config.rank, config.size, options)
