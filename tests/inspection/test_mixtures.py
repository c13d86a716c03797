# SPDX-License-Identifier: Apache-2.0
"""Sizes, errors and numbers of GPUs of mixtures of experts, as `mizzen inspect` reports them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.inspection.gpus import GIB
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles
from mizzen.inspection.text import format_inspection
from mizzen.models.hf_fields import Fields
from mizzen.models.registry import read_model

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "known_models.json").read_text())
QWEN3 = KNOWN["Qwen/Qwen3-8B"]["config"]
MIXTRAL = KNOWN["mistralai/Mixtral-8x7B-Instruct-v0.1"]["config"]
SHARED_MOE = MIXTRAL | {"architectures": ["GraniteMoeSharedForCausalLM"]}
"""A mixture of experts without a native implementation."""
OPTIONS = EngineOptions(model="m")
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 32,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}


def inspect(config: dict[str, Any], gpu: float = 0, tensor: int = 1) -> Inspection:
    """Inspect a model with this config.json on GPUs with `gpu` GiB, or on no GPU if `gpu` is 0."""
    return inspect_model(
        ModelFiles(name="m", fields=Fields(config)),
        OPTIONS,
        tensors=(tensor,),
        gpu=f"{gpu} GiB" if gpu else "",
        memory=int(gpu * GIB),
    )


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_the_experts_of_a_mixture_are_counted_without_files(implementation: str) -> None:
    files = ModelFiles(name="r", fields=Fields(MIXTRAL))
    options = replace(OPTIONS, model_implementation=implementation)
    result = inspect_model(files, options, gpu="80 GiB", memory=80 * GIB, tensors=(1,))
    assert result.implementation == implementation
    assert result.weight_bytes == 2 * result.parameters == 2 * 46_702_792_704
    assert not result.fits
    assert result.memory_fits[0].message.startswith(
        "46.7B parameters on 1 GPU need at least 87.2 GiB of each"
    )
    assert inspect_model(files, options, gpu="141 GiB", memory=141 * GIB).fits


def test_a_mixture_with_a_native_implementation_is_shared_by_gpus() -> None:
    result = inspect(MIXTRAL, gpu=80, tensor=2)
    assert (result.implementation, result.fits) == ("native", True)
    assert 0.5 < result.memory_fits[0].weight_bytes / result.weight_bytes < 0.501  # routers are not shared
    message = inspect(MIXTRAL, gpu=40, tensor=2).memory_fits[0].message
    assert message.endswith(
        "use more GPUs (--tensor) or GPUs with more memory, or quantized weights: --quantization fp8 needs "
        "21.9 GiB for them"
    )


def test_a_mixture_whose_width_cannot_be_divided_is_shared_as_whole_experts() -> None:
    odd = inspect({**MIXTRAL, "intermediate_size": 14338}, tensor=4)
    assert (odd.tensor_sizes[0].possible, odd.tensor_sizes[0].expert) == (True, 2)
    assert "--expert      2 with --tensor 4, since" in format_inspection(odd)
    odd = inspect({**MIXTRAL, "intermediate_size": 14338, "num_local_experts": 7}, tensor=4)
    assert odd.tensor_sizes[0].reason == (
        "intermediate_size (14338) must be a multiple of the tensor ranks (4), or num_local_experts (7) must "
        "be a multiple of the expert groups (4): use --tensor 1 or 2"
    )


def test_active_parameters_are_those_of_the_experts_of_a_token() -> None:
    result = inspect(MIXTRAL)
    expert = 3 * 4096 * 14336
    assert result.parameters - result.active_parameters == 32 * 6 * expert
    assert "46.7B (46,702,792,704); a token uses 12.9B" in format_inspection(result)
    assert inspect(SHARED_MOE).active_parameters == 0
    dense = inspect(QWEN3)
    assert dense.active_parameters == dense.parameters
    assert "a token uses" not in format_inspection(dense)


def test_the_bytes_of_quantized_experts_are_counted() -> None:
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    result = inspect(MIXTRAL | {"quantization_config": block}, gpu=80)
    linear = 32 * (2 * 4096 * (4096 + 1024) + 8 * 3 * 4096 * 14336)
    assert result.fits and result.weight_bytes == 2 * result.parameters - linear + linear // 128 // 32
    options = replace(OPTIONS, quantization="w4a16")
    files = ModelFiles(name="m", fields=Fields(MIXTRAL))
    online = inspect_model(files, options, gpu="80 GiB", memory=80 * GIB, tensors=(1,))
    assert online.memory_fits[0].weight_bytes == 2 * result.parameters - linear * 3 // 2 + linear // 64


def test_experts_with_biases_are_not_quantized_while_they_are_loaded() -> None:
    options = replace(OPTIONS, quantization="fp8")
    files = ModelFiles(name="m", fields=Fields(KNOWN["unsloth/gpt-oss-20b-BF16"]["config"]))
    with pytest.raises(ValueError, match=r"fp8 is not supported for experts with biases \(GptOssForCausalLM"):
        inspect_model(files, options)
    small = inspect_model(files, OPTIONS, gpu="40 GiB", memory=40 * GIB, tensors=(1,))
    assert "--quantization" not in small.memory_fits[0].message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok must be at most num_experts \(128\), not 129"),
        ({"num_experts": 0}, "num_experts must be a positive integer, not 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must list layers without experts, not 3"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be a positive integer"),
    ],
)
def test_wrong_numbers_of_experts_are_named(changes: dict[str, Any], reason: str) -> None:
    assert re.search(reason, inspect({**QWEN3_MOE, **changes}).reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_group": 3}, r"n_group must divide n_routed_experts \(128\) into groups of at least two, not 3"),
        ({"n_group": 128}, "n_group must divide"),
        ({"n_group": 8, "topk_group": 9}, r"topk_group must be at most n_group \(8\)"),
        ({"n_group": 32, "topk_group": 1}, "its groups of 4 experts must hold the 8 experts of a token"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of 0 or more, not -1"),
    ],
)
def test_wrong_groups_of_experts_are_named(changes: dict[str, Any], reason: str) -> None:
    config = KNOWN["zai-org/GLM-4.5-Air"]["config"]
    assert re.search(reason, inspect({**config, **changes}).reason)


def test_the_step_of_a_mixture_holds_all_experts_of_a_token() -> None:
    options = replace(OPTIONS, cuda_graph="off")
    expert, wide = (
        read_model(Fields({**QWEN3_MOE, **changes}), "transformers")
        for changes in ({}, {"num_experts_per_tok": 8, "intermediate_size": 32 * 768})
    )
    assert (expert.expert_width, wide.expert_width) == (32 * 768, 8 * 768)
    needs = [MemoryNeed.estimate(config, options, 2).step_bytes for config in (expert, wide)]
    assert needs[0] == needs[1]


def test_the_step_of_a_native_mixture_holds_inputs_and_outputs_of_experts() -> None:
    options = replace(OPTIONS, cuda_graph="off")
    few, many = (read_model(Fields({**QWEN3_MOE, "num_experts_per_tok": count})) for count in (8, 9))
    needs = [MemoryNeed.estimate(config, options, 2).step_bytes for config in (few, many)]
    tokens = options.prefill_chunk_tokens + options.max_running_requests
    assert needs[1] - needs[0] == 2 * tokens * (4 * 768 + 2 * few.hidden_size)
