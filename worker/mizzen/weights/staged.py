# SPDX-License-Identifier: Apache-2.0
"""Loads tensors into temporary buffers, which are converted batch by batch (`mizzen.layers.staging`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mizzen.layers.staging import Staging
from mizzen.layers.weight_target import WeightTarget
from mizzen.weights.stream import SafetensorsHeader, stream_to_device

BATCH_BYTES = 512 << 20
"""Bytes of buffers that exist at the same time, unless a single buffer is larger."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor of a checkpoint, and its target with a staging; the target has the tensor's name."""

    header: SafetensorsHeader
    target: WeightTarget


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """Tensors that share a buffer."""

    staging: Staging
    tensors: list[StagedTensor]


def load_staged(
    tensors: Sequence[StagedTensor],
    read: Callable[[StagedTensor], torch.Tensor],
    done: Callable[[int], None],
) -> None:
    """Load and convert tensors, a batch of layers at a time.

    Args:
        tensors: All tensors of all layers.
        read: Returns this rank's shard of a tensor whose bytes cannot be copied as they are.
        done: Called with the size in bytes of each part that is loaded.

    Raises:
        OSError: A file cannot be read, or is truncated.
    """
    for batch in split_into_batches(group_by_staging(tensors)):
        ranges = []
        for layer in batch:
            layer.staging.open()
            for tensor in layer.tensors:
                destination = layer.staging.place(tensor.target.destination)
                file_range = tensor.header.file_range(replace(tensor.target, destination=destination))
                if file_range is not None:
                    ranges.append(file_range)
                    continue
                destination.copy_(read(tensor))
                done(destination.numel() * destination.element_size())
        stream_to_device(ranges, done)
        for layer in batch:
            layer.staging.close()


def group_by_staging(tensors: Sequence[StagedTensor]) -> list[StagedLayer]:
    """Return the tensors by their buffers, in the order of the first tensor of each."""
    layers: dict[int, StagedLayer] = {}
    for tensor in tensors:
        staging = tensor.target.staging
        if staging is not None:
            layers.setdefault(id(staging), StagedLayer(staging, [])).tensors.append(tensor)
    return list(layers.values())


def split_into_batches(layers: Sequence[StagedLayer]) -> Iterator[list[StagedLayer]]:
    """Yield consecutive layers whose buffers have at most `BATCH_BYTES` bytes, or single larger ones."""
    batch: list[StagedLayer] = []
    for layer in layers:
        if batch and sum(each.staging.size for each in batch) + layer.staging.size > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(layer)
    if batch:
        yield batch
