# SPDX-License-Identifier: Apache-2.0
"""gpt-oss equals Transformers around the end of its window, with extreme sinks, and on several ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import make, requests_of, run_requests
from logits_check import assert_equal
from safetensors.torch import load_file, save_file

from mizzen.core.sampling_params import SamplingParams
from mizzen.models.block import Activation
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_config, read_fields
from mizzen.weights.checkpoint_files import WeightsError

WINDOW: dict[str, Any] = {"sliding_window": 128, "max_position_embeddings": 512, "swiglu_limit": 7.0}
LENGTHS = (127, 128, 129, 300)


def set_sinks(folder: Path, model: Any, value: float) -> None:
    """Set the sinks of the heads to `value` and its negative, by turns, in a checkpoint and its model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for index, layer in enumerate(model.model.layers):
        sinks = layer.self_attn.sinks.data
        sinks.copy_(value * (1 - 2 * (torch.arange(len(sinks)) % 2)))
        tensors[f"model.layers.{index}.self_attn.sinks"] = sinks.clone()
    save_file(tensors, path)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_prompts_around_the_window_equal_transformers(
    backend: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Each prompt runs whole; then all decode together, while another prompt runs in chunks."""
    model = kit.save_twin(tmp_path, "gpt-oss", **WINDOW)
    set_sinks(tmp_path, model, 10.0)
    bench = kit.Bench(tmp_path, backend, page_size=8)
    texts = [kit.tokens(length + 2, seed=length) for length in LENGTHS]
    expected = [kit.oracle(model, text) for text in texts]
    for slot, (text, rows) in enumerate(zip(texts, expected, strict=True)):
        prompt = text[:-2]
        found = bench.logits(bench.plan([], [(slot, 0, prompt, True)], (kit.greedy(slot),)))
        assert_equal(found, rows[:-2])
    slots, starts = list(range(len(texts))), (kit.greedy(4),)
    for step, (begin, end) in enumerate(((0, 125), (125, 300))):
        for slot in slots:
            bench.state.last_tokens[slot] = int(texts[slot][LENGTHS[slot] + step])
        chunk = (4, begin, texts[-1][begin:end], end == 300)
        found = bench.logits(bench.plan(slots, [chunk], starts))
        assert_equal(found[:4], torch.stack([expected[slot][LENGTHS[slot] + step] for slot in slots]))
        assert_equal(found[4:], expected[-1][begin:end])
        starts = ()


def test_sinks_and_windows_change_the_result(kit: SimpleNamespace, tmp_path: Path) -> None:
    """So that the comparisons with Transformers can fail."""
    model, prompt = kit.save_twin(tmp_path, "gpt-oss", **WINDOW), kit.tokens(300, seed=300)
    plain = kit.oracle(model, prompt)
    set_sinks(tmp_path, model, 10.0)
    with_sinks = kit.oracle(model, prompt)
    assert not torch.allclose(with_sinks, plain, atol=1e-2)
    model = kit.save_twin(tmp_path, "gpt-oss", **WINDOW | {"sliding_window": 300})
    far = kit.oracle(model, prompt)
    assert torch.allclose(far[:128], plain[:128], atol=1e-4)
    assert not torch.allclose(far[129:], plain[129:], atol=1e-2)


def test_dummy_weights_answer_with_different_tokens(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "gpt-oss")
    bench = kit.Bench(tmp_path, load_format="dummy")
    logits = bench.logits(bench.plan([], [(0, 0, kit.tokens(40), True)], (kit.greedy(0),)))
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1).tolist())) > 10
    for layer in bench.model.layers:
        weights = layer.mlp.down.weights
        for tensor in (weights.gate_up, weights.down, weights.biases.gate_up, weights.biases.down):
            assert 0.01 < tensor.std() < 0.5


def test_a_missing_bias_is_named(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "gpt-oss")
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj_bias"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=f"missing: {name}"):
        kit.Bench(tmp_path)


def test_prefixes_are_reused_with_long_contexts(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "gpt-oss", **WINDOW, tie_word_embeddings=False)
    first = kit.tokens(290, seed=300)
    prompts = [first, np.concatenate([first[:200], kit.tokens(20, seed=4)])]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    together, ends = run_requests(
        make(tmp_path, prefill_chunk_tokens=64), requests_of(prompts, [sampling] * 2), [0, 20]
    )
    alone, _ = run_requests(make(tmp_path), requests_of(prompts[1:], [sampling]), [0])
    assert ends[1].cached_tokens >= 192
    assert together[1] == alone[0]


def test_fields_that_config_json_leaves_out_have_the_defaults_of_the_family(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    kit.save_twin(tmp_path, "gpt-oss", num_hidden_layers=4)
    fields = Fields.load(tmp_path)
    optional = ("head_dim", "sliding_window", "layer_types", "swiglu_limit", "swiglu_alpha", "rms_norm_eps")
    config = read_fields(Fields({k: v for k, v in fields.values.items() if k not in optional}))
    assert config.head_dim == 64
    assert config.windows == (128, None, 128, None)
    assert (config.block.activation, config.block.gate_limit) == (Activation.CLAMPED_SWIGLU, 7.0)
    assert (config.block.gate_slope, config.norm_epsilon) == (1.702, 1e-5)
    assert read_config(tmp_path).block.gate_limit == 0.5
    with pytest.raises(ConfigError, match=r"num_experts_per_tok must be at most num_local_experts \(8\)"):
        read_fields(Fields({**fields.values, "num_experts_per_tok": 9}))
