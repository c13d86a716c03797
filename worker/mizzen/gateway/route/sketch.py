"""What an engine's prefix cache is thought to hold: names of 64-token blocks, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

CAPACITY = 1 << 17
"""Blocks remembered for one engine; 8 million tokens."""


class PrefixSketch:
    """Block names of `mizzen.core.blocks`, filled by routing and corrected by the engine's cache events.

    The names used least recently go when it is full.
    """

    __slots__ = ("_capacity", "_names")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def match(self, names: Sequence[int]) -> int:
        """Return how many blocks of a prompt, from its start, are held."""
        held = self._names
        for count, name in enumerate(names):
            if name not in held:
                return count
        return len(names)

    def add(self, names: Iterable[int]) -> None:
        """Note blocks that the engine holds, or soon will."""
        held = self._names
        for name in names:
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._capacity:
            held.popitem(last=False)

    def remove(self, names: Iterable[int]) -> None:
        """Note blocks that the engine has dropped."""
        for name in names:
            self._names.pop(name, None)

    def clear(self) -> None:
        """Forget everything."""
        self._names.clear()
