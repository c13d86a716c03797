"""Token embedding and output heads, which may share their weights; both are sharded by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import CheckpointShard
from mizzen.layers.linear_methods.small_batch import (
    gemm_kernel_specs,
    max_small_batch,
    method_kernel_specs,
    small_batch_gemm,
)
from mizzen.layers.weight_target import WeightTarget
from mizzen.parallel.collectives import Collectives

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec

ROW_MULTIPLE = 8
"""Multiple to which each rank's number of vocabulary rows is padded, for the alignment that kernels need."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """A rank's shard of the vocabulary."""

    total: int
    """Tokens of the whole vocabulary."""
    rows: int
    """Rows of each rank's table, padding included."""
    tokens: slice
    """Tokens of this rank; the rows after theirs are padding."""

    @classmethod
    def for_rank(cls, build: BuildContext, total: int) -> VocabShard:
        """Return this rank's shard of a vocabulary of `total` tokens."""
        return cls(total, *build.mesh.tensor.padded_shard(total, ROW_MULTIPLE))

    @property
    def count(self) -> int:
        """Number of tokens of this rank."""
        return self.tokens.stop - self.tokens.start


class TokenEmbedding:
    """Rows of a table [vocab, hidden] by token id."""

    def __init__(self, build: BuildContext, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.hidden = hidden
        self.vocabulary = VocabShard.for_rank(build, vocab)
        self.collectives = build.collectives
        self.weight = build.allocate(self.vocabulary.rows, hidden)
        self.weight[self.vocabulary.count :].zero_()

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield the destination of the checkpoint's tensor."""
        vocabulary = self.vocabulary
        yield WeightTarget(
            name=f"{prefix}{self.name}.weight",
            shape=(vocabulary.total, self.hidden),
            shard=(vocabulary.tokens, slice(0, self.hidden)),
            destination=self.weight[: vocabulary.count],
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ids [tokens] to [tokens, hidden], newly allocated."""
        if self.collectives.size == 1:
            return F.embedding(tokens, self.weight)
        vocabulary = self.vocabulary
        rows = self.collectives.lookup_rows(tokens, self.weight, vocabulary.tokens, vocabulary.total)
        if rows is not None:
            return rows
        indices = tokens - vocabulary.tokens.start
        on_other_rank = (indices < 0) | (indices >= vocabulary.count)
        own_rows = F.embedding(indices.masked_fill_(on_other_rank, 0), self.weight)
        return self.collectives.all_reduce(own_rows.masked_fill_(on_other_rank[:, None], 0))


ComputeShardLogits = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, out): maps [rows, hidden] to the logits [rows, padded shard] of a rank; rows of `out` may be
strided."""


def gather_logits(
    collectives: Collectives,
    vocabulary: VocabShard,
    compute_shard: ComputeShardLogits,
    x: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Map [rows, hidden] to the logits [rows, vocab] of all ranks, into `out` if given.

    If `out` is a rank-0 logits buffer, every rank writes its shard straight into rank 0's memory, and only
    rank 0 gets the logits.
    """
    shard = None if out is None else collectives.map_logits_shard(out, vocabulary.tokens)
    if out is None or shard is None:
        return collectives.gather_columns(compute_shard(x, None), vocabulary.total, out)
    compute_shard(x, shard)
    collectives.wait_for_logits()
    return out


class TiedHead:
    """Output head that shares the embedding's table."""

    def __init__(self, build: BuildContext, embedding: TokenEmbedding) -> None:
        self.embedding = embedding
        self.collectives = build.collectives
        self.max_batch = max_small_batch(embedding.weight) if build.fused else 0

    def targets(self) -> Iterator[WeightTarget]:
        """Yield nothing: the table is loaded as the embedding."""
        return iter(())

    def kernel_specs(self, batch_sizes: Iterable[int]) -> set[KernelSpec]:
        """Return the specs of the kernels for these batch sizes; empty with several ranks, as in `Head`."""
        if self.collectives.size > 1:
            return set()
        return gemm_kernel_specs(self.embedding.weight, batch_sizes, self.max_batch)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` if given."""
        if self.collectives.size == 1:
            return self.shard_logits(x, out)
        return gather_logits(self.collectives, self.embedding.vocabulary, self.shard_logits, x, out)

    def shard_logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of this rank's tokens, in `out` if given; rows of `out` may be strided."""
        if len(x) <= self.max_batch and (out is None or out.is_contiguous()):
            return small_batch_gemm(self.embedding.weight, x, out)
        if out is None:
            return F.linear(x, self.embedding.weight)
        return torch.mm(x, self.embedding.weight.t(), out=out)


class Head:
    """Output head with a table of its own."""

    def __init__(self, build: BuildContext, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.collectives = build.collectives
        self.vocabulary = VocabShard.for_rank(build, vocab)
        self.checkpoint_shard = CheckpointShard(
            first_row=0, rows=self.vocabulary.tokens, columns=slice(0, hidden), shape=(vocab, hidden)
        )
        self.method = build.make_linear(self.vocabulary.rows, hidden, False, build.dtype, build.device)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the checkpoint's tensor."""
        yield from self.method.targets(self.name, self.checkpoint_shard)

    def kernel_specs(self, batch_sizes: Iterable[int]) -> set[KernelSpec]:
        """Return the specs of the kernels for these batch sizes.

        Empty with several ranks: they write strided rows to rank 0's memory, by cuBLAS.
        """
        return method_kernel_specs(self.method, batch_sizes) if self.collectives.size == 1 else set()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocab], into `out` if given."""
        if self.collectives.size == 1:
            return self.method.apply(x, out)
        return gather_logits(self.collectives, self.vocabulary, self.method.apply, x, out)
