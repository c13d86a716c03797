# SPDX-License-Identifier: Apache-2.0
"""Weights in the fragment layout: positions of elements, padding, and the way back, which is exact."""

from __future__ import annotations

import pytest
import torch

from mizzen.kernels.gemm.fragments import ScaleLayout, expand_scales, pack_weight, unpack_weight
from mizzen.layers.quantized.canonical import Codes
from random_weights import make_weight


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 64), (128, 256), (16, 32), (200, 136), (96, 416)], ids=str
)
@pytest.mark.parametrize(
    ("codes", "row_step", "column_step", "zeros"),
    [
        (Codes.UINT4, 1, 128, True),
        (Codes.UINT4, 1, 64, False),
        (Codes.UINT4, 1, 0, True),
        (Codes.UINT8, 1, 32, True),
        (Codes.UINT8, 1, 0, False),
        (Codes.INT8, 1, 0, False),
        (Codes.INT8, 3, 128, False),
        (Codes.E4M3, 128, 128, False),
        (Codes.E4M3, 32, 128, False),
        (Codes.E4M3, 1000, 0, False),
    ],
)
def test_packed_weights_unpack_to_the_dequantized_weight(
    rows: int, columns: int, codes: Codes, row_step: int, column_step: int, zeros: bool, swiglu: bool
) -> None:
    weight = make_weight(codes, rows, columns, row_step, column_step, zeros=zeros)
    packed = pack_weight(weight, swiglu=swiglu)
    assert (packed.rows, packed.columns) == (rows, columns)
    assert packed.padded_columns % 64 == 0
    assert torch.equal(unpack_weight(packed), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_groups_keep_their_dtype_and_those_of_rows_are_float32(dtype: torch.dtype) -> None:
    weight = make_weight(Codes.UINT4, 64, 256, column_step=128, dtype=dtype)
    packed = pack_weight(weight)
    assert (packed.scale_layout, packed.scales.dtype) == (ScaleLayout.GROUP, dtype)
    weight.scales, weight.column_step = weight.scales[:, :1], 256
    packed = pack_weight(weight)
    assert (packed.scale_layout, packed.scales.dtype) == (ScaleLayout.ROW, torch.float32)
    assert torch.equal(unpack_weight(packed), weight.dequantize())


def test_scales_of_blocks_are_stored_once_for_eight_rows() -> None:
    weight = make_weight(Codes.E4M3, 256, 256, 128, 128)
    plain, swiglu = pack_weight(weight), pack_weight(weight, swiglu=True)
    assert plain.scale_layout is swiglu.scale_layout is ScaleLayout.OCTET
    assert plain.scales.shape == (4, 2, 8)
    assert plain.scales[1, 1].tolist() == [weight.scales[0, 1]] * 8
    assert swiglu.scales[1, 1].tolist() == [weight.scales[0, 1], weight.scales[1, 1]] * 4
    # Blocks whose borders lie inside an octet need a scale for each row.
    assert pack_weight(make_weight(Codes.E4M3, 256, 256, 12, 128)).scale_layout is ScaleLayout.GROUP


def test_words_of_four_bits_hold_a_fragment_each() -> None:
    weight = make_weight(Codes.UINT4, 128, 192, column_step=64)
    q = weight.unpack().int()
    words = pack_weight(weight).values.view(torch.int32)
    for strip, chunk, warp, lane, step in [(0, 0, 0, 0, 0), (1, 2, 3, 31, 3), (1, 1, 2, 9, 1)]:
        word = int(words[strip, chunk, warp, lane, step]) & 0xFFFFFFFF
        row = strip * 64 + warp * 16 + lane // 4
        column = chunk * 64 + step * 16 + lane % 4 * 2
        for register, (down, right) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            pair = (word >> 4 * register) & 0x000F000F
            assert pair & 15 == q[row + down, column + right]
            assert pair >> 16 == q[row + down, column + right + 1]


def test_words_of_eight_bits_hold_half_a_fragment_each() -> None:
    weight = make_weight(Codes.INT8, 128, 96)
    q = weight.unpack().int() & 255
    words = pack_weight(weight).values.view(torch.int32)
    for strip, chunk, warp, lane, word_index in [(0, 0, 0, 0, 0), (1, 2, 3, 31, 3), (0, 1, 2, 9, 1)]:
        word = int(words[strip, chunk, warp, lane, word_index]) & 0xFFFFFFFF
        row = strip * 64 + warp * 16 + lane // 4
        column = chunk * 32 + word_index // 2 * 16 + word_index % 2 * 8 + lane % 4 * 2
        places = [(0, 0), (8, 0), (0, 1), (8, 1)]
        expected = [int(q[row + down, column + right]) for down, right in places]
        assert [word >> 8 * byte & 255 for byte in range(4)] == expected


def test_gate_and_up_rows_alternate_by_eight() -> None:
    weight = make_weight(Codes.INT8, 128, 64)
    weight.scales = torch.arange(128.0)[:, None] + 1
    scales = expand_scales(pack_weight(weight, swiglu=True))[:, 0].tolist()
    assert scales[:16] == [1, 2, 3, 4, 5, 6, 7, 8, 65, 66, 67, 68, 69, 70, 71, 72]
    assert scales[16:24] == [9, 10, 11, 12, 13, 14, 15, 16]


def test_padding_rows_have_scale_zero_and_padding_columns_the_zero_point() -> None:
    weight = make_weight(Codes.UINT8, 24, 72, zeros=True)
    packed = pack_weight(weight)
    assert packed.strips == 1
    assert not packed.scales[24:].any()
    assert packed.zeros is not None
    # Lane 0's second chunk of the second 64 columns lies beyond column 72: only zero points of its rows.
    first_row, row_below = (int(packed.zeros[0, 0, octet]) & 255 for octet in (0, 1))
    assert packed.values[0, 3, 0, 0].tolist() == [first_row, row_below] * 8


def test_gate_and_up_of_an_odd_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="even number of rows; the weight has 15"):
        pack_weight(make_weight(Codes.INT8, 15, 64), swiglu=True)
