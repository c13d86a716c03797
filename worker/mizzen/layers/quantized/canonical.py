# SPDX-License-Identifier: Apache-2.0
"""The canonical form of quantized weights: the form between checkpoints and kernels.

Loading turns the tensors of every checkpoint format into this form, layer by layer; kernels take their own
layouts from it.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch

from mizzen.quantization.schemes import Activations


class Codes(enum.StrEnum):
    """Type of the stored values q of a weight."""

    E4M3 = "e4m3"
    """FP8 E4M3 (float8_e4m3fn) without NaN."""
    INT8 = "int8"
    """Signed integers of 8 bits."""
    UINT8 = "uint8"
    """Unsigned integers of 8 bits, with a zero point of 128 or of their own."""
    UINT4 = "uint4"
    """Unsigned integers of 4 bits, two to a byte, with a zero point of 8 or of their own."""
    E2M1 = "e2m1"
    """4-bit floats, two to a byte: the index of a value in `E2M1_VALUES`, and the sign above it."""


FORMATS = {
    Codes.E4M3: "fp8",
    Codes.INT8: "int8",
    Codes.UINT8: "int8",
    Codes.UINT4: "int4",
    Codes.E2M1: "mxfp4",
}
"""Names of formats of weights in metrics."""
IMPLIED_ZEROS = {Codes.E4M3: 0, Codes.INT8: 0, Codes.UINT8: 128, Codes.UINT4: 8, Codes.E2M1: 0}
"""Zero point of weights that have no tensor of zero points."""
TWO_PER_BYTE = (Codes.UINT4, Codes.E2M1)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of E2M1 by the low three bits of the code."""


@dataclass(slots=True, kw_only=True)
class QuantizedWeight:
    """Weight of a merged linear layer on one rank: w[r, c] = (q[r, c] - z[r', c']) * s[r', c'].

    Row r and column c use the scale and zero point at r' = r // row_step and c' = c // column_step. The last
    step of the rows or of the columns may be incomplete.
    """

    codes: Codes
    values: torch.Tensor
    """q: float8_e4m3fn, int8 or uint8 [rows, columns]; `UINT4` and `E2M1`: uint8 [rows, columns / 2], with
    the even column of each pair in the low four bits."""
    scales: torch.Tensor
    """s: float32, bfloat16 or float16 [ceil(rows / row_step), ceil(columns / column_step)], or the exponents
    of E8M0, uint8 of the same shape, as `decode_exponents` takes them."""
    row_step: int = 1
    """Rows that share a scale."""
    column_step: int
    """Columns that share a scale; the number of columns if all do."""
    zeros: torch.Tensor | None = None
    """z: uint8, of the shape of the scales; None if all are the zero point that the codes imply."""
    order: torch.Tensor | None = None
    """Input column that each column of the weight multiplies (int32 [columns]), if they differ: columns of
    weights in activation order are sorted by group. Columns that only fill a group have q = z."""
    activations: Activations | None = None
    """Quantization of the inputs that the checkpoint asks for; None for weights alone."""
    input_scale: float = 0.0
    """Scale of the inputs if it is static; otherwise 0."""

    @property
    def rows(self) -> int:
        """Number of output rows."""
        return len(self.values)

    @property
    def columns(self) -> int:
        """Number of columns, including columns that only fill a group."""
        return self.values.shape[1] * (2 if self.codes in TWO_PER_BYTE else 1)

    @property
    def format(self) -> str:
        """Name of the format of the codes in metrics."""
        return FORMATS[self.codes]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.values, self.scales, self.zeros, self.order)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    def unpack(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return q of some rows as float32 [rows, columns]."""
        values = self.values[rows]
        if self.codes in TWO_PER_BYTE:
            values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
        if self.codes is Codes.E2M1:
            return e2m1_table(values.device)[values.int()]
        return values.float()

    def dequantize(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return w of some rows as float32 [rows, columns], in the order of the stored columns."""
        first, stop, _ = rows.indices(self.rows)
        which = torch.arange(first, stop, device=self.scales.device) // self.row_step
        weight = self.unpack(rows)
        steps = weight[:, None]
        if self.columns % self.column_step == 0:
            steps = weight.unflatten(1, (-1, self.column_step))
        if self.zeros is not None:
            steps.sub_(self._repeat_columns(self.zeros[which].float(), steps))
        elif zero := IMPLIED_ZEROS[self.codes]:
            weight.sub_(zero)
        steps.mul_(self._repeat_columns(decode_scales(self.scales[which]), steps))
        return weight

    def _repeat_columns(self, values: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return values [rows, column steps] so that they broadcast with columns [rows, steps, columns]."""
        if values.shape[1] == steps.shape[1]:
            return values[:, :, None]
        return values[:, :, None].expand(-1, -1, self.column_step).flatten(1)[:, None, : self.columns]


@functools.cache
def e2m1_table(device: torch.device) -> torch.Tensor:
    """Return the value of each code of E2M1, float32 [16].

    The first call copies from the host, which the capture of a CUDA graph forbids; warm-up steps make it.
    """
    return torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=device)


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float32."""
    return decode_exponents(scales) if scales.dtype == torch.uint8 else scales.float()


def decode_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (e - 127) in float32 for exponents e of E8M0 from 0 to 254, uint8; it is exact."""
    bits = exponents.int() << 23
    return bits.masked_fill_(exponents == 0, 1 << 22).view(torch.float32)  # 2 ** -127 is subnormal


def narrow_scales(scales: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """Return float32 scales in the first of the dtypes that represents all exactly, or else as they are."""
    for dtype in dtypes:
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales
