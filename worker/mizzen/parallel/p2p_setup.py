"""Makes what hands one rank's tokens and rows to the others over peer memory, and tries it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mizzen.parallel.p2p_memory import PeerMemory, agreed, everywhere

if TYPE_CHECKING:
    from mizzen.kernels.comm.peer_broadcast import Lookup, ShareTokens

TOKEN_ROOM = 4608
"""Slots whose tokens are shared over peer memory at most."""
LOOKUP_ROOM = 256
"""Rows of the embedding that are."""


def make_tokens(memory: PeerMemory) -> ShareTokens | None:
    """Make what shares tokens, and try it; None, with a warning, where one rank cannot or finds it wrong."""
    from mizzen.kernels.comm.peer_broadcast import ShareTokens

    def make(memory: PeerMemory) -> ShareTokens:
        region, addresses = memory.region(ShareTokens.region_bytes(TOKEN_ROOM))
        made = ShareTokens(addresses, memory.group.rank(), TOKEN_ROOM, memory.device)
        made.region = region
        return made

    return agreed(memory, "tokens go by NCCL", make, lambda made: tokens_arrive(made, memory))


def tokens_arrive(share: ShareTokens, memory: PeerMemory) -> bool:
    """Tell whether all find the tokens of rank 0, several times in a row."""
    good = True
    for count in (TOKEN_ROOM, 1, 100):
        expected = torch.arange(count, device=memory.device) * 7919 - count
        x = expected.clone() if memory.group.rank() == 0 else torch.zeros_like(expected)
        share(x)
        good = everywhere(torch.equal(x, expected) and good, memory.group, memory.device)
    return good


def make_lookup(memory: PeerMemory, table: torch.Tensor, held: slice, total: int) -> Lookup | None:
    """Make what looks up rows of a split table, and try it; None, with a warning, as in `make_tokens`."""
    from mizzen.kernels.comm.peer_broadcast import Lookup

    def make(memory: PeerMemory) -> Lookup:
        row_bytes = table.shape[1] * table.element_size()
        region, addresses = memory.region(Lookup.region_bytes(LOOKUP_ROOM, row_bytes))
        made = Lookup(addresses, memory.group.rank(), LOOKUP_ROOM, row_bytes, memory.device)
        made.region = region
        return made

    what = "rows of the embedding are summed"
    return agreed(memory, what, make, lambda made: rows_arrive(made, memory, table, held, total))


def rows_arrive(lookup: Lookup, memory: PeerMemory, table: torch.Tensor, held: slice, total: int) -> bool:
    """Tell whether all find the rows of the whole table, several times in a row."""
    good = True
    for count in (LOOKUP_ROOM, 1, 17):
        ids = torch.arange(count, device=memory.device) * 7919 % total
        places = ids - held.start
        elsewhere = (places < 0) | (places >= held.stop - held.start)
        expected = table[places.masked_fill(elsewhere, 0)].masked_fill(elsewhere[:, None], 0)
        dist.all_reduce(expected, group=memory.group)
        found = lookup(ids, table, held, total)
        good = everywhere(torch.equal(found, expected) and good, memory.group, memory.device)
    return good
