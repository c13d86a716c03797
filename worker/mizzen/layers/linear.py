# SPDX-License-Identifier: Apache-2.0
"""Column-parallel and row-parallel linear layers, sharded over the tensor axis.

Models build their projections from these; a `LinearMethod` stores the weights and multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.base import (
    ElementwiseActivation,
    GateActivation,
    InputNorm,
    LinearKind,
    LinearPart,
)
from mizzen.layers.weight_target import WeightTarget
from mizzen.parallel.collectives import Collectives

MIN_FUSED_ADD_ROWS = 1024
"""Minimum number of rows of x for which the GEMM itself may add its output to the residual stream. For fewer
rows, a separate addition was measured to be faster (on an H200)."""


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Output rows of one linear layer, and the part of them that this rank holds.

    Layers whose rows lie in one checkpoint tensor have the same name; `offset` and `total` then give the
    place of their rows in it.
    """

    name: str
    """Full name of the checkpoint's tensor, without `.weight`."""
    shard: slice
    """Rows of the linear layer that this rank holds."""
    total: int
    """Number of rows of the checkpoint's tensor."""
    offset: int = 0
    """Row of the checkpoint's tensor at which the linear layer starts."""


def name_rows(names: Sequence[str], totals: Sequence[int], shards: Sequence[slice]) -> list[OutputRows]:
    """Return the rows of linear layers with the same input; layers with equal names share one tensor.

    Args:
        names: Full name of each layer's tensor.
        totals: Number of rows of each layer.
        shards: Rows of each layer that this rank holds.
    """
    sizes, ends = dict.fromkeys(names, 0), []
    for name, total in zip(names, totals, strict=True):
        ends.append(sizes[name])
        sizes[name] += total
    return [
        OutputRows(name, shard, sizes[name], offset)
        for name, shard, offset in zip(names, shards, ends, strict=True)
    ]


class MergedColumnParallelLinear:
    """Several linear layers with the same input, computed in one GEMM; each rank holds a shard of the rows.

    The outputs are concatenated in the order of `layers`. With `swiglu`, they are the gate and up of a SwiGLU
    block.
    """

    def __init__(
        self,
        build: BuildContext,
        layers: Sequence[OutputRows],
        columns: int,
        bias: bool,
        *,
        swiglu: bool = False,
    ) -> None:
        self.collectives = build.collectives
        parts, first_row = [], 0
        for layer in layers:
            rows = slice(layer.offset + layer.shard.start, layer.offset + layer.shard.stop)
            parts.append(
                LinearPart(
                    name=layer.name,
                    first_row=first_row,
                    rows=rows,
                    columns=slice(0, columns),
                    shape=(layer.total, columns),
                )
            )
            first_row += rows.stop - rows.start
        self.method = build.linear(
            LinearKind.COLUMN, tuple(parts), rows=first_row, columns=columns, bias=bias, swiglu=swiglu
        )

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.method.targets()

    def __call__(self, x: torch.Tensor, activation: GateActivation | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns] by the weights; return this rank's outputs [tokens, rows].

        With the `activation` of a block with a gate, return activation(gate) * up, [tokens, rows / 2].
        """
        return self.method.apply(x) if activation is None else self.method.apply_glu(x, activation)

    def apply_activation(self, x: torch.Tensor, activation: ElementwiseActivation) -> torch.Tensor:
        """Multiply x [tokens, columns]; return activation(this rank's outputs), [tokens, rows]."""
        return self.method.apply_activation(x, activation)

    def apply_after_norm(
        self,
        norm: InputNorm,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        activation: GateActivation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, normalise the sum, and multiply it by the weights.

        Args:
            norm: Norm between the residual stream and this layer.
            x: Output [tokens, columns] of the previous block on this rank, whose sum over ranks is added to
                the residual stream. None if the stream already contains it.
            residual: Residual stream [tokens, columns]; may be updated in place.
            activation: Activation of the gate if this layer's outputs are gate and up; then
                activation(gate) * up is returned.

        Returns:
            This rank's outputs [tokens, rows], or [tokens, rows / 2] with `activation`, and the residual
            stream with `x` added.
        """
        if x is not None and self.collectives.size > 1:
            inputs, x = all_reduce_add_norm(self.collectives, norm, x, residual)
            if inputs is not None:
                return self(inputs, activation), residual
        fused = self.method.apply_after_norm(norm, x, residual, activation)
        if fused is not None:
            return fused
        inputs = norm(residual) if x is None else norm.add(x, residual)
        return self(inputs, activation), residual


def all_reduce_add_norm(
    collectives: Collectives, norm: InputNorm, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sum x [tokens, columns] over ranks, and add the sum to the residual stream if one kernel can do both.

    Returns:
        The normalised residual stream with the sum added, and None; or, if no such kernel is faster, None and
        the sum, which is not added yet.
    """
    if norm.fusible:
        inputs = collectives.all_reduce_add_norm(x, residual, norm.weight, norm.epsilon)
        if inputs is not None:
            return inputs, None
    return None, collectives.all_reduce(x)


class RowParallelLinear:
    """A linear layer sharded by input columns; its input comes from column-parallel layers."""

    def __init__(self, build: BuildContext, name: str, rows: int, columns: int, bias: bool) -> None:
        shard = build.mesh.tensor.shard(columns, f"input columns of {name}")
        self.name = name
        self.rows = rows
        # The sum over ranks must contain the bias once: rank 0 adds it.
        adds_bias = bias and build.collectives.rank == 0
        self.skips_bias = bias and not adds_bias
        part = LinearPart(name=name, first_row=0, rows=slice(0, rows), columns=shard, shape=(rows, columns))
        own_columns = shard.stop - shard.start
        self.method = build.linear(LinearKind.ROW, (part,), rows=rows, columns=own_columns, bias=adds_bias)
        self.empty = build.allocate(0)
        self.has_bias = bias
        self.fuses_add = build.fused and build.collectives.size == 1
        """Whether the GEMM may add its product to the residual stream."""

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.method.targets()
        if self.skips_bias:
            yield WeightTarget(
                name=f"{self.name}.bias", shape=(self.rows,), shard=(slice(0, 0),), destination=self.empty
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
        if not self.has_bias and self.add_without_bias(residual, x):
            return None
        return self.method.apply(x)

    def add_without_bias(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        """Multiply x [tokens, columns], and add the product, without the bias, to `residual` [tokens, rows].

        Returns:
            True if this was done. False if no GEMM can add, or if that is not faster; nothing was done.
        """
        if not self.fuses_add or len(x) < MIN_FUSED_ADD_ROWS:
            return False
        return self.method.add_to_residual(residual, x)
