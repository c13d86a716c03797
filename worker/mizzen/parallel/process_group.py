# SPDX-License-Identifier: Apache-2.0
"""Process group of the ranks of one model: rendezvous, exchange of values at start-up, and shutdown.

Ranks meet at a rendezvous: a file that all of them can write (in one pod), or a TCP address of rank 0 (across
pods). It carries a few values at start-up; steps exchange only tensors.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from mizzen.common.addresses import address_family
from mizzen.parallel.collectives import Collectives, GlooCollectives

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
LOOPBACK = "127.0.0.1"
"""Address at which ranks of one pod exchange tensors on the CPU; private, as gloo has no authentication."""
ENVIRONMENT = {
    # The supervisor ends ranks that hang; NCCL must not.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A program that exits during NVLink multicast can leave GPUs broken, also for their other users.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Environment variables that NCCL and PyTorch read when a group forms on CUDA; existing values are kept."""


class RanksFailed(RuntimeError):
    """The ranks of a model cannot form a group; the message names the ranks and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Settings with which this rank joins its group."""

    rank: int
    size: int
    rendezvous: str
    """URL file:///path, or tcp://host:port/name with the address of rank 0; the name distinguishes groups."""
    device: torch.device
    timeout_seconds: float = 600.0
    """Maximum time in seconds that ranks wait for each other at start-up."""
    all_reduce: str = "auto"
    """All-reduce method on CUDA; see `mizzen.parallel.cuda_collectives`."""
    address: str = ""
    """IP address at which other pods reach this pod; empty if all ranks are in one pod."""


FailureCheck = Callable[[], None]
"""Function that raises if another rank is known to have failed, so that this rank does not wait for it."""


def open_store(config: RankConfig) -> Store:
    """Open the store at the rendezvous; ranks exchange strings through this store.

    Raises:
        ValueError: the rendezvous has neither of the forms that `RankConfig.rendezvous` describes.
        OSError: rank 0 cannot listen at its TCP address.
    """
    url, timeout = urlsplit(config.rendezvous), timedelta(seconds=config.timeout_seconds)
    if url.scheme == "file" and url.path:
        store: Store = FileStore(url.path, config.size)
    elif url.scheme == "tcp" and url.hostname and url.port:
        store = _tcp_store(config, url.hostname, url.port, timeout)
        store = PrefixStore(url.path.strip("/"), store)
    else:
        raise ValueError(f"a rendezvous is file:///path or tcp://host:port, not {config.rendezvous!r}")
    store.set_timeout(timeout)
    return store


def _tcp_store(config: RankConfig, host: str, port: int, timeout: timedelta) -> Store:
    """Connect to rank 0's store. Rank 0 listens only on `host`; torch alone would listen on all addresses."""
    if config.rank:
        return TCPStore(host, port, config.size, False, timeout, wait_for_workers=False)
    try:
        listening = socket.create_server((host, port), family=address_family(host))
    except OSError as error:
        text = f"cannot listen on {host}:{port} for the other ranks: {error.strerror}"
        raise OSError(f"{text} (it is --ranks-port and two more)") from error
    return TCPStore(
        host,
        port,
        config.size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )


class RankGroup:
    """Membership of this rank in the group of a model's ranks.

    Call `close` when no operation is in flight.
    """

    joined_on_cuda: ClassVar[bool] = False
    """Whether this process has already joined a group on CUDA."""

    def __init__(self, config: RankConfig, check: FailureCheck = lambda: None) -> None:
        """Wait for the other ranks at the rendezvous, and form the group; call `check` while waiting.

        Raises:
            RanksFailed: another rank did not arrive within the timeout.
            ValueError: the rendezvous is not a valid URL.
            OSError: rank 0 cannot listen at its TCP address.
        """
        self.config = config
        self.rank, self.size = config.rank, config.size
        self._failure_check = check
        self._exchanges = 0
        self._store = open_store(config)
        self.exchange("here", str(os.getpid()))
        self.collectives: Collectives = self._join()

    def exchange(self, topic: str, value: str) -> list[str]:
        """Send `value` to all ranks, and return all ranks' values in rank order; for start-up only.

        Every rank must make the same calls in the same order. `topic` names the exchange in errors.

        Raises:
            RanksFailed: a rank did not send its value within the timeout.
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
                    f"ranks {late} sent no {topic!r} within {self.config.timeout_seconds:g} s at start-up"
                )
            time.sleep(POLL_SECONDS)
        return [self._store.get(key).decode() for key in keys]

    def barrier(self, topic: str) -> None:
        """Wait until all ranks have called this with the same `topic`; for start-up only.

        Raises:
            RanksFailed: a rank did not arrive within the timeout.
        """
        self.exchange(topic, "")

    def close(self) -> None:
        """Leave the group, even if other ranks have exited.

        Captured graphs that contain collectives must be freed first.
        """
        self.collectives.close()
        if self.config.device.type == "cuda" and dist.is_initialized():
            distributed_c10d._abort_process_group()  # destroying the group would wait for the other ranks

    def _join(self) -> Collectives:
        config, store = self.config, PrefixStore("group", self._store)
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
            raise RanksFailed("torch.distributed has not created a process group")
        from mizzen.parallel.cuda_collectives import CudaCollectives

        first = not RankGroup.joined_on_cuda
        RankGroup.joined_on_cuda = True
        return CudaCollectives(world, config.device, config.all_reduce, first=first)


def _gloo(config: RankConfig, store: Store, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Form a gloo group at this pod's address, or on loopback, where no other pod can connect."""
    address = config.address or (LOOPBACK if config.rendezvous.startswith("file:") else "")
    if not address:
        return dist.ProcessGroupGloo(store, config.rank, config.size, timeout)
    options = cast(Any, dist.ProcessGroupGloo)._Options()  # missing in the type information of PyTorch
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, config.rank, config.size, options)
