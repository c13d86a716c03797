"""The ranks of one model: how they meet, what they tell each other at start-up, and how they part.

They meet at a rendezvous, a file that all can write (in one pod) or a TCP address of rank 0's (between pods),
which carries a few words at start-up. In steps they exchange tensors alone.
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
LOCAL = "127.0.0.1"
"""Where ranks of one pod exchange sums on the CPU: gloo knows no authentication."""
ENVIRONMENT = {
    # Whoever watches the ranks ends them.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A program that ends in the midst of NVLink multicast can leave GPUs that others share out of order.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""What NCCL and PyTorch read as a group comes together on CUDA; what is set already stays."""


class RanksFailed(RuntimeError):
    """The ranks of a model cannot work together; the message says which, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Which of the ranks this is, and where they meet."""

    rank: int
    size: int
    rendezvous: str
    """file:///path, or tcp://host:port/name of rank 0's; the name keeps one group apart from another."""
    device: torch.device
    timeout_seconds: float = 600.0
    """How long ranks wait for each other at start-up."""
    all_reduce: str = "auto"
    """Which way of all-reduce, on cuda; see `mizzen.parallel.cuda_collectives`."""
    address: str = ""
    """This pod's own address, which others reach it at; only where ranks are in several pods."""


Check = Callable[[], None]
"""Raises when another rank is known to have failed, so that nobody waits for it."""


def open_store(place: RankConfig) -> dist.Store:
    """Open the rendezvous.

    Raises:
        ValueError: it is no address of either form.
    """
    url, timeout = urlsplit(place.rendezvous), timedelta(seconds=place.timeout_seconds)
    if url.scheme == "file" and url.path:
        store: dist.Store = dist.FileStore(url.path, place.size)
    elif url.scheme == "tcp" and url.hostname and url.port:
        store = _tcp_store(place, url.hostname, url.port, timeout)
        store = dist.PrefixStore(url.path.strip("/"), store)
    else:
        raise ValueError(f"a rendezvous is file:///path or tcp://host:port, not {place.rendezvous!r}")
    store.set_timeout(timeout)
    return store


def _tcp_store(place: RankConfig, host: str, port: int, timeout: timedelta) -> dist.Store:
    """Connect to rank 0's store; rank 0 listens on that address alone, where torch would on all."""
    if place.rank:
        return dist.TCPStore(host, port, place.size, False, timeout, wait_for_workers=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        text = f"cannot listen on {host}:{port}, where ranks meet: {error.strerror}"
        raise OSError(f"{text} (it is --ranks-port and two more)") from error
    return dist.TCPStore(
        host,
        port,
        place.size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )


class RankGroup:
    """This rank and the others. `close` once nothing is in flight."""

    joined_on_cuda: ClassVar[bool] = False
    """This process was in a group on CUDA."""

    def __init__(self, place: RankConfig, check: Check = lambda: None) -> None:
        """Meet the other ranks.

        Raises:
            RanksFailed: another one did not come in time.
            ValueError: the rendezvous is no address.
        """
        self.place = place
        self.rank, self.size = place.rank, place.size
        self._check = check
        self._words = 0
        self._store = open_store(place)
        self.exchange("here", str(os.getpid()))
        self.collectives: Collectives = self._join()

    def exchange(self, what: str, word: str) -> list[str]:
        """Tell all ranks a word and return those of all, by rank. Every rank calls it, in the same order.

        Raises:
            RanksFailed: one did not answer in time.
        """
        self._words += 1
        keys = [f"{self._words}/{what}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], word)
        deadline = time.monotonic() + self.place.timeout_seconds
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > deadline:
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RanksFailed(
                    f"ranks {late} did not say {what!r} within {self.place.timeout_seconds:g} s at start-up"
                )
            time.sleep(POLL_SECONDS)
        return [self._store.get(key).decode() for key in keys]

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here, at start-up.

        Raises:
            RanksFailed: one did not come in time.
        """
        self.exchange(what, "")

    def close(self) -> None:
        """Part from the others, who may be gone; no graph that holds a collective may be left."""
        self.collectives.close()
        if self.place.device.type == "cuda" and dist.is_initialized():
            distributed_c10d._abort_process_group()  # to destroy it would wait for the others

    def _join(self) -> Collectives:
        place, store = self.place, dist.PrefixStore("group", self._store)
        timeout = timedelta(seconds=place.timeout_seconds)
        if place.device.type == "cpu":
            return GlooCollectives(_gloo(place, store, timeout))
        torch.cuda.set_device(place.device)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Symmetric memory finds groups by their names, which only the default one and its children have.
        dist.init_process_group(
            "nccl",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
            device_id=place.device,
        )
        world = dist.group.WORLD
        if world is None:
            raise RanksFailed("torch.distributed made no process group")
        from mizzen.parallel.cuda_collectives import CudaCollectives

        first = not RankGroup.joined_on_cuda
        RankGroup.joined_on_cuda = True
        return CudaCollectives(world, place.device, place.all_reduce, first=first)


def _gloo(place: RankConfig, store: dist.Store, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Join the ranks over gloo: at the pod's own address, or where nobody outside of it can reach them."""
    address = place.address or (LOCAL if place.rendezvous.startswith("file:") else "")
    if not address:
        return dist.ProcessGroupGloo(store, place.rank, place.size, timeout)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)
