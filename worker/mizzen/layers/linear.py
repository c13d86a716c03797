"""Column-parallel and row-parallel linear layers, sharded over the tensor axis.

Models build their projections from these; a `LinearMethod` stores the weights and multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import CheckpointShard
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.norm import RMSNorm
from mizzen.layers.weight_target import WeightTarget

MAX_BATCH_BEFORE_ATTENTION = ((8 << 20, 64), (256 << 20, 48))
"""Pairs (elements, rows): for weights of up to `elements` elements, a projection before attention uses the
small-batch kernels for up to `rows` rows of x. The first pair that fits applies. For more rows or larger
weights, cuBLAS is faster, as measured in whole steps."""
MIN_FUSED_ADD_ROWS = 1024
"""Minimum number of rows of x for which the cuBLAS GEMM itself adds its output to the residual stream. For
fewer rows, a separate addition was measured to be faster (on an H200)."""


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Number of output rows of a linear layer in the checkpoint, and the rows that this rank holds."""

    total: int
    shard: slice

    @classmethod
    def for_heads(cls, heads: int, head_dim: int, shard: slice) -> OutputRows:
        """Return the rows of `heads` heads with `head_dim` rows each; this rank holds the heads `shard`."""
        return cls(heads * head_dim, slice(shard.start * head_dim, shard.stop * head_dim))


class MergedColumnParallelLinear:
    """Several linear layers with the same input, computed in one GEMM; each rank holds a shard of the rows.

    `rows_by_name` maps names in the checkpoint to output rows; the outputs are concatenated in that order.
    """

    def __init__(
        self, build: BuildContext, rows_by_name: dict[str, OutputRows], columns: int, bias: bool
    ) -> None:
        self.shards: dict[str, CheckpointShard] = {}
        self.collectives = build.collectives
        first_row = 0
        for name, rows in rows_by_name.items():
            self.shards[name] = CheckpointShard(
                first_row=first_row, rows=rows.shard, columns=slice(0, columns), shape=(rows.total, columns)
            )
            first_row += rows.shard.stop - rows.shard.start
        self.method = build.make_linear(first_row, columns, bias, build.dtype, build.device)
        if isinstance(self.method, SmallBatchLinear):
            size = first_row * columns
            max_batch = next((rows for weights, rows in MAX_BATCH_BEFORE_ATTENTION if size <= weights), 0)
            self.method.max_batch = min(self.method.max_batch, max_batch)
            self.method.defer_pdl = True

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors under `prefix`."""
        for name, shard in self.shards.items():
            yield from self.method.targets(prefix + name, shard)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [tokens, columns] by the weights; return this rank's outputs [tokens, rows]."""
        return self.method.apply(x)

    def apply_after_norm(
        self, norm: RMSNorm, x: torch.Tensor | None, residual: torch.Tensor, *, swiglu: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, normalise the sum, and multiply it by the weights.

        Args:
            norm: Norm between the residual stream and this layer.
            x: Output [tokens, columns] of the previous block on this rank, whose sum over ranks is added to
                the residual stream. None if the stream already contains it.
            residual: Residual stream [tokens, columns]; may be updated in place.
            swiglu: Whether this layer's outputs are gate and up; then silu(gate) * up is returned.

        Returns:
            This rank's outputs [tokens, rows], or [tokens, rows / 2] with `swiglu`, and the residual stream
            with `x` added.
        """
        method = self.method
        if x is not None and self.collectives.size > 1:
            inputs = self.collectives.all_reduce_add_norm(x, residual, norm.weight, norm.epsilon)
            if inputs is not None:
                return self.apply(inputs, swiglu), residual
            x = self.collectives.all_reduce(x)
        if isinstance(method, SmallBatchLinear):
            fused = method.apply_after_norm(norm, x, residual, swiglu)
            if fused is not None:
                return fused
        inputs = norm(residual) if x is None else norm.add(x, residual)
        return self.apply(inputs, swiglu), residual

    def apply(self, inputs: torch.Tensor, swiglu: bool) -> torch.Tensor:
        """Multiply `inputs` [tokens, columns] without a norm; with `swiglu`, return silu(gate) * up."""
        method = self.method
        if not swiglu:
            return method.apply(inputs)
        if isinstance(method, SmallBatchLinear):
            return method.apply_swiglu(inputs)
        gate, up = method.apply(inputs).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Query, key and value projections of attention in one GEMM, sharded by heads.

    If there are fewer KV heads than ranks, several ranks hold the same KV head.
    """

    def __init__(
        self, build: BuildContext, hidden: int, heads: int, kv_heads: int, head_dim: int, bias: bool
    ) -> None:
        tensor = build.mesh.tensor
        q_shard = tensor.shard(heads, "num_attention_heads")
        kv_shard = tensor.replicated_shard(kv_heads, "num_key_value_heads")
        self.heads, self.kv_heads = q_shard.stop - q_shard.start, kv_shard.stop - kv_shard.start
        kv_rows = OutputRows.for_heads(kv_heads, head_dim, kv_shard)
        rows_by_name = {
            "q_proj": OutputRows.for_heads(heads, head_dim, q_shard),
            "k_proj": kv_rows,
            "v_proj": kv_rows,
        }
        super().__init__(build, rows_by_name, hidden, bias)


class RowParallelLinear:
    """A linear layer sharded by input columns; its input comes from column-parallel layers."""

    def __init__(self, build: BuildContext, name: str, rows: int, columns: int, bias: bool) -> None:
        shard = build.mesh.tensor.shard(columns, f"input columns of {name}")
        self.name = name
        self.checkpoint_shard = CheckpointShard(
            first_row=0, rows=slice(0, rows), columns=shard, shape=(rows, columns)
        )
        # The sum over ranks must contain the bias once: rank 0 adds it.
        adds_bias = bias and build.collectives.rank == 0
        self.skips_bias = bias and not adds_bias
        self.method = build.make_linear(rows, shard.stop - shard.start, adds_bias, build.dtype, build.device)
        self.empty = build.allocate(0)
        method, fusible = self.method, build.fused and build.collectives.size == 1 and not bias
        # Exactly these classes: a subclass may compute more than a product with `weight`.
        self.fused_add_method = (
            method if fusible and type(method) in (UnquantizedLinear, SmallBatchLinear) else None
        )
        """The layer's linear method if its GEMM can add the output to the residual stream; otherwise None."""

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors under `prefix`."""
        yield from self.method.targets(prefix + self.name, self.checkpoint_shard)
        if self.skips_bias:
            rows = self.checkpoint_shard.shape[0]
            yield WeightTarget(
                name=f"{prefix}{self.name}.bias",
                shape=(rows,),
                shard=(slice(0, 0),),
                destination=self.empty,
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [tokens, columns of this rank] by the weights; return a partial sum [tokens, rows]."""
        return self.method.apply(x)

    def add_to_residual(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Multiply x [tokens, columns of this rank]; return the partial sum, or add it to `residual`.

        Returns:
            This rank's partial sum [tokens, rows]; the caller must sum it over ranks and add the sum to
            `residual` [tokens, rows]. None if the GEMM has already added its output to `residual` in place,
            which it may do for large batches.
        """
        if self.fused_add_method is None or len(x) < MIN_FUSED_ADD_ROWS:
            return self.method.apply(x)
        torch.addmm(residual, x, self.fused_add_method.weight.t(), out=residual)
        return None
