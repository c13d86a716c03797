# SPDX-License-Identifier: Apache-2.0
"""Quantized weights of the experts of one layer, which stay quantized in memory."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.stored_experts import Projection, make_tensors
from mizzen.layers.experts.stored_weights import ExpertTensors, StoredExpertWeights
from mizzen.layers.linear_methods.base import LinearPart
from mizzen.models.experts_config import ExpertLayout, ExpertsConfig
from mizzen.models.hf_fields import ConfigError
from mizzen.quantization.schemes import (
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    Int8Weights,
    ScaleShape,
    WeightScheme,
    describe_scheme,
)

GROUP_COLUMNS = 128
"""Columns of inputs that share a scale in products that quantize inputs."""


class QuantizedExpertWeights(StoredExpertWeights):
    """Weights of experts in the formats of linear layers.

    If the format has inputs in FP8 with computed scales, products may quantize the inputs of large batches,
    with a scale for each 128 columns. Otherwise products never quantize the inputs, whatever the format says:
    the result is that of the exact weights. The experts have no biases.
    """

    def __init__(
        self,
        build: BuildContext,
        experts: ExpertsConfig,
        hidden: int,
        prefix: str,
        scheme: WeightScheme,
        *,
        online: bool = False,
    ) -> None:
        """Describe the tensors of all experts.

        Args:
            build: Settings of the rank.
            experts: Description of the mixture.
            hidden: Number of elements of an input.
            prefix: Beginning of the names of the layer's tensors.
            scheme: Scheme of all experts.
            online: Whether the checkpoint's weights are unquantized, and quantized while they are loaded.

        Raises:
            ConfigError: The scheme does not suit the layout of the experts, or they have biases.
        """
        if isinstance(scheme, Fp8Weights | Int8Weights) and not has_computed_scales(scheme):
            scheme = msgspec.structs.replace(scheme, activations=None)
        if experts.biases or experts.interleaved:
            raise ConfigError(
                f"the experts of {prefix} have biases, or alternating rows of gate and up, which is not "
                f"supported in this format ({describe_scheme(scheme)}): use the checkpoint in bfloat16 or "
                "MXFP4"
            )
        super().__init__(build, experts, hidden, prefix)
        parts = self.parts
        if not parts.separate and not online:
            check_stacked(scheme, experts, prefix)

        def make(layers: Iterable[tuple[LinearPart, ...]], rows: int, columns: int) -> ExpertTensors:
            projection = Projection(
                parts=parts,
                first=self.held.start,
                experts=tuple(layers),
                rows=rows,
                columns=columns,
                dtype=build.dtype,
                device=build.device,
            )
            return make_tensors(projection, scheme, online=online)

        indices = range(self.held.start, self.held.stop)
        self._stored = {
            "gate_up": make(map(parts.gate_up, indices), 2 * parts.own_width, hidden),
            "down": make(map(parts.down, indices), hidden, parts.own_width),
        }


def has_computed_scales(scheme: Fp8Weights | Int8Weights) -> bool:
    """Return whether inputs are in FP8, with computed scales of tokens or of at least 128 columns each."""
    activations = scheme.activations
    if isinstance(scheme, Int8Weights) or activations is None or activations.upper_bound is not None:
        return False
    if activations.scales is ActivationScales.TOKEN_GROUP:
        return activations.group_size >= GROUP_COLUMNS
    return activations.scales is ActivationScales.TOKEN


def check_stacked(scheme: WeightScheme, experts: ExpertsConfig, prefix: str) -> None:
    """Check that a scheme suits tensors that hold all experts of a layer.

    Raises:
        ConfigError: It does not; only blocks of FP8, as Transformers stores them, do.
    """
    served = (
        isinstance(scheme, Fp8Weights)
        and scheme.scale_shape is ScaleShape.BLOCK
        and scheme.layout is Fp8Layout.HUGGING_FACE
        and experts.layout is ExpertLayout.STACKED
    )
    if not served:
        raise ConfigError(
            f"{prefix}{experts.names.stacked_gate_up} holds all experts of a layer, which is not supported "
            f"for this format ({describe_scheme(scheme)}): use a checkpoint with a tensor for each expert"
        )
