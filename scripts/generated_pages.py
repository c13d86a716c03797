# SPDX-License-Identifier: Apache-2.0
"""Writes generated pages of the documentation, and the generated parts of handwritten pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def replace_part(text: str, begin: str, lines: Iterable[str], end: str = "") -> str:
    """Return the text of a page with other lines between two marks.

    Args:
        text: text of the page.
        begin: mark before the generated part.
        lines: lines of the new part.
        end: first mark after the generated part; if it is empty, the part is the rest of the page.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, begin_found, rest = text.partition(begin)
    if not begin_found:
        raise ValueError(f"the page lacks the mark {begin}")
    if not end:
        return "\n".join([before + begin, "", *lines])
    _, end_found, after = rest.partition(end)
    if not end_found:
        raise ValueError(f"the page lacks the mark {end} after {begin}")
    return "\n".join([before + begin, "", *lines, "", end + after])


def read_page(name: str) -> str:
    """Return the text of a page, whose path is relative to the root folder."""
    return (ROOT / name).read_text(encoding="utf-8")


def write_pages(pages: Mapping[str, Callable[[], str]]) -> None:
    """Write pages, given by their paths and by functions that return their new texts."""
    for name, page in pages.items():
        (ROOT / name).write_text(page(), encoding="utf-8")
