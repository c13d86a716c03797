"""Logits of heads that are split over GPUs: written to rank 0's memory, and gathered."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mizzen.layers.context import BuildContext, skinny
from mizzen.layers.embedding import Embedding, TiedHead
from mizzen.layers.sharding import Axis, Mesh
from mizzen.parallel.process_group import RankConfig, RankGroup

SECONDS = 200.0
HIDDEN = 1024
MOST_ROWS = 256
Given = TypeVar("Given")


def on_ranks(size: int, folder: Path, work: Callable[..., Given], *given: Any) -> list[Given]:
    """Call a function of a module with each rank's group, in a process each; return what each returns.

    Raises:
        TimeoutError: it took too long; the processes were killed.
    """
    context = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, context) for _ in range(size)]
    try:
        told = f"file://{folder}/meet"
        futures = [pool.submit(ranked, rank, size, told, work, *given) for rank, pool in enumerate(pools)]
        return [future.result(SECONDS) for future in futures]
    finally:
        for pool in pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()


def ranked(rank: int, size: int, rendezvous: str, work: Callable[..., Given], *given: Any) -> Given:
    """Meet the others and do a rank's work."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    group = RankGroup(RankConfig(rank=rank, size=size, rendezvous=rendezvous, device=device, timeout_seconds=SECONDS))
    with torch.inference_mode():
        done = work(group, *given)
    torch.cuda.synchronize(device)
    group.barrier("end")
    return done


@dataclass
class Found:
    """What a rank found."""

    placed: bool = False
    """There is a place for its logits."""
    right: dict[str, bool] = field(default_factory=dict)
    """Whether they were as they must be, by how they were computed; on rank 0."""


class Case:
    """A head of so many tokens on this rank, a room for its logits, and what they must be.

    Weights and inputs are -1, 0 and 1: sums are whole numbers that bfloat16 holds, in whatever order.
    """

    def __init__(self, group: RankGroup, vocab: int) -> None:
        self.group, self.ranks, self.device = group, group.collectives, group.config.device
        self.numbers = torch.Generator(self.device).manual_seed(0)
        build = BuildContext(
            device=self.device,
            dtype=torch.bfloat16,
            mesh=Mesh(Axis(group.rank, group.size)),
            linear=skinny,
            fused=True,
            ranks=self.ranks,
        )
        embedding = Embedding(build, "embed", vocab, HIDDEN)
        self.whole = self.drawn(vocab)
        self.vocabulary = embedding.vocabulary
        embedding.weight[: self.vocabulary.count] = self.whole[self.vocabulary.tokens]
        self.head = TiedHead(build, embedding)
        self.room = self.ranks.allocate_logits_buffer(MOST_ROWS, vocab, torch.bfloat16, self.device)

    def drawn(self, rows: int) -> torch.Tensor:
        """Return numbers [rows, HIDDEN], the same on all ranks."""
        shape = (rows, HIDDEN)
        return torch.randint(-1, 2, shape, device=self.device, generator=self.numbers).to(torch.bfloat16)

    def layers(self) -> None:
        """Wait for all ranks on the device, as a step's layers do ahead of its logits."""
        self.ranks.all_reduce(torch.zeros((8, HIDDEN), dtype=torch.bfloat16, device=self.device))

    def good(self, inputs: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
        """Tell whether logits are right, and as they are gathered; on rank 0, for others have none.

        Every rank gathers all of them whatever it finds.
        """
        good = True
        for x, logits in zip(inputs, found, strict=True):
            expected = (x.float() @ self.whole.float().t()).to(torch.bfloat16)
            good = torch.equal(self.head(x), expected) and good
            good = (self.group.rank != 0 or torch.equal(logits, expected)) and good
        return good


def plainly(case: Case, rows: int) -> bool:
    """Compute logits twice in a row, with nothing between but what layers do."""
    inputs, copies = [case.drawn(rows) for _ in range(2)], []
    for x in inputs:
        case.layers()
        copies.append(case.head(x, case.room[:rows]).clone())
    return case.good(inputs, copies)


def captured(case: Case, rows: int) -> bool:
    """Compute logits by replays of a graph."""
    x, out = case.drawn(rows), case.room[:rows]
    stream = torch.cuda.Stream(case.device)
    stream.wait_stream(torch.cuda.current_stream(case.device))
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        case.layers()
        case.head(x, out)

    with torch.cuda.stream(stream):
        step()  # loads kernels, which a capture cannot
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        inputs, copies = [case.drawn(rows) for _ in range(4)], []
        for numbers in inputs:
            x.copy_(numbers)
            graph.replay()
            copies.append(out.clone())
    torch.cuda.synchronize(case.device)
    return case.good(inputs, copies)


def logits(group: RankGroup, vocab: int, rows: list[int]) -> Found:
    """Compute the logits of so many rows in each way."""
    case, found = Case(group, vocab), Found()
    found.placed = case.ranks.map_logits_shard(case.room, case.vocabulary.tokens) is not None
    for count in rows:
        found.right[f"{count} rows"] = plainly(case, count)
        if found.placed:  # NCCL's are captured by whole steps
            found.right[f"{count} rows, captured"] = captured(case, count)
    return found
