"""Peer-memory objects exist on all ranks or on none: if one rank fails or finds errors, all do without.

Ranks are threads here; allocations, collectives and kernels are stand-ins in which each waits for the others,
so that a rank out of step is a barrier that breaks.
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
"""Seconds that a rank waits for the others."""
COLUMNS = 64
TABLE_ROWS = 40
KINDS = ("norm", "tokens", "rows", "logits")
Make = Callable[[PeerMemory], Any]


class WriteBarrier:
    """Where the ranks hand each other something."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks brought, each the same kind of thing."""
        self.brought[rank] = value
        self.barrier.wait(PATIENCE)
        found = list(self.brought)
        self.barrier.wait(PATIENCE)
        assert len({type(one) for one in found}) == 1, f"out of step: {found}"
        return found


@dataclass(frozen=True)
class Group:
    """What a process group is to the code."""

    own: int
    meeting: WriteBarrier
    group_name = "threads"

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return len(self.meeting.brought)


@dataclass
class Fault:
    """What goes wrong, and on which rank."""

    rank: int = -1
    allocation: int = -1
    """Number of the one that fails; the first is the buffer of the memory itself."""
    compilation: int = -1
    wrong: bool = False
    deaf: bool = False
    """What others write to its memory is lost."""


class Stage:
    """Stand-ins for symmetric memory, NCCL, the compiler and the kernels."""

    def __init__(self, size: int, fault: Fault) -> None:
        meeting = WriteBarrier(size)
        self.groups = [Group(rank, meeting) for rank in range(size)]
        self.fault = fault
        self.here = threading.local()

    @property
    def group(self) -> Group:
        return self.here.group

    def exchange(self, value: Any) -> list[Any]:
        return self.group.meeting.exchange(self.group.own, value)

    def faulty(self, counter: str) -> bool:
        """Count; tell whether this one is to fail."""
        count = getattr(self.here, counter, 0)
        setattr(self.here, counter, count + 1)
        return self.group.own == self.fault.rank and count == getattr(self.fault, counter)

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.faulty("allocation"):
            raise RuntimeError("no memory is left")
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, memory: torch.Tensor, group: Group) -> Any:
        all_of_them = self.exchange(memory)
        self.here.latest_of_rank_0 = all_of_them[0]

        def buffer(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            found = all_of_them[rank].view(dtype)[: math.prod(sizes)].view(sizes)
            lost = self.fault.deaf and rank == self.fault.rank != group.own
            return found.clone() if lost else found

        return SimpleNamespace(
            buffer_ptrs=[one.data_ptr() for one in all_of_them], get_buffer=buffer, kept=all_of_them
        )

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        """Sum, or take the least."""
        every = torch.stack(self.exchange(x.clone()))
        x.copy_(every.min(0).values if op == dist.ReduceOp.MIN else every.sum(0, dtype=x.dtype))

    def compiled(self, source: str, name: str, defines: Any, device: int) -> str:
        if self.faulty("compilation"):
            raise CompileError("this driver is too old")
        return name

    def launch(self, function: str, blocks: Any, threads: int, arguments: tuple[Any, ...]) -> None:
        """Do what the kernel of that name does."""
        getattr(self, function)(*arguments)

    def spoil(self, out: torch.Tensor) -> None:
        if self.fault.wrong and self.group.own == self.fault.rank:
            out.view(-1)[0] += 8

    def broadcast_tokens(self, peers: Any, calls: Any, values: torch.Tensor, count: int, rank: int) -> None:
        values.copy_(self.exchange(values.clone())[0])
        self.spoil(values)

    def lookup_rows(
        self, peers: Any, calls: Any, ids: Any, table: Any, out: Any, start: int, *_: int
    ) -> None:
        tables = self.exchange(table)
        out.copy_(torch.cat(tables)[ids])
        self.spoil(out)

    def wait_for_writes(self, *_: Any) -> None:
        self.exchange(True)
        self.spoil(self.here.latest_of_rank_0)
        self.exchange(True)

    def allreduce_rmsnorm(
        self, peers: Any, calls: Any, x: Any, residual: Any, weight: Any, out: Any, rank: int, epsilon: float
    ) -> None:
        residual += torch.stack(self.exchange(x.clone())).sum(0, dtype=x.dtype)
        out.copy_(torch.nn.functional.rms_norm(residual, (len(weight),), weight, epsilon))
        self.spoil(residual)

    def on_ranks(self, make: Callable[[int], Make], size: int = 1024) -> list[Any]:
        """Make something on every rank, and hear that all are in step behind it."""

        def one(rank: int) -> Any:
            self.here.group = self.groups[rank]
            with torch.inference_mode():
                memory = PeerMemory(self.groups[rank], DEVICE, size)  # type: ignore[arg-type]
                made = make(rank)(memory)
            assert self.exchange("done") == ["done"] * len(self.groups)
            return made

        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(one, range(len(self.groups))))


