# SPDX-License-Identifier: Apache-2.0
"""Logits of quantized checkpoints equal those of Transformers with the dequantized weights, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from logits_check import assert_equal
from rank_kit import compute_vector, thread_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from family_twins import save_twin
from mizzen.weights.checkpoint_files import WeightsError
from quantized_formats import FORMATS
from quantized_twins import PART_FACTORS, SOURCE_SIZES, QuantizedTwin, quantize_twin, save_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Granite with biases in its projections, and with an untied head."""
    return save_source(tmp_path_factory.mktemp("source"), num_hidden_layers=1)


def compute_reference(source: Path, twin: QuantizedTwin, kit: SimpleNamespace) -> torch.Tensor:
    """Return Transformers' logits of a prompt with the dequantized weights, [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return kit.oracle(twin.dequantize_into(model), kit.tokens(30, seed=1))


def compute_logits(folder: Path, kit: SimpleNamespace, **options: Any) -> torch.Tensor:
    """Return the engine's logits of the same prompt."""
    bench = kit.Bench(folder, **options)
    return bench.logits(bench.plan([], [(0, 0, kit.tokens(30, seed=1), True)], (kit.greedy(0),)))


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantized_weights(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    twin = quantize_twin(source, tmp_path / "twin", FORMATS[name], part_factors=PART_FACTORS)
    reference = compute_reference(source, twin, kit)
    assert reference.std() > 0.3
    assert_equal(compute_logits(twin.folder, kit), reference)


CHOSEN = ("fp8-blocks", "ct-fp8-tensor-static", "ct-int8", "awq", "gptq-act-order", "ct-w4a16-act-order")


@pytest.mark.parametrize("name", CHOSEN)
def test_several_ranks_give_the_same_results_as_one(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """With four ranks, a rank's share of the feed-forward block is 96, and ranks share KV heads."""
    twin = quantize_twin(source, tmp_path / "twin", FORMATS[name], part_factors=PART_FACTORS)
    vectors = []
    for ranks in (1, 2, 4):
        with thread_ranks(twin.folder, ranks) as engine:
            vectors.append(compute_vector(engine, kit.tokens(40)))
    for vector in vectors[1:]:
        np.testing.assert_allclose(vector, vectors[0], atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_give_finite_and_different_logits(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    twin = quantize_twin(source, tmp_path / "twin", FORMATS[name])
    (twin.folder / "model.safetensors").unlink()
    logits = compute_logits(twin.folder, kit, load_format="dummy")
    assert logits.isfinite().all() and 0.1 < logits.std(dim=1).min() < logits.std(dim=1).max() < 10


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq", "ct-w8a16", "ct-fp8-channel", "ct-int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_may_be_quantized(
    name: str, tied: bool, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """A quantized head is used even if config.json says that the head is the embedding."""
    twin = quantize_twin(source, tmp_path / "twin", FORMATS[name], ignored=())
    assert "lm_head" in twin.layers
    reference = compute_reference(source, twin, kit)
    if tied:
        change_config(twin.folder, tie_word_embeddings=True)
    if name.startswith("fp8"):  # this method leaves the head unquantized
        with pytest.raises(WeightsError, match=r"lm_head\.weight is F8_E4M3"):
            compute_logits(twin.folder, kit)
    else:
        assert_equal(compute_logits(twin.folder, kit), reference)


def change_config(folder: Path, **fields: Any) -> None:
    """Replace fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8-blocks"])
def test_layers_may_be_unquantized_without_being_listed(
    name: str, source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    layers = tuple(f"model.layers.0.{layer}" for layer in ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"))
    twin = quantize_twin(source, tmp_path / "twin", FORMATS[name], ignored=("lm_head", *layers))
    assert len(twin.layers) == 4
    change_config(twin.folder, quantization_config=FORMATS[name].config(("lm_head",)))
    assert_equal(compute_logits(twin.folder, kit), compute_reference(source, twin, kit))


def test_layers_of_headless_models_may_be_unquantized_without_being_listed(
    source: Path, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """The files of such a model name layers without the prefix `model.`."""
    layer, vectors = "model.layers.0.mlp.down_proj", list[np.ndarray[Any, Any]]()
    twin = quantize_twin(source, tmp_path / "twin", FORMATS["awq"], ignored=("lm_head", layer))
    change_config(twin.folder, quantization_config=FORMATS["awq"].config(("lm_head",)))
    for headless in (False, True):
        if headless:
            change_config(twin.folder, architectures=["GraniteModel"])
            path = twin.folder / "model.safetensors"
            tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
            tensors.pop("lm_head.weight")
            save_file(tensors, path)
        with thread_ranks(twin.folder, 1) as engine:
            vectors.append(compute_vector(engine, kit.tokens(40)))
    np.testing.assert_array_equal(vectors[1], vectors[0])


@pytest.mark.parametrize("name", ["ct-fp8-channel", "ct-w4a16-32", "modelopt-fp8"])
def test_tied_heads_use_the_unquantized_embedding(name: str, kit: SimpleNamespace, tmp_path: Path) -> None:
    sizes = {**SOURCE_SIZES, "num_hidden_layers": 1, "tie_word_embeddings": True}
    model = save_twin(tmp_path, "granite", **sizes)
    twin = quantize_twin(tmp_path, tmp_path / "twin", FORMATS[name], ignored=())
    reference = kit.oracle(twin.dequantize_into(model), kit.tokens(30, seed=1))
    assert_equal(compute_logits(twin.folder, kit), reference)


@pytest.mark.parametrize("name", ["phi3", "glm", "cohere2", "gemma3", "qwen3"])
@pytest.mark.parametrize("weights", ["fp8-small-blocks", "awq-32", "gptq-act-order", "ct-fp8-tensor"])
def test_other_blocks_equal_the_dequantized_weights(
    name: str, weights: str, kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Among them are layers merged in the checkpoint, and interleaved rotary embeddings."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": False}
    save = kit.save_model if name == "qwen3" else save_twin
    model = save(tmp_path, name, **sizes)
    twin = quantize_twin(tmp_path, tmp_path / "twin", FORMATS[weights])
    reference = kit.oracle(twin.dequantize_into(model), kit.tokens(30, seed=1))
    assert_equal(compute_logits(twin.folder, kit), reference)
