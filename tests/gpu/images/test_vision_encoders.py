# SPDX-License-Identifier: Apache-2.0
"""Vision encoders on a GPU, in bfloat16: embeddings equal those of Transformers in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_twins import OPAQUE_MODES, image_features, read_rules, save_gpu_twin
from hopper import FA3_FAULT, HOPPER
from vision_folders import FAMILIES, random_image

from family_twins import set_dtype
from mizzen.attention import segments
from mizzen.attention.segments import BatchedSegments, FlashSegments
from mizzen.engine.loading.vision_setup import load_vision_encoder
from mizzen.images.decode import decode_image
from mizzen.images.header import read_header
from mizzen.layers.context import BuildContext
from mizzen.models.registry import read_config
from mizzen.models.vision.encoder import VisionEncoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IMAGES = 6
RATIO, MARGIN = 2.0, 0.002
"""A relative error may be RATIO times that of Transformers in bfloat16, plus MARGIN."""
DEVICE = torch.device("cuda")


def load_encoder(folder: Path, *, fused: bool) -> VisionEncoder:
    """Load the encoder of a model folder in bfloat16."""
    config = read_config(folder).vision
    assert config is not None
    return load_vision_encoder(folder, BuildContext(device=DEVICE, dtype=torch.bfloat16, fused=fused), config)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail if an operation waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def relative(difference: torch.Tensor, expected: torch.Tensor) -> float:
    return float(difference.norm() / expected.norm())


@pytest.mark.parametrize("own", [True, False], ids=["own", "pytorch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_equal_those_of_transformers(
    name: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With own kernels, and with PyTorch's attention and operations."""
    if own and HOPPER and FA3_FAULT:
        pytest.skip(f"needs FlashAttention 3: {FA3_FAULT}")
    model, family = save_gpu_twin(tmp_path, name)
    model.to(DEVICE)
    rules = read_rules(tmp_path)
    if not own:
        monkeypatch.setattr(segments, "has_wgmma", lambda device: False)
    encoder = load_encoder(tmp_path, fused=own)
    images: list[tuple[torch.Tensor, tuple[int, int, int]]] = []
    alone: list[tuple[torch.Tensor, float]] = []
    assert isinstance(encoder.attention, FlashSegments if own and HOPPER else BatchedSegments)
    source = random.Random(name)
    for _ in range(IMAGES):
        file = random_image(source, modes=OPAQUE_MODES)
        header = read_header(file)
        size = header.width, header.height
        geometry = rules.geometry(*size)
        if geometry.embeddings == 1:
            continue
        pixels = torch.from_numpy(np.array(decode_image(file, rules, size, None))).to(DEVICE)
        with torch.inference_mode():
            encoder(pixels, geometry.grid)  # loads or compiles kernels
            with no_waiting():
                embeddings = encoder(pixels, geometry.grid)
        expected = image_features(model, family, file)
        rounded = image_features(set_dtype(model, torch.bfloat16), family, file)
        set_dtype(model, torch.float32)
        error, usual = (relative(each - expected, expected) for each in (embeddings.float().cpu(), rounded))
        print(f"{name} {geometry.width} x {geometry.height}: {error:.4f}, Transformers {usual:.4f}")
        assert error < RATIO * usual + MARGIN
        images.append((pixels, geometry.grid))
        alone.append((embeddings.float(), usual))
    with torch.inference_mode():
        encoder.encode(images)
        with no_waiting():
            together = encoder.encode(images)
    for embeddings, (single, usual) in zip(together, alone, strict=True):
        assert (
            relative(embeddings.float() - single, single) < RATIO * usual + MARGIN
        )  # GEMMs round differently
