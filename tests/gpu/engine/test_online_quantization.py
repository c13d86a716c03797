# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are quantized while they are loaded on a GPU: codes, memory and answers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from hopper import on_hopper
from small_models import save_model

from mizzen import LLM, SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.loading import model_setup
from mizzen.layers.linear_methods.base import MeasuredWeights
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.models.registry import read_config
from mizzen.weights import staged

pytestmark = on_hopper("sgl_kernel", "sglang-kernel")
OPTIONS = ("fp8", "int8", "w4a16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen3")
    return path


def load(folder: Path, device: str, option: str) -> list[DequantizedLinear]:
    """Return the quantized layers of a model that runs without Mizzen's kernels."""
    methods: list[MeasuredWeights] = []
    options = EngineOptions(
        model=str(folder), device=device, dtype="bfloat16", quantization=option, fusion="off"
    )
    model_setup.make_model(options, read_config(folder), lambda done, total: None, methods=methods)
    return [cast(DequantizedLinear, method) for method in methods if method.format_bytes()]


@pytest.mark.parametrize("option", OPTIONS)
def test_codes_and_scales_equal_those_of_the_cpu(
    option: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "BATCH_BYTES", 100_000)
    on_gpu, on_cpu = load(folder, "cuda", option), load(folder, "cpu", option)
    assert len(on_gpu) == len(on_cpu) == 12
    for found, wanted in zip(on_gpu, on_cpu, strict=True):
        assert found.weight.values.is_cuda
        assert torch.equal(
            found.weight.values.cpu().view(torch.uint8), wanted.weight.values.view(torch.uint8)
        )
        assert torch.equal(found.weight.scales.cpu(), wanted.weight.scales)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_kernels_generate_with_graphs_as_without(option: str, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(3, 60))]
    answers = []
    for graphs in ("auto", "off"):
        with LLM(
            folder,
            skip_tokenizer=True,
            dtype="bfloat16",
            quantization=option,
            cuda_graph=graphs,
            kv_cache_tokens=4096,
            max_running_requests=8,
        ) as llm:
            assert llm.engine.info.quantization.startswith("Online: ")
            answers.append([answer.token_ids for answer in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert all(len(tokens) == 16 for tokens in answers[0])
