# SPDX-License-Identifier: Apache-2.0
"""Shards of quantized layers equal the same rows and columns of the exact weights, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_layer_kit import LayerFiles, restore, write_layers

from mizzen.layers.linear import RowParallelLinear
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.sharding import check_shardable
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_model
from mizzen.weights.load import fill_dummy
from quantized_formats import FORMATS

FACTORS = {"q": 1.0, "k": 10.0, "v": 0.01}
BLOCK_FORMATS = [name for name in FORMATS if "blocks" in name or name == "fp8-ue8m0"]


def expected_rows(files: LayerFiles, rank: int, size: int) -> torch.Tensor:
    return torch.cat([weight.chunk(size)[rank] for weight in files.weights.values()])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_parts_with_different_scales_are_exact(name: str, size: int, tmp_path: Path) -> None:
    shapes = {"q": (384, 256), "k": (128, 256), "v": (128, 256)}
    files = write_layers(tmp_path, FORMATS[name], shapes, FACTORS)
    for rank in range(size):
        method = files.load_rows(rank, size)
        assert torch.equal(restore(method, 256), expected_rows(files, rank, size))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_columns_of_a_rank_are_exact(name: str, size: int, tmp_path: Path) -> None:
    files = write_layers(tmp_path, FORMATS[name], {"o": (64, 512)})
    for rank in range(size):
        method = files.load_columns(rank, size)
        assert torch.equal(restore(method, 512 // size), files.weights["o"].chunk(size, dim=1)[rank])


@pytest.mark.parametrize("share", [96, 192, 320])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_may_lie_on_two_ranks(name: str, share: int, tmp_path: Path) -> None:
    files = write_layers(tmp_path / "rows", FORMATS[name], {"q": (2 * share, 320), "k": (2 * share, 320)})
    whole = write_layers(tmp_path / "columns", FORMATS[name], {"o": (192, 2 * share)})
    for rank in range(2):
        rows = files.load_rows(rank, 2)
        assert torch.equal(rows.weight.dequantize(), expected_rows(files, rank, 2))
        columns = whole.load_columns(rank, 2)
        assert torch.equal(columns.weight.dequantize(), whole.weights["o"].chunk(2, dim=1)[rank])


@pytest.mark.parametrize("name", ["gptq-32", "ct-w4a16-asymmetric", "awq-32", "gptq-8"])
def test_shards_may_consist_of_one_word(name: str, tmp_path: Path) -> None:
    rows = write_layers(tmp_path / "rows", FORMATS[name], {"q": (16, 32)})
    columns = write_layers(tmp_path / "columns", FORMATS[name], {"o": (16, 64)})
    for rank in range(2):
        assert torch.equal(rows.load_rows(rank, 2).weight.dequantize(), expected_rows(rows, rank, 2))
    for rank in range(8):
        weight = columns.load_columns(rank, 8).weight
        assert torch.equal(weight.dequantize(), columns.weights["o"].chunk(8, dim=1)[rank])


@pytest.mark.parametrize(
    ("shares", "row_step"),
    [((256, 128), 128), ((192, 64), 64), ((320, 320), 64), ((96, 96), 32), ((136, 8), 8)],
)
def test_scales_of_blocks_stand_for_as_many_rows_as_possible(
    shares: tuple[int, int], row_step: int, tmp_path: Path
) -> None:
    shapes = {"q": (2 * shares[0], 256), "k": (2 * shares[1], 256)}
    weight = write_layers(tmp_path, FORMATS["fp8-blocks"], shapes).load_rows(1, 2).weight
    assert (weight.row_step, weight.column_step) == (row_step, 128)


@pytest.mark.parametrize("name", ["awq", "gptq", "ct-w4a16", "gptq-8", "ct-w8a16-asymmetric"])
@pytest.mark.parametrize(("columns", "step"), [(384, 64), (448, 32), (320, 32), (272, 8)])
def test_groups_may_lie_on_two_ranks(name: str, columns: int, step: int, tmp_path: Path) -> None:
    files = write_layers(tmp_path, FORMATS[name], {"o": (64, columns)})
    for rank in range(2):
        method = files.load_columns(rank, 2)
        assert torch.equal(method.weight.dequantize(), files.weights["o"].chunk(2, dim=1)[rank])
    group = {"ct-w8a16-asymmetric": 32}.get(name, 128)
    assert method.weight.column_step == min(step, group)


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "head_dim", "intermediate", "ranks", "message"),
    [
        ("awq", 8, 64, 4, ""),
        ("awq", 8, 48, 4, "mlp.gate_proj .* 4 tensor ranks: the rows .* the 8 in .* use --tensor 1 or 2"),
        ("awq", 4, 64, 2, ""),
        ("awq", 4, 64, 4, "self_attn.q_proj .* 4 tensor ranks: the rows .* use --tensor 1 or 2$"),
        ("awq", 4, 64, 16, r"num_attention_heads \(8\) .* the tensor ranks \(16\): use --tensor 1 or 2$"),
        ("gptq", 8, 48, 4, "mlp.gate_proj .*: the rows"),
        ("ct-w4a16", 8, 48, 4, "mlp.down_proj .*: the columns .* multiple of the 8 in a packed word"),
        ("ct-w4a16-asymmetric", 8, 48, 4, "mlp.gate_proj .*: the rows"),
        ("ct-w8a16", 8, 48, 4, ""),
        ("ct-w8a16", 8, 40, 4, "mlp.down_proj .*: the columns .* multiple of the 4 in a packed word"),
        ("fp8-blocks", 2, 20, 4, ""),
        ("ct-int8", 2, 20, 4, ""),
    ],
)
def test_words_that_ranks_cannot_divide_are_refused_before_loading(
    name: str, head_dim: int, intermediate: int, ranks: int, message: str
) -> None:
    values = {**SHAPE, "head_dim": head_dim, "intermediate_size": intermediate}
    quantization = FORMATS[name].config(("lm_head",))
    config = read_model(Fields({**values, "quantization_config": quantization}), "native")
    check_shardable(config, 1)
    if message:
        with pytest.raises(ValueError, match=message):
            check_shardable(config, ranks)
    else:
        check_shardable(config, ranks)


def test_layers_that_are_computed_together_must_have_one_scheme() -> None:
    values = {**SHAPE, "head_dim": 8, "intermediate_size": 64}
    quantization = FORMATS["fp8-blocks"].config(("lm_head", "model.layers.1.mlp.up_proj"))
    with pytest.raises(ConfigError, match=r"different schemes \(model\.layers\.1\.mlp\.gate_proj"):
        read_model(Fields({**values, "quantization_config": quantization}), "native")


def test_dummy_weights_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    for name in FORMATS:
        files = write_layers(tmp_path / name, FORMATS[name], {"o": (64, 256)})
        whole = make_dummy(files, 0, 1)
        assert whole.std() == pytest.approx(1 / 16, rel=0.1), name
        for rank in range(2):
            assert torch.equal(make_dummy(files, rank, 2), whole.chunk(2, dim=1)[rank]), name


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("awq", torch.float16), ("gptq-32", torch.float16), ("ct-w4a16", torch.bfloat16), ("fp8-blocks", None)],
)
def test_dummy_scales_have_the_type_of_real_ones(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    files = write_layers(tmp_path, FORMATS[name], {"o": (64, 256)})
    layer = RowParallelLinear(files.context(), "o", 64, 256, bias=False)
    fill_dummy(layer.targets(), seed=0, progress=lambda done, total: None)
    assert isinstance(layer.method, DequantizedLinear)
    assert layer.method.weight.scales.dtype == (dtype or torch.float32)


def make_dummy(files: LayerFiles, rank: int, size: int) -> torch.Tensor:
    """Return a rank's columns of a layer with dummy weights."""
    layer = RowParallelLinear(files.context(rank, size), "o", 64, 256, bias=False)
    fill_dummy(layer.targets(), seed=0, progress=lambda done, total: None)
    assert isinstance(layer.method, DequantizedLinear)
    return restore(layer.method, 256 // size)
