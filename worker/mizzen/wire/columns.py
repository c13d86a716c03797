# SPDX-License-Identifier: Apache-2.0
"""Packs a step's output into columns, one set per gateway, and unpacks such columns.

Packing creates no Python object per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mizzen.core.outputs import StepOutput
from mizzen.core.request import Int32, Int64
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.messages import Outputs
from mizzen.wire.server.request_table import NO_OWNER, RequestTable


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Output rows for one gateway, as the columns of an `Outputs` message (little-endian bytes)."""

    rids: bytes = b""
    offsets: bytes = b""
    tokens: bytes = b""
    counts: bytes = b""


def pack_by_peer(output: StepOutput, table: RequestTable) -> Iterator[tuple[int, PackedColumns]]:
    """Yield (index of the peer, columns) for every gateway that owns rows of a step's output."""
    if not len(output.rids):
        return
    handles = table.handle[output.rids]
    if len(table.owners) == 1:  # the usual case: no sorting
        owner = next(iter(table.owners))
        if owner != NO_OWNER:
            yield owner, _pack(handles, output.offsets, output.tokens, output.counts)
        return
    owners = table.owner[output.rids]
    order = owners.argsort(kind="stable")
    owners, handles, offsets = owners[order], handles[order], output.offsets[order]
    tokens, counts, ends = output.tokens, None, None
    if output.counts is None:
        tokens = tokens[order]
    else:
        counts = output.counts[order]
        tokens, ends = _reorder(tokens, output.counts, order)
    cuts = np.flatnonzero(owners[1:] != owners[:-1]) + 1
    start = 0
    for stop in [*cuts.tolist(), len(order)]:
        owner = int(owners[start])
        if owner != NO_OWNER:
            rows = slice(start, stop)
            if ends is None or counts is None:
                part = _pack(handles[rows], offsets[rows], tokens[rows], None)
            else:
                part = _pack(handles[rows], offsets[rows], tokens[ends[start] : ends[stop]], counts[rows])
            yield owner, part
        start = stop


def unpack_columns(message: Outputs) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the columns of a message: handles, offsets and token counts, one per row, and all tokens.

    Raises:
        MalformedFrame: the columns have inconsistent lengths.
    """
    try:
        rids = np.frombuffer(message.rids, "<u4").tolist()
        offsets = np.frombuffer(message.offsets, "<u4").tolist()
        tokens = np.frombuffer(message.tokens, "<i4").tolist()
        counts = np.frombuffer(message.counts, "<u2").tolist() if message.counts else [1] * len(rids)
    except ValueError as error:
        raise MalformedFrame(f"a column of Outputs: {error}") from error
    if not len(rids) == len(offsets) == len(counts) or sum(counts) != len(tokens):
        raise MalformedFrame("the columns of Outputs differ in length")
    return rids, offsets, counts, tokens


def _reorder(tokens: Int32, counts: Int32, order: Int64) -> tuple[Int32, Int64]:
    """Return the tokens of all rows in a new row order, and the row boundaries (int64 [rows + 1]).

    Args:
        tokens: int32 [sum of counts], row after row.
        counts: number of tokens per row, int32 [rows].
        order: index of the old row for each new row, int64 [rows].
    """
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    sizes = counts[order]
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    index = np.arange(ends[-1]) + np.repeat(starts[:-1][order] - ends[:-1], sizes)
    return tokens[index], ends


def _pack(handles: np.ndarray, offsets: Int32, tokens: Int32, counts: Int32 | None) -> PackedColumns:
    # Offsets are never negative, so their int32 bytes equal the uint32 bytes of the protocol.
    packed = b"" if counts is None else counts.astype("<u2").tobytes()
    return PackedColumns(handles.tobytes(), offsets.tobytes(), tokens.tobytes(), packed)
