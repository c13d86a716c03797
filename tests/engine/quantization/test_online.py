# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are quantized while they are loaded: logits, shards of ranks, buffers and messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logits_check import assert_equal
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mizzen.core.sampling_params import SamplingParams
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.quantized import choose_linear
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.quantized.round_to_nearest import round_weight
from mizzen.layers.sharding import Axis, Mesh
from mizzen.layers.staging import Staging
from mizzen.models.hf_fields import ConfigError
from mizzen.offline.llm import LLM
from mizzen.quantization.online import ONLINE_SCHEMES, choose_quantization
from mizzen.quantization.reader import NO_QUANTIZATION
from mizzen.weights import staged
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.weights.load import load_checkpoint
from quantized_formats import FORMATS
from quantized_twins import quantize_twin, save_source
from rounded_weights import ROUNDINGS

BOUNDS = {"fp8": 0.2, "int8": 0.05, "w4a16": 0.6}
"""Mean absolute error of the logits, relative to their standard deviation. The random weights of the twin
magnify errors; those of a trained model are far smaller."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Granite with biases in its projections, and with an untied head."""
    return save_source(tmp_path_factory.mktemp("source"), intermediate_size=512)


def compute_logits(folder: Path, kit: SimpleNamespace, **options: Any) -> torch.Tensor:
    """Return the engine's logits of a prompt, [tokens, vocab]."""
    bench = kit.Bench(folder, **options)
    return bench.logits(bench.plan([], [(0, 0, kit.tokens(30, seed=1), True)], (kit.greedy(0),)))


@pytest.mark.parametrize("option", ROUNDINGS)
def test_logits_equal_those_of_independently_rounded_weights(
    option: str, source: Path, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All linear layers but the head are rounded; the same whether layers are loaded together or alone."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    original = kit.oracle(model, kit.tokens(30, seed=1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".layers." in name:
                parameter.copy_(torch.from_numpy(ROUNDINGS[option](parameter.numpy())))
    reference = kit.oracle(model, kit.tokens(30, seed=1))
    found = compute_logits(source, kit, quantization=option)
    assert_equal(found, reference)
    error = float((found - original).abs().mean() / original.std())
    assert BOUNDS[option] / 10 < error < BOUNDS[option]
    monkeypatch.setattr(staged, "BATCH_BYTES", 1)
    assert torch.equal(compute_logits(source, kit, quantization=option), found)


def make_factory(option: str) -> Any:
    quantization = choose_quantization(option, NO_QUANTIZATION)
    return choose_linear(quantization, UnquantizedLinear, DequantizedLinear)


def build(option: str, rank: int, ranks: int) -> BuildContext:
    return BuildContext(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        mesh=Mesh(Axis(rank, ranks)),
        make_linear=make_factory(option),
    )


@pytest.mark.parametrize("option", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_rank_rounds_its_own_shard(option: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a layer that is sharded by columns, the scale of a row is that of the rank's columns."""
    whole = {
        "gate_proj.weight": torch.randn(24, 192),
        "up_proj.weight": 100 * torch.randn(24, 192),
        "down_proj.weight": torch.randn(16, 192) * torch.logspace(0, 3, 192),
    }
    whole = {name: weight.to(dtype) for name, weight in whole.items()}
    save_file(whole, tmp_path / "model.safetensors")
    for rank in (0, 1):
        context = build(option, rank, 2)
        names, shard = ("gate_proj", "up_proj"), slice(12 * rank, 12 * rank + 12)
        merged = MergedColumnParallelLinear(
            context, name_rows(names, (24, 24), (shard, shard)), columns=192, bias=False
        )
        row = RowParallelLinear(context, "down_proj", 16, 192, bias=False)
        targets = [*merged.targets(), *row.targets()]
        load_checkpoint(tmp_path, targets, tied=False, progress=lambda done, total: None)
        gate_up = torch.cat([whole[f"{name}.weight"][shard] for name in names]).bfloat16()
        down = whole["down_proj.weight"][:, 96 * rank : 96 * rank + 96].bfloat16()
        for layer, weight in ((merged, gate_up), (row, down)):
            wanted, found = round_weight(weight, ONLINE_SCHEMES[option]), layer.method.weight
            assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))
            assert torch.equal(found.scales, wanted.scales)
            assert layer.method.format_bytes() == {found.format: wanted.size}


def generate(folder: Path, **options: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(folder, device="cpu", skip_tokenizer=True, kv_cache_tokens=1024, **options) as llm:
        info = llm.engine.info
        assert sum(info.format_bytes.values()) == info.weights_bytes
        return [answer.token_ids for answer in llm.generate([[3, 5, 7, 11], [2, 9]], params)]


def test_two_ranks_generate_the_same_tokens_as_one(source: Path) -> None:
    """The shards of ranks consist of whole groups, so that all weights are the same."""
    assert generate(source, quantization="w4a16", tensor=2) == generate(source, quantization="w4a16")


@pytest.fixture
def open_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of all open buffers, after each buffer was opened."""
    sizes: dict[int, int] = {}
    totals: list[int] = []
    first_open, first_close = Staging.open, Staging.close

    def open_buffer(self: Staging) -> None:
        first_open(self)
        sizes[id(self)] = self.size
        totals.append(sum(sizes.values()))

    def close_buffer(self: Staging) -> None:
        del sizes[id(self)]
        first_close(self)

    monkeypatch.setattr(Staging, "open", open_buffer)
    monkeypatch.setattr(Staging, "close", close_buffer)
    yield totals
    assert not sizes, "all buffers were freed"


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_few_unquantized_layers_exist_at_the_same_time(
    load_format: str,
    source: Path,
    kit: SimpleNamespace,
    open_bytes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = 2 * 512 * 256 * 4
    monkeypatch.setattr(staged, "BATCH_BYTES", largest)
    logits = compute_logits(source, kit, quantization="fp8", load_format=load_format)
    assert bool(logits.isfinite().all())
    assert logits.std() > 0
    assert max(open_bytes) == largest


def test_the_engine_describes_its_weights(source: Path) -> None:
    with LLM(source, device="cpu", skip_tokenizer=True, kv_cache_tokens=1024, quantization="w4a16") as llm:
        info = llm.engine.info
    layers = [name for name in load_file(source / "model.safetensors") if ".layers." in name]
    matrices = [
        weight
        for name, weight in load_file(source / "model.safetensors").items()
        if name in layers and weight.ndim == 2
    ]
    elements = sum(weight.numel() for weight in matrices)
    assert info.quantization == "Online: 4-bit integers, groups of 128"
    assert info.format_bytes["int4"] == elements // 2 + elements // 128 * 2
    assert set(info.format_bytes) == {"int4", "float32"}
    with LLM(source, device="cpu", skip_tokenizer=True, kv_cache_tokens=1024) as llm:
        assert llm.engine.info.quantization == ""
        assert set(llm.engine.info.format_bytes) == {"float32"}


def test_a_quantized_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    twin = quantize_twin(source, tmp_path / "twin", FORMATS["awq"])
    with pytest.raises(ConfigError, match=r"--quantization int8 .* are quantized already \(AWQ: "):
        LLM(twin.folder, device="cpu", skip_tokenizer=True, quantization="int8")


def test_missing_tensors_are_named(source: Path, kit: SimpleNamespace, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        kit.Bench(tmp_path, quantization="fp8")
