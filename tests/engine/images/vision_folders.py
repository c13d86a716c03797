# SPDX-License-Identifier: Apache-2.0
"""Complete folders of tiny models for images, and Transformers' answers for the same weights."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vision_twins import TOWERS, save_vision_twin

from mizzen.core.request import Int32

IMAGE, START, END, BREAK = 150, 151, 152, 153
"""Token ids of the placeholder and of the tokens around images."""
LARGEST_TEXT_ID = 140
MODES = ("RGB", "L", "RGBA", "P", "LA")
"""Modes of random images in Pillow."""


@dataclass(frozen=True)
class VisionFamily:
    """A twin with its image processor."""

    twin: str
    processor: type
    settings: dict[str, Any]
    """Fields of preprocessor_config.json."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json that differ from those of the twin."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Added tokens of the tokenizer."""


def qwen(twin: str) -> VisionFamily:
    return VisionFamily(
        twin,
        Qwen2VLImageProcessorPil,
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2048}},
        {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END,
         "video_token_id": 149},
        {"<|image_pad|>": IMAGE},
    )  # fmt: skip


SQUARE = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
PIXTRAL_SETTINGS = {"size": {"longest_edge": 28}, "patch_size": {"height": 4, "width": 4}}
FAMILIES: dict[str, VisionFamily] = {
    "qwen2-vl": qwen("qwen2-vl"),
    "qwen2.5-vl": qwen("qwen2.5-vl"),
    "qwen3-vl": qwen("qwen3-vl"),
    "qwen3-vl-moe": qwen("qwen3-vl-moe"),
    "llava": VisionFamily(
        "llava-clip",
        CLIPImageProcessorPil,
        SQUARE,
        {"image_token_index": IMAGE},
        {"<image>": IMAGE},
    ),
    "llava-siglip": VisionFamily(
        "llava-siglip",
        SiglipImageProcessorPil,
        {"size": {"height": 24, "width": 24}},
        {"image_token_index": IMAGE},
        {"<image>": IMAGE},
    ),
    "llava-next": VisionFamily(
        "llava-next",
        LlavaNextImageProcessorPil,
        {**SQUARE, "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]]},
        {"image_token_index": IMAGE, "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48]]},
        {"<image>": IMAGE},
    ),
    "pixtral": VisionFamily(
        "pixtral",
        PixtralImageProcessorPil,
        PIXTRAL_SETTINGS,
        {"image_token_index": IMAGE},
        {"[IMG]": IMAGE, "[IMG_BREAK]": BREAK, "[IMG_END]": END},
    ),
    "mistral3": VisionFamily(
        "mistral3",
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
        {"[IMG]": IMAGE, "[IMG_BREAK]": BREAK, "[IMG_END]": END},
    ),
}


def save_family(folder: Path, family: VisionFamily, tower: dict[str, Any] | None = None, **twin: Any) -> Any:
    """Write the folder of a model; return the model in Transformers.

    Args:
        folder: Folder of the model.
        family: The twin.
        tower: Fields of the tower; by default those of `TOWERS`.
        twin: Further arguments of `save_vision_twin`.
    """
    model = save_vision_twin(folder, family.twin, tower or TOWERS[family.twin], **family.config, **twin)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": family.processor.__name__.removesuffix("Pil"), **family.settings})
    )
    added = [
        {"id": token, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for text, token in family.tokens.items()
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added}))
    return model


def random_image(source: random.Random, largest: int = 90, modes: Sequence[str] = MODES) -> bytes:
    """Return an image file of random size, mode (one of `modes`) and format."""
    width, height = source.randint(4, largest), source.randint(4, largest)
    if width > 20 * height or height > 20 * width:
        width = height
    mode = source.choice(modes)
    noise = np.random.default_rng(source.randint(0, 1 << 30)).integers(0, 256, (height, width, 4), np.uint8)
    image = Image.fromarray(noise, "RGBA").convert("RGB").convert(mode)
    if mode == "RGBA":
        image.putalpha(source.randint(0, 255))
    output = io.BytesIO()
    if mode in ("RGB", "L") and source.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = source.randint(1, 8)
        image.save(output, "JPEG", quality=90, exif=exif)
    else:
        image.save(output, source.choice(["PNG", "WEBP"]) if mode != "LA" else "PNG", lossless=True)
    return output.getvalue()


def random_prompt(source: random.Random, images: int) -> list[int]:
    """Return random token ids with one placeholder for each image, at random places."""
    parts: list[list[int]] = [[START, IMAGE, END] for _ in range(images)]
    ids = [source.randint(3, LARGEST_TEXT_ID) for _ in range(source.randint(0, 6))]
    for part in parts:
        ids += part + [source.randint(3, LARGEST_TEXT_ID) for _ in range(source.randint(1, 8))]
    return ids


def process_images(family: VisionFamily, files: list[bytes]) -> dict[str, Any]:
    """Return the inputs that the image processor of Transformers makes from images."""
    opened = [ImageOps.exif_transpose(Image.open(io.BytesIO(file))) for file in files]
    return dict(family.processor(**family.settings)(opened, return_tensors="pt"))


def prompt_inputs(family: VisionFamily, ids: Int32, files: list[bytes]) -> dict[str, Any]:
    """Return the inputs of a model in Transformers for expanded token ids and their images."""
    inputs = process_images(family, files) if files else {}
    prompt = torch.from_numpy(ids.astype(np.int64))[None]
    if family.twin.startswith("qwen"):
        inputs["mm_token_type_ids"] = (prompt == IMAGE).long()
    return {"input_ids": prompt, **inputs}


def generate(
    model: Any, family: VisionFamily, ids: Int32, files: list[bytes], tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Return the greedy answer of Transformers to expanded token ids, and the logits of its tokens."""
    inputs = prompt_inputs(family, ids, files)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with torch.inference_mode():
        output = model.generate(
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
            **inputs,
        )
    return output.sequences[0, len(ids) :].tolist(), torch.stack(output.logits)[:, 0]
