# SPDX-License-Identifier: Apache-2.0
"""Token embedding and output heads, sharded by the vocabulary; a tied head shares the embedding's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import LinearKind, LinearPart
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.small_batch import (
    gemm_kernel_specs,
    max_small_batch,
    small_batch_gemm,
)
from mizzen.layers.weight_target import WeightTarget
from mizzen.parallel.collectives import Collectives

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


@dataclass(frozen=True, slots=True)
class VocabShard:
    """A rank's shard of the vocabulary."""

    total: int
    """Number of tokens in the whole vocabulary."""
    rows: int
    """Number of rows in each rank's table, including padding."""
    tokens: slice
    """Token ids of this rank; rows of its table beyond these tokens are padding."""

    @classmethod
    def for_rank(cls, build: BuildContext, total: int) -> VocabShard:
        """Return this rank's shard of a vocabulary of `total` tokens."""
        return cls(total, *build.mesh.tensor.vocabulary_shard(total))

    @property
    def count(self) -> int:
        """Number of token ids in this rank's shard, without padding."""
        return self.tokens.stop - self.tokens.start


class TokenEmbedding:
    """Table of hidden states [vocab, hidden] by token id, sharded by rows."""

    def __init__(self, build: BuildContext, name: str, vocab: int, hidden: int) -> None:
        self.name = name
        self.hidden = hidden
        self.vocabulary = VocabShard.for_rank(build, vocab)
        self.collectives = build.collectives
        self.weight = build.allocate(self.vocabulary.rows, hidden)
        self.weight[self.vocabulary.count :].zero_()

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the checkpoint's embedding table."""
        vocabulary = self.vocabulary
        yield WeightTarget(
            name=f"{self.name}.weight",
            shape=(vocabulary.total, self.hidden),
            shard=(vocabulary.tokens, slice(0, self.hidden)),
            destination=self.weight[: vocabulary.count],
        )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up token ids (int64 [tokens]); return a new tensor [tokens, hidden] in the model's dtype."""
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
"""Function (x, out) that maps x [rows, hidden] to this rank's logits [rows, padded shard], in `out` if given.

The rows of `out` may be strided.
"""


def gather_logits(
    collectives: Collectives,
    vocabulary: VocabShard,
    compute_shard: ComputeShardLogits,
    x: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return the logits [rows, vocab] for x [rows, hidden], joined from all ranks' shards, in `out` if given.

    If `out` belongs to a rank-0 logits buffer, every rank writes its shard straight into rank 0's memory, and
    only rank 0 gets the logits.
    """
    shard = None if out is None else collectives.map_logits_shard(out, vocabulary.tokens)
    if out is None or shard is None:
        return collectives.gather_columns(compute_shard(x, None), vocabulary.total, out)
    compute_shard(x, shard)
    collectives.wait_for_logits()
    return out


class TiedHead:
    """Output head that multiplies by the embedding's table."""

    def __init__(self, build: BuildContext, embedding: TokenEmbedding) -> None:
        self.embedding = embedding
        self.collectives = build.collectives
        self.max_batch = max_small_batch(embedding.weight) if build.fused else 0

    def targets(self) -> Iterator[WeightTarget]:
        """Yield nothing: the table is loaded as part of the embedding."""
        return iter(())

    def finish(self) -> None:
        """Do nothing: the weights belong to the embedding."""

    def kernel_specs(self, batch_sizes: Iterable[int]) -> set[KernelSpec]:
        """Return the specs of the kernels for these batch sizes.

        The result is empty with several ranks, which use cuBLAS.
        """
        if self.collectives.size > 1:
            return set()
        return gemm_kernel_specs(self.embedding.weight, batch_sizes, self.max_batch)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] for x [rows, hidden], in `out` if given."""
        if self.collectives.size == 1:
            return self.shard_logits(x, out)
        return gather_logits(self.collectives, self.embedding.vocabulary, self.shard_logits, x, out)

    def shard_logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's logits [rows, padded shard], in `out` if given; rows of `out` may be strided."""
        if len(x) <= self.max_batch and (out is None or out.is_contiguous()):
            return small_batch_gemm(self.embedding.weight, x, out)
        if out is None:
            return F.linear(x, self.embedding.weight)
        return torch.mm(x, self.embedding.weight.t(), out=out)


class Head:
    """Output head with a separate table, and an optional bias of each token."""

    def __init__(
        self, build: BuildContext, name: str, vocab: int, hidden: int, *, bias: bool = False
    ) -> None:
        self.collectives = build.collectives
        self.vocabulary = VocabShard.for_rank(build, vocab)
        part = LinearPart(
            name=name,
            first_row=0,
            rows=self.vocabulary.tokens,
            columns=slice(0, hidden),
            shape=(vocab, hidden),
        )
        self.method = build.linear(
            LinearKind.HEAD, (part,), rows=self.vocabulary.rows, columns=hidden, bias=bias
        )

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's table and bias for this head."""
        yield from self.method.targets()

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels."""
        self.method.finish()

    def kernel_specs(self, batch_sizes: Iterable[int]) -> set[KernelSpec]:
        """Return the specs of the kernels for these batch sizes.

        Unquantized heads on several ranks have none: they use cuBLAS, because they write strided rows to rank
        0's memory.
        """
        uses_own_kernels = self.collectives.size == 1 or isinstance(self.method, DequantizedLinear)
        return self.method.kernel_specs(batch_sizes) if uses_own_kernels else set()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] for x [rows, hidden], in `out` if given."""
        if self.collectives.size == 1:
            return self.method.apply(x, out)
        return gather_logits(self.collectives, self.vocabulary, self.method.apply, x, out)
