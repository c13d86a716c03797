# SPDX-License-Identifier: Apache-2.0
"""Layers whose kernels decode quantized experts equal layers that dequantize them: on a GPU, or in Triton's
interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_device import DEVICE, DTYPE, GPU, RUNS_TRITON

from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.grouped_gemm import GroupedTile
from mizzen.layers.context import BuildContext
from mizzen.layers.experts import coded_kernel_plans, coded_kernel_product
from mizzen.layers.experts.coded_kernel_plans import CodedFormat
from mizzen.layers.experts.coded_kernel_product import CodedKernelProduct
from mizzen.layers.experts.kernel_plans import ExpertKernelPlan, FewRows, Grouped
from mizzen.layers.experts.sparse_mlp import SparseMLP
from mizzen.layers.quantized.canonical import Codes
from mizzen.layers.sharding import Axis, Mesh
from mizzen.models.registry import read_config
from mizzen.weights.load import fill_dummy

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("plans")]
TOLERANCE = 0.02 if GPU else 1e-4
HIDDEN, WIDTH, TOKENS = 64, 64, 9
PLAN = ExpertKernelPlan(
    few_rows=FewRows(FewRowsTile(16, 64, 4), FewRowsTile(8, 64, 4)),
    few_tokens=2,
    grouped=((float("inf"), Grouped(*(2 * (GroupedTile(16, 64, 64, 3, 4, swap=True),)))),),
    library_rows=8,
    library_size=0,
)
PLANS = {CodedFormat(codes, by_row): PLAN for codes in Codes for by_row in (True, False)}
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
QWEN2 = {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 32}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0.5, "sliding_window": 16}


def compress(fmt: str, **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors with these weights."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}}


MODELS: dict[str, dict[str, Any]] = {
    "fp8-channel": QWEN3
    | {"quantization_config": compress("float-quantized", num_bits=8, type="float", strategy="channel")},
    "fp8-blocks": QWEN2
    | {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [16, 32],
        }
    },
    "int4": QWEN3
    | {
        "quantization_config": compress(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32
        )
    },
    "mxfp4": GPT_OSS
    | {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        }
    },
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all formats a plan, and let the kernels run on any device."""
    monkeypatch.setattr(coded_kernel_product, "has_wgmma", lambda device: True)
    monkeypatch.setattr(coded_kernel_plans, "CODED_PLANS", PLANS)


def make_layer(
    name: str, folder: Path, mesh: Mesh, *, fused: bool, counts_experts: bool = False
) -> SparseMLP:
    """Return a layer with random weights, which are the same in each call."""
    (folder / "config.json").write_text(json.dumps(SIZES | MODELS[name]))
    config = read_config(folder)
    assert config.experts is not None
    build = BuildContext(device=DEVICE, dtype=DTYPE, mesh=mesh, fused=fused, counts_experts=counts_experts)
    layer = SparseMLP(build, config, config.experts, "mlp.")
    fill_dummy(layer.targets(), seed=1, progress=lambda done, total: None)
    layer.finish()
    return layer


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, Mesh()) for name in MODELS),
        ("mxfp4", Mesh(tensor=Axis(1, 2))),
        ("fp8-blocks", Mesh(tensor=Axis(1, 2), expert_groups=2)),
    ],
    ids=[*MODELS, "half of the width", "half of the experts"],
)
def test_kernels_equal_layers_that_dequantize(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """One token uses the kernels for few rows, nine use grouped GEMMs, and 24 the older product."""
    exact, fast = (make_layer(name, tmp_path, mesh, fused=fused) for fused in (False, True))
    assert exact.down.kernels is None
    assert fast.down.kernels is not None and isinstance(fast.down.kernels.product, CodedKernelProduct)
    x = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    for tokens in (1, TOKENS, 24) if mesh == Mesh() else (1, TOKENS):
        expected = exact(x[:tokens])
        scale = expected.abs().max().item()
        torch.testing.assert_close(fast(x[:tokens]), expected, rtol=TOLERANCE, atol=TOLERANCE * scale)


def test_the_router_localizes_experts_unless_choices_are_counted(tmp_path: Path) -> None:
    """Counts are by the experts' indices in the layer; otherwise no launch besides the router's is needed."""
    mesh = Mesh(tensor=Axis(1, 2), expert_groups=2)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    results = []
    for counts in (False, True):
        mixture = make_layer("fp8-blocks", tmp_path, mesh, fused=True, counts_experts=counts).down
        results.append(mixture(x))
        assert mixture.kernels is not None
        assert mixture.kernels.localizes is (mixture.partial_weights is None) is not counts
        chosen, _ = mixture.kernels.router(x)
        everywhere, _ = mixture.router(x)
        assert torch.equal(chosen, everywhere if counts else (everywhere - 2).where(everywhere >= 2, 2))
        assert mixture.chosen is None or torch.equal(mixture.chosen, everywhere)
    assert torch.equal(*results)
