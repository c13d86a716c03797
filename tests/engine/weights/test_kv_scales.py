# SPDX-License-Identifier: Apache-2.0
"""Scales of an 8-bit KV cache: reading, exact folding into weights, and their benefit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading.model_setup import make_attention_with_kv, make_model
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.quantization import check_unquantized
from mizzen.models.registry import read_config
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.weights.kv_scales import fold_kv_scales, read_kv_scales

LAYER = "model.layers.{}.self_attn."
FOLDED_TWINS = ("cohere", "gemma3", "hunyuan", "olmo2", "phi3", "starcoder2")
"""Twins whose projections or QK norms differ: their names, biases, scopes and kinds."""


def fold(model: Any, scales: dict[int, tuple[float, float]]) -> None:
    fold_kv_scales([layer.attention for layer in model.layers], scales)


def save_scales(folder: Path, scales: dict[str, float]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: torch.tensor(value) for name, value in scales.items()}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
def test_scales_are_found_under_each_name(
    kit: SimpleNamespace, tmp_path: Path, keys: str, values: str
) -> None:
    kit.save_model(tmp_path, "llama")
    assert read_kv_scales(tmp_path) == {}
    save_scales(tmp_path, {LAYER.format(1) + keys: 0.013, LAYER.format(1) + values: 3.0})
    assert read_kv_scales(tmp_path) == {1: (2.0**-6, 4.0)}
    kit.Bench(tmp_path)  # the scales do not count as unexpected weights


def test_an_invalid_scale_is_named(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama")
    save_scales(tmp_path, {LAYER.format(0) + "k_scale": 0.0})
    with pytest.raises(WeightsError, match=r"layers.0.self_attn.k_scale must be a positive number, not 0.0"):
        read_kv_scales(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *FOLDED_TWINS])
def test_folding_changes_only_keys_and_values(kit: SimpleNamespace, tmp_path: Path, family: str) -> None:
    save = kit.save_twin if family in FOLDED_TWINS else kit.save_model
    transformers_model = save(tmp_path, family)
    bench, prompt = kit.Bench(tmp_path), kit.tokens(40)
    plain = kit.Bench(tmp_path)
    fold(bench.model, {0: (0.25, 8.0), 1: (16.0, 0.5), 99: (2.0, 2.0)})
    for tested in (bench, plain):
        logits = tested.logits(tested.plan([], [(0, 0, prompt, True)], (kit.greedy(0),)))
        torch.testing.assert_close(logits, kit.oracle(transformers_model, prompt), atol=1e-4, rtol=1e-4)
    for layer, (keys, values) in enumerate(((0.25, 8.0), (16.0, 0.5))):
        pairs = ((bench.attention.kv.keys, plain.attention.kv.keys, keys),)
        pairs += ((bench.attention.kv.values, plain.attention.kv.values, values),)
        for folded_kv, plain_kv, scale in pairs:
            torch.testing.assert_close(folded_kv[layer] * scale, plain_kv[layer], atol=1e-4, rtol=1e-4)


def error(
    kit: SimpleNamespace, folder: Path, transformers_model: Any, scales: dict[int, tuple[float, float]]
) -> float:
    """Return the relative error of the logits with an 8-bit KV cache, compared with Transformers."""
    bench, prompt = kit.Bench(folder), kit.tokens(60)
    fold(bench.model, scales)
    attention = make_attention_with_kv(
        bench.model, 4, 256, prefill="reference", decode="reference", dtype=torch.float8_e4m3fn
    )
    bench.attention, bench.step = attention, StepExecutor(bench.model, attention, bench.state, bench.upload)
    actual = bench.logits(bench.plan([], [(0, 0, prompt, True)], (kit.greedy(0),)))
    expected = kit.oracle(transformers_model, prompt)
    return float((actual - expected).norm() / expected.norm())


def test_scales_keep_large_values_in_range(kit: SimpleNamespace, tmp_path: Path) -> None:
    transformers_model = kit.save_model(tmp_path, "llama")
    with torch.no_grad():
        for layer in transformers_model.model.layers:
            layer.self_attn.v_proj.weight *= 1000
            layer.self_attn.o_proj.weight /= 1000
    transformers_model.save_pretrained(tmp_path)
    clipped = error(kit, tmp_path, transformers_model, {})
    scaled = error(kit, tmp_path, transformers_model, {0: (1.0, 32.0), 1: (1.0, 32.0)})
    assert scaled < 0.1
    assert clipped > 3 * scaled


def test_scales_are_folded_only_for_8_bit_caches(kit: SimpleNamespace, tmp_path: Path) -> None:
    from mizzen.engine.loading.model_setup import fold_checkpoint_kv_scales

    kit.save_model(tmp_path, "llama")
    save_scales(tmp_path, {LAYER.format(1) + "k_scale": 0.5})
    options = EngineOptions(model=str(tmp_path), device="cpu")
    model = make_model(options, read_config(tmp_path), lambda done, total: None)
    assert fold_checkpoint_kv_scales(options, model, torch.float32) == ()
    assert fold_checkpoint_kv_scales(options, model, torch.float8_e4m3fn) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("quantization", "served"),
    [
        (None, True),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            False,
        ),
        ({"quant_method": "awq"}, False),
    ],
)
def test_only_kv_cache_quantization_is_accepted(quantization: dict[str, Any] | None, served: bool) -> None:
    fields = Fields({} if quantization is None else {"quantization_config": quantization})
    if served:
        check_unquantized(fields)
        return
    with pytest.raises(ConfigError, match="quantization_config"):
        check_unquantized(fields)
