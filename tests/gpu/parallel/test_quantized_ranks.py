# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints on two ranks give the log probabilities of one rank, but for rounding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensor_kit
import torch
import transformers
from checkpoint_kit import checkpoint_log_probabilities
from logprob_check import SIZES
from tensor_kit import run_in_process

from family_twins import save_random_model
from quantized_formats import FORMATS
from quantized_twins import quantize_twin

pytestmark = tensor_kit.several_gpus
MEAN_BOUND, BOUND = 0.25, 1.5
"""Bounds of differences in nats: their mean, and the largest. A rank's inputs get scales of their own, or
stay unquantized if the rank's rows begin within a block, so FP8 codes differ: an emulation on the CPU
gave means of 0.13 (blocks), 0.10 (channels) and 0.04 (INT8), and at most 0.6. With a wrong shard, the
mean would be about the standard deviation of the log probabilities, 1.4."""


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-fp8-channel", "ct-int8", "awq-64", "gptq-act-order"])
def test_two_ranks_equal_one(name: str, tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=64, tie_word_embeddings=False)
    source = tmp_path / "source"
    save_random_model(source, transformers.Qwen3ForCausalLM, config, torch.bfloat16, plus_one=False)
    folder = quantize_twin(source, tmp_path / "twin", FORMATS[name]).folder
    with ThreadPoolExecutor(2) as pool:  # most of the time, the processes start
        one, two = pool.map(
            lambda ranks: np.concatenate(run_in_process(checkpoint_log_probabilities, folder, ranks)), (1, 2)
        )
    differences = np.abs(one - two)
    print(f"{name}: {differences.mean():.4f} {differences.max():.3f}")
    assert one.std() > 4 * MEAN_BOUND
    assert differences.mean() < MEAN_BOUND
    assert differences.max() < BOUND
