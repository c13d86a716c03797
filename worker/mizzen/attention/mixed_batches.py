# SPDX-License-Identifier: Apache-2.0
"""Plans captured batches of decodes and prefill chunks, from lengths in device memory.

The numbers of decodes and chunks differ from replay to replay, but the host's decisions (grids of kernels,
slices of tensors) are captured once. So a planner must not depend on them on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mizzen.attention.base import (
    AttentionBackend,
    DevicePlannedDecode,
    DevicePlannedSequences,
    HostPlannedDecode,
    LengthSplitDecode,
    PlannedAttention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """A captured batch: decodes, one query each, then prefill chunks, then padding; tensors on the device.

    Each decode and each chunk is a sequence; further sequences, at least one of them, are padding in the
    scratch slot.
    """

    is_decode: torch.Tensor
    """Whether each token is a decode, bool [tokens]."""
    slots: torch.Tensor
    """Row of the page table for each token, int32 [tokens]."""
    positions: torch.Tensor
    """Position of each token in its sequence, int32 [tokens]."""
    starts: torch.Tensor
    """Index of the first token of each sequence, and the end of the last sequence, int32 [sequences + 1]."""
    sequence_slots: torch.Tensor
    """Row of the page table for each sequence, int32 [sequences]."""
    lengths: torch.Tensor
    """Number of tokens whose KV the last token of each sequence reads, int32 [sequences]."""
    table: torch.Tensor
    """Page table, int32 [slots, columns]."""
    scratch_slot: int
    """Slot of padding."""

    @property
    def tokens(self) -> int:
        """Number of tokens, including padding."""
        return len(self.slots)


PREFERRED_PLANNERS = ("apart-by-length", "apart", "sequences")
"""Names of planners (see `select_planners`), the fastest one first; an engine uses the first one that its
backends support. `benchmarks/mixed.py --one-step` compares them."""
FEW_CHUNKS = 2
"""Maximum number of chunks of a batch whose contexts may be split among thread blocks. Combining the parts
costs time for each chunk that the captured batch has room for."""
MixedPlanner = Callable[[DeviceBatch], PlannedAttention]
"""Plans the attention of a captured batch, and may itself be captured.

