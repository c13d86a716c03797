# SPDX-License-Identifier: Apache-2.0
"""Side outputs of a step (log probabilities and embeddings) on the device, and their conversion.

Steps create them on the device; runners copy them to the host and pass them to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from mizzen.core.request import Int32
from mizzen.core.step_plan import SideOutputs, SlotLogprobs, SlotVector

LOGPROB_FLOOR = -9999.0
"""Lowest log probability that is reported; also reported for tokens that cannot be sampled."""

TensorCopy = Callable[[torch.Tensor], torch.Tensor]
"""Returns a copy of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """Rows of `LogprobTensors` that belong to a slot, and the entries in them that the slot requested."""

    slot: int
    rows: int
    """Number of rows of the slot."""
    top_logprobs: int
    """Number of most probable tokens that the slot requested."""
    token_id_count: int
    """Number of tokens that the slot requested by id."""
    start_position: int | None = None
    """For prompt log probabilities, sequence position of the first row's token; None for a sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Log probabilities of several slots, as one tensor.

    The entries of a row are the token itself, the `max_top_logprobs` most probable tokens, and the tokens
    that were requested by id.
    """

    requests: tuple[LogprobRequest, ...]
    """Requests in the order of their rows."""
    max_top_logprobs: int
    """Largest `top_logprobs` of all requests."""
    packed: torch.Tensor
    """Token ids, and the bits of float32 log probabilities, int32 [rows, 2, entries]."""

    def to_slot_logprobs(self) -> list[SlotLogprobs]:
        """Return the log probabilities of each request; the tensor must be on the host."""
        packed: Int32 = self.packed.numpy()
        ids, values = packed[:, 0], packed.view(np.float32)[:, 1]
        results: list[SlotLogprobs] = []
        row = 0
        for request in self.requests:
            width = ids.shape[1]
            if (
                request.top_logprobs >= self.max_top_logprobs
                and request.token_id_count == width - 1 - self.max_top_logprobs
            ):
                columns = slice(None)
            elif not request.token_id_count:
                columns = slice(1 + min(request.top_logprobs, self.max_top_logprobs))
            else:
                id_columns = range(
                    1 + self.max_top_logprobs, 1 + self.max_top_logprobs + request.token_id_count
                )
                columns = [*range(1 + min(request.top_logprobs, self.max_top_logprobs)), *id_columns]
            part = slice(row, row + request.rows)
            results.append(
                SlotLogprobs(request.slot, ids[part, columns], values[part, columns], request.start_position)
            )
            row += request.rows
        return results


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """Embeddings of several slots, or the logits of their labels, as one tensor."""

    slots: tuple[int, ...]
    values: torch.Tensor
    """Vectors, float32 [len(slots), size]."""

    def to_slot_vectors(self) -> list[SlotVector]:
        """Return the vector of each slot; the tensor must be on the host."""
        vectors = np.ascontiguousarray(self.values.numpy())
        return [SlotVector(slot, vector) for slot, vector in zip(self.slots, vectors, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSideOutputs:
    """Side outputs of a step as tensors, on the device or on the host."""

    logprobs: tuple[LogprobTensors, ...] = ()
    vectors: tuple[PooledVectors, ...] = ()

    def with_logprobs(self, logprobs: LogprobTensors) -> DeviceSideOutputs:
        """Return these outputs with additional log probabilities."""
        return replace(self, logprobs=(*self.logprobs, logprobs))

    def copy_with(self, copy: TensorCopy) -> DeviceSideOutputs:
        """Return these outputs with each tensor replaced by the result of `copy`."""
        return DeviceSideOutputs(
            logprobs=tuple(replace(part, packed=copy(part.packed)) for part in self.logprobs),
            vectors=tuple(replace(part, values=copy(part.values)) for part in self.vectors),
        )

    def to_side_outputs(self) -> SideOutputs:
        """Convert these outputs for the scheduler; the tensors must be on the host."""
        return SideOutputs(
            logprobs=tuple(part for tensors in self.logprobs for part in tensors.to_slot_logprobs()),
            vectors=tuple(vector for part in self.vectors for vector in part.to_slot_vectors()),
        )


def pack_logprobs(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Pack token ids (int32) and log probabilities (float32), both [rows, m], as in `LogprobTensors`."""
    return torch.stack((ids, values.view(torch.int32)), dim=1)
