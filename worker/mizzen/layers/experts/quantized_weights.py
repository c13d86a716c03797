# SPDX-License-Identifier: Apache-2.0
"""Quantized weights of the experts of one layer, which stay quantized in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from mizzen.layers.context import BuildContext
from mizzen.layers.experts.expert_parts import ExpertParts
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.experts.stored_experts import ExpertTensors, Projection, make_tensors
from mizzen.layers.linear_methods.base import LinearPart
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertLayout, ExpertsConfig
from mizzen.models.hf_fields import ConfigError
from mizzen.quantization.schemes import (
    Fp8Layout,
    Fp8Weights,
    Int8Weights,
    ScaleShape,
    WeightScheme,
    describe_scheme,
)


class QuantizedExpertWeights:
    """Weights of the experts of a layer; each rank holds a shard of the inner elements of every expert.

    Products never quantize the inputs of experts, whatever the checkpoint asks for: the result is that of the
    exact weights. The experts have no biases.
    """

    biases = None

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
        if isinstance(scheme, Fp8Weights | Int8Weights):
            scheme = msgspec.structs.replace(scheme, activations=None)
        self.config, self.hidden, self.prefix = experts, hidden, prefix
        if experts.biases or experts.interleaved:
            raise ConfigError(
                f"the experts of {prefix} have biases, or alternating rows of gate and up, which is not "
                f"supported in this format ({describe_scheme(scheme)}): use the checkpoint in bfloat16 or "
                "MXFP4"
            )
        self.shard = build.mesh.tensor.shard(experts.width, experts.width_field)
        parts = ExpertParts(config=experts, hidden=hidden, prefix=prefix, shard=self.shard)
        if not parts.separate and not online:
            check_stacked(scheme, experts, prefix)

        def make(layers: Iterable[tuple[LinearPart, ...]], rows: int, columns: int) -> ExpertTensors:
            projection = Projection(
                parts=parts,
                experts=tuple(layers),
                rows=rows,
                columns=columns,
                dtype=build.dtype,
                device=build.device,
            )
            return make_tensors(projection, scheme, online=online)

        indices = range(experts.count)
        self._stored = {
            "gate_up": make(map(parts.gate_up, indices), 2 * parts.own_width, hidden),
            "down": make(map(parts.down, indices), hidden, parts.own_width),
        }
        self._loaded: dict[str, QuantizedExperts] = {}
        build.methods.append(self)

    @property
    def gate_up(self) -> QuantizedExperts:
        """Gate and up projections, [2 * width of this rank, hidden] for each expert, gate before up."""
        return self._find("gate_up")

    @property
    def down(self) -> QuantizedExperts:
        """Down projections, [hidden, width of this rank] for each expert."""
        return self._find("down")

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors; nothing once these are converted."""
        for tensors in self._stored.values():
            yield from tensors.targets()

    def finish(self) -> None:
        """Convert the stored tensors to the canonical form, and free them.

        Raises:
            WeightsError: A tensor has invalid values.
        """
        for name in list(self._stored):
            self._loaded[name] = self._stored.pop(name).take()

    def format_bytes(self) -> Mapping[str, int]:
        """Return the bytes of the loaded weights with their scales and zero points, by their format."""
        sizes: Counter[str] = Counter()
        for projection in self._loaded.values():
            sizes[projection.weight.format] += projection.size
        return sizes

    def _find(self, name: str) -> QuantizedExperts:
        """Return a loaded projection.

        Raises:
            RuntimeError: It is not loaded.
        """
        if name not in self._loaded:
            raise RuntimeError(f"the experts of {self.prefix} are not loaded")
        return self._loaded[name]


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