def maker(kind: str, rank: int, ranks: int) -> Make:
    """Return what makes that kind of thing on a rank."""
    if kind == "norm":
        return lambda memory: make_fused_norm(memory, COLUMNS, SIZES_BY_RANKS[4])
    if kind == "rows":
        held = slice(rank * TABLE_ROWS, (rank + 1) * TABLE_ROWS)
        table = torch.arange(ranks * TABLE_ROWS * 8.0).view(-1, 8)[held]
        return lambda memory: make_row_lookup(memory, table, held, ranks * TABLE_ROWS)
    return make_token_broadcast if kind == "tokens" else make_logits_buffers


def install_fakes(monkeypatch: pytest.MonkeyPatch, ranks: int, fault: Fault) -> Stage:
    """Put the stand-ins in place."""
    stage = Stage(ranks, fault)
    monkeypatch.setattr(dist, "all_reduce", stage.all_reduce)
    monkeypatch.setattr(symmetric, "empty", stage.empty)
    monkeypatch.setattr(symmetric, "rendezvous", stage.rendezvous)
    for module in (peer_broadcast, allreduce_rmsnorm):
        monkeypatch.setattr(module, "load_kernel", stage.compiled)
        monkeypatch.setattr(module, "launch", stage.launch)
    return stage


def make_on_ranks(monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int, fault: Fault) -> list[Any]:
    """Return what each rank has."""
    return install_fakes(monkeypatch, ranks, fault).on_ranks(lambda rank: maker(kind, rank, ranks))


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_agree_whether_copies_arrive(
    monkeypatch: pytest.MonkeyPatch, ranks: int, deaf: bool
) -> None:
    stage = install_fakes(monkeypatch, ranks, Fault(rank=ranks - 1, deaf=deaf))

    def tried(rank: int) -> Make:
        return lambda memory: check_copies_arrive(memory, stage.groups[rank], DEVICE)  # type: ignore[arg-type]

    assert stage.on_ranks(tried, size=1 << 16) == [not deaf] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_make_the_object(monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int) -> None:
    assert None not in make_on_ranks(monkeypatch, kind, ranks, Fault())


COMPILATIONS = [(kind, count) for kind in KINDS for count in range(3 if kind == "norm" else 1)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "compilation"), COMPILATIONS)
def test_all_ranks_do_without_if_one_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, compilation: int, rank: int
) -> None:
    fault = Fault(rank=rank, compilation=compilation)
    assert make_on_ranks(monkeypatch, kind, 2, fault) == [None, None]
    assert "this driver is too old" in caplog.text and "another rank cannot" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_do_without_if_one_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, rank: int
) -> None:
    assert make_on_ranks(monkeypatch, kind, 2, Fault(rank=rank, allocation=1)) == [None, None]
    assert "no memory is left" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_do_without_if_one_finds_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, rank: int
) -> None:
    assert make_on_ranks(monkeypatch, kind, 2, Fault(rank=rank, wrong=True)) == [None, None]
    assert "a check gave wrong results" in caplog.text
