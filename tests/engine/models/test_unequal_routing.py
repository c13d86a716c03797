# SPDX-License-Identifier: Apache-2.0
"""Mixtures equal Transformers where one expert gets all tokens, one gets none, and two have equal scores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logits_check import assert_equal

from mizzen.core.request import Int32

MIXTURES = (
    *("ernie4.5-moe", "glm4-moe", "gpt-oss", "granite-moe", "minimax-m2", "mixtral", "olmoe"),
    *("phi3.5-moe", "qwen2-moe", "qwen3-moe"),
)
TOKENS = 45


def bend_routers(model: Any, experts: int) -> None:
    """Let all tokens prefer expert 2 to experts 0 and 1, these to all others, and expert 3 least.

    The first element of all hidden states is large and positive. Experts 0 and 1 have the same scores and the
    same weights, so that the result does not depend on the one that is chosen.
    """
    model.get_input_embeddings().weight[:, 0] = 32.0
    for name, weights in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("norm.weight"):
            weights[0] = 1.0
        elif name.endswith("correction_bias"):
            weights.zero_()
            weights[..., :4] = torch.tensor([1.0, 1.0, 2.0, -1.0])
        elif weights.shape == (experts, model.config.hidden_size):  # a router
            weights[1] = weights[0]
            weights[:, 0] = 0
            weights[:4, 0] = torch.tensor([1.6, 1.6, 2.0, -2.0])
        elif weights.dim() and len(weights) == experts:
            weights[1] = weights[0]


@pytest.mark.parametrize("twin", MIXTURES)
@torch.inference_mode()
def test_an_expert_with_all_tokens_one_without_and_ties_equal_transformers(
    twin: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    model = kit.save_twin(tmp_path, twin)
    bench = kit.Bench(tmp_path, expert_load="on")
    bend_routers(model, bench.model.config.experts.count)
    model.save_pretrained(tmp_path)
    bench = kit.Bench(tmp_path, expert_load="on")
    bench.model.expert_load.counts.zero_()
    prompt: Int32 = kit.tokens(TOKENS, seed=1)
    found = bench.logits(bench.plan([], [(0, 0, prompt, True)], (kit.greedy(0),)))
    reference = kit.oracle(model, prompt)
    assert reference.std(0).mean() > 0.01, "tokens differ by more than the tolerance"
    assert_equal(found, reference)
    counts, per_token = bench.model.expert_load.counts, bench.model.config.experts.per_token
    expected = [TOKENS, TOKENS if per_token > 2 else 0, TOKENS, 0]
    assert counts[:, :4].tolist() == [expected] * len(counts), "the first of equal experts is chosen"
