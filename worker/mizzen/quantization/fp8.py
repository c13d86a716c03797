# SPDX-License-Identifier: Apache-2.0
"""Readers of the FP8 configurations of Transformers: `quant_method` fp8 and fbgemm_fp8.

fp8 is the format of DeepSeek V3, Qwen3-*-FP8 and AutoFP8; Transformers calls it FineGrainedFP8Config.
"""

from __future__ import annotations

from mizzen.models.hf_fields import Fields
from mizzen.quantization.config_fields import (
    OUTPUT_HEAD,
    USE_SERVED,
    read_block,
    read_kv_scheme,
    read_patterns,
)
from mizzen.quantization.layer_patterns import PatternKind
from mizzen.quantization.quantization import Quantization, ignore_layers
from mizzen.quantization.schemes import (
    Activations,
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    ScaleShape,
)

IGNORED = ("modules_to_not_convert", "ignored_layers")


def read_fp8(fields: Fields) -> Quantization:
    """Read `quant_method` fp8. The output head is never quantized.

    Raises:
        ConfigError: A field is invalid or not supported.
    """
    if fields.values.get("fmt", "e4m3") != "e4m3":
        raise fields.error("fmt", "must be e4m3")
    block = read_block(fields, "weight_block_size")
    scheme = fields.values.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.error("activation_scheme", "must be dynamic or static")
    if block is None:
        scales = ActivationScales.TOKEN if scheme == "dynamic" else ActivationScales.STATIC
        activations = Activations(scales=scales)
    elif scheme == "static":
        raise fields.unsupported(
            "activation_scheme", f"is static, which is not supported with weight_block_size: {USE_SERVED}"
        )
    else:
        activations = Activations(scales=ActivationScales.TOKEN_GROUP, group_size=block[1])
    ignored = (OUTPUT_HEAD, *read_patterns(fields, IGNORED, PatternKind.MODULE))
    return Quantization(
        method="FP8",
        rules=ignore_layers(ignored),
        default=Fp8Weights(
            scale_shape=ScaleShape.TENSOR if block is None else ScaleShape.BLOCK,
            block=block,
            activations=activations,
            layout=Fp8Layout.HUGGING_FACE,
        ),
        kv=read_kv_scheme(fields),
    )


def read_fbgemm(fields: Fields) -> Quantization:
    """Read `quant_method` fbgemm_fp8 of Meta's checkpoints: a scale for each row and each token.

    Raises:
        ConfigError: A field is invalid.
    """
    bound = fields.optional_number("activation_scale_ub", None)
    ignored = (OUTPUT_HEAD, *read_patterns(fields, IGNORED, PatternKind.MODULE))
    return Quantization(
        method="FBGEMM FP8",
        rules=ignore_layers(ignored),
        default=Fp8Weights(
            scale_shape=ScaleShape.CHANNEL,
            activations=Activations(scales=ActivationScales.TOKEN, upper_bound=bound),
            layout=Fp8Layout.FBGEMM,
        ),
    )
