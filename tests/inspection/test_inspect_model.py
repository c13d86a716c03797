# SPDX-License-Identifier: Apache-2.0
"""Files of a model, numbers of GPUs and memory, as `mizzen inspect` reports them."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.host import DeviceMemory
from mizzen.engine.loading.memory_budget import fit_kv_pages
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.inspection.gpus import GIB, GPUS, gpu_bytes
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.memory import RESERVED_BYTES, format_count
from mizzen.inspection.model_files import ModelFiles, read_folder, read_listing
from mizzen.inspection.text import format_inspection
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_fields, read_model

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "known_models.json").read_text())
QWEN3 = KNOWN["Qwen/Qwen3-8B"]["config"]
GEMMA3 = KNOWN["google/gemma-3-27b-it"]["config"]
OPTIONS = EngineOptions(model="m")


def inspect(config: dict[str, Any], gpu: float = 0, tensor: int = 1, **options: Any) -> Inspection:
    """Inspect a model with this config.json on GPUs with `gpu` GiB, or on no GPU if `gpu` is 0."""
    return inspect_model(
        ModelFiles(name="m", fields=Fields(config)),
        replace(OPTIONS, **options),
        tensors=(tensor,),
        gpu=f"{gpu} GiB" if gpu else "",
        memory=int(gpu * GIB),
    )


def save(folder: Path, *names: str, config: dict[str, Any] | None = QWEN3) -> None:
    """Write config.json and empty files with the given names to a folder."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name in names:
        (folder / name).touch()


def save_header(path: Path, **tensors: tuple[str, list[int]]) -> None:
    """Write a safetensors file that consists of a header only."""
    header = {name: {"dtype": kind, "shape": shape} for name, (kind, shape) in tensors.items()}
    body = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
def test_the_kv_cache_has_as_many_pages_as_in_the_engine(config: dict[str, Any], tensor: int) -> None:
    (fit,) = inspect(config, gpu=139.8, tensor=tensor).memory_fits
    options = replace(OPTIONS, tensor=tensor)
    need = MemoryNeed.estimate(read_fields(Fields(config)), options, 2)
    total = int(139.8 * GIB)
    memory = DeviceMemory(total, total - fit.weight_bytes - RESERVED_BYTES)
    pages = fit_kv_pages(options, 4096, need.with_measured_step(need.step_bytes), memory)
    assert fit.kv_tokens == pages * options.page_size > 0
    assert fit.kv_bytes == fit.kv_tokens * need.token_bytes


def test_an_fp8_cache_holds_twice_as_many_tokens() -> None:
    half, full = (inspect(QWEN3, gpu=80, kv_cache_dtype=kind).memory_fits[0] for kind in ("fp8", "auto"))
    assert abs(half.kv_tokens - 2 * full.kv_tokens) <= 16


def test_the_memory_limits_requests() -> None:
    (fit,) = inspect(QWEN3, gpu=80).memory_fits
    assert fit.longest_request == 40960
    assert fit.full_requests == fit.kv_tokens // 40960 >= 2
    (small,) = inspect(QWEN3, gpu=22.5).memory_fits
    assert small.longest_request == small.kv_tokens < 40960
    assert (small.full_requests, small.fits) == (0, True)
    assert "tokens, less than one request of 40,960 tokens" in small.message


def test_a_wanted_context_must_fit() -> None:
    fits = [inspect(QWEN3, gpu=22.5, context_length=length).memory_fits[0] for length in (1000, 40960)]
    assert [fit.fits for fit in fits] == [True, False]
    assert fits[1].message.endswith(
        "less than one request of 40,960 tokens: use more GPUs (--tensor) or GPUs with more memory, or "
        "quantized weights: --quantization fp8 needs 8.8 GiB for them, or lower --context-length"
    )
    with pytest.raises(
        ValueError, match="--context-length 50000 exceeds the model's max_position_embeddings"
    ):
        inspect(QWEN3, context_length=50000)


