"""Collectives on CUDA: peer memory for small messages, NCCL for large ones.

One shot reads everything from everyone: least latency. Two shots reduce a share each and gather the shares:
fewest bytes from four ranks on. All of it may be captured in graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mizzen.parallel.collectives import NoPeerMemory, concatenate_columns
from mizzen.parallel.logits_gather import Rooms, make_logits_buffers
from mizzen.parallel.p2p_memory import ALIGNMENT, LARGEST, PeerMemory, make_on_all_ranks, make_peer_memory
from mizzen.parallel.p2p_setup import MAX_LOOKUP_ROWS, MAX_BROADCAST_TOKENS, make_row_lookup, make_token_broadcast

# Newer releases of PyTorch call it otherwise.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


KIB = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Up to how many bytes each way of all-reduce is taken; NCCL takes what is larger."""

    one_shot: int = 0
    two_shot: int = 0
    push: int = 0
    """Fused with the norm, rows sent to the others."""
    fused: int = 0
    """Fused with the norm, rows read by the others."""
    shared: int = 0
    """Fused with the norm, each rank adding up a share of the rows."""

    @property
    def max_fused_bytes(self) -> int:
        """Bytes that go fused with the norm at most."""
        return max(self.push, self.fused, self.shared)


TABLE = {
    2: Sizes(one_shot=256 * KIB, two_shot=8192 * KIB, push=512 * KIB, fused=8192 * KIB),
    4: Sizes(one_shot=512 * KIB, two_shot=8192 * KIB, push=4 * KIB, fused=448 * KIB, shared=8192 * KIB),
    8: Sizes(one_shot=256 * KIB, two_shot=16384 * KIB, push=64 * KIB, fused=256 * KIB, shared=8192 * KIB),
}
"""By number of ranks; `benchmarks/allreduce.py` measures them."""
FORCED = {
    "nccl": Sizes(),
    "one-shot": Sizes(one_shot=LARGEST),
    "two-shot": Sizes(two_shot=LARGEST),
    "push": Sizes(one_shot=LARGEST, push=LARGEST),
    "fused": Sizes(one_shot=LARGEST, fused=LARGEST),
    "fused-two-shot": Sizes(two_shot=LARGEST, shared=LARGEST),
}
"""By way, where one is chosen by hand: taken wherever it can be."""
WAYS = ("auto", *FORCED)
"""Values of `--all-reduce`."""


def resolve_sizes(way: str, ranks: int) -> Sizes:
    """Return the sizes for a number of ranks.

    Raises:
        ValueError: there is no such way.
    """
    if way not in WAYS:
        raise ValueError(f"--all-reduce must be one of {', '.join(WAYS)}, not {way!r}")
    if way != "auto":
        return FORCED[way]
    return TABLE.get(ranks, Sizes(one_shot=256 * KIB))


