# SPDX-License-Identifier: Apache-2.0
"""Quantized weights that are dequantized tile by tile for each multiplication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from mizzen.layers.linear_methods.base import LinearMethod, LinearSpec, list_bias_targets
from mizzen.layers.quantized.canonical import QuantizedWeight, narrow_scales
from mizzen.layers.quantized.convert import convert_layer
from mizzen.layers.quantized.rounded_layer import RoundedLayer
from mizzen.layers.quantized.stored_layer import StoredLayer
from mizzen.layers.weight_target import WeightTarget
from mizzen.quantization.schemes import WeightScheme

TILE_ROWS = 512
"""Output rows that are dequantized at a time."""


class DequantizedLinear(LinearMethod):
    """Quantized weights, dequantized in tiles of rows to the model's dtype and multiplied by PyTorch's GEMM.

    Inputs stay unquantized, even if the checkpoint asks for quantized inputs: the result is that of the exact
    weights. This is the only method on CPUs, and the slow but general one on GPUs, where graphs can capture
    it.
    """

    def __init__(self, spec: LinearSpec, scheme: WeightScheme) -> None:
        self.spec = spec
        self._stored: StoredLayer | RoundedLayer | None = (
            RoundedLayer(spec, scheme) if spec.online else StoredLayer(spec, scheme)
        )
        self._weight: QuantizedWeight | None = None
        self._format_bytes: Mapping[str, int] = {}
        self.bias = torch.empty(spec.rows, dtype=spec.dtype, device=spec.device) if spec.bias else None

    @property
    def weight(self) -> QuantizedWeight:
        """The weight in canonical form; the first use after loading converts and frees the stored tensors.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        if self._stored is not None:
            stored = self._stored
            self._weight = stored.take_weight() if isinstance(stored, RoundedLayer) else convert_layer(stored)
            self._stored = None
            self._format_bytes = {self._weight.format: self._weight.size}
        if self._weight is None:
            raise RuntimeError("the weight is no longer in canonical form")
        return self._weight

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the tensors of all parts; nothing once these are converted."""
        if self._stored is None:
            return
        yield from self._stored.targets()
        yield from list_bias_targets(self.spec, self.bias)

    def finish(self) -> None:
        """Convert the stored tensors to the canonical form.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        _ = self.weight

    def release_weight(self) -> None:
        """Free the canonical form; subclasses that keep the weight in another form call this."""
        self._weight = None

    def format_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the weight in canonical form and of the bias, by their formats.

        The result is empty before the weight is loaded.
        """
        if self.bias is None or not self._format_bytes:
            return self._format_bytes
        name = str(self.bias.dtype).removeprefix("torch.")
        return {**self._format_bytes, name: self.bias.numel() * self.bias.element_size()}

    def permute_rows(self, order: torch.Tensor) -> None:
        """Replace output row i by row order[i] (int64 [rows])."""
        weight = self.weight
        repeat_row_scales(weight, 1)
        weight.values = weight.values.view(torch.uint8)[order].view(weight.values.dtype)
        weight.scales = weight.scales[order]
        weight.zeros = None if weight.zeros is None else weight.zeros[order]
        if self.bias is not None:
            self.bias.copy_(self.bias[order])

    def scale_rows(self, rows: slice, factor: float, *, bias: bool = True) -> None:
        """Multiply the scales of output rows, and with `bias` their biases too, by a power of two."""
        weight = self.weight
        start, stop, _ = rows.indices(weight.rows)
        repeat_row_scales(weight, math.gcd(weight.row_step, start, 0 if stop == weight.rows else stop))
        steps = slice(start // weight.row_step, -(-stop // weight.row_step))
        scales = weight.scales.float()
        scales[steps] *= factor
        weight.scales = narrow_scales(scales, weight.scales.dtype)
        if bias and self.bias is not None:
            self.bias[rows].mul_(factor)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` if given."""
        weight = self.weight
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if out is None:
            out = x.new_empty(len(x), weight.rows)
        for first in range(0, weight.rows, TILE_ROWS):
            rows = slice(first, min(first + TILE_ROWS, weight.rows))
            tile = weight.dequantize(rows).to(x.dtype).t()
            if self.bias is None:
                torch.mm(x, tile, out=out[:, rows])
            else:
                torch.addmm(self.bias[rows], x, tile, out=out[:, rows])
        return out


def repeat_row_scales(weight: QuantizedWeight, step: int) -> None:
    """Repeat the scales of a weight so that one stands for `step` rows, a divisor of its step of rows."""
    if step == weight.row_step:
        return
    which = torch.arange(0, weight.rows, step, device=weight.scales.device) // weight.row_step
    weight.scales = weight.scales[which]
    weight.zeros = None if weight.zeros is None else weight.zeros[which]
    weight.row_step = step