def test_weights_that_do_not_fit_are_reported_with_a_remedy() -> None:
    result = inspect(QWEN3, gpu=16)
    assert not result.fits
    assert result.memory_fits[0].message == (
        "8.19B parameters on 1 GPU need at least 15.5 GiB of each, and may use 14.4 GiB: 0.9 of 16 GiB; "
        "use more GPUs (--tensor) or GPUs with more memory, or quantized weights: --quantization fp8 needs "
        "8.8 GiB for them"
    )
    assert "does not fit with --tensor 1: 8.19B parameters" in format_inspection(result)
    assert inspect(QWEN3, gpu=16, tensor=2).fits


def test_a_step_that_leaves_no_memory_is_reported() -> None:
    (fit,) = inspect(QWEN3, gpu=18, max_running_requests=512).memory_fits
    assert (fit.fits, fit.kv_tokens) == (False, 0)
    assert "no memory is left for the KV cache" in fit.message


MIXTRAL = KNOWN["mistralai/Mixtral-8x7B-Instruct-v0.1"]["config"]
SHARED_MOE = MIXTRAL | {"architectures": ["GraniteMoeSharedForCausalLM"]}
"""A mixture of experts without a native implementation."""
THROUGH_TRANSFORMERS: dict[str, Any] = {"model_implementation": "transformers"}


def test_a_model_through_transformers_is_sized_by_its_headers(tmp_path: Path) -> None:
    save(tmp_path, config=SHARED_MOE)
    save_header(tmp_path / "model.safetensors", a=("BF16", [3, 1 << 30]), b=("BF16", [7]))
    result = inspect_model(read_folder(tmp_path), OPTIONS, tensors=(1, 2), gpu="5 GiB", memory=5 * GIB)
    assert (result.implementation, result.estimated) == ("transformers", True)
    assert (result.parameters, result.weight_bytes) == ((3 << 30) + 7, (6 << 30) + 14)
    assert [fit.weight_bytes for fit in result.memory_fits] == [(6 << 30) + 14]
    assert result.memory_fits[0].message.endswith("; use a GPU with more memory")
    reason = "mixtures of experts that run through Transformers need --tensor 1"
    assert result.tensor_sizes[1].reason == reason
    assert result.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    text = format_inspection(result)
    assert f"{tmp_path}: served through Transformers" in text
    assert reason in text
    assert "the sizes are estimates" in text


def test_a_remote_model_through_transformers_is_sized_by_its_files() -> None:
    files = read_listing("r", {"model.safetensors": 40}, {"config.json": json.dumps(SHARED_MOE).encode()})
    assert inspect_model(files, OPTIONS).parameters == 20
    files = ModelFiles(name="r", fields=Fields(SHARED_MOE))
    result = inspect_model(files, OPTIONS, gpu="80 GiB", memory=80 * GIB)
    assert (result.parameters, result.memory_fits, result.fits) == (0, (), True)
    assert "unknown without the files of the weights" in format_inspection(result)


def test_attention_sinks_need_the_native_implementation() -> None:
    config = KNOWN["unsloth/gpt-oss-20b-BF16"]["config"]
    assert inspect(config).implementation == "native"
    reason = inspect(config, **THROUGH_TRANSFORMERS).reason
    assert "architectures lists GptOssForCausalLM, whose layers have attention sinks" in reason
    assert reason.endswith("use --model-implementation native")


def test_the_implementation_can_be_chosen() -> None:
    native, other = (inspect(SHARED_MOE, model_implementation=name) for name in ("native", "transformers"))
    assert "num_local_experts is 8: mixtures of experts" in native.reason
    assert native.reason.endswith(
        ", or --model-implementation auto, which runs the model's code in Transformers"
    )
    assert other.served
    assert inspect(QWEN3, model_implementation="transformers").implementation == "transformers"


@pytest.mark.parametrize("config", [{**QWEN3, "architectures": ["Qwen3Model"]}, GEMMA3])
def test_transformers_serves_only_causal_language_models(config: dict[str, Any]) -> None:
    assert inspect(config).implementation == "native"
    result = inspect(config, model_implementation="transformers")
    assert not result.served
    assert f"architectures lists {config['architectures'][0]}, but --model-imp" in result.reason
    assert result.reason.endswith("use --model-implementation auto")


QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 32,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}


def test_yarn_extends_the_context_through_transformers() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for changes, length in (
        ({}, 40960),
        ({"rope_scaling": yarn}, 131072),
        ({"rope_scaling": {"rope_type": "unknown"}}, 40960),
    ):
        result = inspect({**QWEN3_MOE, **changes}, **THROUGH_TRANSFORMERS)
        assert (result.implementation, result.context_length) == ("transformers", length)


def test_fields_that_transformers_would_set_are_asked_for() -> None:
    for name in ("vocab_size", "max_position_embeddings"):
        result = inspect({**QWEN3_MOE, name: None}, **THROUGH_TRANSFORMERS)
        assert result.reason == f"config.json: {name} is missing: add it to config.json"


def test_multi_query_attention_has_one_kv_head() -> None:
    config = {
        "architectures": ["GPTBigCodeForCausalLM"],
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 128,
        "vocab_size": 100,
    }
    counts = [read_model(Fields({**config, "multi_query": value})).kv_heads for value in (True, False)]
    assert counts == [1, 4]


def test_layers_are_listed_by_their_windows() -> None:
    result = inspect(GEMMA3)
    assert [(layers.count, layers.window) for layers in result.layers] == [(10, None), (52, 1024)]
    assert sum(layers.kv_bytes_per_token for layers in result.layers) == result.kv_bytes_per_token
    text = format_inspection(result)
    assert "10 with full attention, 52 with a window of 1,024 tokens" in text
    assert "m: served by the native implementation, text only: images are rejected" in text
    assert "RMSNorm with 1 + weight; norms around the blocks; QK norm" in text


