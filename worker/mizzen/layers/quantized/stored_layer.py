# SPDX-License-Identifier: Apache-2.0
"""Tensors of a quantized linear layer as a checkpoint stores them: the shards of one rank, part by part.

They are allocated before loading, filled by `mizzen.weights`, and become a `QuantizedWeight` afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mizzen.layers.linear_methods.base import LinearPart, LinearSpec
from mizzen.layers.quantized.dummy_values import choose_fill
from mizzen.layers.weight_target import WeightTarget
from mizzen.quantization.schemes import PackedIntegers, WeightScheme
from mizzen.quantization.stored_tensors import UNUSED, StoredTensor, list_tensors
from mizzen.weights.checkpoint_files import WeightsError

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32}
"""Dtypes of tensors in memory by their names in safetensors; scales are float32, which is exact for all."""
GROUPED = ("scales", "qzeros", "weight_scale", "weight_zero_point")
"""Tensors of packed integers that have an element for each group of columns."""
IGNORED = re.compile(
    r"\.(weight_shape|input_scale|activation_scale|input_scale_ub|input_zero_point|input_global_scale)$"
)
"""Names of tensors of quantized layers that need not be loaded if the scheme does not use them."""
ZEROS = re.compile(r"\.(bias|weight_zero_point)$")
"""Names of tensors that exporters may add to any layer with all elements 0: biases (GPTQ), and zero points of
symmetric weights (compressed-tensors)."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Tensors of one layer of the checkpoint."""

    part: LinearPart
    tensors: dict[str, torch.Tensor]
    """This rank's shards by the first suffix of their names. The first element of a shard may also stand for
    rows or columns before those of the rank (see `Dimension.shard`)."""

    @property
    def rows(self) -> int:
        """Number of output rows of this rank."""
        return self.part.rows.stop - self.part.rows.start

    def error(self, suffix: str, problem: str) -> WeightsError:
        """Return the error for invalid values in a tensor."""
        return WeightsError(f"{self.part.name}.{suffix} {problem}: use another checkpoint of the model")


class StoredLayer:
    """Tensors of all parts of one linear layer."""

    def __init__(self, spec: LinearSpec, scheme: WeightScheme) -> None:
        self.spec, self.scheme = spec, scheme
        self.layout = tuple(each for each in list_tensors(scheme) if each.suffixes[0] not in UNUSED)
        codes, *others = self.layout
        shapes = [self._shard_shape(codes, part) for part in spec.parts]
        sizes = [math.prod(shape) for shape in shapes]
        self.codes = torch.empty(sum(sizes), dtype=DTYPES[codes.dtypes[0]], device=spec.device)
        """Codes of all parts, one after the other. The merged weight has the same size, so that it can use
        this memory, or that of another layer that has been freed, and memory does not fragment."""
        self.parts = tuple(
            StoredPart(
                part,
                {
                    codes.suffixes[0]: own_codes.view(shape),
                    **{each.suffixes[0]: self._allocate(each, part) for each in others},
                },
            )
            for part, shape, own_codes in zip(spec.parts, shapes, self.codes.split(sizes), strict=True)
        )

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        for stored in self.parts:
            part = stored.part
            for each in self.layout:
                shapes = each.shapes(*part.shape)
                yield WeightTarget(
                    name=f"{part.name}.{each.suffixes[0]}",
                    other_names=tuple(f"{part.name}.{suffix}" for suffix in each.suffixes[1:]),
                    dtypes=each.dtypes,
                    shape=shapes[0],
                    other_shapes=shapes[1:],
                    shard=self._shard(each, part),
                    destination=stored.tensors[each.suffixes[0]],
                    optional=each.optional,
                    fill=choose_fill(self.scheme, each.suffixes[0], part.shape[1]),
                )

    def _shard(self, stored: StoredTensor, part: LinearPart) -> tuple[slice, ...]:
        """Return this rank's part of a tensor.

        Columns in activation order may belong to any group, so that the scales of all groups are needed.
        """
        columns, scheme = part.columns, self.scheme
        if stored.suffixes[0] in GROUPED and isinstance(scheme, PackedIntegers) and scheme.activation_order:
            columns = slice(0, part.shape[1])
        return tuple(each.shard(part.rows, columns) for each in stored.dimensions[0])

    def _shard_shape(self, stored: StoredTensor, part: LinearPart) -> list[int]:
        return [shard.stop - shard.start for shard in self._shard(stored, part)]

    def _allocate(self, stored: StoredTensor, part: LinearPart) -> torch.Tensor:
        """Allocate this rank's part of a tensor; optional tensors get the values that the scheme implies."""
        device = self.spec.device
        dtype = DTYPES.get(stored.dtypes[0], torch.float32)
        if not stored.optional:
            return torch.empty(self._shard_shape(stored, part), dtype=dtype, device=device)
        whole = torch.empty(stored.shapes(*part.shape)[0], dtype=dtype, device=device)
        fill = choose_fill(self.scheme, stored.suffixes[0], part.shape[1])
        if callable(fill):
            fill(whole, torch.Generator(device))
        else:
            whole.fill_(fill)
        return whole[self._shard(stored, part)].clone()
