# SPDX-License-Identifier: Apache-2.0
"""Experts are loaded from tensors of their own and from stacked tensors; a wrong set of them is an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.model_setup import make_model
from mizzen.models.registry import read_config
from mizzen.weights.checkpoint_files import WeightsError

BLOCK = "model.layers.0.mlp."
EXPERTS, WIDTH = 9, 16


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Load the model of a folder; return the contents of all its parameters by their tensors' names."""
    options = EngineOptions(model=str(folder), device="cpu", dtype="float32")
    model = make_model(options, read_config(folder), lambda done, total: None)
    mixtures = {index: layer.mlp for index, layer in enumerate(model.layers)}  # type: ignore[attr-defined]
    return {
        f"{index} {name}": tensor
        for index, mlp in mixtures.items()
        if hasattr(mlp.down, "weights")
        for name, tensor in (
            ("router", mlp.down.router.weight),
            ("gate_up", mlp.down.weights.gate_up),
            ("down", mlp.down.weights.down),
        )
    }


def stack(folder: Path, *, transposed: bool) -> None:
    """Replace the tensors of the experts in a folder by tensors that hold all experts of a layer."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        prefix = name.removesuffix("0.gate_proj.weight")
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{i}.{part}.weight") for i in range(EXPERTS)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        stacked = {
            "gate_up_proj": torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1),
            "down_proj": parts["down_proj"],
        }
        for part, tensor in stacked.items():
            tensors[prefix + part] = (tensor.transpose(1, 2) if transposed else tensor).contiguous()
    save_file(tensors, path)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_equal_separate_ones(transposed: bool, kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "qwen3-moe", hidden_size=24)
    separate = load(tmp_path)
    assert sorted(separate) == [
        f"{layer} {name}" for layer in (0, 2) for name in ("down", "gate_up", "router")
    ]
    stack(tmp_path, transposed=transposed)
    stacked = load(tmp_path)
    assert all(torch.equal(stacked[name], tensor) for name, tensor in separate.items())


def change(folder: Path, removed: str, **added: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(removed, None)
    save_file(tensors | added, path)


def test_missing_and_surplus_experts_are_named(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "qwen3-moe")
    missing = f"{BLOCK}experts.8.up_proj.weight"
    surplus = f"{BLOCK}experts.9.up_proj.weight"
    change(tmp_path, missing, **{surplus: torch.zeros(WIDTH, 32)})
    with pytest.raises(WeightsError) as error:
        load(tmp_path)
    assert f"missing: {missing}; unexpected: {surplus}" in str(error.value)


def test_a_stacked_tensor_with_other_experts_is_refused(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "qwen3-moe")
    stack(tmp_path, transposed=False)
    name = f"{BLOCK}experts.down_proj"
    change(tmp_path, name, **{name: torch.zeros(EXPERTS + 1, 32, WIDTH)})
    with pytest.raises(
        WeightsError, match=r"down_proj has the shape \[10, 32, 16\], .* implies \[9, 32, 16\]"
    ):
        load(tmp_path)


def test_layers_for_multi_token_prediction_are_not_loaded(kit: SimpleNamespace, tmp_path: Path) -> None:
    kit.save_twin(tmp_path, "glm4-moe")
    change(tmp_path, "", **{"model.layers.3.eh_proj.weight": torch.zeros(2, 2)})
    assert load(tmp_path)
    change(tmp_path, "", **{"model.layers.4.eh_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        load(tmp_path)
