# SPDX-License-Identifier: Apache-2.0
"""Reader of the MXFP4 configuration of Transformers (`Mxfp4Config`), which gpt-oss uses."""

from __future__ import annotations

from mizzen.models.hf_fields import Fields
from mizzen.quantization.config_fields import read_patterns
from mizzen.quantization.layer_patterns import LayerPattern, PatternKind
from mizzen.quantization.quantization import LayerRule, Quantization, ignore_layers
from mizzen.quantization.schemes import Mxfp4Weights

EXPERTS = LayerPattern("mlp.experts", PatternKind.MODULE)
"""The only layers that this configuration quantizes."""


def read_mxfp4(fields: Fields) -> Quantization:
    """Read `quant_method` mxfp4.

    Raises:
        ConfigError: A field is invalid.
    """
    ignored = read_patterns(fields, ("modules_to_not_convert",), PatternKind.MODULE)
    return Quantization(method="MXFP4", rules=(*ignore_layers(ignored), LayerRule(EXPERTS, Mxfp4Weights())))