def test_impossible_numbers_of_gpus_have_a_reason() -> None:
    result = inspect(QWEN3, tensor=3)
    assert not result.tensor_sizes[0].possible
    assert "not 3: num_attention_heads (32) must be a multiple" in format_inspection(result)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("model.Q4_K_M.gguf",), "'model.Q4_K_M.gguf' is in the GGUF format, which is not supported; "),
        (("pytorch_model.bin",), "pytorch_model.bin is a pickle, which may contain code and is never loaded"),
    ],
)
@pytest.mark.parametrize("config", [QWEN3, None])
def test_files_in_another_format_are_named(
    names: tuple[str, ...], reason: str, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    save(tmp_path, *names, config=config)
    result = inspect_model(read_folder(tmp_path), OPTIONS)
    assert (result.served, result.implementation) == (False, "none")
    assert result.reason.startswith(reason)
    assert f"  reason        {reason}" in format_inspection(result)
    sizes = {path.name: 1 for path in tmp_path.iterdir()}
    contents = {} if config is None else {"config.json": json.dumps(config).encode()}
    assert inspect_model(read_listing("r", sizes, contents), OPTIONS).reason.startswith(reason)


def test_a_folder_without_weights_is_inspected_by_its_config(tmp_path: Path) -> None:
    save(tmp_path)
    result = inspect_model(read_folder(tmp_path), OPTIONS)
    assert (result.served, result.file_bytes, result.weight_bytes) == (True, None, 2 * 8190735360)
    assert "no files found, computed from config.json" in format_inspection(result)


def test_quantized_tensors_are_found_in_the_headers(tmp_path: Path) -> None:
    save(tmp_path)
    save_header(tmp_path / "model.safetensors", a=("BF16", [2, 2]), b=("I32", [2]))
    result = inspect_model(read_folder(tmp_path), OPTIONS)
    assert result.reason == (
        f"{tmp_path}: b is I32, but config.json does not describe it as quantized: use a checkpoint in "
        "bfloat16, float16 or float32, or one whose config.json describes its quantization"
    )
    scales = {"layers.0.self_attn.k_scale": ("F8_E4M3", [1]), "layers.0.rotary_emb.inv_freq": ("I64", [2])}
    save_header(tmp_path / "model.safetensors", **scales)
    assert inspect_model(read_folder(tmp_path), OPTIONS).served
    save(tmp_path, config=GEMMA3)
    save_header(tmp_path / "model.safetensors", **{"vision_tower.position_ids": ("I64", [2])})
    assert inspect_model(read_folder(tmp_path), OPTIONS).served


def test_buffers_of_models_in_transformers_are_left_to_the_engine(tmp_path: Path) -> None:
    save(tmp_path, config=SHARED_MOE)
    save_header(tmp_path / "model.safetensors", **{"layers.0.attention.bias": ("BOOL", [1, 1])})
    assert inspect_model(read_folder(tmp_path), OPTIONS).served
    save_header(tmp_path / "model.safetensors", **{"layers.0.mlp.weight": ("F8_E4M3", [1, 1])})
    assert "layers.0.mlp.weight is F8_E4M3" in inspect_model(read_folder(tmp_path), OPTIONS).reason


@pytest.mark.parametrize("names", [("consolidated.safetensors",), ("tokenizer.json",)])
def test_missing_weights_are_a_reason(names: tuple[str, ...], tmp_path: Path) -> None:
    save(tmp_path, *names)
    reason = " has neither model.safetensors nor model.safetensors.index.json: weights are read only from "
    result = inspect_model(read_folder(tmp_path), OPTIONS)
    assert (result.served, result.reason) == (False, f"{tmp_path}{reason}safetensors")
    contents = {"config.json": json.dumps(QWEN3).encode()}
    listed = read_listing("r", dict.fromkeys(("config.json", *names), 1), contents)
    assert inspect_model(listed, OPTIONS).reason == f"r{reason}safetensors"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (struct.pack("<Q", 2) + b"[]", "cannot be read"),
    ],
)
def test_broken_files_are_a_reason(body: bytes, reason: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(body)
    result = inspect_model(read_folder(tmp_path), OPTIONS)
    assert not result.served
    assert reason in result.reason


def test_a_missing_part_of_the_weights_is_a_reason(tmp_path: Path) -> None:
    save(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    result = inspect_model(read_folder(tmp_path), OPTIONS)
    assert "names files that are missing: model-00001-of-00002.safetensors" in result.reason


def test_sizes_of_a_remote_model_come_from_its_listing() -> None:
    sizes = {
        "model-1.safetensors": 5,
        "model-2.safetensors": 7,
        "model.safetensors.index.json": 1,
        "consolidated.safetensors": 9,
        "x/model.bin": 1,
    }
    result = inspect_model(read_listing("r", sizes, {"config.json": json.dumps(QWEN3).encode()}), OPTIONS)
    assert (result.served, result.file_bytes) == (True, 12)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000])
def test_an_invalid_config_of_a_remote_model_is_an_error(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"config\.json of r"):
        read_listing("r", {"config.json": 1}, {"config.json": content})
    with pytest.raises(ConfigError, match=r"r has no config\.json"):
        read_listing("r", {"model.safetensors": 1}, {})


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("h100", 79.1),
        ("H200", 139.8),
        ("NVIDIA-L4", 22.0),
        ("24", 24),
        ("24GiB", 24),
        ("79.5 GiB", 79.5),
        ("512Mi", 0.5),
    ],
)
def test_a_gpu_is_a_name_or_a_size(name: str, size: float) -> None:
    assert gpu_bytes(name) == int(size * GIB)


def test_the_guide_names_all_gpus() -> None:
    guide = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    names = guide.partition("`--gpu` names a GPU (")[2].partition(")")[0].replace(" or ", ", ")
    assert names.split(", ") == list(GPUS)


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (999_400_000, "999M"), (999_600_000, "1B"), (8_190_735_360, "8.19B"), (10**12, "1T")],
)
def test_numbers_of_parameters_are_rounded(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize("name", ["h1000", "", "0", "-1", "24TB", "nan"])
def test_an_unknown_gpu_is_an_error(name: str) -> None:
    with pytest.raises(
        ValueError, match="must be a size in GiB, such as 24, a size such as 79Gi or 9856Mi, or one of a10"
    ):
        gpu_bytes(name)
