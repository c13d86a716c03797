"""Collectives on CUDA: peer memory for small messages, NCCL for large ones.

Peer memory is PyTorch's symmetric memory: a buffer of each rank that the others read over NVLink. One shot
reads everything from everyone: least latency. Two shots reduce a share each and gather the shares: fewest
bytes from four ranks on. All of it may be captured in graphs. NVLink multicast is not used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mizzen.parallel.collectives import ProcessGroupCollectives

log = logging.getLogger(__name__)

KIB = 1 << 10
ALIGNMENT = 16
"""Bytes that kernels over peer memory move at once: messages are multiples of it."""
WAYS = ("auto", "nccl", "one-shot", "two-shot")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Up to how many bytes each way of all-reduce is taken; NCCL takes what is larger."""

    one_shot: int
    two_shot: int


TABLE = {
    2: Sizes(one_shot=4096 * KIB, two_shot=0),
    4: Sizes(one_shot=512 * KIB, two_shot=8192 * KIB),
    8: Sizes(one_shot=256 * KIB, two_shot=16384 * KIB),
}
"""By number of ranks; `benchmarks/allreduce.py` measures them."""
LARGEST = 16384 * KIB
"""Bytes of the peer buffer."""


def sizes_of(way: str, ranks: int) -> Sizes:
    """Return the sizes for a number of ranks; a way other than auto is taken wherever it can be.

    Raises:
        ValueError: there is no such way.
    """
    if way not in WAYS:
        raise ValueError(f"--all-reduce must be one of {', '.join(WAYS)}, not {way!r}")
    if way == "nccl":
        return Sizes(0, 0)
    if way == "one-shot":
        return Sizes(LARGEST, 0)
    if way == "two-shot":
        return Sizes(0, LARGEST)
    return TABLE.get(ranks, Sizes(one_shot=256 * KIB, two_shot=0))


class PeerMemory:
    """A buffer that all ranks of a group read, and the operations over it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        """Allocate it; all ranks do so together.

        Raises:
            RuntimeError: the GPUs do not reach each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric

        self.name = group.group_name
        self.buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self.buffer, group=group)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of the buffer that x goes through."""
        return self.buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        return torch.ops.symm_mem.one_shot_all_reduce_copy(self.take(x), x, "sum", self.name)

    def two_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, in x."""
        through = self.take(x).copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(through, "sum", self.name)
        return x.copy_(through)


def make_peer_memory(group: dist.ProcessGroup, device: torch.device, way: str) -> PeerMemory | None:
    """Make the peer memory of a group and try it; None, with a warning, where one rank finds it broken.

    What is tried is each operation against NCCL, so that wiring that corrupts data is found at start-up.
    """
    memory, fault = None, ""
    try:
        memory = PeerMemory(group, device, LARGEST)
    except Exception as error:  # of many kinds: drivers, containers and wiring all have their own
        fault = f"{type(error).__name__}: {error}"
    if not everywhere(memory is not None, group, device):
        log.warning("all-reduce goes by NCCL alone: no peer memory %s", fault or "on another rank")
        return None
    if memory is not None and not everywhere(agrees(memory, group, device), group, device):
        log.warning("all-reduce goes by NCCL alone: sums over peer memory are wrong")
        return None
    return memory


def everywhere(fact: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether something is true on all ranks."""
    flag = torch.tensor([int(fact)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag.item())


def agrees(memory: PeerMemory, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether the operations over peer memory give NCCL's sums."""
    generator = torch.Generator(device).manual_seed(group.rank())
    for count in (1024, 65536):
        # Whole numbers, so that every order of additions has the same sum.
        x = torch.randint(-8, 8, (8, count), device=device, generator=generator).to(torch.bfloat16)
        expected = x.clone()
        dist.all_reduce(expected, group=group)
        for operation in (memory.one_shot, memory.two_shot):
            if not torch.equal(operation(x.clone()), expected):
                return False
    return True


class DeviceCollectives(ProcessGroupCollectives):
    """NCCL, and peer memory where a message is small."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, way: str) -> None:
        """Set up both; all ranks do so together."""
        super().__init__(group)
        self.sizes = sizes_of(way, self.size)
        self.peers: PeerMemory | None = None
        if self.sizes != Sizes(0, 0):
            self.peers = make_peer_memory(group, device, way)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks by the way that its size calls for."""
        size, peers = x.numel() * x.element_size(), self.peers
        if peers is not None and not size % (ALIGNMENT * self.size) and x.dtype.is_floating_point:
            if size <= self.sizes.one_shot:
                return peers.one_shot(x)
            if size <= self.sizes.two_shot:
                return peers.two_shot(x)
        return super().all_reduce(x)

    def close(self) -> None:
        """Let the peer buffer go."""
        self.peers = None
