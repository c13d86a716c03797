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


class Placing(SingleRank):
    """A rank whose part of rank 0's buffer is local memory; it gathers nothing."""

    def __init__(self, rank: int, size: int, first: torch.Tensor) -> None:
        self.rank, self.size, self.first = rank, size, first  # type: ignore[assignment]
        self.met = 0

    def map_logits_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        return self.first[: len(out), shard]

    def wait_for_logits(self) -> None:
        self.met += 1

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("there is a place")


def head_of(kind: str, ranks: Placing, whole: torch.Tensor) -> Head | TiedHead:
    """Return a rank's shard of a head with the weights `whole` [vocab, hidden]."""
    build = BuildContext(
        device=CPU,
        dtype=torch.float32,
        mesh=Mesh(Axis(ranks.rank, ranks.size)),
        collectives=ranks,
        fused=True,
    )
    if kind == "tied":
        embedding = TokenEmbedding(build, "embed", len(whole), HIDDEN)
        embedding.weight.copy_(whole[embedding.vocabulary.tokens])
        return TiedHead(build, embedding)
    head = Head(build, "head", len(whole), HIDDEN)
    (target,) = head.targets()
    target.destination.copy_(whole[target.shard])
    return head


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", ["tied", "own"])
def test_gemms_write_to_their_place_in_the_buffer(kind: str, rows: int) -> None:
    whole, x = torch.randn(64, HIDDEN), torch.randn(rows, HIDDEN)
    room, elsewhere = torch.full((8, 64), 7.0), torch.zeros(8, 64)
    ranks = [Placing(rank, 4, room) for rank in range(4)]
    with torch.inference_mode():
        results = [
            head_of(kind, one, whole)(x, (elsewhere if one.rank else room)[:rows]) for one in reversed(ranks)
        ]
    torch.testing.assert_close(room[:rows], x @ whole.t())
    assert (room[rows:] == 7).all() and not elsewhere.any()
    assert results[-1].data_ptr() == room.data_ptr() and results[-1].shape == (rows, 64)
    assert [one.met for one in ranks] == [1] * 4


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_choose_the_same_way_for_a_vocabulary(size: int) -> None:
    for total in (*range(1, 400), 32_000, 128_256, 151_936, 151_937, 151_952):
        parts = [Axis(rank, size).padded_shard(total, 8) for rank in range(size)]
        results = {is_aligned_shard(total, 2, shard, rank, size) for rank, (_, shard) in enumerate(parts)}
        assert results == {all(shard.stop - shard.start == room for room, shard in parts)}, total


def test_shards_begin_at_multiples_of_16_bytes() -> None:
    assert is_aligned_shard(24, 2, slice(8, 16), 1, 3)
    assert not is_aligned_shard(24, 1, slice(8, 16), 1, 3)
    assert not is_aligned_shard(12, 2, slice(6, 12), 1, 2)


def test_a_single_rank_has_a_buffer_but_no_peer_place() -> None:
    room = SINGLE_RANK.allocate_logits_buffer(3, 5, torch.float16, CPU)
    assert room.shape == (3, 5) and room.dtype == torch.float16
    assert SINGLE_RANK.map_logits_shard(room, slice(0, 5)) is None
