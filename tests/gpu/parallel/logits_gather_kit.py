"""Logits of heads that are sharded over GPUs: written to rank 0's buffer, and gathered."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.embedding import TiedHead, TokenEmbedding
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear
from mizzen.layers.sharding import Axis, Mesh
from mizzen.parallel.process_group import RankConfig, RankGroup

SECONDS = 200.0
HIDDEN = 1024
MOST_ROWS = 256
Given = TypeVar("Given")


def on_ranks(size: int, folder: Path, work: Callable[..., Given], *args: Any) -> list[Given]:
    """Call a function of a module with each rank's group, one process each; return the results by rank.

    Raises:
        TimeoutError: It took too long; the processes were killed.
    """
    context = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, context) for _ in range(size)]
    try:
        output = f"file://{folder}/meet"
        futures = [pool.submit(ranked, rank, size, output, work, *args) for rank, pool in enumerate(pools)]
        return [future.result(SECONDS) for future in futures]
    finally:
        for pool in pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()


def ranked(rank: int, size: int, rendezvous: str, work: Callable[..., Given], *args: Any) -> Given:
    """Join the group and do a rank's work."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    group = RankGroup(
        RankConfig(rank=rank, size=size, rendezvous=rendezvous, device=device, timeout_seconds=SECONDS)
    )
    with torch.inference_mode():
        done = work(group, *args)
    torch.cuda.synchronize(device)
    group.barrier("end")
    return done


@dataclass
class RankResult:
    """Results of a rank."""

    placed: bool = False
    """There is a place for its logits."""
    right: dict[str, bool] = field(default_factory=dict)
    """Whether they were as they must be, by how they were computed; on rank 0."""


class Case:
    """A head with its logits buffer on this rank, and the expected logits.

    Weights and inputs are -1, 0 and 1: sums are whole numbers that bfloat16 represents, in any order.
    """

    def __init__(self, group: RankGroup, vocab: int) -> None:
        self.group, self.ranks, self.device = group, group.collectives, group.config.device
        self.numbers = torch.Generator(self.device).manual_seed(0)
        build = BuildContext(
            device=self.device,
            dtype=torch.bfloat16,
            mesh=Mesh(Axis(group.rank, group.size)),
            make_linear=SmallBatchLinear,
            fused=True,
            collectives=self.ranks,
        )
        embedding = TokenEmbedding(build, "embed", vocab, HIDDEN)
        self.whole = self.drawn(vocab)
        self.vocabulary = embedding.vocabulary
        embedding.weight[: self.vocabulary.count] = self.whole[self.vocabulary.tokens]
        self.head = TiedHead(build, embedding)
        self.buffer = self.ranks.allocate_logits_buffer(MOST_ROWS, vocab, torch.bfloat16, self.device)

    def drawn(self, rows: int) -> torch.Tensor:
        """Return random numbers [rows, HIDDEN], the same on all ranks."""
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
        copies.append(case.head(x, case.buffer[:rows]).clone())
    return case.good(inputs, copies)


def captured(case: Case, rows: int) -> bool:
    """Compute logits by replays of a graph."""
    x, out = case.drawn(rows), case.buffer[:rows]
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


def logits(group: RankGroup, vocab: int, rows: list[int]) -> RankResult:
    """Compute the logits of each number of rows, eagerly and captured."""
    case, results = Case(group, vocab), RankResult()
    results.placed = case.ranks.map_logits_shard(case.buffer, case.vocabulary.tokens) is not None
    for count in rows:
        results.right[f"{count} rows"] = plainly(case, count)
        if results.placed:  # NCCL's are captured by whole steps
            results.right[f"{count} rows, captured"] = captured(case, count)
    return results
