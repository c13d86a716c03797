# SPDX-License-Identifier: Apache-2.0
"""Peer memory: buffers that all ranks of a group read and write over NVLink (P2P), and checks of them.

The buffers are PyTorch's symmetric memory, without NVLink multicast. Ranks allocate together and always agree
on whether something works, because a rank that stopped early would leave the other ranks waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

ALIGNMENT = 16
"""Number of bytes that a kernel over peer memory moves at once. Each rank's share of a message must be a
multiple of it."""
BUFFER_BYTES = 16 << 20
"""Size in bytes of the buffer for all-reduces."""
TRIAL_WORDS = 512
"""Number of values that each rank writes to every other rank when delivery is checked."""
T = TypeVar("T")


class PeerMemory:
    """Peer memory of a group: a buffer for all-reduces, and allocation of further memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int) -> None:
        """Allocate the buffer of `size` bytes; all ranks must call this together.

        Raises:
            RuntimeError: the GPUs cannot access each other's memory.
        """
        self.group = group
        self.device = device
        self.name = group.group_name
        self.buffer, self._handle = self._allocate(size)

    def allocate_region(self, size: int) -> tuple[torch.Tensor, list[int]]:
        """Allocate `size` bytes of zeros on every rank.

        All ranks must call this together, and not during graph capture.

        Returns:
            This rank's memory, uint8 [size], and the address of each rank's memory on this rank's device.

        Raises:
            RuntimeError: a rank has too little memory, or cannot access the memory of another rank.
        """
        memory, handle = self._allocate(size)
        return memory, list(handle.buffer_ptrs)

    def allocate_matrix(
        self, rows: int, columns: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate zeros [rows, columns] on every rank; return this rank's tensor, and a view of rank 0's.

        The view is valid as long as this rank's tensor exists. All ranks must call this together, and not
        during graph capture.

        Raises:
            RuntimeError: a rank has too little memory, or cannot access the memory of another rank.
        """
        memory, handle = self._allocate(rows * columns * dtype.itemsize)
        own = memory.view(dtype).view(rows, columns)
        return own, own if self.group.rank() == 0 else handle.get_buffer(0, (rows, columns), dtype)

    def _allocate(self, size: int) -> tuple[torch.Tensor, Any]:
        """Allocate `size` bytes of zeros on every rank.

        Return this rank's memory, and a handle that gives access to the memory of all ranks.
        """
        import torch.distributed._symmetric_memory as symmetric

        memory, fault = None, ""
        try:
            memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        except Exception as error:  # any type of error, as in `make_peer_memory`
            fault = f"{type(error).__name__}: {error}"
        # A rank whose allocation failed must not leave the others waiting at the rendezvous.
        if not true_on_all_ranks(memory is not None, self.group, self.device) or memory is None:
            raise RuntimeError(fault or "another rank cannot allocate its peer memory")
        handle = symmetric.rendezvous(memory, self.group)
        if handle is None:
            raise RuntimeError("the ranks cannot map each other's peer memory")
        memory.zero_()
        true_on_all_ranks(True, self.group, self.device)  # no rank writes before all have zeroed their memory
        return memory, handle

    def view_of_rank(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a view, with the given shape and dtype, of the start of a rank's buffer."""
        return self._handle.get_buffer(rank, shape, dtype)

    def view_like(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of the start of this rank's buffer, with the shape and dtype of x."""
        return self.buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of x in a new tensor, by one-shot all-reduce."""
        return torch.ops.symm_mem.one_shot_all_reduce_copy(self.view_like(x), x, "sum", self.name)

    def two_shot(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over ranks in place by two-shot all-reduce, and return it."""
        through = self.view_like(x).copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(through, "sum", self.name)
        return x.copy_(through)


def make_peer_memory(group: dist.ProcessGroup, device: torch.device, *, first: bool) -> PeerMemory | None:
    """Make and check the peer memory of a group; log a warning and return None if it does not work.

    Each operation is compared with NCCL, so that wiring that corrupts data is detected at start-up. `first`
    is True if this is the first group of this process. If it is False on any rank, there is no peer memory:
    PyTorch identifies a group by its name, and a rendezvous by a number that each process counts by itself,
    so ranks with different histories would wait for each other forever.
    """
    if not true_on_all_ranks(first, group, device):
        log.warning(
            "all-reduce uses only NCCL, which is slower: a process of this group has already run another "
            "tensor-parallel model; start new processes"
        )
        return None
    memory, fault = None, ""
    try:
        memory = PeerMemory(group, device, BUFFER_BYTES)
    except Exception as error:  # any type of error: drivers, containers and wiring raise their own
        fault = f"{type(error).__name__}: {error}"
    if not true_on_all_ranks(memory is not None, group, device):
        log.warning("all-reduce uses only NCCL: peer memory fails: %s", fault or "error on another rank")
        return None
    if memory is None or not check_copies_arrive(memory, group, device):
        log.warning("all-reduce uses only NCCL: data that ranks write to peer memory does not arrive")
        return None
    if not true_on_all_ranks(check_sums(memory, group, device), group, device):
        log.warning("all-reduce uses only NCCL: sums over peer memory are wrong")
        return None
    return memory


def true_on_all_ranks(fact: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether `fact` is true on all ranks; all ranks must call this together."""
    flag = torch.tensor([int(fact)], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group)
    return bool(flag.item())


def make_on_all_ranks(
    memory: PeerMemory,
    fallback: str,
    make: Callable[[PeerMemory], T],
    check: Callable[[T], bool] | None = None,
) -> T | None:
    """Make and check an object over peer memory on all ranks.

    If `make` or `check` fails on any rank, log a warning and return None on all ranks. The warning begins
    with `fallback`, a clause such as "tokens fall back to NCCL".

    `make` must allocate its peer memory before anything that may fail on one rank only, such as compiling, so
    that all ranks allocate. `check` is called only if all ranks have the object; it must run the same
    operations on every rank, whatever their results.
    """
    made_object, fault = None, ""
    try:
        made_object = make(memory)
    except Exception as error:  # any type of error: compilers and drivers raise their own
        fault = f"{type(error).__name__}: {error}"
    if not true_on_all_ranks(made_object is not None, memory.group, memory.device) or made_object is None:
        log.warning("%s: %s", fallback, fault or "another rank cannot use peer memory")
        return None
    if check is None or true_on_all_ranks(check(made_object), memory.group, memory.device):
        return made_object
    log.warning("%s: a check of peer memory gave wrong results", fallback)
    return None


def check_copies_arrive(memory: PeerMemory, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether plain copies to and from all ranks' memory arrive; all ranks get the same result.

    Kernels over peer memory wait for writes of other ranks. They would wait forever if such writes got lost,
    as between GPUs whose traffic a virtual machine's IOMMU rejects. Copies do not wait for other ranks, so
    they are checked first.
    """
    rank, size = group.rank(), group.size()
    shape, dtype = (size, TRIAL_WORDS), torch.int64
    expected = torch.arange(size * TRIAL_WORDS, device=device).view(shape) * 7919 + 1
    for peer in range(size):
        memory.view_of_rank(peer, shape, dtype)[rank].copy_(expected[rank])
    true_on_all_ranks(True, group, device)  # wait for the copies of all ranks
    correct = True
    for peer in range(size):
        correct = torch.equal(memory.view_of_rank(peer, shape, dtype).to(device), expected) and correct
    return true_on_all_ranks(correct, group, device)


def check_sums(memory: PeerMemory, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all-reduces over peer memory and by NCCL have equal sums on this rank.

    Every rank runs all checks whatever their results, because a rank that stopped early would leave the other
    ranks waiting.
    """
    correct = True
    generator = torch.Generator(device).manual_seed(group.rank())
    for count in (1024, 65536):
        # Integers, so that every order of additions gives the same sum.
        x = torch.randint(-8, 8, (8, count), device=device, generator=generator).to(torch.bfloat16)
        expected = x.clone()
        dist.all_reduce(expected, group=group)
        for operation in (memory.one_shot, memory.two_shot):
            correct = torch.equal(operation(x.clone()), expected) and correct
    return correct
