# SPDX-License-Identifier: Apache-2.0
"""Shapes of models for images that benchmarks run with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Files of a model folder without weights."""

    config: dict[str, Any]
    """Fields of config.json."""
    preprocessor: dict[str, Any]
    """Fields of preprocessor_config.json."""
    tokens: Mapping[str, int]
    """Added tokens that the rules for images need."""

    def write(self, folder: Path, config: dict[str, Any] | None = None) -> None:
        """Write the files to a folder, with another config.json if one is given."""
        added = [
            {
                "id": token,
                "content": text,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for text, token in self.tokens.items()
        ]
        for name, content in (
            ("config", config or self.config),
            ("preprocessor_config", self.preprocessor),
            ("tokenizer", {"version": "1.0", "added_tokens": added}),
        ):
            (folder / f"{name}.json").write_text(json.dumps(content))


QWEN_TOKENS = {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655}
QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
QWEN3_VL = VisionShape(
    config={
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        **QWEN_IDS,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "eos_token_id": 151645,
            "dtype": "bfloat16",
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    preprocessor={
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    tokens=QWEN_TOKENS,
)
QWEN2_5_VL = VisionShape(
    config={
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **QWEN_IDS,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "eos_token_id": 151645,
        "dtype": "bfloat16",
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": 3584,
            "hidden_act": "silu",
        },
    },
    preprocessor={
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    tokens=QWEN_TOKENS,
)
MISTRAL3 = VisionShape(
    config={
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "mistral",
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "head_dim": 64,
            "image_size": 1540,
            "patch_size": 14,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
        },
    },
    preprocessor={
        "image_processor_type": "PixtralImageProcessorFast",
        "size": {"longest_edge": 1540},
        "patch_size": {"height": 14, "width": 14},
    },
    tokens={"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13},
)
LLAVA = VisionShape(
    config={
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
        },
    },
    preprocessor={
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    },
    tokens={"<image>": 32000},
)
TINY = VisionShape(
    config={
        **QWEN3_VL.config,
        "text_config": {
            **QWEN3_VL.config["text_config"],
            "vocab_size": 152064,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        },
        "vision_config": {
            **QWEN3_VL.config["vision_config"],
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 49,
        },
    },
    preprocessor=QWEN3_VL.preprocessor,
    tokens=QWEN_TOKENS,
)
VISION_SHAPES: Mapping[str, VisionShape] = {
    "qwen3-vl-8b": QWEN3_VL,
    "qwen2.5-vl-7b": QWEN2_5_VL,
    "mistral-small-3.1-24b": MISTRAL3,
    "llava-1.5-7b": LLAVA,
    "tiny-vl": TINY,
}
"""Files of each shape; "tiny-vl" is not a real model, but serves to check that everything works."""


@contextmanager
def vision_folder(shape: str) -> Iterator[Path]:
    """Provide a temporary model folder of a shape, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        VISION_SHAPES[shape].write(Path(folder))
        yield Path(folder)
