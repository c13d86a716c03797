"""Logits equal Transformers' in float32, however a prompt is chunked, shared and batched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from family_twins import TWINS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BACKENDS = ("reference", "cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "no-gqa": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide-heads": {"head_dim": 16},
    "llama3-rope": {"rope_parameters": LLAMA3},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "yarn-rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn-rope-of-its-own": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 2000.0,
            "factor": 3.0,
            "original_max_position_embeddings": 24,
            "attention_factor": 1.3,
            "beta_fast": 6.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
        "head_dim": 16,
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


def check(kit: SimpleNamespace, folder: Path, model: Any, backend: str) -> None:
    """Compare logits with Transformers: whole, chunked and page-sharing prompts, and a mixed batch."""
    bench = kit.Bench(folder, backend)
    first_prompt, second_prompt = kit.tokens(45, seed=1), kit.tokens(29, seed=2)
    reference = kit.oracle(model, first_prompt)
    assert reference.std() > 0.3

    assert_equal(bench.logits(bench.plan([], [(0, 0, first_prompt, True)], (kit.greedy(0),))), reference)

    starts = (kit.greedy(1),)
    for begin, end in ((0, 7), (7, 8), (8, 30), (30, 45)):
        actual = bench.logits(bench.plan([], [(1, begin, first_prompt[begin:end], end == 45)], starts))
        assert_equal(actual, reference[begin:end])
        starts = ()

    hit = bench.share(0, 2, 40)
    actual = bench.logits(bench.plan([], [(2, 40, first_prompt[40:], True)], (kit.greedy(2, 40),), (hit,)))
    assert_equal(actual, reference[40:])

    # Slot 0 decodes while slots 3 and 4 run prompt chunks; then slots 0 to 4 all decode.
    answers = {slot: kit.tokens(3, seed=10 + slot) for slot in range(5)}
    texts = {0: first_prompt, 1: first_prompt, 2: first_prompt, 3: second_prompt, 4: second_prompt[:10]}
    full = {slot: np.concatenate([text, answers[slot]]) for slot, text in texts.items()}
    expected = {slot: kit.oracle(model, text) for slot, text in full.items()}

    def feed(slots: list[int]) -> None:
        for slot in slots:
            bench.state.last_tokens[slot] = int(full[slot][bench.state.lengths[slot]])

    feed([0])
    actual = bench.logits(
        bench.plan(
            [0],
            [(3, 0, second_prompt[:20], False), (4, 0, second_prompt[:10], True)],
            (kit.greedy(3), kit.greedy(4)),
        )
    )
    assert_equal(actual, torch.cat([expected[0][45:46], expected[3][:20], expected[4][:10]]))
    actual = bench.logits(bench.plan([], [(3, 20, second_prompt[20:], True)]))
    assert_equal(actual, expected[3][20:29])
    for _ in range(2):
        slots = [4, 0, 2, 3, 1]
        feed(slots)
        lengths = [int(bench.state.lengths[slot]) for slot in slots]
        actual = bench.logits(bench.plan(slots, []))
        assert_equal(actual, torch.stack([expected[s][n] for s, n in zip(slots, lengths, strict=True)]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_for_each_family(
    family: str, backend: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    check(kit, tmp_path, kit.save_model(tmp_path, family), backend)


@pytest.mark.parametrize("twin", TWINS)
def test_logits_equal_transformers_for_each_twin(twin: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    check(kit, tmp_path, kit.save_twin(tmp_path, twin), BACKENDS[list(TWINS).index(twin) % 2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_config_variants(
    variant: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    check(kit, tmp_path, kit.save_model(tmp_path, "llama", **VARIANTS[variant]), BACKENDS[-1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    ],
)
def test_logits_equal_transformers_with_sliding_windows(
    family: str, changes: dict[str, Any], backend: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    check(kit, tmp_path, kit.save_model(tmp_path, family, **changes), backend)


def test_logits_equal_transformers_from_sharded_files(kit: SimpleNamespace, tmp_path: Path) -> None:
    model = kit.save_model(tmp_path, "qwen3", shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check(kit, tmp_path, model, "reference")
