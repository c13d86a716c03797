# SPDX-License-Identifier: Apache-2.0
"""The fragment layout: quantized weights in the order in which the registers of an MMA hold them.

Rows are padded to strips of 64, and columns to a multiple of 64. In a strip, warp w of four holds rows 16w
to 16w + 15, and lane l of a warp holds, for every 16 columns (a k-step), the four registers of the A fragment
of mma.m16n8k16, which equals that of wgmma's m64k16. Register 0 holds row l / 4 and columns
2(l % 4) + {0, 1}, register 1 the row 8 below, and registers 2 and 3 the columns 8 to the right. A lane loads
16 bytes at once:

- 4 bits: 64 columns, one word for each k-step. Nibble i of a word (0 to 3, from the low bits) is the low
  element of register i, and nibble i + 4 the high element.
- 8 bits: 32 columns, two words for each k-step. The bytes of the first word, from the low bits, are the low
  elements of registers 0 and 1 and then their high elements; the second word holds registers 2 and 3 alike.

Values are [strips, columns / 64 or columns / 32, 4 warps, 32 lanes, 16 bytes], so a strip is contiguous.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from mizzen.layers.quantized.canonical import IMPLIED_ZEROS, Codes, QuantizedWeight

STRIP_ROWS = 64
"""Rows of a strip; numbers of rows are padded to a multiple."""
OCTET_ROWS = 8
"""Rows that lie 8 apart in the fragments of one lane; SwiGLU layers alternate gate and up by octets."""
COLUMN_MULTIPLE = 64
"""Numbers of columns are padded to a multiple of this."""
UINT8_OFFSET = 128
"""Number subtracted from unsigned codes of 8 bits and their zero points, which are packed as INT8."""
TEMPORARY_ELEMENTS = 32 << 20
"""Number of weights that are packed or unpacked at a time, which bounds temporary memory."""


class ScaleLayout(enum.StrEnum):
    """Arrangement of the scales of a packed weight."""

    ROW = "row"
    """One scale for each row, which a kernel applies to finished sums: float32 [strips * 64]."""
    OCTET = "octet"
    """One scale for 8 packed rows and a group of columns: float32 [strips, groups, 8]."""
    GROUP = "group"
    """One scale for each row and group of columns, in the checkpoint's dtype: [strips, groups, 64].

    The scale of row r of the strip is at (r % 8) * 8 + r / 8, so those of one lane are contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Weight of a linear layer in the fragment layout: w = (q - z) * s, as in `QuantizedWeight`."""

    codes: Codes
    """Type of the packed values: E4M3, INT8 or UINT4. UINT8 is packed as INT8."""
    rows: int
    """Output rows without padding; with `swiglu`, those of gate and up together."""
    columns: int
    """Columns without padding."""
    group_columns: int
    """Columns that share a scale; `columns` if all do."""
    values: torch.Tensor
    """q: uint8 [strips, chunks, 4, 32, 16]; a chunk is 64 columns (4 bits) or 32 columns (8 bits).

    In padding columns, q is the code nearest to the zero point; in padding rows, the scale is 0. Kernels must
    set padding columns of x to 0."""
    scales: torch.Tensor
    """s, arranged by `scale_layout`."""
    scale_layout: ScaleLayout
    zeros: torch.Tensor | None
    """z: uint8 (UINT4) or int8 (INT8) [strips, groups, 64], in the order of `ScaleLayout.GROUP`.

    None if all are `implied_zero`."""
    swiglu: bool
    """Whether 8 gate rows alternate with their 8 up rows; without it, rows are in the order of the layer."""
    order: torch.Tensor | None
    """Input column that each column multiplies (int32 [columns]); None if they are the same."""

    @property
    def strips(self) -> int:
        """Number of strips of 64 rows."""
        return len(self.values)

    @property
    def padded_columns(self) -> int:
        """Number of columns with padding."""
        return self.values.shape[1] * chunk_columns(self.codes)

    @property
    def groups(self) -> int:
        """Number of groups of columns that have their own scales."""
        return -(-self.columns // self.group_columns)

    @property
    def implied_zero(self) -> int:
        """Zero point of a weight without `zeros`."""
        return IMPLIED_ZEROS[self.codes]


def chunk_columns(codes: Codes) -> int:
    """Return the number of columns whose fragments a lane loads at once, in 16 bytes."""
    return 64 if codes is Codes.UINT4 else 32


def find_source_rows(rows: int, *, swiglu: bool) -> torch.Tensor:
    """Return the row of the layer that each packed row holds, int64 [strips * 64]; -1 for padding rows."""
    if not swiglu:
        packed = torch.arange(-(-rows // STRIP_ROWS) * STRIP_ROWS)
        return torch.where(packed < rows, packed, -1)
    half = rows // 2
    packed = torch.arange(-(-half * 2 // STRIP_ROWS) * STRIP_ROWS)
    pair = packed // (2 * OCTET_ROWS) * OCTET_ROWS + packed % OCTET_ROWS
    return torch.where(pair < half, pair + packed // OCTET_ROWS % 2 * half, -1)


def pack_weight(weight: QuantizedWeight, *, swiglu: bool = False) -> PackedWeight:
    """Return a weight in the fragment layout, on the same device.

    Args:
        weight: Weight in canonical form.
        swiglu: Whether the rows are gate rows followed by as many up rows, which are to alternate.

    Raises:
        ValueError: `swiglu` is set and the number of rows is odd.
    """
    if swiglu and weight.rows % 2:
        raise ValueError(f"gate and up need an even number of rows; the weight has {weight.rows}")
    source = find_source_rows(weight.rows, swiglu=swiglu).to(weight.values.device)
    layout, scales = _pack_scales(weight, source)
    packed_as = Codes.INT8 if weight.codes is Codes.UINT8 else weight.codes
    zeros = None
    if weight.zeros is not None:
        zeros = _gather_groups(weight.zeros, source, weight.row_step, IMPLIED_ZEROS[weight.codes])
        if weight.codes is Codes.UINT8:
            zeros = (zeros ^ UINT8_OFFSET).view(torch.int8)
    return PackedWeight(
        codes=packed_as,
        rows=weight.rows,
        columns=weight.columns,
        group_columns=weight.column_step,
        values=_pack_values(weight, source),
        scales=scales,
        scale_layout=layout,
        zeros=zeros,
        swiglu=swiglu,
        order=weight.order,
    )


def unpack_weight(packed: PackedWeight) -> torch.Tensor:
    """Return w as float32 [rows, columns] with the rows in the order of the layer.

    It equals `QuantizedWeight.dequantize` of the weight that was packed, bit for bit.
    """
    source = find_source_rows(packed.rows, swiglu=packed.swiglu).to(packed.values.device)
    groups = torch.arange(packed.columns, device=source.device) // packed.group_columns
    scales = expand_scales(packed)
    zeros = None if packed.zeros is None else _rows_of_groups(packed.zeros)
    out = torch.empty((packed.rows, packed.columns), device=source.device)
    step = _strips_at_a_time(packed.padded_columns)
    for first in range(0, packed.strips, step):
        rows = slice(first * STRIP_ROWS, min(first + step, packed.strips) * STRIP_ROWS)
        q = _unpack_values(packed, first, step)[:, : packed.columns]
        q = q - (packed.implied_zero if zeros is None else zeros[rows][:, groups].float())
        w = q * scales[rows][:, groups]
        valid = source[rows] >= 0
        out[source[rows][valid]] = w[valid]
    return out


def expand_scales(packed: PackedWeight) -> torch.Tensor:
    """Return the scale of every packed row and group, float32 [strips * 64, groups]."""
    if packed.scale_layout is ScaleLayout.ROW:
        return packed.scales[:, None]
    if packed.scale_layout is ScaleLayout.OCTET:
        return packed.scales.transpose(1, 2).repeat_interleave(OCTET_ROWS, 1).flatten(0, 1)
    return _rows_of_groups(packed.scales).float()


def _strips_at_a_time(columns: int) -> int:
    return max(1, TEMPORARY_ELEMENTS // (STRIP_ROWS * columns))


def _pack_scales(weight: QuantizedWeight, source: torch.Tensor) -> tuple[ScaleLayout, torch.Tensor]:
    """Return the layout that suits the scales of a weight, and the scales in it."""
    if weight.scales.shape[1] == 1:
        scales = weight.scales[(source.clamp(min=0) // weight.row_step), 0].float()
        return ScaleLayout.ROW, scales.masked_fill_(source < 0, 0)
    octets = source.view(-1, OCTET_ROWS)
    which = octets.clamp(min=0) // weight.row_step
    # Padding rows come last in an octet, so its first row is padding only if all are.
    shared = ((which == which[:, :1]) | (octets < 0)).all()
    if weight.row_step == 1 or not shared:
        return ScaleLayout.GROUP, _gather_groups(weight.scales, source, weight.row_step, 0)
    scales = weight.scales[which[:, 0]].float().masked_fill_(octets[:, :1] < 0, 0)
    strips = scales.view(-1, STRIP_ROWS // OCTET_ROWS, scales.shape[1])
    return ScaleLayout.OCTET, strips.transpose(1, 2).contiguous()


def _gather_groups(table: torch.Tensor, source: torch.Tensor, row_step: int, padding: int) -> torch.Tensor:
    """Return a table [ceil(rows / row_step), groups] as [strips, groups, 64] in `ScaleLayout.GROUP`'s order.

    `padding` is the value for padding rows.
    """
    rows = table[source.clamp(min=0) // row_step].masked_fill_(source[:, None] < 0, padding)
    octets = rows.view(-1, STRIP_ROWS // OCTET_ROWS, OCTET_ROWS, table.shape[1])
    return octets.permute(0, 3, 2, 1).reshape(len(octets), table.shape[1], STRIP_ROWS)


def _rows_of_groups(table: torch.Tensor) -> torch.Tensor:
    """Return a table [strips, groups, 64] in `ScaleLayout.GROUP`'s order as [strips * 64, groups]."""
    strips, groups, _ = table.shape
    octets = table.view(strips, groups, OCTET_ROWS, STRIP_ROWS // OCTET_ROWS)
    return octets.permute(0, 3, 2, 1).reshape(strips * STRIP_ROWS, groups)


def _pack_values(weight: QuantizedWeight, source: torch.Tensor) -> torch.Tensor:
    columns = -(-weight.columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    strips, chunks = len(source) // STRIP_ROWS, columns // chunk_columns(weight.codes)
    out = torch.empty((strips, chunks, 4, 32, 16), dtype=torch.uint8, device=source.device)
    stored, step = weight.values.view(torch.uint8), _strips_at_a_time(columns)
    for first in range(0, strips, step):
        some = source[first * STRIP_ROWS : (first + step) * STRIP_ROWS]
        q = stored[some.clamp(min=0)]
        if weight.codes is Codes.UINT4:
            q = torch.stack((q & 15, q >> 4), dim=-1).flatten(1)
        padding = torch.full_like(q[:, :1], IMPLIED_ZEROS[weight.codes])
        if weight.zeros is not None:
            padding = weight.zeros[some.clamp(min=0) // weight.row_step, -1:]
            if weight.codes is Codes.UINT4:
                padding = padding.clamp(max=15)
        q = torch.cat((q, padding.expand(-1, columns - weight.columns)), dim=1)
        if weight.codes is Codes.UINT8:
            q = q ^ UINT8_OFFSET
        out[first : first + step] = _order_codes(q, weight.codes)
    return out


def _order_codes(q: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Return codes, uint8 [rows, columns], as [strips, chunks, 4, 32, 16]."""
    chunk = chunk_columns(codes)
    # Rows: strip, warp, octet, lane / 4; columns: chunk, k-step, octet, lane % 4, element of the register.
    parts = q.view(-1, 4, 2, 8, q.shape[1] // chunk, chunk // 16, 2, 4, 2)
    shape = (len(parts), q.shape[1] // chunk, 4, 32, 16)
    if codes is not Codes.UINT4:
        return parts.permute(0, 4, 1, 3, 7, 5, 6, 8, 2).reshape(shape)
    pairs = parts.permute(0, 4, 1, 3, 7, 5, 8, 6, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).reshape(shape)


def _unpack_values(packed: PackedWeight, first: int, count: int) -> torch.Tensor:
    """Return q of up to `count` strips as float32 [packed rows, padded columns]."""
    values = packed.values[first : first + count]
    strips, chunks = values.shape[:2]
    if packed.codes is Codes.UINT4:
        pairs = torch.stack((values & 15, values >> 4), dim=-1)
        parts = pairs.view(strips, chunks, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    else:
        dtype = torch.float8_e4m3fn if packed.codes is Codes.E4M3 else torch.int8
        parts = (
            values.view(dtype).view(strips, chunks, 4, 8, 4, 2, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 6, 4, 7)
        )
    return parts.float().reshape(strips * STRIP_ROWS, packed.padded_columns)
