# SPDX-License-Identifier: Apache-2.0
"""All tensors of a tower are loaded, by the names of old and new checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vision_twins import TOWERS, save_vision_twin

from mizzen.engine.loading.vision_setup import load_vision_encoder
from mizzen.layers.context import BuildContext
from mizzen.models.registry import read_config
from mizzen.models.vision.encoder import VisionEncoder
from mizzen.weights.checkpoint_files import WeightsError

ChangeTensors = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
LoadEncoder = Callable[[Path], VisionEncoder]
CPU = BuildContext(device=torch.device("cpu"), dtype=torch.float32)


def rewrite_tensors(folder: Path, change: ChangeTensors) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)


def rename(old: str, new: str) -> ChangeTensors:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
        assert renamed.keys() != tensors.keys()
        return renamed

    return change


def weights(encoder: VisionEncoder) -> dict[str, torch.Tensor]:
    """Return all weights of an encoder by the names of their tensors and their place in them."""
    return {f"{target.name} {target.shard}": target.destination.clone() for target in encoder.targets()}


@pytest.mark.parametrize(
    ("twin", "layouts"),
    [
        ("qwen2.5-vl", {"visual.": ("visual.", "model.visual.")}),
        (
            "llava-next",
            {
                "vision_tower.": (
                    "vision_tower.",
                    "model.vision_tower.",
                    "vision_tower.vision_model.",
                    "model.vision_tower.vision_model.",
                ),
                "multi_modal_projector.": ("multi_modal_projector.", "model.multi_modal_projector."),
                "image_newline": ("image_newline", "model.image_newline"),
            },
        ),
    ],
)
def test_all_layouts_of_names_are_read(
    twin: str, layouts: dict[str, tuple[str, ...]], load_encoder: LoadEncoder, tmp_path: Path
) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    expected = weights(load_encoder(tmp_path))
    for prefixes in layouts.values():
        names = load_file(tmp_path / "model.safetensors")
        stored = max((each for each in prefixes if any(name.startswith(each) for name in names)), key=len)
        for prefix in prefixes:
            if prefix != stored:
                rewrite_tensors(tmp_path, rename(stored, prefix))
                stored = prefix
            loaded = weights(load_encoder(tmp_path))
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_missing_tensor_is_named(load_encoder: LoadEncoder, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "qwen3-vl", TOWERS["qwen3-vl"])
    missing = "model.visual.blocks.2.attn.proj.bias"
    rewrite_tensors(tmp_path, lambda all: {name: tensor for name, tensor in all.items() if name != missing})
    with pytest.raises(WeightsError, match=r"missing: visual\.blocks\.2\.attn\.proj\.bias; --images off"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("twin", "name"),
    [
        ("qwen3-vl", "model.visual.blocks.4.attn.proj.bias"),
        ("qwen3-vl", "model.visual.blocks.0.attn.qkv.weight_scale"),
        ("llava-clip", "vision_tower.vision_model.encoder.layers.2.mlp.fc1.scale"),
        ("mistral3", "multi_modal_projector.linear_1.bias"),
    ],
)
def test_a_surplus_tensor_is_named(twin: str, name: str, load_encoder: LoadEncoder, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    rewrite_tensors(tmp_path, lambda tensors: {**tensors, name: torch.ones(1)})
    with pytest.raises(WeightsError, match=f"unexpected: {name}"):
        load_encoder(tmp_path)


def test_a_quantized_tower_is_refused_by_name(load_encoder: LoadEncoder, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "qwen2-vl", TOWERS["qwen2-vl"])

    def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in tensors if name.endswith("visual.blocks.0.mlp.fc1.weight"))
        return {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}

    rewrite_tensors(tmp_path, quantize)
    with pytest.raises(WeightsError, match=r"visual\.blocks\.0\.mlp\.fc1\.weight.*F8_E4M3.*--images off"):
        load_encoder(tmp_path)


def test_unused_tensors_of_a_pooling_head_are_ignored(load_encoder: LoadEncoder, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, "llava-siglip", TOWERS["llava-siglip"])
    assert any(".head." in name for name in load_file(tmp_path / "model.safetensors"))
    load_encoder(tmp_path)
    rewrite_tensors(
        tmp_path,
        lambda all: {name: tensor for name, tensor in all.items() if ".head." not in name},
    )
    load_encoder(tmp_path)


@pytest.mark.parametrize("twin", TOWERS)
def test_dummy_weights_make_finite_embeddings(twin: str, tmp_path: Path) -> None:
    save_vision_twin(tmp_path, twin, TOWERS[twin])
    config = read_config(tmp_path).vision
    assert config is not None
    encoder = load_vision_encoder(tmp_path / "none", CPU, config, dummy_seed=0)
    pixels = torch.zeros(3 if config.newline else 1, 24, 24, 3, dtype=torch.uint8)
    with torch.inference_mode():
        embeddings = encoder(pixels, (1, config.side, 2 * config.side))
    assert embeddings.isfinite().all()
    assert embeddings.std() > 0.01
