# SPDX-License-Identifier: Apache-2.0
"""Finds runs of consecutive KV slots that several rows of a batch can read together, called shared KV spans.

Attention over a set of tokens does not depend on their order, and partial results merge exactly by their
log-sum-exps. So a prefix that many rows share is read once for all these rows (as in Hydragen, arXiv
2402.05099, and cascade inference), and long runs are read in place; only the other KV slots are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mizzen.core.request import Int32, Int64

MIN_SPAN = 64
"""Minimum product of tokens and rows for which reading a span in place is faster than gathering its slots."""


@dataclass(frozen=True, slots=True)
class KVSpan:
    """KV slots start..start+count-1, which the sorted rows first..last-1 read together.

    `level` is the index of this span among the partial results of each of these rows.
    """

    first: int
    last: int
    start: int
    count: int
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpans:
    """Shared spans of a batch, and the remaining KV slots of each row."""

    order: Int64
    """Row of the batch for each sorted row, [rows]; sorting makes rows that share pages adjacent."""
    spans: tuple[KVSpan, ...]
    levels: int
    """Number of levels: one more than the maximum number of spans of a row; level 0 is for `leftover`."""
    leftover: tuple[Int64, ...]
    """KV slots that no span covers, by sorted row."""


def find_shared_spans(table: Int32, slots: Int64, lengths: Int64, page_size: int, keep_last: bool) -> KVSpans:
    """Find the shared spans of a batch; KV slots of partial pages and of short runs are left over.

    Args:
        table: Page table, [slots, columns].
        slots: Row of the page table for each row of the batch, [rows].
        lengths: Number of tokens that each row reads, from position 0 on, [rows].
        page_size: Tokens per page.
        keep_last: Whether the KV slot of each row's last token must be left over, even if its page is full.
    """
    full = (lengths - keep_last) // page_size
    keys = [table[slot, :count].tobytes() for slot, count in zip(slots, full, strict=True)]
    order = np.array(sorted(range(len(slots)), key=keys.__getitem__), np.int64)
    pages = [table[slots[row], : full[row]] for row in order]
    leftover: list[list[Int32]] = [[] for _ in order]
    depth = [0] * len(order)
    spans: list[KVSpan] = []
    for first, last, begin, end in shared_pages(pages):
        for start, count in page_runs(np.sort(pages[first][begin:end])):
            if count * page_size * (last - first) < MIN_SPAN:
                for row in range(first, last):
                    leftover[row].append(np.arange(start, start + count, dtype=np.int32))
                continue
            level = 1 + depth[first]
            spans.append(KVSpan(first, last, start * page_size, count * page_size, level))
            for row in range(first, last):
                depth[row] = level
    kv_slots = tuple(
        leftover_slots(leftover[i], table[slots[row]], int(full[row]), int(lengths[row]), page_size)
        for i, row in enumerate(order)
    )
    return KVSpans(order=order, spans=tuple(spans), levels=1 + max(depth), leftover=kv_slots)


def leftover_slots(pages: list[Int32], columns: Int32, full: int, length: int, page_size: int) -> Int64:
    """Return the KV slots of a row that no span covers.

    Args:
        pages: Lists of full pages that no span covers.
        columns: The row's pages by column of the page table.
        full: Number of full pages that the row reads; if tokens remain, they are in the page after these.
        length: Number of tokens that the row reads.
        page_size: Tokens per page.
    """
    offsets = np.arange(page_size)
    full_pages = np.concatenate(pages)[:, None] * page_size + offsets if pages else np.empty(0, np.int64)
    filled = length - full * page_size
    last = columns[full] * page_size + offsets[:filled] if filled else np.empty(0, np.int64)
    return np.concatenate([full_pages.ravel(), last]).astype(np.int64)


def shared_pages(pages: list[Int32]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, end row, first column, end column) for each range of rows and columns of equal pages.

    The end row and column are exclusive, and all rows of a range have the same pages in its columns; a range
    may have only one row. `pages` lists the pages of each row; the rows must be sorted by these lists. The
    ranges are the edges of the rows' prefix tree, so together they cover each column of a row exactly once,
    from left to right.
    """
    common = [0] + [shared_length(a, b) for a, b in pairwise(pages)]
    stack = [(0, len(pages), 0)]
    while stack:
        first, last, column = stack.pop()
        if last - first == 1:
            if len(pages[first]) > column:
                yield first, last, column, len(pages[first])
            continue
        until = min(common[first + 1 : last])
        if until > column:
            yield first, last, column, until
        begin = first
        for row in range(first + 1, last + 1):
            if row == last or common[row] == until:
                stack.append((begin, row, until))
                begin = row


def shared_length(a: Int32, b: Int32) -> int:
    """Return the number of leading pages that two rows have in common."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def page_runs(pages: Int32) -> Iterator[tuple[int, int]]:
    """Yield (first page, count) for each run of consecutive numbers in sorted `pages`."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    for run in np.split(pages, breaks):
        yield int(run[0]), len(run)
