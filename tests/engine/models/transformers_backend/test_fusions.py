# SPDX-License-Identifier: Apache-2.0
"""Modules of Transformers are replaced only where Mizzen computes the same."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logits_check import assert_equal, check
from torch import nn
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from family_twins import save_other_twin
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading import warmup
from mizzen.models.block import Activation
from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend import build, loading
from mizzen.models.transformers_backend.attention import merge_heads
from mizzen.models.transformers_backend.meta_run import TOKENS, find_window
from mizzen.models.transformers_backend.parameters import keeps_float32
from mizzen.models.transformers_backend.recognition import recognise_mlp, recognise_norm


class OddRMSNorm(nn.Module):
    """Like RMSNorm, but with another formula."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.ones(8)), 1e-6, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.eps) ** self.power


class GatedBlock(nn.Module):
    def __init__(self, factor: float, limit: float = math.inf) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down_proj, self.factor = nn.Linear(16, 8, bias=False), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu((self.gate_proj(x) * self.factor).clamp(max=self.limit))
        return self.down_proj(gate * self.up_proj(x))


@pytest.mark.parametrize(("power", "found"), [(-0.5, (1e-6, False)), (-0.49, None), (0.5, None)])
def test_norms_are_recognised_by_their_result(power: float, found: Any) -> None:
    assert recognise_norm(OddRMSNorm(power)) == found


@pytest.mark.parametrize(("factor", "found"), [(1.0, Activation.SILU), (1.01, None)])
def test_feed_forward_blocks_are_recognised_by_their_result(factor: float, found: Any) -> None:
    assert recognise_mlp(GatedBlock(factor)) == found


@pytest.mark.parametrize(
    ("installed", "right"),
    [("5.9.1", False), ("5.10.0", True), ("5.23.0.dev0", True), ("6.0.0", False), ("4.57.1", False)],
)
def test_other_releases_of_transformers_are_refused(
    installed: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "version", lambda _: installed)
    if right:
        build.check_version()
    else:
        with pytest.raises(ConfigError, match=rf"from 5\.10 and below 6, not {installed}: install mizzen"):
            build.check_version()


@pytest.mark.parametrize("limit", [7.0, 20.0])
def test_clamped_gates_are_not_recognised(limit: float) -> None:
    assert recognise_mlp(GatedBlock(1.0, limit)) is None


@pytest.mark.parametrize(
    ("window", "function", "found"),
    [
        (24_576, causal_mask_function, None),
        (24_576, sliding_window_causal_mask_function(24_576), 24_576),
        (3, sliding_window_causal_mask_function(3), 3),
        (3, sliding_window_causal_mask_function(4), ConfigError),
        (24_576, sliding_window_causal_mask_function(24_575), ConfigError),
        (None, sliding_window_causal_mask_function(3), ConfigError),
    ],
)
def test_a_window_is_found_with_few_comparisons(window: int | None, function: Any, found: Any) -> None:
    sizes = []

    def recording(batch: Any, head: Any, query: Any, key: Any) -> Any:
        sizes.append(query.numel())
        return function(batch, head, query, key)

    if found is ConfigError:
        with pytest.raises(ConfigError, match="neither causal nor a sliding window"):
            find_window(recording, window)
    else:
        assert find_window(recording, window) == found
    assert sizes == [2 * TOKENS]


@pytest.mark.parametrize(
    ("twin", "rotation", "additions"),
    [
        ("phi3", True, False),  # a layer has modules for dropout
        ("granite", True, False),  # outputs are multiplied before they are added
        ("olmo2", True, False),  # outputs are normalised
        ("cohere2", False, False),  # interleaved RoPE
        ("seed-oss", True, True),
        ("ministral3", False, True),  # queries are scaled after the rotation
    ],
)
def test_rotations_and_additions_are_fused_where_they_are_plain(
    twin: str, rotation: bool, additions: bool, kit: SimpleNamespace, tmp_path: Path
) -> None:
    kit.save_twin(tmp_path, twin)
    model = kit.Bench(tmp_path, model_implementation="transformers").model
    assert (model.defers_rotation, model.deferred_adds.active) == (rotation, additions)


