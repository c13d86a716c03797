# SPDX-License-Identifier: Apache-2.0
"""Quantized weights with unquantized inputs, on a Hopper GPU.

Once loaded, the weight is packed into the fragment layout (`mizzen.kernels.gemm.fragments`), the only copy.
Small batches use kernels that dequantize it in registers: `packed_small` for a few rows of x where it is the
fastest, and `packed_swap_ab` for more. For larger batches, the whole weight is dequantized into a temporary
bfloat16 matrix, which takes a small share of the GEMM's time, and multiplied by the kernels of unquantized
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from mizzen.layers.linear_methods.base import (
    GateActivation,
    InputNorm,
    LinearKind,
    LinearMethod,
    LinearSpec,
)
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.small_batch import (
    fuses,
    prefill_swiglu,
    prepare_norm,
    supports_prefill_swiglu,
)
from mizzen.layers.quantized.canonical import Codes
from mizzen.models.block import Activation
from mizzen.quantization.schemes import WeightScheme

if TYPE_CHECKING:
    from mizzen.kernels.gemm.fragments import PackedWeight
    from mizzen.kernels.nvrtc import KernelSpec

MAX_PREFETCHED_BYTES = 16 << 20
"""Most bytes of the next weight that `packed_small` loads into the L2 cache, which holds 50 MB on an H100.

