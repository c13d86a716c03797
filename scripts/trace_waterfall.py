# SPDX-License-Identifier: Apache-2.0
"""Print a trace as a waterfall: one line for each span, with its times and a bar.

    python scripts/trace_waterfall.py traces.jsonl
    python scripts/trace_waterfall.py traces.jsonl --trace 478c21288cb2360cf2c18d10e3931331

The file contains OTLP as JSON, one message per line, as the `file` exporter of the OpenTelemetry Collector
writes it. Without `--trace`, the trace that began last is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BAR_COLUMNS = 40
"""Width of the longest bar, in characters."""


@dataclass(frozen=True)
class WaterfallSpan:
    """The parts of a span that a waterfall shows."""

    trace: str
    span: str
    parent: str
    """Id of the parent; empty if the span has none."""
    name: str
    began: int
    """Unix time in nanoseconds, like `ended`."""
    ended: int
    detail: str
    """Name of the engine of a span `engine`, the reason of a preemption, or empty."""
    error: str | None
    """Message of the error; None if the span ended without one."""

    @property
    def label(self) -> str:
        """The span's name with its detail and error."""
        failure = "" if self.error is None else f"({self.error or 'error'})"
        return " ".join(filter(None, (self.name, self.detail, failure)))


def parse_span(span: dict[str, Any]) -> WaterfallSpan:
    """Return the parts of a span that a waterfall shows.

    Raises:
        KeyError: the span lacks an id, a name or a time.
    """
    texts = {pair["key"]: pair["value"].get("stringValue", "") for pair in span.get("attributes", [])}
    status = span.get("status", {})
    return WaterfallSpan(
        trace=span["traceId"],
        span=span["spanId"],
        parent=span.get("parentSpanId", ""),
        name=span["name"],
        began=int(span["startTimeUnixNano"]),
        ended=int(span["endTimeUnixNano"]),
        detail=texts.get("engine.name") or texts.get("mizzen.preemption.reason", ""),
        error=status.get("message", "") if status.get("code") == 2 else None,
    )


def read_spans(lines: Iterable[str]) -> list[WaterfallSpan]:
    """Return the spans of OTLP messages, each one line of JSON.

    Raises:
        ValueError: a line is not JSON.
        KeyError: a span lacks an id, a name or a time.
    """
    return [
        parse_span(span)
        for line in lines
        if line.strip()
        for resource in json.loads(line).get("resourceSpans", [])
        for scope in resource.get("scopeSpans", [])
        for span in scope.get("spans", [])
    ]


def in_order(spans: Iterable[WaterfallSpan]) -> Iterator[tuple[int, WaterfallSpan]]:
    """Yield each span with its depth: a parent before its children, and siblings in order of their start.

    Spans whose parent is not among `spans`, such as children of a client's span, have depth 0.
    """
    chosen = list(spans)
    known = {span.span for span in chosen}
    children: dict[str, list[WaterfallSpan]] = defaultdict(list)
    for span in sorted(chosen, key=lambda span: (span.began, span.ended)):
        children[span.parent if span.parent in known else ""].append(span)

    def walk(parent: str, depth: int) -> Iterator[tuple[int, WaterfallSpan]]:
        for span in children[parent]:
            yield depth, span
            yield from walk(span.span, depth + 1)

    return walk("", 0)


def draw_bar(began: float, ended: float) -> str:
    """Return the bar of a span; `began` and `ended` are fractions of the trace's duration."""
    first = min(int(began * BAR_COLUMNS), BAR_COLUMNS - 1)
    last = max(first + 1, round(ended * BAR_COLUMNS))
    return (" " * first + "█" * (last - first)).ljust(BAR_COLUMNS)


def render_waterfall(spans: Iterable[WaterfallSpan]) -> str:
    """Return one line for each span of a trace: label, begin and duration in milliseconds, and a bar."""
    rows = list(in_order(spans))
    if not rows:
        return ""
    zero = min(span.began for _, span in rows)
    length = max(1, max(span.ended for _, span in rows) - zero)
    labels = ["  " * depth + span.label for depth, span in rows]
    width = max(map(len, labels))
    lines = [f"{'span':{width}}  {'begin':>8} {'duration':>9}   (ms)"]
    for label, (_, span) in zip(labels, rows, strict=True):
        began, took = (span.began - zero) / 1e6, (span.ended - span.began) / 1e6
        bar = draw_bar((span.began - zero) / length, (span.ended - zero) / length)
        lines.append(f"{label:{width}}  {began:8.1f} {took:9.1f}  |{bar}|")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Print a trace as a waterfall.")
    parser.add_argument("file", type=Path, help="OTLP as JSON, one message per line")
    parser.add_argument("--trace", help="id of the trace; by default, the trace that began last")
    arguments = parser.parse_args()
    try:
        spans = read_spans(arguments.file.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError, KeyError) as error:
        print(f"{arguments.file}: no OTLP as JSON lines: {error!r}", file=sys.stderr)
        return 1
    trace = arguments.trace or max(spans, key=lambda span: span.began).trace if spans else ""
    text = render_waterfall(span for span in spans if span.trace == trace)
    if not text:
        print(f"{arguments.file} has no spans of this trace", file=sys.stderr)
        return 1
    print(f"trace {trace}\n\n{text}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
