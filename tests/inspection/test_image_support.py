# SPDX-License-Identifier: Apache-2.0
"""Images that the engine accepts, and the vision encoder, as `mizzen inspect` reports them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mizzen.engine.config import EngineOptions
from mizzen.images.rules import load_image_rules
from mizzen.images.types import PixelLimits
from mizzen.inspection.gpus import GIB
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles, read_folder
from mizzen.inspection.text import format_inspection
from mizzen.models.hf_fields import Fields

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "known_models.json").read_text())
QWEN = KNOWN["Qwen/Qwen2.5-VL-7B-Instruct"]["config"]


def inspect(**options: Any) -> Inspection:
    """Inspect Qwen2.5-VL-7B on a GPU with 80 GiB."""
    return inspect_model(
        ModelFiles(name="m", fields=Fields(QWEN)),
        EngineOptions(model="m", **options),
        tensors=(1,),
        gpu="80 GiB",
        memory=80 * GIB,
    )


def test_the_vision_encoder_counts_where_images_are_accepted() -> None:
    found = inspect()
    alone = inspect(images="off")
    assert alone.images is None
    assert alone.text_only
    assert found.images is not None
    assert not found.text_only
    assert found.images.parameters == found.parameters - alone.parameters == 676550144
    assert found.images.weight_bytes == found.weight_bytes - alone.weight_bytes
    assert found.active_parameters == alone.active_parameters
    room = alone.memory_fits[0].kv_bytes - found.memory_fits[0].kv_bytes
    page = 16 * found.kv_bytes_per_token
    assert abs(room - found.images.weight_bytes - found.images.step_bytes) < page
    text = format_inspection(found)
    assert (
        "images        encoder qwen2_5_vl with 677M parameters (1.3 GiB); the largest image, by the" in text
    )
    assert "images        " not in format_inspection(alone)


def test_the_folder_of_a_model_tells_the_largest_image(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    preprocessor = {"min_pixels": 56 * 56, "max_pixels": 640 * 28 * 28}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    save_file({"model.norm.weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    result = inspect_model(read_folder(tmp_path), EngineOptions(model=str(tmp_path)))
    assert result.images is not None
    assert not result.images.estimated
    # A request may raise min_pixels to max_pixels, and a narrow image is then stretched beyond both.
    rules = load_image_rules(tmp_path)
    assert rules is not None
    stretched = rules.geometry(30, 3000, PixelLimits(640 * 28 * 28, 640 * 28 * 28))
    assert 640 < stretched.embeddings <= result.images.largest_embeddings == 957
