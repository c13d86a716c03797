# SPDX-License-Identifier: Apache-2.0
"""Inspections of quantized checkpoints: the formats of their weights are shown."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mizzen.engine.config import EngineOptions
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import read_folder, read_listing
from mizzen.inspection.text import format_inspection
from mizzen.inspection.weight_formats import WeightFormat
from mizzen.models.registry import read_config

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "known_models.json").read_text())
QWEN3 = KNOWN["Qwen/Qwen3-8B"]["config"]
OPTIONS = EngineOptions(model="m")
SIZE = 12288 * 4096
UP = "model.layers.0.mlp.up_proj"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
COMMON = {
    "model.embed_tokens.weight": ("BF16", [151936, 4096]),
    "model.norm.weight": ("BF16", [4096]),
    "lm_head.weight": ("BF16", [151936, 4096]),
}
MODELOPT = {
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write config.json and a safetensors file that consists of a header only."""
    (folder / "config.json").write_text(json.dumps(config))
    header = {name: {"dtype": kind, "shape": shape} for name, (kind, shape) in tensors.items()}
    body = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body)


def inspect(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]]) -> Inspection:
    save(folder, config, tensors)
    return inspect_model(read_folder(folder), OPTIONS)


@pytest.mark.parametrize(
    ("quantization", "tensors", "quantized"),
    [
        (
            FP8,
            {f"{UP}.weight": ("F8_E4M3", [12288, 4096]), f"{UP}.weight_scale_inv": ("F32", [96, 32])},
            WeightFormat(format="FP8, blocks of 128 x 128", parameters=SIZE, size=SIZE + 4 * 96 * 32),
        ),
        (
            AWQ,
            {
                f"{UP}.qweight": ("I32", [4096, 1536]),
                f"{UP}.qzeros": ("I32", [64, 1536]),
                f"{UP}.scales": ("F16", [64, 12288]),
            },
            WeightFormat(
                format="4-bit integers, groups of 64",
                parameters=SIZE,
                size=SIZE // 2 + SIZE // 64 // 2 + SIZE // 64 * 2,
            ),
        ),
    ],
)
def test_weights_are_measured_by_format(
    quantization: dict[str, Any],
    tensors: dict[str, tuple[str, list[int]]],
    quantized: WeightFormat,
    tmp_path: Path,
) -> None:
    result = inspect(tmp_path, {**QWEN3, "quantization_config": quantization}, {**COMMON, **tensors})
    assert (result.served, result.reason) == (True, "")
    count = 2 * 151936 * 4096 + 4096
    plain = WeightFormat(format="BF16", parameters=count, size=2 * count)
    assert result.weight_formats == (plain, quantized)
    lines = format_inspection(result).splitlines()
    assert f"  quantization  {result.quantization}" in lines
    assert "  weights       2.3 GiB in BF16, 1.24B parameters" in lines
    mib = f"{quantized.size / 2**20:.1f} MiB"
    assert f"                {mib} in {quantized.format}, 50.3M parameters" in lines


def test_only_the_text_part_counts(tmp_path: Path) -> None:
    config = {**KNOWN["google/gemma-3-27b-it"]["config"], "quantization_config": FP8}
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    tower = {"vision_tower.encoder.weight": ("BF16", [9, 9])}
    result = inspect(tmp_path, config, {name: ("F8_E4M3", [128, 128]), **tower})
    assert [each.format for each in result.weight_formats] == ["FP8, blocks of 128 x 128"]


def test_unquantized_weights_are_not_listed_by_format(tmp_path: Path) -> None:
    result = inspect(tmp_path, QWEN3, dict(COMMON))
    assert (result.served, result.quantization, result.weight_formats) == (True, "", ())


def test_the_file_of_modelopt_is_read(tmp_path: Path) -> None:
    save(tmp_path, QWEN3, {f"{UP}.weight": ("F8_E4M3", [128, 128])})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    result = inspect_model(read_folder(tmp_path), OPTIONS)
    assert (result.served, result.quantization) == (True, "ModelOpt: FP8, a scale for each tensor")
    assert [each.format for each in result.weight_formats] == ["FP8, a scale for each tensor"]
    assert read_config(tmp_path).quantization.describe() == result.quantization
    contents = {path.name: path.read_bytes() for path in tmp_path.glob("*.json")}
    sizes = {path.name: 1 for path in tmp_path.iterdir()}
    listed = inspect_model(read_listing("r", sizes, contents), OPTIONS)
    assert listed.quantization == result.quantization


def test_a_file_of_modelopt_may_describe_the_kv_cache_alone(tmp_path: Path) -> None:
    save(tmp_path, QWEN3, dict(COMMON))
    kv_only = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(kv_only))
    assert inspect_model(read_folder(tmp_path), OPTIONS).served
    assert read_config(tmp_path).architecture == "Qwen3ForCausalLM"


def test_parts_of_a_merged_layer_that_disagree_are_a_reason(tmp_path: Path) -> None:
    """The layer's tensors cannot be assigned to a format, but the model is refused all the same."""
    config = {**QWEN3, "quantization_config": {**FP8, "modules_to_not_convert": [UP]}}
    result = inspect(tmp_path, config, {"model.layers.0.mlp.gate_up_proj.weight": ("F8_E4M3", [128, 128])})
    assert "different schemes" in result.reason
    assert (result.quantization, result.weight_formats) == ("", ())
