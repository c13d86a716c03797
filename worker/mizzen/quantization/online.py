# SPDX-License-Identifier: Apache-2.0
"""Schemes of `--quantization`, by which an unquantized checkpoint is quantized while it is loaded.

`mizzen.layers.quantized.round_to_nearest` computes the codes. Importing this module does not import torch:
`mizzen inspect` uses it too.
"""

from __future__ import annotations

from mizzen.models.hf_fields import ConfigError
from mizzen.quantization.layer_patterns import LayerPattern, PatternKind
from mizzen.quantization.quantization import Quantization, ignore_layers
from mizzen.quantization.schemes import (
    Activations,
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    Int8Weights,
    PackedIntegers,
    Packing,
    ScaleShape,
    WeightScheme,
)

AS_STORED = "auto"
"""Value of `--quantization` with which weights keep the format of the checkpoint."""
ONLINE_METHOD = "Online"
"""Name of the method in descriptions of weights that were quantized while they were loaded."""
ONLINE_SCHEMES: dict[str, WeightScheme] = {
    "fp8": Fp8Weights(
        scale_shape=ScaleShape.CHANNEL,
        activations=Activations(scales=ActivationScales.TOKEN),
        layout=Fp8Layout.COMPRESSED_TENSORS,
    ),
    "int8": Int8Weights(scale_shape=ScaleShape.CHANNEL, activations=None),
    "w4a16": PackedIntegers(bits=4, group_size=128, symmetric=True, packing=Packing.COMPRESSED_TENSORS),
}
"""Schemes by the values of `--quantization`."""


def choose_quantization(option: str, stored: Quantization) -> Quantization:
    """Return the schemes in which a model is held in memory.

    Args:
        option: Value of `--quantization`.
        stored: Schemes of the checkpoint.

    Raises:
        ConfigError: The option asks for another format of weights that are quantized already.
    """
    if option == AS_STORED:
        return stored
    if stored.schemes:
        raise ConfigError(
            f"--quantization {option} quantizes unquantized weights, but those of this checkpoint are "
            f"quantized already ({stored.describe()}): leave the option out, or use the original checkpoint"
        )
    return Quantization(
        method=ONLINE_METHOD,
        rules=ignore_layers([LayerPattern("lm_head", PatternKind.NAME)]),
        default=ONLINE_SCHEMES[option],
        online=True,
        kv=stored.kv,
    )
