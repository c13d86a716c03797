# SPDX-License-Identifier: Apache-2.0
"""Peer-memory objects exist on all ranks or on none: if one rank fails or detects errors, no rank has them.

Ranks are threads here. Fake allocations, collectives and kernels wait for all ranks at a barrier, so a rank
that makes a call too many or too few breaks the barrier.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from mizzen.kernels.comm import allreduce_rmsnorm, peer_broadcast
from mizzen.kernels.nvrtc import CompileError
from mizzen.parallel.cuda_collectives import SIZES_BY_RANKS, make_fused_norm
from mizzen.parallel.logits_gather import make_logits_buffers
from mizzen.parallel.p2p_memory import PeerMemory, check_copies_arrive
from mizzen.parallel.p2p_setup import make_row_lookup, make_token_broadcast

DEVICE = torch.device("cpu", 0)
PATIENCE = 20
"""Seconds that a rank waits at a barrier for the other ranks."""
COLUMNS = 64
TABLE_ROWS = 40
KINDS = ("norm", "tokens", "rows", "logits")
Make = Callable[[PeerMemory], Any]


class ExchangeBarrier:
    """A barrier at which the ranks exchange values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Wait for all ranks; return their values in order of rank. All values must have the same type."""
        self.values[rank] = value
        self.barrier.wait(PATIENCE)
        values = list(self.values)
        self.barrier.wait(PATIENCE)
        assert len({type(exchanged) for exchanged in values}) == 1, f"out of step: {values}"
        return values


@dataclass(frozen=True)
class FakeGroup:
    """A fake process group with the attributes that the tested code uses."""

    own: int
    meeting: ExchangeBarrier
    group_name = "threads"

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return len(self.meeting.values)


@dataclass
class Fault:
    """A fault on one rank.

    `allocation` and `compilation` are the numbers of the calls that fail, counted from 0; -1 if none fails.
    """

    rank: int = -1
    allocation: int = -1
    """Number of the allocation that fails; allocation 0 is the buffer of `PeerMemory` itself."""
    compilation: int = -1
    corrupt: bool = False
    loses_writes: bool = False
    """Whether writes of other ranks to this rank's memory are lost."""


class FakeRanks:
    """Fakes of symmetric memory, NCCL, the compiler and the kernels, for ranks that are threads."""

    def __init__(self, size: int, fault: Fault) -> None:
        meeting = ExchangeBarrier(size)
        self.groups = [FakeGroup(rank, meeting) for rank in range(size)]
        self.fault = fault
        self.local = threading.local()

    @property
    def group(self) -> FakeGroup:
        return self.local.group

    def exchange(self, value: Any) -> list[Any]:
        return self.group.meeting.exchange(self.group.own, value)

    def count_and_fail(self, counter: str) -> bool:
        """Count a call of this rank in `counter`; return whether the fault makes this call fail."""
        count = getattr(self.local, counter, 0)
        setattr(self.local, counter, count + 1)
        return self.group.own == self.fault.rank and count == getattr(self.fault, counter)

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.count_and_fail("allocation"):
            raise RuntimeError("no memory is left")
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, memory: torch.Tensor, group: FakeGroup) -> Any:
        memories = self.exchange(memory)
        self.local.latest_of_rank_0 = memories[0]

        def buffer(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            view = memories[rank].view(dtype)[: math.prod(sizes)].view(sizes)
            writes_are_lost = self.fault.loses_writes and rank == self.fault.rank != group.own
            return view.clone() if writes_are_lost else view

        return SimpleNamespace(
            buffer_ptrs=[peer_memory.data_ptr() for peer_memory in memories], get_buffer=buffer, kept=memories
        )

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        """All-reduce `x` in place, by sum or minimum."""
        contributions = torch.stack(self.exchange(x.clone()))
        x.copy_(
            contributions.min(0).values if op == dist.ReduceOp.MIN else contributions.sum(0, dtype=x.dtype)
        )

    def compiled(self, source: str, name: str, defines: Any, device: int) -> str:
        if self.count_and_fail("compilation"):
            raise CompileError("this driver is too old")
        return name

    def launch(self, function: str, blocks: Any, threads: int, arguments: tuple[Any, ...]) -> None:
        """Run the fake kernel named `function`."""
        getattr(self, function)(*arguments)

    def corrupt_result(self, out: torch.Tensor) -> None:
        if self.fault.corrupt and self.group.own == self.fault.rank:
            out.view(-1)[0] += 8

    def broadcast_tokens(self, peers: Any, calls: Any, values: torch.Tensor, count: int, rank: int) -> None:
        values.copy_(self.exchange(values.clone())[0])
        self.corrupt_result(values)

    def lookup_rows(
        self, peers: Any, calls: Any, ids: Any, table: Any, out: Any, start: int, *_: int
    ) -> None:
        tables = self.exchange(table)
        out.copy_(torch.cat(tables)[ids])
        self.corrupt_result(out)

    def wait_for_writes(self, *_: Any) -> None:
        self.exchange(True)
        self.corrupt_result(self.local.latest_of_rank_0)
        self.exchange(True)

    def allreduce_rmsnorm(
        self, peers: Any, calls: Any, x: Any, residual: Any, weight: Any, out: Any, rank: int, epsilon: float
    ) -> None:
        residual += torch.stack(self.exchange(x.clone())).sum(0, dtype=x.dtype)
        out.copy_(torch.nn.functional.rms_norm(residual, (len(weight),), weight, epsilon))
        self.corrupt_result(residual)

    def create_on_ranks(self, make: Callable[[int], Make], size: int = 1024) -> list[Any]:
        """Create an object on every rank; check that all ranks have made the same number of exchanges."""

        def run_rank(rank: int) -> Any:
            self.local.group = self.groups[rank]
            with torch.inference_mode():
                memory = PeerMemory(self.groups[rank], DEVICE, size)  # type: ignore[arg-type]
                created = make(rank)(memory)
            assert self.exchange("done") == ["done"] * len(self.groups)
            return created

        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(run_rank, range(len(self.groups))))


