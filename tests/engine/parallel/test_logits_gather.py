# SPDX-License-Identifier: Apache-2.0
"""Ranks write their logits directly to rank 0's buffer if the vocabulary splits evenly."""

from __future__ import annotations

import pytest
import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.embedding import Head, TiedHead, TokenEmbedding
from mizzen.layers.sharding import Axis, Mesh
from mizzen.parallel.collectives import SINGLE_RANK, SingleRank
from mizzen.parallel.logits_gather import is_aligned_shard

HIDDEN = 16
CPU = torch.device("cpu")


class PlacedLogits(SingleRank):
    """A logits gather for one rank; local memory replaces the rank's part of rank 0's buffer."""

    def __init__(self, rank: int, size: int, first: torch.Tensor) -> None:
        self.rank, self.size, self.first = rank, size, first  # type: ignore[assignment]
        self.met = 0

    def map_logits_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        return self.first[: len(out), shard]

    def wait_for_logits(self) -> None:
        self.met += 1

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("there is a place")


def head_of(kind: str, ranks: PlacedLogits, weights: torch.Tensor) -> Head | TiedHead:
    """Return a rank's shard of an LM head whose full weights are `weights` [vocab, hidden]."""
    build = BuildContext(
        device=CPU,
        dtype=torch.float32,
        mesh=Mesh(Axis(ranks.rank, ranks.size)),
        collectives=ranks,
        fused=True,
    )
    if kind == "tied":
        embedding = TokenEmbedding(build, "embed", len(weights), HIDDEN)
        embedding.weight.copy_(weights[embedding.vocabulary.tokens])
        return TiedHead(build, embedding)
    head = Head(build, "head", len(weights), HIDDEN)
    (target,) = head.targets()
    target.destination.copy_(weights[target.shard])
    return head


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", ["tied", "own"])
def test_gemms_write_directly_to_the_ranks_columns_of_the_buffer(kind: str, rows: int) -> None:
    weights, x = torch.randn(64, HIDDEN), torch.randn(rows, HIDDEN)
    buffer, elsewhere = torch.full((8, 64), 7.0), torch.zeros(8, 64)
    ranks = [PlacedLogits(rank, 4, buffer) for rank in range(4)]
    with torch.inference_mode():
        results = [
            head_of(kind, placing, weights)(x, (elsewhere if placing.rank else buffer)[:rows])
            for placing in reversed(ranks)
        ]
    torch.testing.assert_close(buffer[:rows], x @ weights.t())
    assert (buffer[rows:] == 7).all() and not elsewhere.any()
    assert results[-1].data_ptr() == buffer.data_ptr() and results[-1].shape == (rows, 64)
    assert [placing.met for placing in ranks] == [1] * 4


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_agree_whether_to_gather_a_vocabulary(size: int) -> None:
    for total in (*range(1, 400), 32_000, 128_256, 151_936, 151_937, 151_952):
        shards = [Axis(rank, size).padded_shard(total, 8) for rank in range(size)]
        results = {is_aligned_shard(total, 2, shard, rank, size) for rank, (_, shard) in enumerate(shards)}
        assert results == {all(shard.stop - shard.start == buffer for buffer, shard in shards)}, total


def test_shards_begin_at_multiples_of_16_bytes() -> None:
    assert is_aligned_shard(24, 2, slice(8, 16), 1, 3)
    assert not is_aligned_shard(24, 1, slice(8, 16), 1, 3)
    assert not is_aligned_shard(12, 2, slice(6, 12), 1, 2)


def test_a_single_rank_has_a_buffer_but_no_peer_place() -> None:
    buffer = SINGLE_RANK.allocate_logits_buffer(3, 5, torch.float16, CPU)
    assert buffer.shape == (3, 5) and buffer.dtype == torch.float16
    assert SINGLE_RANK.map_logits_shard(buffer, slice(0, 5)) is None
