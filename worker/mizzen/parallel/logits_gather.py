"""Memory of rank 0 to which all ranks write what it alone needs: the logits that it draws from.

A rank's product goes straight to its columns there, over NVLink, while it is computed; a small kernel behind
it lets rank 0 wait for the others. Nothing is gathered, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.parallel.p2p_memory import ALIGNMENT, PeerMemory, make_on_all_ranks, true_on_all_ranks

TRIAL_ROWS = (16, 1, 3)
TRIAL_SHARE = 64
"""Columns of each rank, where rooms are tried."""


@dataclass(frozen=True, slots=True)
class Room:
    """One room, both [rows, columns]; on rank 0 they are the same."""

    own: torch.Tensor
    """This rank's memory."""
    of_rank_0: torch.Tensor


def is_aligned_shard(columns: int, element: int, held: slice, rank: int, ranks: int) -> bool:
    """Tell whether `held` is a rank's equal share of columns of so many bytes, and every share aligned.

    The same on all ranks: where a vocabulary is padded, the share that rank 0 holds is no equal one, and all
    others begin elsewhere.
    """
    share = columns // ranks
    equal = share * ranks == columns and held == slice(rank * share, (rank + 1) * share)
    return equal and share * element % ALIGNMENT == 0


class Rooms:
    """The rooms of a group, and how rank 0 learns that they are filled."""

    def __init__(self, memory: PeerMemory) -> None:
        """Make the kernel; all ranks do so together.

        Raises:
            RuntimeError: it cannot be compiled, or there is no memory for it.
        """
        from mizzen.kernels.comm.peer_broadcast import Meeting

        self.memory = memory
        self.rank, self.size = memory.group.rank(), memory.group.size()
        region, addresses = memory.region(Meeting.region_bytes(self.size))
        self.meet = Meeting(addresses, self.rank, memory.device)
        self.meet.region = region
        self.rooms: dict[int, Room] = {}
        """By the address of this rank's memory."""

    def add(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a room of zeros; None, with a warning, where one rank cannot. All ranks do so together."""
        pair = make_on_all_ranks(
            self.memory,
            "logits are gathered, and not written to peer memory",
            lambda memory: memory.matrix(rows, columns, dtype),
        )
        if pair is None:
            return None
        room = Room(*pair)
        self.rooms[room.own.data_ptr()] = room
        return room.own

    def place(self, out: torch.Tensor, held: slice) -> torch.Tensor | None:
        """Return the columns `held` of rank 0's memory behind `out`; see `Collectives.place`."""
        room = self.rooms.get(out.data_ptr())
        if room is None or out.shape[1:] != room.own.shape[1:] or len(out) > len(room.own):
            return None
        if not is_aligned_shard(out.shape[1], out.element_size(), held, self.rank, self.size):
            return None
        return room.of_rank_0[: len(out), held]


def make_logits_buffers(memory: PeerMemory) -> Rooms | None:
    """Make what holds rooms, and try it; None, with a warning, where one rank cannot or finds it wrong."""
    return make_on_all_ranks(memory, "logits are gathered, and not written to peer memory", Rooms, arrives)


def arrives(rooms: Rooms) -> bool:
    """Tell whether rank 0 finds what all write to a room, products and copies, several times in a row.

    Every rank does all of it whatever it finds, as in `mizzen.parallel.p2p_memory.check_sums`, and learns the same.
    """
    memory, columns = rooms.memory, TRIAL_SHARE * rooms.size
    room = rooms.add(max(TRIAL_ROWS), columns, torch.bfloat16)
    if room is None:
        return False
    held = slice(rooms.rank * TRIAL_SHARE, (rooms.rank + 1) * TRIAL_SHARE)
    good, shift = True, 0
    for rows in TRIAL_ROWS:
        for multiply in (True, False):
            # Whole numbers that bfloat16 holds, other ones at each place than before.
            shift += 7
            numbers = torch.arange(rows * columns, device=memory.device).view(rows, columns)
            expected = ((numbers + shift) % 251).to(torch.bfloat16)
            good = written(rooms, room[:rows], held, expected, multiply) and good
            rooms.meet()
            alike = rooms.rank != 0 or torch.equal(room[:rows], expected)
            good = true_on_all_ranks(alike and good, memory.group, memory.device)
    rooms.rooms.clear()
    return good


def written(rooms: Rooms, out: torch.Tensor, held: slice, expected: torch.Tensor, multiply: bool) -> bool:
    """Write this rank's columns of `expected` to their place behind `out`; tell whether that can be done."""
    place = rooms.place(out, held)
    if place is None:
        return False
    if not multiply:
        place.copy_(expected[:, held])
        return True
    weight = expected[:, held].t().contiguous()
    try:
        torch.mm(torch.eye(len(out), dtype=weight.dtype, device=weight.device), weight.t(), out=place)
    except RuntimeError:  # the others wait for this rank all the same
        return False
    return True