def hook_layer(monkeypatch: pytest.MonkeyPatch, index: int, hook: Any) -> None:
    """Let a forward hook change the output of a decoder layer in each model of Transformers that is built."""
    make = loading.make_transformers_model

    def make_hooked(*args: Any, **options: Any) -> Any:
        model = make(*args, **options)
        model.base.layers[index].register_forward_hook(hook)
        return model

    monkeypatch.setattr(loading, "make_transformers_model", make_hooked)


def test_additions_are_not_fused_if_the_model_changes_the_stream(
    kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook changes the residual stream between the layers, as the code of a model may do."""
    reference = kit.save_model(tmp_path, "llama")

    def double(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    reference.model.layers[0].register_forward_hook(double)
    hook_layer(monkeypatch, 0, double)
    check(kit, tmp_path, reference, "reference", model_implementation="transformers")


def test_a_model_whose_tokens_influence_each_other_is_refused(
    kit: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.save_model(tmp_path, "llama")
    hook_layer(monkeypatch, 1, lambda module, inputs, output: output.cumsum(dim=1))
    with pytest.raises(ConfigError, match="tokens influence each other outside the attention"):
        kit.Bench(tmp_path, model_implementation="transformers")


def test_heads_of_one_projection_are_merged_without_a_copy() -> None:
    qkv = torch.randn(5, (4 + 2 * 2) * 8)
    q, k, v = (part.view(5, -1, 8) for part in qkv.split((32, 16, 16), dim=1))
    merged = merge_heads(q, k, v)
    assert merged.data_ptr() == qkv.data_ptr()
    assert_equal(merged, qkv)
    assert_equal(merge_heads(q.clone(), k, v), qkv)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [("OPT", "has no tensor parallel plan"), ("FlexOlmo", r"has \w+ for layers.*experts.*Use --tensor 1")],
)
def test_plans_that_cannot_be_followed_are_refused(
    prefix: str, message: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    save_other_twin(tmp_path, prefix)
    with pytest.raises(ConfigError, match=message):
        kit.Bench(tmp_path, tensor=2)


def test_a_missing_tensor_of_an_expert_is_named(kit: SimpleNamespace, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_other_twin(tmp_path, "FlexOlmo")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"lacks some of the tensors.*layers\.1\.mlp\.experts\.gate"):
        kit.Bench(tmp_path)


def test_code_that_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    for name in ("make_prefill_graphs", "make_decode_graphs", "compile_kernels"):
        monkeypatch.setattr(warmup, name, lambda *args: None)
    monkeypatch.setattr(warmup, "CudaRunner", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    options, device = EngineOptions(model=".", device="cuda"), torch.device("cuda")
    config = SimpleNamespace(implementation="transformers", architecture="SomeForCausalLM")
    step: Any = SimpleNamespace(model=SimpleNamespace(config=config), images=None)
    with pytest.raises(ValueError, match=r"SomeForCausalLM .*not permitted.* use --cuda-graph off"):
        warmup.make_runner(options, step, device, None, lambda done, total: None)
    config.implementation = "native"
    with pytest.raises(RuntimeError, match="not permitted"):
        warmup.make_runner(options, step, device, None, lambda done, total: None)


def test_tensors_stay_in_float32_where_transformers_keeps_them() -> None:
    model = SimpleNamespace(_keep_in_fp32_modules_strict=["score_bias"], _keep_in_fp32_modules=["router"])
    names = ("layers.0.score_bias", "layers.0.router.weight", "layers.0.score_bias2")
    kept = {
        dtype: [keeps_float32(model, name, dtype) for name in names]
        for dtype in (torch.bfloat16, torch.float16)
    }
    assert kept == {torch.bfloat16: [True, False, False], torch.float16: [True, True, False]}
