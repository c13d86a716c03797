"""Makes what hands one rank's tokens and rows to the others over peer memory, and tries it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mizzen.parallel.p2p_memory import PeerMemory, make_on_all_ranks, true_on_all_ranks

if TYPE_CHECKING:
    from mizzen.kernels.comm.peer_broadcast import Lookup, TokenBroadcast

MAX_BROADCAST_TOKENS = 4608
"""Slots whose tokens are shared over peer memory at most."""
MAX_LOOKUP_ROWS = 256
"""Rows of the embedding that are."""


def make_token_broadcast(memory: PeerMemory) -> TokenBroadcast | None:
    """Make what shares tokens, and try it; None, with a warning, where one rank cannot or finds it wrong."""
    from mizzen.kernels.comm.peer_broadcast import TokenBroadcast

    def make(memory: PeerMemory) -> TokenBroadcast:
        region, addresses = memory.region(TokenBroadcast.region_bytes(MAX_BROADCAST_TOKENS))
        made = TokenBroadcast(addresses, memory.group.rank(), MAX_BROADCAST_TOKENS, memory.device)
        made.region = region
        return made

    return make_on_all_ranks(memory, "tokens go by NCCL", make, lambda made: check_tokens_arrive(made, memory))


def check_tokens_arrive(share: TokenBroadcast, memory: PeerMemory) -> bool:
    """Tell whether all find the tokens of rank 0, several times in a row."""
    good = True
    for count in (MAX_BROADCAST_TOKENS, 1, 100):
        expected = torch.arange(count, device=memory.device) * 7919 - count
        x = expected.clone() if memory.group.rank() == 0 else torch.zeros_like(expected)
        share(x)
        good = true_on_all_ranks(torch.equal(x, expected) and good, memory.group, memory.device)
    return good


def make_row_lookup(memory: PeerMemory, table: torch.Tensor, held: slice, total: int) -> Lookup | None:
    """Make what looks up rows of a split table, and try it; None, with a warning, as in `make_token_broadcast`."""
    from mizzen.kernels.comm.peer_broadcast import Lookup

    def make(memory: PeerMemory) -> Lookup:
        row_bytes = table.shape[1] * table.element_size()
        region, addresses = memory.region(Lookup.region_bytes(MAX_LOOKUP_ROWS, row_bytes))
        made = Lookup(addresses, memory.group.rank(), MAX_LOOKUP_ROWS, row_bytes, memory.device)
        made.region = region
        return made

    what = "rows of the embedding are summed"
    return make_on_all_ranks(memory, what, make, lambda made: check_rows_arrive(made, memory, table, held, total))


def check_rows_arrive(lookup: Lookup, memory: PeerMemory, table: torch.Tensor, held: slice, total: int) -> bool:
    """Tell whether all find the rows of the whole table, several times in a row."""
    good = True
    for count in (MAX_LOOKUP_ROWS, 1, 17):
        ids = torch.arange(count, device=memory.device) * 7919 % total
        places = ids - held.start
        elsewhere = (places < 0) | (places >= held.stop - held.start)
        expected = table[places.masked_fill(elsewhere, 0)].masked_fill(elsewhere[:, None], 0)
        dist.all_reduce(expected, group=memory.group)
        found = lookup(ids, table, held, total)
        good = true_on_all_ranks(torch.equal(found, expected) and good, memory.group, memory.device)
    return good
