# SPDX-License-Identifier: Apache-2.0
"""Selection of the all-reduce method by size: the measured sizes, and the option `--all-reduce`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mizzen.parallel.cuda_collectives import KIB, METHODS, SIZES_BY_RANKS, AllReduceSizes, resolve_sizes

PAGE = Path(__file__).parents[3] / "docs" / "tensor.md"
COLUMNS = ("fused_push", "fused_read", "fused_two_shot", "one_shot", "two_shot")


def test_docs_list_the_measured_sizes() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line[:3] in ("| 2", "| 4", "| 8")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    documented = {
        int(ranks): AllReduceSizes(
            **{name: int(size) * KIB for name, size in zip(COLUMNS, sizes, strict=True)}
        )
        for ranks, *sizes in rows
    }
    assert documented == SIZES_BY_RANKS


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_all_reduce_method_has_sizes(ranks: int) -> None:
    for method in METHODS:
        sizes = resolve_sizes(method, ranks)
        assert (sizes == AllReduceSizes()) == (method == "nccl")
        # All-reduces that are not fused with a norm need a method, too.
        assert method == "nccl" or max(sizes.one_shot, sizes.two_shot) > 0
    assert resolve_sizes("auto", ranks) == SIZES_BY_RANKS.get(ranks, resolve_sizes("auto", 3))


def test_an_unknown_all_reduce_method_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--all-reduce must be one of auto, nccl, one-shot.*not 'ring'"):
        resolve_sizes("ring", 2)