The planned attention writes the output of all decodes and chunks; that of padding may be any finite value."""


@dataclass(frozen=True, slots=True)
class MixedPlanners:
    """Planners of batches with different chunks."""

    any_chunks: MixedPlanner
    """Plans batches with any number of chunks."""
    few_chunks: MixedPlanner | None = None
    """Plans batches of at most `FEW_CHUNKS` chunks, and is faster if these have few tokens and long contexts;
    None if `any_chunks` is as fast."""


def plan_as_sequences(backend: DevicePlannedSequences) -> MixedPlanner:
    """Return a planner that runs decodes and chunks in one kernel call of the prefill backend."""

    def plan(batch: DeviceBatch) -> PlannedAttention:
        return backend.plan_on_device(
            batch.starts, batch.sequence_slots, batch.lengths, batch.table, batch.tokens
        )

    return plan


def plan_chunks(
    backend: DevicePlannedSequences, batch: DeviceBatch, count: torch.Tensor, max_chunks: int | None
) -> PlannedAttention:
    """Plan the chunks and the padding of a batch, but not its decodes.

    Args:
        backend: Backend of chunks.
        batch: The batch.
        count: Number of decodes, int32 [].
        max_chunks: Maximum number of chunks, whose contexts may then be split; None for any number.
    """
    sequences = len(batch.lengths)
    index = torch.arange(sequences, device=count.device)
    if max_chunks is None or max_chunks + 1 >= sequences:
        # Decodes are sequences without queries.
        return backend.plan_on_device(
            torch.maximum(batch.starts, count),
            batch.sequence_slots,
            torch.where(index < count, 1, batch.lengths),
            batch.table,
            batch.tokens,
            split=max_chunks is not None,
        )
    # The padding follows the chunks as one sequence; sequences behind it are empty.
    kept = (index[: max_chunks + 2] + count).clamp_(max=sequences)
    last = kept[:-1].clamp(max=sequences - 1)
    return backend.plan_on_device(
        batch.starts[kept], batch.sequence_slots[last], batch.lengths[last], batch.table, batch.tokens
    )


def plan_decodes_apart(
    prefill: DevicePlannedSequences,
    decode: DevicePlannedDecode,
    most: int,
    *,
    split_by_length: bool,
    max_chunks: int | None = None,
) -> MixedPlanner:
    """Return a planner that runs decodes with the decode backend, and chunks with the prefill backend.

    The first `most` tokens are rows of the decode kernel. Rows that are no decodes read one token of the
    scratch slot, and their result is dropped.

    Args:
        prefill: Backend of chunks.
        decode: Backend of decodes.
        most: Maximum number of decodes.
        split_by_length: Whether decodes use length-aware splits. With equal splits, a few long contexts in a
            batch of few decodes are slow, because the number of splits is that of `most` rows.
        max_chunks: Maximum number of chunks, whose contexts may then be split among thread blocks; None for
            any number of chunks, whose contexts are not split.

    Raises:
        ValueError: `split_by_length` is set, and the decode backend has no length-aware splits.
    """
    plan_rows = decode.plan_decode_on_device
    if split_by_length:
        if not isinstance(decode, LengthSplitDecode) or not decode.concurrent_splits:
            raise ValueError("the decode backend does not support length-aware splits")
        plan_rows = decode.plan_length_splits_on_device

    def plan(batch: DeviceBatch) -> PlannedAttention:
        rows = min(most, batch.tokens)
        is_decode = batch.is_decode[:rows]
        decodes = plan_rows(
            torch.where(is_decode, batch.slots[:rows], batch.scratch_slot),
            torch.where(is_decode, batch.positions[:rows] + 1, 1),
            batch.table,
        )
        chunks = plan_chunks(prefill, batch, is_decode.sum(dtype=torch.int32), max_chunks)
        keep = is_decode[:, None, None]

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            decoded = torch.empty_like(out[:rows])
            decodes(layer, q[:rows], None, None, decoded)
            chunks(layer, q, None, None, out)
            torch.where(keep, decoded, out[:rows], out=out[:rows])

        return run

    return plan


def select_planners(
    prefill: AttentionBackend, decode: AttentionBackend, most: int, name: str
) -> MixedPlanners:
    """Return planners by name: `sequences`, `apart`, or `apart-by-length`.

    Args:
        prefill: Backend of chunks.
        decode: Backend of decodes.
        most: Maximum number of decodes.
        name: `sequences` for `plan_as_sequences`; `apart` and `apart-by-length` for `plan_decodes_apart` with
            equal and with length-aware splits.

    Raises:
        ValueError: the name is unknown, or a backend does not support this planner.
    """
    if not isinstance(prefill, DevicePlannedSequences):
        raise ValueError("the prefill backend needs lengths on the host")
    if name == "sequences":
        return MixedPlanners(plan_as_sequences(prefill))
    if name not in ("apart", "apart-by-length"):
        raise ValueError(f"unknown planner {name!r}")
    if not isinstance(decode, DevicePlannedDecode) or isinstance(decode, HostPlannedDecode):
        raise ValueError("the decode backend needs lengths on the host")
    split_by_length = name == "apart-by-length"
    any_chunks, few_chunks = (
        plan_decodes_apart(prefill, decode, most, split_by_length=split_by_length, max_chunks=max_chunks)
        for max_chunks in (None, FEW_CHUNKS)
    )
    return MixedPlanners(any_chunks, few_chunks)


def choose_planners(prefill: AttentionBackend, decode: AttentionBackend, most: int) -> MixedPlanners:
    """Return the first of `PREFERRED_PLANNERS` that the backends support.

    Raises:
        ValueError: the backends support none of them.
    """
    reasons = []
    for name in PREFERRED_PLANNERS:
        try:
            return select_planners(prefill, decode, most, name)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
    raise ValueError("; ".join(reasons))
