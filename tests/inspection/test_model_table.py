# SPDX-License-Identifier: Apache-2.0
"""The table of docs/models.md names sizes, architectures and numbers of GPUs that were really tried."""

from __future__ import annotations

import re

import model_table
import pytest

from family_twins import OTHERS, SHARDED_OTHERS


def rows() -> dict[str, list[str]]:
    """Return the cells of the table, by the name of the family."""
    text = (
        model_table.models_page().partition(model_table.MODELS_BEGIN)[2].partition(model_table.MODELS_END)[0]
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()]
    return {cells[0]: cells for cells in lines[2:]}


@pytest.mark.parametrize(
    ("family", "measured"),
    [
        (
            "Qwen3",
            [
                *("qwen3-0.6b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-8b-fp8", "qwen3-8b-int4"),
                "qwen3-30b-a3b-fp8-blocks",
            ],
        ),
        ("Gemma", ["gemma-3-12b"]),
        ("Phi", ["phi-4"]),
        ("Mistral", ["mistral-small-24b"]),
        ("OLMo", ["olmo-3-7b"]),
        ("Llama", ["llama-3.1-8b"]),
        ("Apertus", ["–"]),
    ],
)
def test_sizes_measured_on_a_gpu_have_figures(family: str, measured: list[str]) -> None:
    assert rows()[family][5].split(", ") == measured


def test_only_rows_of_tables_count_as_figures() -> None:
    page = "Run `decode.py --shape phi-4`.\n| the shape of `gemma-3-12b` | 1 ms |\n"
    assert model_table.measured_shapes(page) == []
    page += "| `olmo-3-7b` | 1 ms |\n| `decode.py --shape qwen3-8b --tensor 2`, batch 1 | 2 ms |\n"
    assert model_table.measured_shapes(page) == ["qwen3-8b", "olmo-3-7b"]


def test_inspected_sizes_are_known_models_that_are_served() -> None:
    cells = rows()
    assert {"Qwen3-0.6B", "Qwen3-32B"} <= set(cells["Qwen3"][6].split(", "))
    assert "Qwen3-8B-FP8" in cells["Qwen3"][6] and "Qwen2.5-7B-Instruct-AWQ" in cells["Qwen2"][6]
    assert not re.search(r"bnb", " ".join(row[6] for row in cells.values()))
    assert "Qwen3-30B-A3B" in cells["Qwen3"][6].split(", ")


def test_tensor_sizes_follow_from_the_heads() -> None:
    cells = rows()
    assert cells["Phi"][7] == "1, 2"
    assert cells["Gemma"][7] == "1, 2, 4, 8; gemma-3-270m-it: 1, 2, 4"
    assert cells["mixtures of experts"][7] == "1"


def test_groups_of_transformers_equal_the_tested_twins() -> None:
    groups = {group.name: group.prefixes for group in model_table.TRANSFORMERS_GROUPS}
    dense, unsharded, mixtures = groups.values()
    assert sorted(dense + unsharded + mixtures) == sorted(OTHERS)
    assert set(dense) == set(SHARDED_OTHERS)
    assert set(mixtures) == {prefix for prefix, fields in OTHERS.items() if "experts" in str(fields)}
