# SPDX-License-Identifier: Apache-2.0
"""Mixtures on two ranks give the log probabilities of one rank, whichever way the experts are divided."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensor_kit
import torch
import transformers
from checkpoint_kit import checkpoint_log_probabilities
from logprob_check import SIZES
from tensor_kit import run_in_process

from family_twins import save_random_model
from quantized_mixtures import quantize_mixture

pytestmark = tensor_kit.several_gpus
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "head_dim": 64,
}
MEAN_BOUND = 0.08
"""Bound of the mean difference in nats. An emulation on the CPU gave 0.02 for both formats and both ways;
single values differ by up to 1.4, where rounding chooses another expert. Unrelated log probabilities would
differ by 1.6."""


@pytest.mark.parametrize("name", ["bfloat16", "awq"])
def test_two_ranks_equal_one(name: str, tmp_path: Path) -> None:
    """The ranks share the width of each expert, or each holds half of the experts."""
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=2, tie_word_embeddings=False)
    folder = tmp_path / "source"
    save_random_model(folder, transformers.Qwen3MoeForCausalLM, config, torch.bfloat16, plus_one=False)
    if name != "bfloat16":
        folder = quantize_mixture(folder, tmp_path / "twin", name).folder

    def compute(ranks: int, expert: int) -> np.ndarray:
        return np.concatenate(run_in_process(checkpoint_log_probabilities, folder, ranks, expert))

    with ThreadPoolExecutor(2) as pool:  # most of the time, the processes start
        one, shared_width = pool.map(compute, (1, 2), (1, 1))
    assert one.std() > 4 * MEAN_BOUND
    for way, two in (("width", shared_width), ("experts", compute(2, 2))):
        differences = np.abs(one - two)
        print(f"{name}, {way}: {differences.mean():.4f} {differences.max():.3f}")
        assert differences.mean() < MEAN_BOUND