def creator_of(kind: str, rank: int, ranks: int) -> Make:
    """Return the function that creates an object of one of `KINDS` on a rank."""
    if kind == "norm":
        return lambda memory: make_fused_norm(memory, COLUMNS, SIZES_BY_RANKS[4])
    if kind == "rows":
        rows = slice(rank * TABLE_ROWS, (rank + 1) * TABLE_ROWS)
        table = torch.arange(ranks * TABLE_ROWS * 8.0).view(-1, 8)[rows]
        return lambda memory: make_row_lookup(memory, table, rows, ranks * TABLE_ROWS)
    return make_token_broadcast if kind == "tokens" else make_logits_buffers


def install_fakes(monkeypatch: pytest.MonkeyPatch, ranks: int, fault: Fault) -> FakeRanks:
    """Replace PyTorch's and the kernels' functions with the fakes."""
    stage = FakeRanks(ranks, fault)
    monkeypatch.setattr(dist, "all_reduce", stage.all_reduce)
    monkeypatch.setattr(symmetric, "empty", stage.empty)
    monkeypatch.setattr(symmetric, "rendezvous", stage.rendezvous)
    for module in (peer_broadcast, allreduce_rmsnorm):
        monkeypatch.setattr(module, "load_kernel", stage.compiled)
        monkeypatch.setattr(module, "launch", stage.launch)
    return stage


def make_on_ranks(monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int, fault: Fault) -> list[Any]:
    """Create an object of one of `KINDS` on every rank; return the objects by rank."""
    return install_fakes(monkeypatch, ranks, fault).create_on_ranks(
        lambda rank: creator_of(kind, rank, ranks)
    )


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_agree_whether_copies_arrive(
    monkeypatch: pytest.MonkeyPatch, ranks: int, deaf: bool
) -> None:
    stage = install_fakes(monkeypatch, ranks, Fault(rank=ranks - 1, loses_writes=deaf))

    def tried(rank: int) -> Make:
        return lambda memory: check_copies_arrive(memory, stage.groups[rank], DEVICE)  # type: ignore[arg-type]

    assert stage.create_on_ranks(tried, size=1 << 16) == [not deaf] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_create_the_object(monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int) -> None:
    assert None not in make_on_ranks(monkeypatch, kind, ranks, Fault())


COMPILATIONS = [(kind, count) for kind in KINDS for count in range(3 if kind == "norm" else 1)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "compilation"), COMPILATIONS)
def test_no_rank_has_the_object_if_one_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, compilation: int, rank: int
) -> None:
    fault = Fault(rank=rank, compilation=compilation)
    assert make_on_ranks(monkeypatch, kind, 2, fault) == [None, None]
    assert "this driver is too old" in caplog.text and "another rank cannot" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_has_the_object_if_one_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, rank: int
) -> None:
    assert make_on_ranks(monkeypatch, kind, 2, Fault(rank=rank, allocation=1)) == [None, None]
    assert "no memory is left" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_has_the_object_if_one_finds_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, rank: int
) -> None:
    assert make_on_ranks(monkeypatch, kind, 2, Fault(rank=rank, corrupt=True)) == [None, None]
    assert "a check of peer memory gave wrong results" in caplog.text
