# SPDX-License-Identifier: Apache-2.0
"""Tensors of quantized layers, compared with the shapes that exporters write."""

from __future__ import annotations

import pytest

from mizzen.quantization.schemes import (
    UNQUANTIZED,
    Activations,
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    Int8Weights,
    PackedIntegers,
    Packing,
    ScaleShape,
    WeightScheme,
    describe_scheme,
)
from mizzen.quantization.stored_tensors import Dimension, Follows, list_tensors

ROWS, COLUMNS = 320, 576
"""Neither is a multiple of 128."""
TOKEN = Activations(scales=ActivationScales.TOKEN)
STATIC = Activations(scales=ActivationScales.STATIC)
FP8_BLOCK = Fp8Weights(
    scale_shape=ScaleShape.BLOCK,
    block=(128, 128),
    activations=Activations(scales=ActivationScales.TOKEN_GROUP, group_size=128),
    layout=Fp8Layout.HUGGING_FACE,
)
CASES: dict[str, tuple[WeightScheme, dict[str, tuple[int, ...]]]] = {
    "bf16": (UNQUANTIZED, {"weight": (320, 576)}),
    "fp8 block": (FP8_BLOCK, {"weight": (320, 576), "weight_scale_inv": (3, 5)}),
    "fp8 tensor": (
        Fp8Weights(scale_shape=ScaleShape.TENSOR, activations=STATIC, layout=Fp8Layout.HUGGING_FACE),
        {"weight": (320, 576), "weight_scale": (), "input_scale": ()},
    ),
    "fbgemm": (
        Fp8Weights(scale_shape=ScaleShape.CHANNEL, activations=TOKEN, layout=Fp8Layout.FBGEMM),
        {"weight": (320, 576), "weight_scale": (320, 1), "input_scale_ub": ()},
    ),
    "int8": (
        Int8Weights(
            scale_shape=ScaleShape.CHANNEL,
            activations=Activations(scales=ActivationScales.STATIC, symmetric=False),
        ),
        {"weight": (320, 576), "weight_scale": (320, 1), "input_scale": (), "input_zero_point": ()},
    ),
    "int8 groups": (
        Int8Weights(scale_shape=ScaleShape.GROUP, group_size=64, activations=None),
        {"weight": (320, 576), "weight_scale": (320, 9)},
    ),
    "awq": (
        PackedIntegers(bits=4, group_size=64, symmetric=False, packing=Packing.AWQ),
        {"qweight": (576, 40), "qzeros": (9, 40), "scales": (9, 320)},
    ),
    "gptq": (
        PackedIntegers(bits=4, group_size=64, symmetric=True, activation_order=True, packing=Packing.GPTQ),
        {"qweight": (72, 320), "qzeros": (9, 40), "scales": (9, 320), "g_idx": (576,)},
    ),
    "gptq 8 bits, one group": (
        PackedIntegers(bits=8, group_size=None, symmetric=True, packing=Packing.GPTQ_V2),
        {"qweight": (144, 320), "qzeros": (1, 80), "scales": (1, 320), "g_idx": (576,)},
    ),
    "pack-quantized": (
        PackedIntegers(bits=4, group_size=64, symmetric=False, packing=Packing.COMPRESSED_TENSORS),
        {
            "weight_packed": (320, 72),
            "weight_scale": (320, 9),
            "weight_shape": (2,),
            "weight_zero_point": (40, 9),
        },
    ),
    "pack-quantized, channels, order": (
        PackedIntegers(
            bits=8,
            group_size=None,
            symmetric=True,
            activation_order=True,
            packing=Packing.COMPRESSED_TENSORS,
        ),
        {
            "weight_packed": (320, 144),
            "weight_scale": (320, 1),
            "weight_shape": (2,),
            "weight_g_idx": (576,),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tensors_have_the_shapes_that_exporters_write(name: str) -> None:
    scheme, expected = CASES[name]
    found = {tensor.suffixes[0]: tensor.shapes(ROWS, COLUMNS)[0] for tensor in list_tensors(scheme)}
    assert found == expected


def test_exporters_may_add_dimensions_or_use_other_names() -> None:
    _, scale = list_tensors(FP8_BLOCK)
    assert scale.shapes(ROWS, COLUMNS) == ((3, 5), (3, 1, 5, 1))
    _, scale, inputs = list_tensors(CASES["fp8 tensor"][0])
    assert scale.suffixes == ("weight_scale", "weight_scale_inv")
    assert scale.shapes(ROWS, COLUMNS) == ((), (1,), (1, 1))
    assert inputs.suffixes == ("input_scale", "activation_scale")


def test_shards_share_the_element_at_an_indivisible_bound() -> None:
    blocks = Dimension(Follows.ROWS, 128)
    whole = slice(0, COLUMNS)
    assert [blocks.shard(slice(start, start + 160), whole) for start in (0, 160)] == [
        slice(0, 2),
        slice(1, 3),
    ]
    assert blocks.shard(slice(128, 256), whole) == slice(1, 2)
    assert Dimension(Follows.COLUMNS, 8).shard(whole, slice(16, 32)) == slice(2, 4)
    assert Dimension(Follows.NEITHER, 2).shard(whole, slice(16, 32)) == slice(0, 2)


def test_only_4_and_8_bits_can_be_packed() -> None:
    with pytest.raises(ValueError, match="bits must be 4 or 8, not 3"):
        PackedIntegers(bits=3, group_size=128, symmetric=True, packing=Packing.GPTQ)


def test_schemes_have_distinct_descriptions() -> None:
    descriptions = [describe_scheme(scheme) for scheme, _ in CASES.values()]
    assert descriptions[:3] == ["unquantized", "FP8, blocks of 128 x 128", "FP8, a scale for each tensor"]
    assert "4-bit integers, groups of 64, in activation order" in descriptions
    assert "INT8, groups of 64" in descriptions
