# SPDX-License-Identifier: Apache-2.0
"""Logits of mixtures with quantized experts equal those of Transformers with the dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from logits_check import assert_equal
from rank_kit import compute_vector, thread_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.quantized_weights import QuantizedExpertWeights, has_computed_scales
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.quantized import choose_linear
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.sharding import Axis, Mesh
from mizzen.models.base import DecoderModel
from mizzen.models.registry import read_config
from mizzen.quantization.online import choose_quantization
from mizzen.quantization.schemes import Activations, ActivationScales, Fp8Layout, Fp8Weights, ScaleShape
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.weights.load import fill_dummy, load_checkpoint
from quantized_formats import FORMATS
from quantized_mixtures import ROUTERS, quantize_mixture, save_mixture, stack_tensors
from quantized_twins import FILE, PART_FACTORS, QuantizedTwin
from rounded_weights import ROUNDINGS

BUILD = BuildContext(device=torch.device("cpu"), dtype=torch.float32)


def compute_reference(twin: QuantizedTwin, folder: Path, kit: SimpleNamespace) -> torch.Tensor:
    """Return Transformers' logits of a prompt with the dequantized weights, [tokens, vocab]."""
    twin.save_dequantized(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = kit.oracle(model, kit.tokens(30, seed=1))
    assert reference.std() > 0.3
    return reference


def compute_logits(folder: Path, kit: SimpleNamespace, **options: Any) -> torch.Tensor:
    """Return the engine's logits of the same prompt."""
    bench = kit.Bench(folder, **options)
    return bench.logits(bench.plan([], [(0, 0, kit.tokens(30, seed=1), True)], (kit.greedy(0),)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with ten experts."""
    folder = tmp_path_factory.mktemp("source")
    save_mixture(folder, "qwen3-moe")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantized_weights(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    twin = quantize_mixture(source, tmp_path / "twin", name, part_factors=PART_FACTORS)
    assert sum(".experts." in layer for layer in twin.layers) == 30
    reference = compute_reference(twin, tmp_path / "exact", kit)
    assert_equal(compute_logits(twin.folder, kit), reference)


@pytest.mark.parametrize("family", ["qwen2-moe", "glm4-moe", "minimax-m2"])
@pytest.mark.parametrize("name", ["fp8-blocks", "ct-fp8-channel", "gptq-act-order", "ct-w4a16-32"])
def test_other_families_equal_the_dequantized_weights(
    family: str, name: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Their shared experts and dense layers are quantized, too."""
    save_mixture(tmp_path / "source", family)
    twin = quantize_mixture(tmp_path / "source", tmp_path / "twin", name)
    reference = compute_reference(twin, tmp_path / "exact", kit)
    assert_equal(compute_logits(twin.folder, kit), reference)


@pytest.mark.parametrize("width", [96, 320])
@pytest.mark.parametrize("name", ["fp8-blocks", "ct-int8", "ct-fp8-tensor", "awq", "ct-w4a16-asymmetric"])
def test_several_ranks_give_the_same_results_as_one(
    name: str, width: int, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Blocks and groups of 128 lie on several ranks."""
    save_mixture(tmp_path / "source", "qwen2-moe", width=width)
    twin = quantize_mixture(tmp_path / "source", tmp_path / "twin", name, part_factors=PART_FACTORS)
    ranks = (1, 2) if name.startswith(("awq", "ct-w4")) and width == 96 else (1, 2, 4)
    vectors = []
    for size in ranks:
        with thread_ranks(twin.folder, size) as engine:
            vectors.append(compute_vector(engine, kit.tokens(40)))
    for vector in vectors[1:]:
        np.testing.assert_allclose(vector, vectors[0], atol=1e-4)


WHOLE = (
    "fp8-blocks",
    "ct-fp8-channel",
    "ct-fp8-tensor-static",
    "ct-int8",
    "awq",
    "gptq-act-order",
    "ct-w4a16-32",
)
"""Formats whose tensors have all kinds of shapes: blocks, channels, scalars, packed words and orders."""


@pytest.mark.parametrize("name", WHOLE)
def test_ranks_with_different_experts_give_the_same_results_as_one(
    name: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    save_mixture(tmp_path / "source", "qwen2-moe", num_experts=8)
    twin = quantize_mixture(tmp_path / "source", tmp_path / "twin", name, part_factors=PART_FACTORS)
    with thread_ranks(twin.folder, 1) as engine:
        alone = compute_vector(engine, kit.tokens(40))
    groups = ((2, 2), (4, 4)) if name == "gptq-act-order" else ((2, 2), (4, 2), (4, 4))
    for ranks, expert in groups:
        with thread_ranks(twin.folder, ranks, expert=expert) as engine:
            np.testing.assert_allclose(compute_vector(engine, kit.tokens(40)), alone, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq-act-order", "ct-w4a16-32"])
def test_experts_whose_width_cannot_be_divided_stay_whole(
    name: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Four ranks would divide packed words of 8 columns, and orders cannot be divided."""
    width = 128 if name == "gptq-act-order" else 48
    save_mixture(tmp_path / "source", "qwen3-moe", width=width, num_experts=8)
    twin = quantize_mixture(tmp_path / "source", tmp_path / "twin", name)
    vectors = []
    for ranks in (1, 4):
        with thread_ranks(twin.folder, ranks) as engine:
            vectors.append(compute_vector(engine, kit.tokens(40)))
    assert engine.info.expert_groups == (4 if name == "gptq-act-order" else 2)
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-4)


@pytest.mark.parametrize("option", ["fp8", "int8"])
def test_ranks_round_their_experts_while_they_are_loaded(option: str, source: Path) -> None:
    config = read_config(source)
    experts = config.experts
    assert experts is not None
    quantization = choose_quantization(option, config.quantization)
    scheme = quantization.find_merged_scheme(experts.down_layers(""))

    def load(mesh: Mesh) -> list[torch.Tensor]:
        weights = QuantizedExpertWeights(
            replace(BUILD, mesh=mesh), experts, config.hidden_size, "", scheme, online=True
        )
        fill_dummy(weights.targets(), seed=0, progress=lambda _, __: None)
        weights.finish()
        return [each.weight.dequantize() for each in (weights.gate_up, weights.down)]

    parts = [load(Mesh(Axis(rank, 5), expert_groups=5)) for rank in range(5)]
    for own, whole in zip(zip(*parts, strict=True), load(Mesh()), strict=True):
        assert torch.equal(torch.cat(own), whole)


def test_a_rank_misses_quantized_experts_of_other_ranks(tmp_path: Path) -> None:
    save_mixture(tmp_path / "source", "qwen3-moe", num_experts=8)
    twin = quantize_mixture(tmp_path / "source", tmp_path / "twin", "ct-fp8-tensor")
    tensors, name = load_file(twin.folder / FILE), "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    del tensors[name]
    save_file(tensors, twin.folder / FILE, {"format": "pt"})
    config = read_config(twin.folder)
    linear = choose_linear(config.quantization, UnquantizedLinear, DequantizedLinear)
    build = replace(BUILD, mesh=Mesh(Axis(1, 2), expert_groups=2), make_linear=linear)
    model = DecoderModel(build, config)
    with pytest.raises(WeightsError, match=f"missing: {name}"):
        load_checkpoint(twin.folder, model.targets(), tied=False, progress=lambda _, __: None)


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-small-blocks"])
def test_tensors_may_hold_all_experts(name: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    """The width is a multiple of the rows of a block, so that no block has rows of gate and of up."""
    save_mixture(tmp_path / "source", "qwen3-moe")
    twin = quantize_mixture(tmp_path / "source", tmp_path / "twin", name)
    separate = compute_logits(twin.folder, kit)
    stack_tensors(twin.folder)
    assert torch.equal(compute_logits(twin.folder, kit), separate)
    vectors = []
    for ranks in (1, 2):
        with thread_ranks(twin.folder, ranks, expert=ranks) as engine:
            vectors.append(compute_vector(engine, kit.tokens(40)))
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_give_finite_and_different_logits(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    twin = quantize_mixture(source, tmp_path / "twin", name)
    (twin.folder / FILE).unlink()
    logits = compute_logits(twin.folder, kit, load_format="dummy")
    assert logits.isfinite().all() and 0.1 < logits.std(dim=1).min() < logits.std(dim=1).max() < 10


@pytest.mark.parametrize("layout", ["separate", "stacked", "transposed"])
@pytest.mark.parametrize("option", ROUNDINGS)
def test_unquantized_experts_are_rounded_while_they_are_loaded(
    option: str, layout: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = save_mixture(tmp_path, "qwen3-moe", hidden=64, width=256)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." not in name or name.removesuffix(".weight").endswith(ROUTERS):
                continue
            for matrix in parameter if parameter.ndim == 3 else [parameter] if parameter.ndim == 2 else []:
                matrix.copy_(torch.from_numpy(ROUNDINGS[option](matrix.numpy())))
    reference = kit.oracle(model, kit.tokens(30, seed=1))
    if layout != "separate":
        stack_tensors(tmp_path, transposed=layout == "transposed")
    assert_equal(compute_logits(tmp_path, kit, quantization=option), reference)


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq"])
def test_experts_may_be_unquantized_without_being_listed(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    keys = [key.removesuffix(".weight") for key in load_file(source / FILE)]
    experts = tuple(key for key in keys if ".experts." in key)
    twin = quantize_mixture(source, tmp_path / "twin", name, ignored=experts)
    assert len(twin.layers) == 4
    twin.describe(("lm_head", *(key for key in keys if key.endswith(ROUTERS))))
    reference = compute_reference(twin, tmp_path / "exact", kit)
    assert_equal(compute_logits(twin.folder, kit), reference)


@pytest.mark.parametrize("scale", [0.0, 1e-30])
@pytest.mark.parametrize("name", ["fp8-blocks", "ct-fp8-tensor", "ct-w4a16-32"])
def test_dead_experts_give_finite_logits(
    name: str, scale: float, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    twin = quantize_mixture(source, tmp_path / "twin", name)
    for expert in range(10):
        for part in ("gate_proj", "down_proj"):
            twin.set_scale(f"model.layers.0.mlp.experts.{expert}.{part}", scale)
    logits = compute_logits(twin.folder, kit)
    assert logits.isfinite().all()
    assert_equal(logits, compute_reference(twin, tmp_path / "exact", kit))


@pytest.mark.parametrize(
    ("activations", "computed"),
    [
        (Activations(scales=ActivationScales.TOKEN), True),
        (Activations(scales=ActivationScales.TOKEN_GROUP, group_size=128), True),
        (Activations(scales=ActivationScales.TOKEN_GROUP, group_size=64), False),
        (Activations(scales=ActivationScales.TOKEN, upper_bound=1200.0), False),
        (Activations(scales=ActivationScales.STATIC), False),
        (None, False),
    ],
)
def test_only_inputs_with_computed_scales_may_be_rounded(
    activations: Activations | None, computed: bool
) -> None:
    layout = Fp8Layout.COMPRESSED_TENSORS
    scheme = Fp8Weights(scale_shape=ScaleShape.CHANNEL, activations=activations, layout=layout)
    assert has_computed_scales(scheme) is computed
