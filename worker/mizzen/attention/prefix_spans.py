"""Cuts the KV that a batch reads into spans of consecutive cells, each shared by as many rows as possible.

Attention over a set of tokens does not depend on their order, and parts of it merge exactly by their
log-sum-exp. So a prefix that many rows share is read once for all of them (as in Hydragen, arXiv 2402.05099,
and cascade inference), and long consecutive runs are read in place; only what is left over is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mizzen.core.request import Int32, Int64

MIN_SPAN = 64
"""Tokens times rows from which on a span of its own is worth it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Cells start..start+count-1, read by the (sorted) rows first..last-1 as their part number `level`."""

    first: int
    last: int
    start: int
    count: int
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """What each of a batch's rows reads."""

    order: Int64
    """[rows]: the sorted row i is the caller's row order[i]. Rows that share pages are neighbours."""
    spans: tuple[Span, ...]
    levels: int
    """1 more than the spans of any row; level 0 stands for what is left over."""
    rest: tuple[Int64, ...]
    """By sorted row: cells that no span covers."""


def find_shared_spans(table: Int32, slots: Int64, lengths: Int64, page_size: int, keep_last: bool) -> Spans:
    """Cut what rows read: positions 0..lengths[i]-1 of slots[i], by the page table [slots, columns].

    A page that is not full is left over, and so are full ones whose run is short. With `keep_last` each row's
    last token is always left over.
    """
    full = (lengths - keep_last) // page_size
    keys = [table[slot, :count].tobytes() for slot, count in zip(slots, full, strict=True)]
    order = np.array(sorted(range(len(slots)), key=keys.__getitem__), np.int64)
    pages = [table[slots[row], : full[row]] for row in order]
    rest: list[list[Int32]] = [[] for _ in order]
    depth = [0] * len(order)
    spans: list[Span] = []
    for first, last, begin, end in shared_pages(pages):
        for start, count in runs(np.sort(pages[first][begin:end])):
            if count * page_size * (last - first) < MIN_SPAN:
                for row in range(first, last):
                    rest[row].append(np.arange(start, start + count, dtype=np.int32))
                continue
            level = 1 + depth[first]
            spans.append(Span(first, last, start * page_size, count * page_size, level))
            for row in range(first, last):
                depth[row] = level
    cells = tuple(
        rest_cells(rest[i], table[slots[row]], int(full[row]), int(lengths[row]), page_size)
        for i, row in enumerate(order)
    )
    return Spans(order=order, spans=tuple(spans), levels=1 + max(depth), rest=cells)


def rest_cells(pages: list[Int32], columns: Int32, full: int, length: int, page_size: int) -> Int64:
    """Return the cells of whole pages, and of the page behind the `full` first as far as it is filled."""
    offsets = np.arange(page_size)
    whole = np.concatenate(pages)[:, None] * page_size + offsets if pages else np.empty(0, np.int64)
    filled = length - full * page_size
    last = columns[full] * page_size + offsets[:filled] if filled else np.empty(0, np.int64)
    return np.concatenate([whole.ravel(), last]).astype(np.int64)


def shared_pages(pages: list[Int32]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, last row, first column, last column) of pages that these rows share.

    The rows must be sorted; together the pieces cover each row's columns exactly once, left to right. They
    are the edges of the rows' prefix tree.
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
    """Return how many leading pages are the same."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


def runs(pages: Int32) -> Iterator[tuple[int, int]]:
    """Yield (first page, count) of consecutive numbers in sorted pages."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    for run in np.split(pages, breaks):
        yield int(run[0]), len(run)
