# SPDX-License-Identifier: Apache-2.0
"""Logits of an LM head that is sharded over GPUs: written to rank 0's buffer by peers, or gathered."""

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
Result = TypeVar("Result")


def on_ranks(size: int, folder: Path, work: Callable[..., Result], *args: Any) -> list[Result]:
    """Call `work(group, *args)` on every rank, each in its own process; return the results by rank.

    `work` must be defined at the top level of a module.

    Raises:
        TimeoutError: A rank has not returned within `SECONDS`; all processes were killed.
    """
    context = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, context) for _ in range(size)]
    try:
        output = f"file://{folder}/meet"
        futures = [pool.submit(run_rank, rank, size, output, work, *args) for rank, pool in enumerate(pools)]
        return [future.result(SECONDS) for future in futures]
    finally:
        for pool in pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()


def run_rank(rank: int, size: int, rendezvous: str, work: Callable[..., Result], *args: Any) -> Result:
    """Join the group as a rank, and return the result of `work`."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    group = RankGroup(
        RankConfig(rank=rank, size=size, rendezvous=rendezvous, device=device, timeout_seconds=SECONDS)
    )
    with torch.inference_mode():
        result = work(group, *args)
    torch.cuda.synchronize(device)
    group.barrier("end")
    return result


@dataclass
class RankResult:
    """Results of a rank."""

    placed: bool = False
    """Whether the rank writes its logits directly to rank 0's buffer."""
    correct: dict[str, bool] = field(default_factory=dict)
    """Whether the logits were correct, by case: "N rows" (run eagerly) or "N rows, captured" (in a graph)."""


class ShardedHead:
    """This rank's shard of an LM head, its logits buffer, and the weights of the whole head.

    Weights and inputs are -1, 0 or 1, so all sums are integers that bfloat16 represents exactly.
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
        self.weights = self.random_numbers(vocab)
        self.vocabulary = embedding.vocabulary
        embedding.weight[: self.vocabulary.count] = self.weights[self.vocabulary.tokens]
        self.head = TiedHead(build, embedding)
        self.buffer = self.ranks.allocate_logits_buffer(MOST_ROWS, vocab, torch.bfloat16, self.device)

    def random_numbers(self, rows: int) -> torch.Tensor:
        """Return random numbers [rows, HIDDEN], the same on all ranks."""
        shape = (rows, HIDDEN)
        return torch.randint(-1, 2, shape, device=self.device, generator=self.numbers).to(torch.bfloat16)

    def layers(self) -> None:
        """Run an all-reduce, as the layers of a step do before its logits."""
        self.ranks.all_reduce(torch.zeros((8, HIDDEN), dtype=torch.bfloat16, device=self.device))

    def are_correct(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        """Return whether `outputs` (on rank 0) and newly gathered logits (on all ranks) are correct.

        Each rank gathers the logits of all inputs even if some are wrong, because a gather needs all ranks.
        """
        correct = True
        for x, logits in zip(inputs, outputs, strict=True):
            expected = (x.float() @ self.weights.float().t()).to(torch.bfloat16)
            correct = torch.equal(self.head(x), expected) and correct
            correct = (self.group.rank != 0 or torch.equal(logits, expected)) and correct
        return correct


def logits_are_correct_eagerly(case: ShardedHead, rows: int) -> bool:
    """Compute logits twice in a row, each after an all-reduce; return whether they are correct."""
    inputs, copies = [case.random_numbers(rows) for _ in range(2)], []
    for x in inputs:
        case.layers()
        copies.append(case.head(x, case.buffer[:rows]).clone())
    return case.are_correct(inputs, copies)


def logits_are_correct_in_graphs(case: ShardedHead, rows: int) -> bool:
    """Compute logits by replaying a graph four times; return whether they are correct."""
    x, out = case.random_numbers(rows), case.buffer[:rows]
    stream = torch.cuda.Stream(case.device)
    stream.wait_stream(torch.cuda.current_stream(case.device))
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        case.layers()
        case.head(x, out)

    with torch.cuda.stream(stream):
        step()  # loads the kernels, which is not possible during a capture
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        inputs, copies = [case.random_numbers(rows) for _ in range(4)], []
        for numbers in inputs:
            x.copy_(numbers)
            graph.replay()
            copies.append(out.clone())
    torch.cuda.synchronize(case.device)
    return case.are_correct(inputs, copies)


def logits(group: RankGroup, vocab: int, rows: list[int]) -> RankResult:
    """Check logits for each number of rows, eagerly and (unless NCCL gathers them) in a graph."""
    case, results = ShardedHead(group, vocab), RankResult()
    results.placed = case.ranks.map_logits_shard(case.buffer, case.vocabulary.tokens) is not None
    for count in rows:
        results.correct[f"{count} rows"] = logits_are_correct_eagerly(case, count)
        if results.placed:  # gathers by NCCL are captured only in whole steps
            results.correct[f"{count} rows, captured"] = logits_are_correct_in_graphs(case, count)
    return results
