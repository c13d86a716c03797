# SPDX-License-Identifier: Apache-2.0
"""Vision towers that are served, by the architecture of the whole model.

Importing this module does not import torch: the supervisor reads configurations too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mizzen.models.hf_fields import Fields
from mizzen.models.vision.config import VisionConfig
from mizzen.models.vision.llava import read_llava, read_llava_next, read_mistral3
from mizzen.models.vision.qwen import read_qwen2, read_qwen2_5, read_qwen3

VisionReader = Callable[[Fields], VisionConfig | None]

VISION_READERS: Mapping[str, VisionReader] = {
    "LlavaForConditionalGeneration": read_llava,
    "LlavaNextForConditionalGeneration": read_llava_next,
    "Mistral3ForConditionalGeneration": read_mistral3,
    "Qwen2VLForConditionalGeneration": read_qwen2,
    "Qwen2_5_VLForConditionalGeneration": read_qwen2_5,
    "Qwen3VLForConditionalGeneration": read_qwen3,
    "Qwen3VLMoeForConditionalGeneration": read_qwen3,
}
"""Reader of the tower by the name that config.json lists under `architectures`."""


def read_vision(fields: Fields) -> VisionConfig | None:
    """Read the vision tower and the projectors of a model from the fields of its config.json.

    Returns:
        The configuration, with the family's usual normalisation of pixels; None if the model takes no images,
        or if its tower is not served.

    Raises:
        ConfigError: a field is missing, invalid or not supported. The message names the field.
    """
    for name in fields.strings("architectures"):
        if name in VISION_READERS:
            return VISION_READERS[name](fields)
    return None
