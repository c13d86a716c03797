# SPDX-License-Identifier: Apache-2.0
"""Makes and checks the kernels that broadcast tokens and look up embedding rows over peer memory.

`mizzen.parallel.cuda_collectives` uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mizzen.parallel.p2p_memory import PeerMemory, make_on_all_ranks, true_on_all_ranks

if TYPE_CHECKING:
    from mizzen.kernels.comm.peer_broadcast import RowLookup, TokenBroadcast

MAX_BROADCAST_TOKENS = 4608
"""Maximum number of slots whose tokens are broadcast over peer memory."""
MAX_LOOKUP_ROWS = 256
"""Maximum number of embedding rows that are looked up over peer memory."""


def make_token_broadcast(memory: PeerMemory) -> TokenBroadcast | None:
    """Make and check the token broadcast.

    Log a warning and return None if any rank cannot make it, or if a check fails.
    """
    from mizzen.kernels.comm.peer_broadcast import TokenBroadcast

    def make(memory: PeerMemory) -> TokenBroadcast:
        region, addresses = memory.allocate_region(TokenBroadcast.region_bytes(MAX_BROADCAST_TOKENS))
        broadcast = TokenBroadcast(addresses, memory.group.rank(), MAX_BROADCAST_TOKENS, memory.device)
        broadcast.region = region
        return broadcast

    return make_on_all_ranks(
        memory, "tokens fall back to NCCL", make, lambda broadcast: check_tokens_arrive(broadcast, memory)
    )


def check_tokens_arrive(broadcast: TokenBroadcast, memory: PeerMemory) -> bool:
    """Return whether all ranks receive rank 0's tokens, in several broadcasts."""
    correct = True
    for count in (MAX_BROADCAST_TOKENS, 1, 100):
        expected = torch.arange(count, device=memory.device) * 7919 - count
        x = expected.clone() if memory.group.rank() == 0 else torch.zeros_like(expected)
        broadcast(x)
        correct = true_on_all_ranks(torch.equal(x, expected) and correct, memory.group, memory.device)
    return correct


def make_row_lookup(memory: PeerMemory, table: torch.Tensor, shard: slice, total: int) -> RowLookup | None:
    """Make and check the lookup in a table of `total` rows, which is sharded over the ranks.

    `table` [any, columns] starts with this rank's rows, which are the rows `shard` of the whole table.
    Log a warning and return None if any rank cannot make it, or if a check fails.
    """
    from mizzen.kernels.comm.peer_broadcast import RowLookup

    def make(memory: PeerMemory) -> RowLookup:
        row_bytes = table.shape[1] * table.element_size()
        region, addresses = memory.allocate_region(RowLookup.region_bytes(MAX_LOOKUP_ROWS, row_bytes))
        lookup = RowLookup(addresses, memory.group.rank(), MAX_LOOKUP_ROWS, row_bytes, memory.device)
        lookup.region = region
        return lookup

    fallback = "embedding lookups fall back to all-reduce"
    return make_on_all_ranks(
        memory, fallback, make, lambda lookup: check_rows_arrive(lookup, memory, table, shard, total)
    )


def check_rows_arrive(
    lookup: RowLookup, memory: PeerMemory, table: torch.Tensor, shard: slice, total: int
) -> bool:
    """Return whether all ranks get the right rows of the whole table, in several lookups."""
    correct = True
    for count in (MAX_LOOKUP_ROWS, 1, 17):
        ids = torch.arange(count, device=memory.device) * 7919 % total
        local_rows = ids - shard.start
        on_other_rank = (local_rows < 0) | (local_rows >= shard.stop - shard.start)
        expected = table[local_rows.masked_fill(on_other_rank, 0)].masked_fill(on_other_rank[:, None], 0)
        dist.all_reduce(expected, group=memory.group)
        rows = lookup(ids, table, shard, total)
        correct = true_on_all_ranks(torch.equal(rows, expected) and correct, memory.group, memory.device)
    return correct
