# SPDX-License-Identifier: Apache-2.0
"""Prompts with images for tiny twins: their plans, and Transformers' logits for them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_twins import TOWERS, save_vision_twin

from mizzen.core.images.types import ChunkImage, ImageEncoding, PromptImage
from mizzen.core.request import Int32
from mizzen.core.step_plan import PrefillChunk
from mizzen.images.rotary import rotary_positions
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageRules

PLACEHOLDER = 7
"""Token id of an image's placeholders in the twins."""
QWEN_TWINS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe")
PATCH = 4
"""Edge of a patch of the twins' towers in pixels; an embedding covers 2 x 2 patches."""


def save_image_twin(folder: Path, twin: str) -> Any:
    """Save a Qwen-VL twin that accepts small images; return the Transformers model."""
    model = save_vision_twin(
        folder, twin, TOWERS[twin], image_token_id=PLACEHOLDER, video_token_id=158, vision_start_token_id=157
    )
    bounds = {"min_pixels": 64, "max_pixels": 4096}
    (folder / "preprocessor_config.json").write_text(json.dumps(bounds))
    return model


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt whose images are pixels of the size that the encoder receives."""

    ids: Int32
    """Token ids with placeholders."""
    images: tuple[PromptImage, ...]
    pixels: tuple[np.ndarray, ...]
    """Pixels of each image, uint8 [1, height, width, 3]."""
    rotary: Int32
    """Rotary positions up to the last image, int32 [3, m]."""
    offset: int
    """Rotary offset of later tokens."""

    @classmethod
    def build(cls, rules: ImageRules, *parts: Int32 | np.ndarray) -> ImagePrompt:
        """Join token ids (int32) and pixels (uint8 [height, width, 3])."""
        ids: list[int] = []
        images, pixels = [], []
        for part in parts:
            if part.dtype == np.int32:
                ids += part.tolist()
                continue
            geometry = rules.geometry(part.shape[1], part.shape[0])
            assert (geometry.height, geometry.width) == part.shape[:2]
            positions = np.arange(len(ids), len(ids) + geometry.embeddings, dtype=np.int32)
            digest = hashlib.sha256(part.tobytes()).digest()
            images.append(PromptImage(digest=digest, positions=positions, grid=geometry.grid))
            pixels.append(part[None])
            ids += [rules.placeholder_id] * geometry.embeddings
        positions = rotary_positions(images, len(ids), rules)
        assert positions is not None
        return cls(
            np.array(ids, np.int32), tuple(images), tuple(pixels), positions.positions, positions.offset
        )

    def encodings(self) -> tuple[ImageEncoding, ...]:
        """Return the encodings of all different images."""
        return tuple(
            {
                image.digest: ImageEncoding(
                    digest=image.digest, grid=image.grid, embeddings=len(image.positions), pixels=pixels
                )
                for image, pixels in zip(self.images, self.pixels, strict=True)
            }.values()
        )

    def chunk(self, slot: int, start: int, end: int) -> PrefillChunk:
        """Return the chunk of the tokens `start` to `end`."""
        tokens = self.ids[start:end].copy()
        images = []
        for number, image in enumerate(self.images):
            inside = (image.positions >= start) & (image.positions < end)
            if inside.any():
                offsets = image.positions[inside] - start
                tokens[offsets] = -1 - number
                first = int(np.argmax(inside))
                images.append(ChunkImage(digest=image.digest, first=first, offsets=offsets))
        rotary = np.broadcast_to(np.arange(len(self.ids), dtype=np.int32) + self.offset, (3, len(self.ids)))
        rotary = np.concatenate([self.rotary, rotary[:, self.rotary.shape[1] :]], axis=1)[:, start:end]
        return PrefillChunk(
            slot=slot,
            start=start,
            tokens=tokens,
            last=end == len(self.ids),
            images=tuple(images),
            rotary=rotary.astype(np.int32),
        )

    def logits(self, model: Any, answer: Int32 | None = None) -> torch.Tensor:
        """Return Transformers' logits of the prompt and an answer, [tokens, vocab]."""
        ids = self.ids if answer is None else np.concatenate([self.ids, answer])
        processor = Qwen2VLImageProcessorPil(patch_size=PATCH, do_resize=False)
        inputs = processor([Image.fromarray(pixels[0]) for pixels in self.pixels], return_tensors="pt")
        row = torch.from_numpy(ids.astype(np.int64))[None]
        model.model.rope_deltas = None
        with torch.inference_mode():
            return model(
                input_ids=row,
                pixel_values=inputs["pixel_values"],
                image_grid_thw=inputs["image_grid_thw"],
                mm_token_type_ids=(row == PLACEHOLDER).long(),
            ).logits[0]


def random_text(count: int, seed: int) -> Int32:
    """Return random token ids without special ones."""
    return np.random.default_rng(seed).integers(PLACEHOLDER + 1, 150, count).astype(np.int32)


def random_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def read_rules(folder: Path) -> ImageRules:
    """Read the rules for images of a twin."""
    rules = load_image_rules(folder)
    assert rules is not None
    return rules
