"""Makes what hands one rank's tokens and rows to the others over peer memory, and tries it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mizzen.parallel.peers import PeerMemory, everywhere

TOKEN_ROOM = 4608
"""Slots whose tokens are shared over peer memory at most."""
LOOKUP_ROOM = 256
"""Rows of the embedding that are."""


def make_tokens(memory: PeerMemory) -> Any:
    """Make what shares tokens, and try it.

    Raises:
        RuntimeError: it is wrong here.
    """
    from mizzen.kernels.share import ShareTokens

    region, addresses = memory.region(ShareTokens.region_bytes(TOKEN_ROOM))
    made = ShareTokens(addresses, memory.group.rank(), TOKEN_ROOM, memory.device)
    made.region = region
    good = True
    for count in (TOKEN_ROOM, 1, 100):
        expected = torch.arange(count, device=memory.device) * 7919 - count
        x = expected.clone() if memory.group.rank() == 0 else torch.zeros_like(expected)
        made(x)
        good = everywhere(torch.equal(x, expected), memory.group, memory.device) and good
    if not good:
        raise RuntimeError("tokens came wrong")
    return made


def make_lookup(memory: PeerMemory, table: torch.Tensor, held: slice, total: int) -> Any:
    """Make what looks up rows of a split table, and try it.

    Raises:
        RuntimeError: it is wrong here.
    """
    from mizzen.kernels.share import Lookup

    row_bytes = table.shape[1] * table.element_size()
    region, addresses = memory.region(Lookup.region_bytes(LOOKUP_ROOM, row_bytes))
    made = Lookup(addresses, memory.group.rank(), LOOKUP_ROOM, row_bytes, memory.device)
    made.region = region
    good = True
    for count in (LOOKUP_ROOM, 1, 17):
        ids = torch.arange(count, device=memory.device) * 7919 % total
        places = ids - held.start
        elsewhere = (places < 0) | (places >= held.stop - held.start)
        expected = table[places.masked_fill(elsewhere, 0)].masked_fill(elsewhere[:, None], 0)
        dist.all_reduce(expected, group=memory.group)
        found = made(ids, table, held, total)
        good = everywhere(torch.equal(found, expected), memory.group, memory.device) and good
    if not good:
        raise RuntimeError("rows came wrong")
    return made
