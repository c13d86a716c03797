# SPDX-License-Identifier: Apache-2.0
"""Random twins of models for images with head dims that GPU kernels support, and prompts for them.

The towers have the head dims of the real ones: 80 (Qwen2-VL, Qwen2.5-VL), 72 (Qwen3-VL, SigLIP) and 64 (CLIP,
Pixtral).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from logprob_check import SIZES
from vision_folders import FAMILIES, VisionFamily, process_images, random_image, random_prompt, save_family
from vision_twins import TOWERS

from mizzen import ImagePrompt
from mizzen.engine.loading.served_images import find_largest_image
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageRules
from mizzen.offline.image_prompts import PreparedImages, prepare_images

MROPE = {"rope_type": "default", "rope_theta": 1e4}
SECTIONS = {"qwen3-vl": [12, 10, 10], "qwen3-vl-moe": [12, 10, 10]}
"""Sections of M-RoPE that differ from those below."""
EXPERTS = {"moe_intermediate_size": 128}
WIDTHS: dict[str, tuple[int, int]] = {
    "qwen2-vl": (160, 2),
    "qwen2.5-vl": (160, 2),
    "qwen3-vl": (144, 2),
    "qwen3-vl-moe": (144, 2),
    "llava-clip": (128, 2),
    "llava-siglip": (144, 2),
    "llava-next": (128, 2),
    "pixtral": (128, 2),
    "mistral3": (128, 2),
}
"""Hidden size and number of heads of each twin's tower."""
INNER = {"qwen2.5-vl": 108}
"""Intermediate sizes of towers that differ from 96; GEMMs need padding for 108."""
OPAQUE_MODES = ("RGB", "L", "P")
"""Modes of images. The versions of Transformers that GPU machines have may differ in transparent images."""
SCALE = 0.09
"""Standard deviation of the weights."""


def gpu_tower(twin: str) -> dict[str, Any]:
    """Return the fields of a twin's tower."""
    hidden, heads = WIDTHS[twin]
    tower = {**TOWERS[twin], "hidden_size": hidden, "intermediate_size": INNER.get(twin, 96)}
    if not twin.startswith("qwen"):
        return {**tower, "num_attention_heads": heads, "head_dim": hidden // heads}
    tower |= {"num_heads": heads, "out_hidden_size": SIZES["hidden_size"]}
    if twin == "qwen2-vl":
        tower |= {"embed_dim": hidden, "hidden_size": SIZES["hidden_size"]}
    return tower


def save_gpu_twin(folder: Path, name: str) -> tuple[Any, VisionFamily]:
    """Save the twin of a family with weights in bfloat16; return its model in Transformers, in float32."""
    family = FAMILIES[name]
    text: dict[str, Any] = {**SIZES, "head_dim": 64}
    if name.startswith("qwen"):
        text["rope_parameters"] = {**MROPE, "mrope_section": SECTIONS.get(name, [8, 12, 12])}
    if name == "qwen3-vl-moe":
        text |= EXPERTS
    model = save_family(folder, family, gpu_tower(family.twin), text=text, scale=SCALE, dtype=torch.bfloat16)
    return model, family


def read_rules(folder: Path) -> ImageRules:
    """Read the rules for images of a model folder."""
    rules = load_image_rules(folder)
    assert rules is not None
    return rules


def largest_embeddings(rules: ImageRules) -> int:
    """Return the number of embeddings of the largest image."""
    largest = find_largest_image(rules, SIZES["max_position_embeddings"] - 1)
    assert largest is not None
    return largest.embeddings


def make_prompts(rules: ImageRules, seed: str, count: int) -> list[tuple[ImagePrompt, PreparedImages]]:
    """Return random prompts with none to three images, some of them shared, and what they become."""
    source = random.Random(seed)
    files = [random_image(source, modes=OPAQUE_MODES) for _ in range(count)]
    prompts: list[tuple[ImagePrompt, PreparedImages]] = []
    while len(prompts) < count:
        chosen = source.choices(files, k=len(prompts) % 4)
        ids = [*random_prompt(source, len(chosen)), 9]
        prepared = prepare_images(np.array(ids, np.int32), chosen, rules)
        if chosen and sum(len(image.positions) for image in prepared.images) == 1:
            continue  # Transformers drops the dimension of a single embedding of Mistral 3, and fails
        prompts.append((ImagePrompt(ids, chosen), prepared))
    return prompts


def image_features(model: Any, family: VisionFamily, file: bytes) -> torch.Tensor:
    """Return the embeddings that Transformers computes of an image, [embeddings, width] on the CPU."""
    inputs = on_device(model, process_images(family, [file]))
    with torch.inference_mode():
        outputs = model.get_image_features(**inputs)
    stages = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
    parts = [each if isinstance(each, torch.Tensor) else torch.cat(tuple(each)) for each in stages]
    return torch.cat([part.view(-1, part.shape[-1]) for part in parts], dim=-1).float().cpu()


def on_device(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs on the model's device, with pixels in its dtype."""
    dtype = next(model.parameters()).dtype
    tensors = {name: torch.as_tensor(np.asarray(values)) for name, values in inputs.items()}
    return {
        name: tensor.to(model.device, dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
