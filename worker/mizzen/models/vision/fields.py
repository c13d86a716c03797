# SPDX-License-Identifier: Apache-2.0
"""Reads fields that configurations of vision towers share. Importing this module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mizzen.models.block import Activation
from mizzen.models.config import ACTIVATIONS
from mizzen.models.hf_fields import Fields
from mizzen.models.vision.config import CHANNELS, Normalisation, VisionConfig

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CLIP_NORMALISATION = Normalisation(mean=CLIP_MEAN, std=CLIP_STD)
"""Normalisation of CLIP's training images, which most families share."""
ROPE_THETA = 10000.0
VISION_ACTIVATIONS = {name: kind for name, kind in ACTIVATIONS.items() if kind is not Activation.XIELU} | {
    "quick_gelu": Activation.QUICK_GELU
}
"""Activation functions of towers by their names in config.json."""


def tower_fields(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return the fields of `vision_config`, with values for fields that it leaves out.

    Raises:
        ConfigError: `vision_config` is not an object, or its images do not have three channels.
    """
    tower = fields.child("vision_config")
    tower = Fields({**defaults, **tower.values}, tower.source)
    for name in ("in_channels", "in_chans", "num_channels"):
        if tower.integer(name, CHANNELS) != CHANNELS:
            raise tower.error(name, "must be 3: images have three channels")
    return tower


def read_size(fields: Fields, name: str, default: int | None = None) -> int:
    """Read a positive integer that may be written as a list of equal integers, such as a patch's size.

    Raises:
        ConfigError: the field is missing, or holds anything else.
    """
    value = fields.values.get(name)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return Fields({name: value[0]}, fields.source).integer(name)
    return fields.integer(name, default)


def read_vision_activation(fields: Fields, name: str, default: str) -> Activation:
    """Read an activation function of a tower or a projector.

    Raises:
        ConfigError: the function is not supported; the message lists the supported ones.
    """
    value = fields.values.get(name) or default
    if not isinstance(value, str) or value not in VISION_ACTIVATIONS:
        raise fields.error(name, f"must be one of {', '.join(VISION_ACTIVATIONS)}")
    return VISION_ACTIVATIONS[value]


def read_heads(fields: Fields, name: str, hidden: int, hidden_name: str) -> int:
    """Read the number of heads of a tower with the hidden size `hidden`.

    Raises:
        ConfigError: the number does not divide the hidden size, or the head dim is not a multiple of 4, which
            rotary embeddings of rows and columns need.
    """
    heads = fields.integer(name)
    if hidden % heads or hidden // heads % 4:
        raise fields.error(hidden_name, f"must be a multiple of 4 * {name} ({heads})")
    return heads


def read_layer_indices(fields: Fields, name: str, layers: int) -> tuple[int, ...]:
    """Read a list of different layers of a tower that has `layers` layers.

    Raises:
        ConfigError: the field is not such a list.
    """
    value = fields.values.get(name)
    valid = isinstance(value, list) and all(type(item) is int and 0 <= item < layers for item in value)
    if not valid or len(set(value or ())) != len(value or ()):
        raise fields.error(name, f"must list different layers from 0 to {layers - 1}")
    return tuple(value or ())


def read_features(fields: Fields, name: str, layers: int, default: int) -> tuple[int, ...]:
    """Read the hidden states of a tower with `layers` layers that a projector receives.

    Index 0 stands for the input of the first layer; negative indices count from the last layer's output.

    Raises:
        ConfigError: the field is neither an index nor a list of indices.
    """
    value = fields.values.get(name)
    value = default if value is None else value
    indices = value if isinstance(value, list) else [value]
    if not indices or not all(type(item) is int and -layers - 1 <= item <= layers for item in indices):
        raise fields.error(name, f"must be a layer from {-layers - 1} to {layers}, or a list of them")
    return tuple(item % (layers + 1) for item in indices)


def read_rope_theta(fields: Fields) -> float:
    """Read the base of a tower's rotary embedding, from `rope_parameters` or the older `rope_theta`.

    Raises:
        ConfigError: a field is invalid, or the type of the embedding is not supported.
    """
    rope = fields.child("rope_parameters")
    kind = rope.values.get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise rope.error("rope_type", "must be axial")
    return rope.number("rope_theta", fields.number("rope_theta", ROPE_THETA))


def with_normalisation(config: VisionConfig, preprocessor: Fields) -> VisionConfig:
    """Return the configuration with the normalisation of preprocessor_config.json.

    Fields that the file leaves out keep the family's defaults.

    Raises:
        ConfigError: a field is invalid; the message names it.
    """
    usual = config.normalisation
    normalises = preprocessor.flag("do_normalize", True)
    mean = read_channels(preprocessor, "image_mean", usual.mean) if normalises else (0.0,) * CHANNELS
    std = read_channels(preprocessor, "image_std", usual.std) if normalises else (1.0,) * CHANNELS
    if not all(value > 0 for value in std):
        raise preprocessor.error("image_std", "must have only positive numbers")
    rescale = preprocessor.number("rescale_factor", usual.rescale)
    if not preprocessor.flag("do_rescale", True):
        rescale = 1.0
    return replace(config, normalisation=Normalisation(mean=mean, std=std, rescale=rescale))


def read_channels(fields: Fields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Read a number for each channel, or one for all channels.

    Raises:
        ConfigError: the field holds anything else.
    """
    value = fields.values.get(name)
    if value is None:
        return default
    numbers = value if isinstance(value, list) else [value] * CHANNELS
    valid = all(
        isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
        for item in numbers
    )
    if len(numbers) != CHANNELS or not valid:
        raise fields.error(name, f"must list {CHANNELS} numbers")
    return tuple(float(number) for number in numbers)
