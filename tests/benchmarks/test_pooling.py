# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmarks of pooling and of shared prefixes, with a tiny shape on this CPU."""

from __future__ import annotations

from typing import Any

import pytest
from pooling import embed, shared_prefixes


def test_embeddings_are_compared_with_prefill(measured: Any) -> None:
    table, figures = measured(embed, "--work", "3x8", "--prefill=2x32")
    assert [row["work"] for row in table.rows] == ["prefill 2x32", "embed 3x8"]
    assert all(len(row["rounds"]) == 2 and row["unit"] == "tok/s" for row in table.rows)
    rates = {name: figure["tokens_per_second"] for name, figure in figures["embed"].items()}
    assert figures["embed"]["3x8"]["ratio"] == pytest.approx(rates["3x8"] / rates["prefill"])


def test_encoders_are_compared_with_the_limit_alone(measured: Any) -> None:
    table, figures = measured(embed, "--shape=tiny-bert", "--work", "3x8", "2x5")
    assert [row["work"] for row in table.rows] == ["embed 3x8", "embed 2x5"]
    assert figures["embed"]["3x8"]["ratio"] is None


def test_common_beginnings_are_computed_once(measured: Any) -> None:
    table, figures = measured(
        shared_prefixes,
        "--query=64",
        "--documents=3",
        "--document=8",
        "--state=64",
        "--forks=3",
        "--context=96",
    )
    works = [row["work"] for row in table.rows]
    assert works == ["rerank 64 + 3x8", "fork 64 to 3", "select 8 of 96", "select, engine 8 of 96"]
    results = figures["shared_prefixes"]
    assert 64 + 3 * 8 <= results["rerank"]["computed_tokens"] < 2 * 64
    assert 1 <= results["fork"]["ratio"] < 2
    assert results["select"]["ms"] >= results["select, engine"]["ms"]
