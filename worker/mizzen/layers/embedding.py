"""Token embedding and the output head, which may share their weights; both are split by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext, CheckpointShard, WeightTarget
from mizzen.layers.linear import small_batch_gemm, method_kernel_specs, gemm_kernel_specs, max_small_batch
from mizzen.parallel.collectives import Collectives

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec

ROW_MULTIPLE = 8
"""Ranks have room for a multiple of so many tokens each, as kernels want it."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which tokens a rank has rows for."""

    total: int
    room: int
    """Rows of each rank's table."""
    held: slice
    """Tokens of this rank; rows behind theirs are padding."""

    @classmethod
    def of(cls, build: BuildContext, total: int) -> VocabShard:
        """Split a vocabulary over the ranks."""
        return cls(total, *build.mesh.tensor.padded_shard(total, ROW_MULTIPLE))

    @property
    def count(self) -> int:
        """Tokens of this rank."""
        return self.held.stop - self.held.start


class Embedding:
    """Rows of a table [vocab, hidden] by token id."""

    def __init__(self, build: BuildContext, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.hidden = hidden
        self.vocabulary = VocabShard.of(build, vocab)
        self.collectives = build.collectives
        self.weight = build.allocate(self.vocabulary.rows, hidden)
        self.weight[self.vocabulary.count :].zero_()

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensor goes."""
        vocabulary = self.vocabulary
        yield WeightTarget(
            name=f"{prefix}{self.name}.weight",
            shape=(vocabulary.total, self.hidden),
            part=(vocabulary.tokens, slice(0, self.hidden)),
            into=self.weight[: vocabulary.count],
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ids [tokens] to [tokens, hidden], freshly allocated."""
        if self.collectives.size == 1:
            return F.embedding(tokens, self.weight)
        vocabulary = self.vocabulary
        rows = self.collectives.lookup_rows(tokens, self.weight, vocabulary.tokens, vocabulary.total)
        if rows is not None:
            return rows
        rows = tokens - self.vocabulary.tokens.start
        elsewhere = (rows < 0) | (rows >= self.vocabulary.count)
        found = F.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        return self.collectives.all_reduce(found.masked_fill_(elsewhere[:, None], 0))


ComputeShardLogits = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Maps [rows, hidden] to logits [rows, room] of a rank's tokens, into a tensor whose rows may lie apart."""


def gather_logits(
    ranks: Collectives,
    vocabulary: VocabShard,
    product: ComputeShardLogits,
    x: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Map [rows, hidden] to logits [rows, vocab] of several ranks, into `out` where it is given.

    In a room of the ranks rank 0 alone has them: each writes its product to where rank 0 reads it.
    """
    place = None if out is None else ranks.map_logits_shard(out, vocabulary.tokens)
    if out is None or place is None:
        return ranks.gather_columns(product(x, None), vocabulary.total, out)
    product(x, place)
    ranks.wait_for_logits()
    return out


class TiedHead:
    """Logits from the embedding's own table."""

    def __init__(self, build: BuildContext, embedding: Embedding) -> None:
        self.embedding = embedding
        self.collectives = build.collectives
        self.widest = max_small_batch(embedding.weight) if build.fused else 0

    def targets(self) -> Iterator[WeightTarget]:
        """Yield nothing: the table is loaded as the embedding."""
        return iter(())

    def kernel_specs(self, counts: Iterable[int]) -> set[KernelSpec]:
        """Return what logits of so many rows are compiled from; of several ranks nothing, as in `Head`."""
        alone = self.collectives.size == 1
        return gemm_kernel_specs(self.embedding.weight, counts, self.widest) if alone else set()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` where it is given."""
        if self.collectives.size == 1:
            return self.part(x, out)
        return gather_logits(self.collectives, self.embedding.vocabulary, self.part, x, out)

    def part(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of this rank's tokens, in `out` where it is given; its rows may lie apart."""
        if len(x) <= self.widest and (out is None or out.is_contiguous()):
            return small_batch_gemm(self.embedding.weight, x, out)
        if out is None:
            return F.linear(x, self.embedding.weight)
        return torch.mm(x, self.embedding.weight.t(), out=out)


class Head:
    """Logits from a table of their own."""

    def __init__(self, build: BuildContext, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.collectives = build.collectives
        self.vocabulary = VocabShard.of(build, vocab)
        self.part = CheckpointShard(
            start=0, rows=self.vocabulary.tokens, columns=slice(0, hidden), shape=(vocab, hidden)
        )
        self.method = build.make_linear(self.vocabulary.rows, hidden, False, build.dtype, build.device)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensor goes."""
        yield from self.method.targets(self.name, self.part)

    def kernel_specs(self, counts: Iterable[int]) -> set[KernelSpec]:
        """Return what logits of so many rows are compiled from.

        Of several ranks nothing: where they write to rank 0's memory, rows lie apart, and cuBLAS takes them.
        """
        return method_kernel_specs(self.method, counts) if self.collectives.size == 1 else set()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` where it is given."""
        if self.collectives.size == 1:
            return self.method.apply(x, out)
        return gather_logits(self.collectives, self.vocabulary, self.method.apply, x, out)