class FusedAllReduceNorm:
    """The sum over ranks fused with residual addition and norm, for rows of one length."""

    def __init__(self, memory: PeerMemory, columns: int, sizes: Sizes) -> None:
        """Allocate what it goes through; all ranks do so together."""
        from mizzen.kernels.comm.allreduce_rmsnorm import AllReduceRMSNorm, Way, region_bytes

        ranks, rank = memory.group.size(), memory.group.rank()
        ways: tuple[tuple[int, Way], ...] = (
            (sizes.push, "push"),
            (sizes.fused, "read"),
            (sizes.shared, "shared"),
        )
        rooms = [(size // (2 * columns), way) for size, way in ways if size // (2 * columns)]
        self.regions = [memory.region(region_bytes(columns, ranks, room, way)) for room, way in rooms]
        self.kernels = [
            AllReduceRMSNorm(addresses, columns, rank, room, memory.device, way)
            for (room, way), (_, addresses) in zip(rooms, self.regions, strict=True)
        ]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Do it by the first kernel that has room; None where none has."""
        for kernel in self.kernels:
            if len(x) <= kernel.room:
                return kernel(x, residual, weight, epsilon)
        return None


class NcclCollectives(NoPeerMemory):
    """The operations by NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Return None: there is no such operation."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather whole blocks, then put them side by side."""
        rows, share = x.shape
        blocks = torch.empty((self.size * rows, share), dtype=x.dtype, device=x.device)
        all_gather(blocks, x.contiguous(), group=self.group)
        return concatenate_columns(blocks.view(self.size, rows, share), total, out)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's."""
        dist.broadcast(x, src=0, group=self.group)

    def lookup_rows(self, ids: torch.Tensor, table: torch.Tensor, held: slice, total: int) -> torch.Tensor | None:
        """Return None: there is no such operation."""
        return None

    def close(self) -> None:
        """Do nothing: the process group is its owner's."""


class CudaCollectives(NcclCollectives):
    """NCCL, and peer memory where a message is small."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, way: str, *, first: bool = True
    ) -> None:
        """Set up both; all ranks do so together. `first`: this process was in no other group before."""
        super().__init__(group)
        self.sizes = resolve_sizes(way, self.size)
        self.peers: PeerMemory | None = None
        if self.sizes != Sizes():
            self.peers = make_peer_memory(group, device, first=first)
        self.norms: dict[int, FusedAllReduceNorm | None] = {}
        """By length of a row; None where it is not served here."""
        self.shared: dict[str, Any] = {}
        """What else goes over peer memory, by what it shares; None where that is not served here."""

    def serves(self, x: torch.Tensor) -> bool:
        """Tell whether x goes over peer memory."""
        size = x.numel() * x.element_size()
        fits = not size % (ALIGNMENT * self.size) and x.dtype.is_floating_point
        return self.peers is not None and fits and size <= max(self.sizes.one_shot, self.sizes.two_shot)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks by the way that its size calls for."""
        if self.peers is None or not self.serves(x):
            return super().all_reduce(x)
        small = x.numel() * x.element_size() <= self.sizes.one_shot
        return self.peers.one_shot(x) if small else self.peers.two_shot(x)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Sum, add and normalise in one kernel, where one serves these rows."""
        from mizzen.kernels.comm import allreduce_rmsnorm

        size = x.numel() * x.element_size()
        if self.peers is None or size > self.sizes.max_fused_bytes or not allreduce_rmsnorm.serves(x):
            return None
        columns = x.shape[1]
        if columns not in self.norms:
            if torch.cuda.is_current_stream_capturing():
                return None  # peer memory cannot be allocated now
            self.norms[columns] = make_fused_norm(self.peers, columns, self.sizes)
        norm = self.norms[columns]
        return None if norm is None else norm(x, residual, weight, epsilon)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's, over peer memory where it is the tokens of slots."""
        tokens = x.dtype == torch.int64 and len(x) <= MAX_BROADCAST_TOKENS
        kernel = self._kernel("tokens", make_token_broadcast) if tokens else None
        if kernel is None:
            super().broadcast(x)
        else:
            kernel(x)

    def allocate_logits_buffer(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate peer memory, where there is some."""
        made = None
        if not torch.cuda.is_current_stream_capturing():
            rooms: Rooms | None = self._kernel("logits", make_logits_buffers)
            made = rooms and rooms.add(rows, columns, dtype)
        return super().allocate_logits_buffer(rows, columns, dtype, device) if made is None else made

    def map_logits_shard(self, out: torch.Tensor, held: slice) -> torch.Tensor | None:
        """Find the columns in rank 0's memory."""
        rooms: Rooms | None = self.shared.get("logits")
        return rooms and rooms.place(out, held)

    def wait_for_logits(self) -> None:
        """Let rank 0 wait for the others; there is a place."""
        rooms: Rooms | None = self.shared.get("logits")
        if rooms is not None:
            rooms.meet()

    def lookup_rows(self, ids: torch.Tensor, table: torch.Tensor, held: slice, total: int) -> torch.Tensor | None:
        """Look up over peer memory, where there are not too many rows."""
        row_bytes = table.shape[1] * table.element_size()
        if len(ids) > MAX_LOOKUP_ROWS or row_bytes % ALIGNMENT:
            return None
        kernel = self._kernel("rows", lambda memory: make_row_lookup(memory, table, held, total))
        return None if kernel is None else kernel(ids, table, held, total)

    def _kernel(self, name: str, make: Callable[[PeerMemory], Any]) -> Any:
        if self.peers is None:
            return None
        if name not in self.shared:
            if torch.cuda.is_current_stream_capturing():
                return None  # peer memory cannot be allocated now
            self.shared[name] = make(self.peers)
        return self.shared[name]

    def close(self) -> None:
        """Let the peer buffers go."""
        self.norms.clear()
        self.shared.clear()
        self.peers = None


def make_fused_norm(memory: PeerMemory, columns: int, sizes: Sizes) -> FusedAllReduceNorm | None:
    """Make the fused kernels for a length of rows, and try them; None, with a warning, without them."""
    return make_on_all_ranks(
        memory,
        "all-reduce is not fused with norms",
        lambda memory: FusedAllReduceNorm(memory, columns, sizes),
        lambda made: check_fused_norms(made, memory, columns),
    )


def check_fused_norms(made: FusedAllReduceNorm, memory: PeerMemory, columns: int) -> bool:
    """Tell whether the fused kernels give what plain operations give, several times in a row.

    Every rank does all of it whatever it finds, as in `check_sums`.
    """
    device, group, good = memory.device, memory.group, True
    generator = torch.Generator(device).manual_seed(group.rank())
    weight = torch.linspace(0.5, 1.5, columns, device=device).to(torch.bfloat16)
    for kernel in made.kernels:
        for rows in (1, kernel.room, 1, min(3, kernel.room)):
            x = torch.randint(-8, 8, (rows, columns), device=device, generator=generator).to(torch.bfloat16)
            total, residual = x.clone(), torch.ones_like(x)
            dist.all_reduce(total, group=group)
            stream = total + residual
            expected = torch.nn.functional.rms_norm(stream, (columns,), weight, 1e-6)
            normed = kernel(x, residual, weight, 1e-6)
            alike = torch.allclose(normed, expected, atol=0.05, rtol=0.05)
            good = torch.equal(residual, stream) and alike and good
    return good
