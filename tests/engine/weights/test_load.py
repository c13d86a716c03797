# SPDX-License-Identifier: Apache-2.0
"""Loading a model folder: errors name the file, field or tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.loader import load_engine
from mizzen.engine.loading.model_setup import make_model
from mizzen.models.hf_fields import ConfigError
from mizzen.models.registry import read_config, read_end_tokens
from mizzen.weights.checkpoint_files import WeightsError


def load(folder: Path, **options: Any) -> list[tuple[int, int]]:
    """Load a model's weights; return the reported progress, as pairs of bytes read and bytes in total."""
    progress: list[tuple[int, int]] = []
    settings = EngineOptions(model=str(folder), device="cpu", **options)
    make_model(settings, read_config(folder), lambda done, total: progress.append((done, total)))
    return progress


def change_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in remove}))


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folder(kit: SimpleNamespace, tmp_path: Path) -> Path:
    kit.save_model(tmp_path, "llama")
    return tmp_path


def test_progress_counts_every_byte(folder: Path) -> None:
    progress = load(folder)
    size = sum(t.numel() * 4 for t in load_file(folder / "model.safetensors").values())
    assert progress[0] == (0, size)
    assert progress[-1] == (size, size)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_files_are_read_ahead_of_converted_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are mapped, and would be read from the disk page by page; other tensors are streamed."""
    advised: list[tuple[str, int, int, int]] = []

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        advised.append((os.readlink(f"/proc/self/fd/{descriptor}"), start, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    load(folder)
    assert advised == []
    load(folder, dtype="bfloat16")
    assert advised == [(str(folder / "model.safetensors"), 0, 0, os.POSIX_FADV_WILLNEED)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures.*GPT2.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must list one of"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"hidden_size": 33, "head_dim": None}, "hidden_size must be a multiple of num_attention_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"hidden_act": "mish"}, "hidden_act must be one of .*, not 'mish'"),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
            "rope_parameters: rope_type.*not 'proportional'",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be a positive number, not nan"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling must agree with rope_parameters.*yarn",
        ),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, not inf"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"quantization_config describes quantized weights \(HQQ\), which are not supported",
        ),
        ({"rope_parameters": {"rope_type": "x" * 999}}, "rope_type.{0,300}…$"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"layer_types": [["full_attention"]] * 2}, "layer_types"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_configuration_errors_name_the_field(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        read_config(folder, "native")


def test_a_missing_config_field_is_named(folder: Path) -> None:
    change_config(folder, remove=("intermediate_size",))
    with pytest.raises(ConfigError, match="intermediate_size must be a positive integer"):
        read_config(folder)


def test_older_rope_fields_are_read(folder: Path) -> None:
    old = {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
    change_config(folder, remove=("rope_parameters",), **old)
    rope = read_config(folder).rope
    assert (rope.kind, rope.theta, rope.factor) == ("linear", 777.0, 3.0)


def test_older_rope_fields_may_repeat_the_new_ones(folder: Path) -> None:
    rope = {"factor": 3.0, "rope_theta": 777.0}
    change_config(
        folder,
        rope_parameters={**rope, "rope_type": "linear"},
        rope_scaling={"type": "linear", "factor": 3.0},
    )
    assert read_config(folder).rope.factor == 3.0


@pytest.mark.parametrize(("window", "windows"), [(None, (None, None)), (9, (None, 9))])
def test_a_null_window_means_full_attention(
    kit: SimpleNamespace, tmp_path: Path, window: int | None, windows: tuple[int | None, ...]
) -> None:
    kit.save_model(tmp_path, "qwen2")
    config = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": window}
    change_config(tmp_path, remove=("layer_types",), **config)
    assert read_config(tmp_path).windows == windows


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    config = read_config(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 9, 7]}))
    assert read_end_tokens(folder, config) == (7, 9)
    path.write_text(json.dumps({"eos_token_id": 4}))
    assert read_end_tokens(folder, config) == (4,)
    path.unlink()
    assert read_end_tokens(folder, config) == (2,)
    path.write_text(json.dumps({"eos_token_id": 160}))
    with pytest.raises(ConfigError, match=r"160.*outside the vocabulary"):
        read_end_tokens(folder, config)


def test_missing_tensors_are_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load(folder)


def test_unexpected_tensors_are_named(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"model.extra.weight": torch.zeros(1)}))
    with pytest.raises(WeightsError, match=r"unexpected: model\.extra\.weight$"):
        load(folder)


def test_foreign_tensor_names_are_listed_next_to_missing_ones(folder: Path) -> None:
    change_weights(
        folder, lambda w: w.update({"blk.0.attn_k": w.pop("model.layers.0.self_attn.k_proj.weight")})
    )
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.0.*; unexpected: blk\.0\.attn_k$"):
        load(folder)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_tensors_of_quantized_weights_are_rejected(folder: Path, dtype: torch.dtype, kind: str) -> None:
    """They are not converted, even if config.json has no quantization_config."""
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights.update({name: weights[name].to(dtype)}))
    with pytest.raises(WeightsError, match=rf"layers\.1\.mlp\.up_proj\.weight is {kind}, but config"):
        load(folder)


def test_a_tensor_with_a_wrong_shape_is_named(folder: Path) -> None:
    change_config(folder, intermediate_size=56)
    with pytest.raises(WeightsError, match=r"(gate|up|down)_proj.*\[.*\].*config.json implies \[.*\]"):
        load(folder)


def test_a_copy_of_a_tied_head_is_accepted(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama", tie_word_embeddings=True)
    change_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert load(tmp_path)


def test_a_separate_head_is_used_despite_tie_word_embeddings(kit: SimpleNamespace, tmp_path: Path) -> None:
    model = kit.save_model(tmp_path, "llama", tie_word_embeddings=True)
    change_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].flip(0)}))
    transformers_model, prompt = type(model).from_pretrained(tmp_path, dtype=torch.float32), kit.tokens(9)
    bench = kit.Bench(tmp_path)
    loaded = bench.logits(bench.plan([], [(0, 0, prompt, True)], (kit.greedy(0),)))
    torch.testing.assert_close(loaded, kit.oracle(transformers_model, prompt), atol=2e-4, rtol=2e-4)
    assert not torch.allclose(loaded, kit.oracle(model, prompt))


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: .*git lfs pull"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"none")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_an_index_may_name_only_files_in_its_folder(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_model(tmp_path, "llama", shard="20KB")
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    first = sorted(values["weight_map"].values())[0]
    (tmp_path / first).rename(tmp_path / "away")
    with pytest.raises(WeightsError, match=f"missing: {first}"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(WeightsError, match="outside the folder"):
        load(tmp_path)


def test_dummy_weights_are_seeded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    options = EngineOptions(model=str(folder), device="cpu", load_format="dummy")
    first, second = (make_model(options, read_config(folder), lambda d, t: None) for _ in range(2))
    for a, b in zip(first.targets(), second.targets(), strict=True):
        assert torch.equal(a.destination, b.destination)
        assert a.destination.isfinite().all()
    assert first.embedding.weight.std() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor": 2}, "--tensor 2 needs as many ranks"),
        ({"tensor": 8}, r"num_attention_heads \(4\) must be a multiple .*\(8\): use --tensor 1 or 2 or 4"),
        ({"context_length": 1000}, "--context-length 1000 exceeds .*256"),
        ({"kv_cache_tokens": 10**12}, "--kv-cache-tokens 1000000000000 needs .* are free"),
        (
            {"memory_fraction": 0.05, "prefill_chunk_tokens": 10**9},
            "--memory-fraction .*prefill-chunk-tokens",
        ),
    ],
)
def test_impossible_options_are_errors(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_engine(EngineOptions(model=str(folder), device="cpu", **options))


def test_phases_are_reported_and_timed(folder: Path) -> None:
    phases: list[str] = []
    engine = load_engine(EngineOptions(model=str(folder), device="cpu", kv_cache_tokens=64), phases.append)
    engine.close()
    assert phases == ["config", "weights", "kv", "warmup"] == list(engine.info.phases)
    assert 0 < engine.info.free_bytes < engine.info.device_bytes
    assert engine.info.context_length == engine.info.pages_total * engine.info.page_size == 64
