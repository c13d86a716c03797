# SPDX-License-Identifier: Apache-2.0
"""Computes the summary of a run from the records of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from online_parts.replay import Record

QUANTILES = (50, 90, 99)


def quantiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return the mean, quantiles and maximum of `seconds`, in milliseconds; None if there are no values."""
    values = np.fromiter(seconds, float) * 1e3
    if not len(values):
        return None
    percentiles = {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}
    return {"mean": float(values.mean()), **percentiles, "max": float(values.max())}


def first_token(record: Record) -> float:
    """Return the seconds between a request's due time and the arrival of its first piece of text."""
    return record.tokens_at[0] - record.due


def per_token(record: Record) -> float:
    """Return the mean seconds per token of an answer, not counting the first token."""
    return (record.tokens_at[-1] - record.tokens_at[0]) / (record.output_tokens - 1)


def in_flight(records: list[Record]) -> int:
    """Return the maximum number of requests that were open at the same time."""
    edges = sorted([(r.sent, 1) for r in records] + [(r.end, -1) for r in records])
    return int(np.cumsum([step for _, step in edges]).max()) if edges else 0


def per_piece(records: list[Record]) -> float | None:
    """Return the mean number of tokens per piece of text; None if there is no text."""
    pieces = sum(len(record.tokens_at) for record in records)
    return sum(record.output_tokens for record in records if record.tokens_at) / pieces if pieces else None


def details(records: list[Record]) -> dict[str, str]:
    """Return the first error message for each type of error."""
    messages: dict[str, str] = {}
    for record in records:
        if record.error and record.detail:
            messages.setdefault(record.error, record.detail)
    return messages


def summarize(
    records: list[Record], *, warm: float, most_first: float | None, most_token: float | None
) -> dict[str, Any]:
    """Return the throughput of the whole run, and the latencies of requests due after `warm` seconds.

    Args:
        records: the records of all requests.
        warm: seconds of warm-up at the start of the run; latencies of requests due in it do not count.
        most_first: the maximum seconds to the first token of a good request; None for no limit.
        most_token: the maximum mean seconds per further token of a good request; None for no limit.
    """
    served = [record for record in records if not record.error]
    counted = [record for record in served if record.due >= warm and record.tokens_at]
    several = [record for record in counted if record.output_tokens > 1]
    seconds = max(record.end for record in records) - min(record.due for record in records)
    good = [
        record
        for record in counted
        if (most_first is None or first_token(record) <= most_first)
        and (most_token is None or record.output_tokens < 2 or per_token(record) <= most_token)
    ]
    due = [record for record in records if record.due >= warm]
    last_due = max(record.due for record in records)
    return {
        "requests": len(records),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "error_details": details(records),
        "seconds": seconds,
        "drain_seconds": max(record.end for record in records) - last_due,
        "last_due_seconds": last_due,
        "requests_per_second": len(served) / seconds,
        "output_tokens_per_second": sum(record.output_tokens for record in served) / seconds,
        "prompt_tokens_per_second": sum(record.prompt_tokens for record in served) / seconds,
        "output_tokens": sum(record.output_tokens for record in served),
        "prompt_tokens": sum(record.prompt_tokens for record in served),
        "cached_tokens": sum(record.cached_tokens for record in served),
        "tokens_per_piece": per_piece(served),
        "most_in_flight": in_flight(records),
        "first_token_ms": quantiles(first_token(record) for record in counted),
        "per_token_ms": quantiles(per_token(record) for record in several),
        "between_tokens_ms": quantiles(
            later - earlier for record in counted for earlier, later in pairwise(record.tokens_at)
        ),
        "whole_ms": quantiles(record.end - record.due for record in counted),
        "client_lag_ms": quantiles(record.sent - record.due for record in due),
        "good_share": len(good) / len(due) if due else 0.0,
    }
