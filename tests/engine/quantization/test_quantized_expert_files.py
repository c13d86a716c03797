# SPDX-License-Identifier: Apache-2.0
"""Quantized experts are loaded without a second copy; wrong files and unsupported schemes are named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.model_setup import make_model, measure_weights
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.quantized_weights import QuantizedExpertWeights
from mizzen.layers.linear_methods.base import MeasuredWeights
from mizzen.layers.sharding import Axis, Mesh, check_shardable, choose_expert_groups
from mizzen.models.experts_config import ExpertsConfig
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_config, read_model
from mizzen.models.weight_bytes import count_weight_bytes
from mizzen.quantization.reader import read_quantization
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.weights.load import fill_dummy
from quantized_formats import FORMATS
from quantized_mixtures import quantize_mixture, save_mixture, stack_tensors

EXPERT = "model.layers.0.mlp.experts.9.up_proj"
LARGE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 12,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_mixture(folder, "qwen3-moe")
    return folder


def load(folder: Path, methods: list[MeasuredWeights] | None = None) -> Any:
    options = EngineOptions(model=str(folder), device="cpu", dtype="bfloat16")
    return make_model(options, read_config(folder), lambda done, total: None, methods=methods)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "ct-w4a16-act-order"])
def test_missing_and_surplus_tensors_are_named(name: str, source: Path, tmp_path: Path) -> None:
    twin = quantize_mixture(source, tmp_path / "twin", name)
    suffix = twin.format.scale_name
    renamed = EXPERT.replace("experts.9", "experts.10")
    moved: dict[str, torch.Tensor] = {}
    twin.edit(f"{EXPERT}.{suffix}", lambda tensor: moved.update(tensor=tensor))
    twin.add(f"{renamed}.{suffix}", moved["tensor"])
    expected = f"missing: {EXPERT}.{suffix}; unexpected: {renamed}.{suffix}"
    with pytest.raises(WeightsError, match=re.escape(expected)):
        load(twin.folder)


def test_invalid_values_are_named(source: Path, tmp_path: Path) -> None:
    twin = quantize_mixture(source, tmp_path / "twin", "ct-fp8-channel")
    twin.set_weight_code(EXPERT, 0xFF, index=5)
    with pytest.raises(WeightsError, match=rf"{re.escape(EXPERT)}\.weight contains NaN"):
        load(twin.folder)


@pytest.mark.parametrize("name", [name for name in FORMATS if "small" not in name])
def test_the_computed_bytes_are_those_in_memory(name: str, tmp_path: Path) -> None:
    save_mixture(tmp_path / "source", "qwen3-moe", hidden=256, width=256, head_dim=32)
    source = tmp_path / "source"
    twin, methods = quantize_mixture(source, tmp_path / "twin", name), list[MeasuredWeights]()
    measured = measure_weights(load(twin.folder, methods), methods)
    computed = count_weight_bytes(read_config(twin.folder), 2)
    difference = sum(measured.values()) - computed
    if "tensor" in name or name == "modelopt-fp8":
        rows = 256 + 2 * 64 + 256 + 10 * (3 * 256)
        assert -4 * rows <= difference <= 0, "kernels may need a scale for each row"
    elif "act-order" in name:
        assert difference >= 0, "queries and keys in different orders need more"
    else:
        assert abs(difference) < 100
    experts = next(each for each in methods if isinstance(each, QuantizedExpertWeights))
    (size,) = experts.format_bytes().values()
    assert size > sum(measured.values()) / 4


def test_codes_of_experts_are_not_copied() -> None:
    """The stored codes of FP8 and of packed words become the weights of the product."""
    for name in ("fp8-blocks", "ct-w4a16-32", "ct-int8"):
        weights = make_weights(name)
        targets = list(weights.targets())
        fill_dummy(targets, seed=0, progress=lambda done, total: None)
        addresses = {target.destination.data_ptr() for target in targets}
        weights.finish()
        assert {weights.gate_up.weight.values.data_ptr(), weights.down.weight.values.data_ptr()} < addresses
        assert not list(weights.targets())


def make_weights(name: str, ranks: int = 1, width: int = 256) -> QuantizedExpertWeights:
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32, mesh=Mesh(Axis(ranks - 1, ranks)))
    experts = ExpertsConfig(count=4, per_token=2, width=width, layers=(True,))
    scheme = read_quantization(Fields({"quantization_config": FORMATS[name].config(())})).find_scheme("m")
    return QuantizedExpertWeights(build, experts, 128, "m.", scheme)


@pytest.mark.parametrize(
    ("width", "row_step", "column_step"), [(256, 128, 128), (192, 32, 32), (320, 32, 32)]
)
def test_scales_of_blocks_stand_for_as_many_rows_as_possible(
    width: int, row_step: int, column_step: int
) -> None:
    weights = make_weights("fp8-blocks", 2, width)
    fill_dummy(weights.targets(), seed=0, progress=lambda done, total: None)
    weights.finish()
    assert (weights.gate_up.weight.row_step, weights.down.weight.column_step) == (row_step, column_step)


def read_large(name: str, width: int, *ignored: str) -> Any:
    quantization = FORMATS[name].config(("lm_head", *ignored))
    values = {**LARGE, "moe_intermediate_size": width, "quantization_config": quantization}
    return read_model(Fields(values), "native")


@pytest.mark.parametrize(
    ("name", "width"), [("fp8-blocks", 20), ("ct-int8", 20), ("ct-w8a16", 48), ("awq", 96)]
)
def test_ranks_divide_the_width_of_experts_where_the_format_allows_it(name: str, width: int) -> None:
    assert choose_expert_groups(read_large(name, width), 4) == 1


@pytest.mark.parametrize(
    ("name", "width", "problem", "groups"),
    [
        ("awq", 48, r"experts\.0\.gate_proj .*: the rows .* the 8 in a packed word", (2, 4)),
        ("ct-w4a16", 48, r"experts\.0\.down_proj .*: the columns .* in a packed word", (2, 4)),
        ("gptq-act-order", 64, r"experts\.0\.down_proj .* 4 tensor .* an order of its own", (4,)),
        ("gptq", 30, r"moe_intermediate_size \(30\) .* the tensor ranks \(4\)", (4,)),
    ],
)
def test_ranks_hold_whole_experts_where_the_width_cannot_be_divided(
    name: str, width: int, problem: str, groups: tuple[int, ...]
) -> None:
    config = read_large(name, width)
    assert choose_expert_groups(config, 4) == groups[0]
    check_shardable(config, 4)
    possible = " or ".join(str(count) for count in groups)
    with pytest.raises(ValueError, match=f"--expert 1 .*{problem}: use --expert {possible}$"):
        check_shardable(config, 4, 1)


def test_experts_that_cannot_be_divided_in_any_way_are_refused_before_loading() -> None:
    config = read_large("awq", 8)
    check_shardable(config, 4)
    message = r"experts\.0\.gate_proj .*, or num_experts \(12\) .*\(8\): use --tensor 1 or 2 or 4$"
    with pytest.raises(ValueError, match=message):
        check_shardable(config, 8)


def test_experts_of_a_layer_must_have_one_scheme() -> None:
    ignored = "model.layers.1.mlp.experts.7.down_proj"
    with pytest.raises(ConfigError) as error:
        read_large("fp8-blocks", 64, ignored)
    shown = f"model.layers.1.mlp.experts.0.gate_proj: FP8, blocks of 128 x 128, {ignored}: unquantized"
    assert f"gives different schemes ({shown})" in str(error.value)
    every = [f"model.layers.1.mlp.experts.{i}" for i in range(12)]
    sizes = [count_weight_bytes(read_large("fp8-blocks", 64, *names), 2) for names in ([], every)]
    assert sizes[1] - sizes[0] == 12 * (3 * 64 * 64 - 3 * 4)


def test_stacked_tensors_of_other_formats_are_refused(source: Path, tmp_path: Path) -> None:
    twin = quantize_mixture(source, tmp_path / "twin", "ct-fp8-channel")
    stack_tensors(twin.folder)
    with pytest.raises(ConfigError, match=r"gate_up_proj holds all experts .* a tensor for each expert"):
        load(twin.folder)


def test_experts_with_biases_are_refused(tmp_path: Path) -> None:
    weights = make_weights("fp8-blocks")
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32)
    scheme = read_large("fp8-blocks", 64).quantization.find_scheme("m")
    with pytest.raises(ConfigError, match=r"the experts of m\. have biases.*use the checkpoint in bfloat16"):
        QuantizedExpertWeights(build, replace(weights.config, biases=True), 128, "m.", scheme)
