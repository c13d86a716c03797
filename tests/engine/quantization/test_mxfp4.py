# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4 are dequantized exactly, on any number of ranks, and answer as in Transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import requests_of, run_requests
from logits_check import check
from rank_kit import thread_ranks
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import mxfp4
from family_twins import save_twin
from mizzen.core.sampling_params import SamplingParams
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.mxfp4_weights import Mxfp4ExpertWeights
from mizzen.layers.quantized.canonical import decode_exponents
from mizzen.layers.sharding import Axis, Mesh, check_shardable, choose_expert_groups
from mizzen.models.experts_config import ExpertLayout, ExpertsConfig
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_config, read_fields
from mizzen.models.weight_bytes import count_weight_bytes
from mizzen.weights.checkpoint_files import WeightsError

BUILD = BuildContext(device=torch.device("cpu"), dtype=torch.float32)
EXPERTS, HIDDEN, WIDTH = 3, 64, 160
CONFIG = ExpertsConfig(
    count=EXPERTS,
    per_token=2,
    width=WIDTH,
    layers=(True,),
    biases=True,
    interleaved=True,
    layout=ExpertLayout.TRANSPOSED,
)


def random_tensors(name: str, rows: int, columns: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random codes, and scales from 2 ** -127 to 2 ** 10, of one projection of all experts."""
    rng = np.random.default_rng(seed)
    shape = (EXPERTS, rows, columns // mxfp4.BLOCK)
    return {
        f"{name}_blocks": torch.from_numpy(rng.integers(0, 256, (*shape, 16), np.uint8)),
        f"{name}_scales": torch.from_numpy(rng.integers(0, 137, shape, np.uint8)),
    }


def checkpoint() -> dict[str, torch.Tensor]:
    """Return the tensors of the experts of a layer."""
    names = CONFIG.names
    return {
        **random_tensors(names.stacked_gate_up, 2 * WIDTH, HIDDEN),
        **random_tensors(names.stacked_down, HIDDEN, WIDTH, seed=1),
        names.stacked_gate_up_bias: torch.randn(EXPERTS, 2 * WIDTH),
        names.stacked_down_bias: torch.randn(EXPERTS, HIDDEN),
    }


def dequantize(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the float32 weights [experts, rows, columns] of a projection by the reference."""
    parts = (tensors[f"{name}_{part}"].numpy() for part in ("blocks", "scales"))
    return torch.from_numpy(mxfp4.dequantize(*parts))


def load(
    tensors: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1, groups: int = 1
) -> Mxfp4ExpertWeights:
    """Load a rank's shard of the experts; `groups` of ranks hold different experts."""
    weights = Mxfp4ExpertWeights(replace(BUILD, mesh=Mesh(Axis(rank, ranks), groups)), CONFIG, HIDDEN, "")
    for target in weights.targets():
        tensor = tensors[target.name]
        assert tuple(tensor.shape) in (target.shape, *target.other_shapes)
        target.destination.copy_(tensor.view(target.shape)[target.shard])
    weights.finish()
    return weights


def test_the_reference_equals_transformers() -> None:
    tensors = random_tensors("w", 6, 128)
    theirs = convert_moe_packed_tensors(tensors["w_blocks"], tensors["w_scales"], dtype=torch.float32)
    assert torch.equal(dequantize(tensors, "w"), theirs.transpose(1, 2))


def test_the_reference_rounds_to_nearest() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 96)).astype(np.float32)
    rounded = mxfp4.dequantize(*mxfp4.quantize(weight))
    largest = np.abs(weight.reshape(4, 3, 32)).max(-1, keepdims=True)
    errors = np.abs(rounded - weight).reshape(4, 3, 32) / largest
    assert errors.max() <= 0.25  # values up to 8 saturate at 6
    assert np.array_equal(mxfp4.dequantize(*mxfp4.quantize(rounded)), rounded)


def test_scales_are_exact_powers_of_two() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    expected = np.ldexp(np.float32(1), np.arange(255) - 127).astype(np.float32)
    assert torch.equal(decode_exponents(exponents), torch.from_numpy(expected))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shards_are_dequantized_exactly(ranks: int) -> None:
    """With 160 inner elements, shards of 4 and 8 ranks begin within blocks of 32."""
    tensors, names = checkpoint(), CONFIG.names
    gate_up, down = (dequantize(tensors, name) for name in (names.stacked_gate_up, names.stacked_down))
    size = WIDTH // ranks
    for rank in range(ranks):
        own = slice(rank * size, (rank + 1) * size)
        weights = load(tensors, rank, ranks)
        halves = torch.cat([gate_up[:, half::2][:, own] for half in (0, 1)], dim=1)
        assert torch.equal(weights.gate_up.weight.dequantize(), halves.flatten(0, 1))
        assert torch.equal(weights.down.weight.dequantize(), down[:, :, own].flatten(0, 1))
        assert (weights.gate_up.count, weights.down.rows) == (EXPERTS, HIDDEN)
        codes = EXPERTS * 3 * HIDDEN * size // 2
        assert codes < weights.format_bytes()["mxfp4"] < 1.25 * codes
        biases = weights.biases
        assert biases is not None and (biases.down is None) == (rank > 0)


