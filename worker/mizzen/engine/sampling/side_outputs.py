"""Side outputs of a step besides its tokens: log probabilities and pooled vectors, on their way to the host.

Steps create them on the device; runners copy them and pass them to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from mizzen.core.request import Int32
from mizzen.core.step_plan import SideOutputs, SlotLogprobs, SlotVector

LOGPROB_FLOOR = -9999.0
"""Lowest log probability that is reported; also that of tokens that cannot be sampled."""

TensorCopy = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """A slot's share of a log probability table, and the entries that it requests."""

    slot: int
    rows: int
    top_logprobs: int
    token_id_count: int
    """Number of tokens requested by id."""
    start_position: int | None = None
    """Sequence position of the first row's token, for prompt log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Log probabilities by row: of the token itself, of the `max_top_logprobs` most probable, then by id."""

    requests: tuple[LogprobRequest, ...]
    """Requests in the order of the rows."""
    max_top_logprobs: int
    packed: torch.Tensor
    """int32 [rows, 2, 1 + max_top_logprobs + most tokens by id]: ids, and the bits of float32 values."""

    def to_slot_logprobs(self) -> list[SlotLogprobs]:
        """Return each request's rows and columns; the tensor must be on the host."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSideOutputs:
    """Side outputs of a step, on a device."""

    logprobs: tuple[LogprobTensors, ...] = ()
    vector_slots: tuple[int, ...] = ()
    """Slots of the pooled vectors."""
    vectors: torch.Tensor | None = None
    """Pooled vectors, float32 [vector_slots, hidden]."""

    def with_logprobs(self, logprobs: LogprobTensors) -> DeviceSideOutputs:
        """Return these outputs with additional log probabilities."""
        return replace(self, logprobs=(*self.logprobs, logprobs))

    def copy_with(self, copy: TensorCopy) -> DeviceSideOutputs:
        """Return these outputs with every tensor passed through `copy`."""
        return DeviceSideOutputs(
            logprobs=tuple(replace(part, packed=copy(part.packed)) for part in self.logprobs),
            vector_slots=self.vector_slots,
            vectors=None if self.vectors is None else copy(self.vectors),
        )

    def to_side_outputs(self) -> SideOutputs:
        """Return these outputs for the scheduler; the tensors must be on the host."""
        vectors = () if self.vectors is None else tuple(np.ascontiguousarray(self.vectors.numpy()))
        return SideOutputs(
            logprobs=tuple(part for tensors in self.logprobs for part in tensors.to_slot_logprobs()),
            vectors=tuple(
                SlotVector(slot, vector) for slot, vector in zip(self.vector_slots, vectors, strict=True)
            ),
        )


def pack_logprobs(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ids int32 and values float32, both [rows, m], packed as in `LogprobTensors`."""
    return torch.stack((ids, values.view(torch.int32)), dim=1)