For 8 tokens of Qwen3-8B in 4 bits, this saved 3.7 us of 75.3 us a layer; for one token it saved nothing.
"""
MAX_DEQUANTIZED_BYTES = 256 << 20
"""Bytes of a weight in bfloat16 that are dequantized at a time for large batches."""


class PackedLinear(DequantizedLinear):
    """Quantized weights in the fragment layout; a weight that the kernels do not support stays unpacked."""

    def __init__(self, spec: LinearSpec, scheme: WeightScheme) -> None:
        super().__init__(spec, scheme)
        self.packed: PackedWeight | None = None
        self.next: PackedLinear | None = None
        """Method that multiplies next."""
        self.max_small_batch = 0
        """Largest number of rows of x for `packed_small`."""
        self.max_batch = 0
        """Largest number of rows of x for `packed_swap_ab`."""
        self.fuses_norm = False
        """Whether `packed_small` can normalise a single row of x."""
        self.defer_pdl = spec.kind is LinearKind.COLUMN
        self.supports_prefill_swiglu = False
        self.fuses_prefill_swiglu = False
        """Whether large batches use the fused gate-up SwiGLU kernel wherever it is faster."""

    def finish(self) -> None:
        """Convert the stored tensors, and pack the weight if the kernels support it.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        super().finish()
        from mizzen.kernels.gemm.fragments import pack_weight

        packed = pack_weight(self.weight, swiglu=self.spec.swiglu and self.bias is None)
        if supports_packed(packed):
            self._keep(packed)
            self.supports_prefill_swiglu = supports_fused_prefill(packed)
            self.fuses_prefill_swiglu = self.supports_prefill_swiglu
            self.release_weight()

    def set_next(self, method: LinearMethod) -> None:
        """Name the method that multiplies next; see `LinearMethod.set_next`."""
        self.next = method if isinstance(method, PackedLinear) else None

    def _next_weight(self, count: int) -> torch.Tensor | None:
        """Return the bytes of the next weight to load into the L2 cache during a product of `count` rows."""
        following = None if self.next is None else self.next.packed
        if following is None or following.codes is not Codes.UINT4 or count == 1:
            return None
        return following.values.view(-1)[:MAX_PREFETCHED_BYTES]

    def scale_rows(self, rows: slice, factor: float, *, bias: bool = True) -> None:
        """Multiply the scales of output rows, and with `bias` their biases too, by a power of two."""
        if self.packed is None:
            super().scale_rows(rows, factor, bias=bias)
            return
        from mizzen.kernels.gemm.packed_rows import scale_packed_rows

        self._keep(scale_packed_rows(self.packed, rows, factor))
        if bias and self.bias is not None:
            self.bias[rows].mul_(factor)

    def _keep(self, packed: PackedWeight) -> None:
        """Keep a packed weight, and determine which batches the kernels on it multiply."""
        from mizzen.kernels.gemm import packed_small, packed_swap_ab

        self.packed = packed
        self.max_small_batch = packed_small.max_batch(packed)
        self.max_batch = packed_swap_ab.max_batch(packed)
        from_norm = self.spec.kind is LinearKind.COLUMN and self.max_small_batch > 0
        self.fuses_norm = from_norm and packed_small.supports_norm(packed)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` if given."""
        packed = self.packed
        if packed is None:
            return super().apply(x, out)
        x = order_columns(packed, x)
        if packed.swiglu or len(x) > self.max_batch:
            return self._apply_dequantized(packed, x, out)
        target = out if out is not None and out.is_contiguous() else None
        product = self._multiply_packed(packed, x, target)
        if self.bias is not None:
            product.add_(self.bias)
        return product if out is None or out is target else out.copy_(product)

    def apply_glu(self, x: torch.Tensor, activation: GateActivation) -> torch.Tensor:
        """Multiply x [tokens, columns] by gate and up; return activation(gate) * up, [tokens, rows / 2]."""
        packed, swiglu = self.packed, activation.kind is Activation.SILU
        if packed is None or not (swiglu and packed.swiglu):
            return super().apply_glu(x, activation)
        x = order_columns(packed, x)
        if len(x) <= self.max_batch:
            return self._multiply_packed(packed, x, None, swiglu=True)
        if self.fuses_prefill_swiglu:
            _, weight = next(dequantized_tiles(packed))
            product = prefill_swiglu(weight, x)
            return activation.gate(torch.mm(x, weight.t())) if product is None else product
        return activation.gate(self._apply_dequantized(packed, x, None))

    def apply_after_norm(
        self,
        norm: InputNorm,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        activation: GateActivation | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Add x to the residual stream, normalise the sum and multiply by the weights, all in one kernel.

        Only a single token has such a kernel; see `LinearMethod.apply_after_norm`.
        """
        packed, swiglu = self.packed, activation is not None
        if packed is None or not self.fuses_norm or len(residual) != 1 or packed.swiglu != swiglu:
            return None
        if not fuses(norm, activation):
            return None
        from mizzen.kernels.gemm.packed_small import packed_small_gemm

        row, pre_norm, new_residual = prepare_norm(norm, x, residual)
        row = row.contiguous()
        out = packed_small_gemm(packed, row, swiglu=swiglu, norm=pre_norm, new_residual=new_residual)
        if self.bias is not None:
            out.add_(self.bias)
        return out, residual if new_residual is None else new_residual

    def _multiply_packed(
        self, packed: PackedWeight, x: torch.Tensor, out: torch.Tensor | None, *, swiglu: bool = False
    ) -> torch.Tensor:
        """Multiply a small batch x without the bias; return [tokens, rows], or with SwiGLU half the rows."""
        from mizzen.kernels.gemm import packed_small, packed_swap_ab

        if len(x) <= self.max_small_batch:
            following = self._next_weight(len(x))
            return packed_small.packed_small_gemm(packed, x, out, swiglu=swiglu, next_weight=following)
        defer_pdl = self.defer_pdl and not swiglu
        return packed_swap_ab.packed_swap_ab_gemm(packed, x, out, swiglu=swiglu, defer_pdl=defer_pdl)

    def _apply_dequantized(
        self, packed: PackedWeight, x: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply x, whose columns are in the weight's order, by the dequantized weight."""
        if out is None:
            out = x.new_empty(len(x), packed.rows)
        for parts, tile in dequantized_tiles(packed):
            first = 0
            for rows in parts:
                weight = tile[first : first + rows.stop - rows.start].t()
                first += rows.stop - rows.start
                if self.bias is None:
                    torch.mm(x, weight, out=out[:, rows])
                else:
                    torch.addmm(self.bias[rows], x, weight, out=out[:, rows])
        return out

    def add_to_residual(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        """Multiply a large batch x [tokens, columns], and add the product to `residual` in place."""
        packed = self.packed
        if packed is None or self.bias is not None or packed.swiglu or len(x) <= self.max_batch:
            return False
        x = order_columns(packed, x)
        for (rows,), tile in dequantized_tiles(packed):
            part = residual[:, rows]
            torch.addmm(part, x, tile.t(), out=part)
        return True

    def kernel_specs(
        self, batch_sizes: Iterable[int], *, activation: GateActivation | None = None
    ) -> set[KernelSpec]:
        """Return the specs of the kernels for all batch sizes.

        Eager steps may have sizes between or beyond those of graphs, which `batch_sizes` lists.
        """
        packed = self.packed
        if packed is None:
            return set()
        from mizzen.kernels.gemm import gate_up_swiglu, packed_small, packed_swap_ab
        from mizzen.kernels.quantization import dequantize_packed

        sizes = {*batch_sizes, *range(1, self.max_small_batch + 1), *range(16, self.max_batch + 1, 16)}
        small = {size for size in sizes if size <= self.max_small_batch}
        swap = {size for size in sizes if self.max_small_batch < size <= self.max_batch}
        defer_pdl = self.defer_pdl and not packed.swiglu
        specs = packed_small.kernel_specs(packed, small, norm=self.fuses_norm)
        specs |= packed_swap_ab.kernel_specs(packed, swap, defer_pdl=defer_pdl)
        specs.add(dequantize_packed.kernel_spec(packed))
        if self.fuses_prefill_swiglu:
            specs.add(gate_up_swiglu.kernel_spec())
        return specs

    def set_prefill_fusion(self, enabled: bool) -> None:
        """Allow or forbid the fused gate-up SwiGLU kernel of large batches."""
        self.fuses_prefill_swiglu = enabled and self.supports_prefill_swiglu


def supports_packed(packed: PackedWeight) -> bool:
    """Return whether the kernels support a packed weight; `packed_small` is optional."""
    from mizzen.kernels.gemm import packed_swap_ab
    from mizzen.kernels.quantization import dequantize_packed

    return packed_swap_ab.supports(packed) and dequantize_packed.supports(packed)


def supports_fused_prefill(packed: PackedWeight) -> bool:
    """Return whether large batches can use the fused gate-up SwiGLU kernel on the dequantized weight."""
    if not packed.swiglu or packed.rows * packed.columns * 2 > MAX_DEQUANTIZED_BYTES:
        return False
    element = torch.empty((1, 1), dtype=torch.bfloat16, device=packed.values.device)
    return supports_prefill_swiglu(element.expand(packed.rows, packed.columns))


def order_columns(packed: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, columns], contiguous, with its columns in the order of the weight's columns."""
    if packed.order is None:
        return x.contiguous()
    from mizzen.kernels.quantization.gather import gather_columns

    return gather_columns(x, packed.order)


def dequantized_tiles(packed: PackedWeight) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Dequantize a weight into a temporary matrix of at most `MAX_DEQUANTIZED_BYTES`, part by part.

    Yields:
        The output rows of the part, and their weights, bfloat16 [rows, columns]: with SwiGLU rows of the gate
        and then of up. The next part overwrites the weights.
    """
    from mizzen.kernels.gemm.fragments import STRIP_ROWS
    from mizzen.kernels.quantization.dequantize_packed import dequantize_packed, rows_of_strips

    step = max(1, MAX_DEQUANTIZED_BYTES // (2 * STRIP_ROWS * packed.columns))
    size = rows_of_strips(packed, 0, min(step, packed.strips))
    buffer = torch.empty((size, packed.columns), dtype=torch.bfloat16, device=packed.values.device)
    for first in range(0, packed.strips, step):
        stop = min(first + step, packed.strips)
        tile = buffer[: rows_of_strips(packed, first, stop)]
        dequantize_packed(packed, tile, first, stop)
        start = first * STRIP_ROWS
        if not packed.swiglu:
            yield (slice(start, start + len(tile)),), tile
            continue
        gate = slice(start // 2, start // 2 + len(tile) // 2)
        half = packed.rows // 2
        yield (gate, slice(gate.start + half, gate.stop + half)), tile