@pytest.mark.parametrize("rank", range(6))
def test_ranks_hold_different_experts(rank: int) -> None:
    """Groups of two ranks hold one of three experts each, and each rank half of its width."""
    tensors, names = checkpoint(), CONFIG.names
    weights, expert = load(tensors, rank, 6, groups=3), rank // 2
    own = slice(rank % 2 * WIDTH // 2, (rank % 2 + 1) * WIDTH // 2)
    gate_up, down = (
        dequantize(tensors, name)[expert] for name in (names.stacked_gate_up, names.stacked_down)
    )
    halves = torch.cat([gate_up[half::2][own] for half in (0, 1)])
    assert torch.equal(weights.gate_up.weight.dequantize(), halves)
    assert torch.equal(weights.down.weight.dequantize(), down[:, own])
    assert (weights.gate_up.count, weights.partial) == (1, True)
    biases = weights.biases
    assert biases is not None and biases.gate_up.shape == (1, WIDTH)
    if biases.down is not None:
        assert torch.equal(biases.down[0], tensors[names.stacked_down_bias][expert])


def save_mxfp4(folder: Path, **sizes: Any) -> Any:
    """Save a tiny gpt-oss in MXFP4; return the Transformers model with the dequantized weights."""
    model = save_twin(folder, "gpt-oss", hidden_size=64, intermediate_size=WIDTH, **sizes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer, block in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            full = f"model.layers.{layer}.mlp.experts.{name}"
            weight = tensors.pop(full).transpose(1, 2).numpy()
            blocks, exponents = mxfp4.quantize(weight)
            tensors |= {
                f"{full}_blocks": torch.from_numpy(blocks),
                f"{full}_scales": torch.from_numpy(exponents),
            }
            rounded = torch.from_numpy(mxfp4.dequantize(blocks, exponents))
            assert not np.array_equal(rounded, weight)
            getattr(block.mlp.experts, name).data.copy_(rounded.transpose(1, 2))
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return model


def test_logits_equal_transformers_with_dequantized_weights(kit: SimpleNamespace, tmp_path: Path) -> None:
    check(kit, tmp_path, save_mxfp4(tmp_path), "cpu")


def test_answers_on_several_ranks_equal_those_on_one(kit: SimpleNamespace, tmp_path: Path) -> None:
    """With 160 inner elements, ranks share blocks of 32."""
    save_mxfp4(tmp_path)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts, alone = [kit.tokens(length, seed=length) for length in (5, 40)], None
    for ranks, expert in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)):
        with thread_ranks(tmp_path, ranks, expert=expert) as engine:
            answers, _ = run_requests(engine, requests_of(prompts, [sampling] * 2))
        alone = alone or answers
        assert answers == alone, (ranks, expert)


def test_dummy_weights_are_finite_and_differ(kit: SimpleNamespace, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    bench = kit.Bench(tmp_path, load_format="dummy")
    logits = bench.logits(bench.plan([], [(0, 0, kit.tokens(40), True)], (kit.greedy(0),)))
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1).tolist())) > 10
    for layer in bench.model.layers:
        for projection in (layer.mlp.down.weights.gate_up, layer.mlp.down.weights.down):
            columns = projection.weight.columns
            assert 0.7 < projection.weight.dequantize().std() * columns**0.5 < 1.4


def test_scales_of_a_float_type_are_refused(tmp_path: Path) -> None:
    """They would be converted by value, not by their bits."""
    save_mxfp4(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name].view(torch.float8_e8m0fnu)}, path)
    with pytest.raises(WeightsError, match=f"{name} is F8_E8M0"), thread_ranks(tmp_path, 1):
        pass


def test_the_bytes_of_the_weights_are_counted(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = sum(each.numel() * each.element_size() for each in load_file(path).values())
    assert count_weight_bytes(read_config(tmp_path), 4) == stored


def test_a_missing_scale_is_named(kit: SimpleNamespace, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=f"missing: {name}"):
        kit.Bench(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            r"\(MXFP4\) of Qwen3ForCausalLM, which are served only",
        ),
        ({"intermediate_size": 168}, r"intermediate_size \(168\) must be a multiple of 32 with MXFP4"),
    ],
)
def test_other_models_and_incomplete_blocks_are_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_mxfp4(tmp_path)
    fields = Fields.load(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        read_fields(Fields({**fields.values, **changes}))


def test_ranks_that_would_divide_a_byte_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, num_attention_heads=32)
    config = read_config(tmp_path)
    check_shardable(config, 16)
    problem = r"--expert 1 is not possible.* intermediate_size \(160\).* 32 tensor ranks in MXFP4: .* be even"
    with pytest.raises(ValueError, match=problem):
        check_shardable(config, 32, expert=1)
    assert choose_expert_groups(config, 32) == 2, "whole experts"


def test_a_scale_that_is_nan_is_refused() -> None:
    tensors = checkpoint()
    tensors[f"{CONFIG.names.stacked_down}_scales"][1, 2, 3] = 255
    with pytest.raises(WeightsError, match=r"experts\.down_proj_scales contains NaN"):
        load(tensors)
