"""Memory of each rank that the others read and write over NVLink, and what makes sure that it works.

It is PyTorch's symmetric memory. NVLink multicast is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

ALIGNMENT = 16
"""Bytes that kernels over peer memory move at once: messages are multiples of it, for each rank."""
LARGEST = 16 << 20
"""Bytes of the peer buffer."""
TRIAL_WORDS = 512
"""Numbers that each rank writes to each, where it is tried whether they arrive."""
Made = TypeVar("Made")


class PeerMemory:
    """A buffer that all ranks of a group read, and the operations over it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        """Allocate it; all ranks do so together.

        Raises:
            RuntimeError: the GPUs do not reach each other's memory.
        """
        self.group = group
        self.device = device
        self.name = group.group_name
        self.buffer, self._handle = self._allocate(size)

    def region(self, size: int) -> tuple[torch.Tensor, list[int]]:
        """Allocate so many bytes of zeros on every rank; return this one's, and the addresses of all.

        All ranks do so together, and not while a graph is captured.
        """
        memory, handle = self._allocate(size)
        return memory, list(handle.buffer_ptrs)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate zeros [rows, columns] on every rank; return this one's, and a tensor over those of rank 0.

        The latter is good as long as the former is kept. All ranks do so together, as in `region`.
        """
        memory, handle = self._allocate(rows * columns * dtype.itemsize)
        own = memory.view(dtype).view(rows, columns)
        return own, own if self.group.rank() == 0 else handle.get_buffer(0, (rows, columns), dtype)

    def _allocate(self, size: int) -> tuple[torch.Tensor, Any]:
        """Allocate so many bytes of zeros on every rank; return this one's, and what knows those of all."""
        import torch.distributed._symmetric_memory as symmetric

        memory, fault = None, ""
        try:
            memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        except Exception as error:  # of many kinds, as in `make_peer_memory`
            fault = f"{type(error).__name__}: {error}"
        # A rank that has none must not leave the others waiting for it at the rendezvous.
        if not true_on_all_ranks(memory is not None, self.group, self.device) or memory is None:
            raise RuntimeError(fault or "another rank has no memory for it")
        handle = symmetric.rendezvous(memory, self.group)
        if handle is None:
            raise RuntimeError("peer memory has no rendezvous here")
        memory.zero_()
        true_on_all_ranks(True, self.group, self.device)  # nobody writes before all have their zeros
        return memory, handle

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of a rank's buffer."""
        return self._handle.get_buffer(rank, shape, dtype)

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


def make_peer_memory(group: dist.ProcessGroup, device: torch.device, *, first: bool) -> PeerMemory | None:
    """Make the peer memory of a group and try it; None, with a warning, where one rank finds it broken.

    What is tried is each operation against NCCL, so that wiring that corrupts data is found at start-up.
    Nothing is where a rank was in another group before, and so not at its `first`: PyTorch keeps groups by
    name and numbers meetings by process, so that such a rank and new ones would wait for each other for ever.
    """
    if not true_on_all_ranks(first, group, device):
        log.warning(
            "all-reduce goes by NCCL alone and slower: this process had a tensor parallel model before, "
            "start a new one"
        )
        return None
    memory, fault = None, ""
    try:
        memory = PeerMemory(group, device, LARGEST)
    except Exception as error:  # of many kinds: drivers, containers and wiring all have their own
        fault = f"{type(error).__name__}: {error}"
    if not true_on_all_ranks(memory is not None, group, device):
        log.warning("all-reduce goes by NCCL alone: no peer memory %s", fault or "on another rank")
        return None
    if memory is None or not check_copies_arrive(memory, group, device):
        log.warning("all-reduce goes by NCCL alone: what ranks write to peer memory does not arrive")
        return None
    if not true_on_all_ranks(check_sums(memory, group, device), group, device):
        log.warning("all-reduce goes by NCCL alone: sums over peer memory are wrong")
        return None
    return memory


def true_on_all_ranks(fact: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether something is true on all ranks."""
    flag = torch.tensor([int(fact)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag.item())


def make_on_all_ranks(
    memory: PeerMemory,
    what: str,
    make: Callable[[PeerMemory], Made],
    right: Callable[[Made], bool] | None = None,
) -> Made | None:
    """Make something that goes over peer memory on all ranks, and try it; None, with a warning, without it.

    It is done without where one rank cannot make it or finds it wrong. Ranks stay in step because `make`
    allocates before it does what may fail on one rank alone, such as to compile, and `right`, which is called
    only where all have it, does the same on every rank whatever it finds: the others wait for each part.
    """
    made, fault = None, ""
    try:
        made = make(memory)
    except Exception as error:  # of many kinds: compilers and drivers have their own
        fault = f"{type(error).__name__}: {error}"
    if not true_on_all_ranks(made is not None, memory.group, memory.device) or made is None:
        log.warning("%s: %s", what, fault or "another rank cannot")
        return None
    if right is None or true_on_all_ranks(right(made), memory.group, memory.device):
        return made
    log.warning("%s: it was tried, and what came was wrong", what)
    return None


def check_copies_arrive(memory: PeerMemory, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether plain copies to all ranks' memory, and from it, arrive; all ranks learn the same.

    Kernels over peer memory wait for what the others write: where wiring loses it, such as between GPUs whose
    traffic a virtual machine's IOMMU turns away, they would wait for ever. Copies wait for nobody.
    """
    rank, size = group.rank(), group.size()
    shape, dtype = (size, TRIAL_WORDS), torch.int64
    expected = torch.arange(size * TRIAL_WORDS, device=device).view(shape) * 7919 + 1
    for peer in range(size):
        memory.of(peer, shape, dtype)[rank].copy_(expected[rank])
    true_on_all_ranks(True, group, device)  # behind the copies of all
    good = True
    for peer in range(size):
        good = torch.equal(memory.of(peer, shape, dtype).to(device), expected) and good
    return true_on_all_ranks(good, group, device)


def check_sums(memory: PeerMemory, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether the operations over peer memory give NCCL's sums.

    Every rank does all of them whatever it finds: one that stopped early would leave the others waiting.
    """
    good = True
    generator = torch.Generator(device).manual_seed(group.rank())
    for count in (1024, 65536):
        # Whole numbers, so that every order of additions has the same sum.
        x = torch.randint(-8, 8, (8, count), device=device, generator=generator).to(torch.bfloat16)
        expected = x.clone()
        dist.all_reduce(expected, group=group)
        for operation in (memory.one_shot, memory.two_shot):
            good = torch.equal(operation(x.clone()), expected) and good
    return good
