# SPDX-License-Identifier: Apache-2.0
"""Logits equal Transformers' in float32, however a prompt is chunked, shared and batched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from logits_check import check

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
    "exact-gelu": {"hidden_act": "gelu"},
}


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
