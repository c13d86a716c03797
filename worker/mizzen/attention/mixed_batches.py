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


PREFERRED_PLANNERS = ("sequences",)
"""Names of planners (see `select_planner`), the fastest one first; an engine uses the first one that its
backends support. `benchmarks/mixed.py --one-step` compares them."""
MixedPlanner = Callable[[DeviceBatch], PlannedAttention]
"""Plans the attention of a captured batch, and may itself be captured.

The planned attention writes the output of all decodes and chunks; that of padding may be any finite value."""


def plan_as_sequences(backend: DevicePlannedSequences) -> MixedPlanner:
    """Return a planner that runs decodes and chunks in one kernel call of the prefill backend."""

    def plan(batch: DeviceBatch) -> PlannedAttention:
        return backend.plan_on_device(
            batch.starts, batch.sequence_slots, batch.lengths, batch.table, batch.tokens
        )

    return plan


def plan_decodes_apart(
    prefill: DevicePlannedSequences, decode: DevicePlannedDecode, most: int, *, split_by_length: bool
) -> MixedPlanner:
    """Return a planner that runs decodes with the decode backend, and chunks with the prefill backend.

    The first `most` tokens are rows of the decode kernel. Rows that are no decodes read one token of the
    scratch slot, and their result is dropped. For the prefill backend, decodes are sequences without queries.

    Args:
        prefill: Backend of chunks.
        decode: Backend of decodes.
        most: Maximum number of decodes.
        split_by_length: Whether decodes use length-aware splits. With equal splits, a few long contexts in a
            batch of few decodes are slow, because the number of splits is that of `most` rows.

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
        count = is_decode.sum(dtype=torch.int32)
        index = torch.arange(len(batch.lengths), device=count.device)
        chunks = prefill.plan_on_device(
            torch.maximum(batch.starts, count),
            batch.sequence_slots,
            torch.where(index < count, 1, batch.lengths),
            batch.table,
            batch.tokens,
        )
        keep = is_decode[:, None, None]

        def run(layer: int, q: torch.Tensor, k: object, v: object, out: torch.Tensor) -> None:
            decoded = torch.empty_like(out[:rows])
            decodes(layer, q[:rows], None, None, decoded)
            chunks(layer, q, None, None, out)
            torch.where(keep, decoded, out[:rows], out=out[:rows])

        return run

    return plan


def select_planner(prefill: AttentionBackend, decode: AttentionBackend, most: int, name: str) -> MixedPlanner:
    """Return a planner by name: `sequences`, `apart`, or `apart-by-length`.

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
        return plan_as_sequences(prefill)
    if name not in ("apart", "apart-by-length"):
        raise ValueError(f"unknown planner {name!r}")
    if not isinstance(decode, DevicePlannedDecode) or isinstance(decode, HostPlannedDecode):
        raise ValueError("the decode backend needs lengths on the host")
    return plan_decodes_apart(prefill, decode, most, split_by_length=name == "apart-by-length")


def choose_planner(prefill: AttentionBackend, decode: AttentionBackend, most: int) -> MixedPlanner:
    """Return the first of `PREFERRED_PLANNERS` that the backends support.

    Raises:
        ValueError: the backends support none of them.
    """
    reasons = []
    for name in PREFERRED_PLANNERS:
        try:
            return select_planner(prefill, decode, most, name)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
    raise ValueError("; ".join(reasons))
