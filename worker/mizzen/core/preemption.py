"""Who makes room for a request of a higher priority."""

from __future__ import annotations

from collections.abc import Iterable

from mizzen.core.decode_batch import DecodeBatch
from mizzen.core.inflight import Flights
from mizzen.core.kv.manager import KvMemory
from mizzen.core.kv.radix_cache import Known
from mizzen.core.kv.radix_node import Node
from mizzen.core.sequence import Phase, Sequence


class _Room:
    """Pages and slots that are there, or will be once the steps in flight are complete."""

    def __init__(self, memory: KvMemory, decode: DecodeBatch, flights: Flights, known: Known) -> None:
        self._memory, self._decode, self._known = memory, decode, known
        self._locks: dict[Node, int] = {}
        """Locks that are left of nodes that those who leave have locked."""
        self.pages, self.slots = memory.available, len(memory.free_slots)
        for release in flights.releases():
            self.slots += release.slot >= 0
            self.pages += len(memory.fenced_pages(release))
        for sequence in flights.leaving():
            self.take(sequence)

    def take(self, sequence: Sequence) -> None:
        """Let a running request leave."""
        node, decodes = sequence.node, sequence.phase is Phase.DECODE
        assert node is not None
        computed = self._decode.computed(sequence) if decodes else sequence.computed
        held = max(self._memory.columns(computed), sequence.pages_held)
        self.slots += 1
        self.pages += held - node.end
        above: Node | None = node
        while above is not None:
            self._locks[above] = left = self._locks.get(above, above.refs) - 1
            if not left:
                self.pages += len(above.pages)
            above = above.parent

    @property
    def shared(self) -> int:
        """Pages of the waiting request that others hold: what nobody holds is among the available ones."""
        ends = ((node, min(node.end, self._known.pages)) for node in self._known.path())
        return sum(end - node.start for node, end in ends if self._locks.get(node, node.refs))


def victims(
    head: Sequence,
    known: Known,
    running: Iterable[Sequence],
    memory: KvMemory,
    decode: DecodeBatch,
    flights: Flights,
    reserve: int,
) -> list[Sequence]:
    """Return the requests to retract so that a waiting one finds a slot and pages: as few as do.

    The lowest priority goes first, in it the youngest. None is returned when the request needs nobody to
    leave, or when all that may would not be enough.

    Args:
        head: the waiting request.
        known: what is cached of it.
        running: all that run.
        memory: pages and slots.
        decode: the requests that decode.
        flights: the steps in flight.
        reserve: pages that admission leaves for each running request.
    """
    everyone = list(running)
    lower = [sequence for sequence in everyone if sequence.rank < head.rank and not sequence.urgent]
    if not lower:
        return []
    lower.sort(key=lambda sequence: (-sequence.rank, sequence.serial))
    room, need = _Room(memory, decode, flights, known), memory.columns(len(head.tokens))
    chosen: list[Sequence] = []

    def enough() -> bool:
        left = reserve * (len(everyone) - len(chosen))
        return room.slots > 0 and room.pages + room.shared >= need + left

    while lower and not enough():
        chosen.append(lower.pop())
        room.take(chosen[-1])
    return chosen if enough() else []
