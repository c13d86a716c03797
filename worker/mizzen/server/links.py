"""What ties the ranks of a group together in one pod: descriptors that they inherit, and where they meet."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mizzen.server.pulse import create_pulses
from mizzen.server.status import create_block
from mizzen.wire.plan_ring import RingHandles, create_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The same for all ranks of a group."""

    size: int
    rendezvous: str
    """file:///path of a file that all ranks write to at start-up."""
    ring: RingHandles
    """Plans."""
    pulses: int
    """How far each rank is."""
    status: int
    """The ranks' status blocks."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a rank inherits."""
        return (*self.ring.all, self.pulses, self.status)

    def to_json(self) -> str:
        """Return it as an argument of a rank's command line."""
        return json.dumps(
            {
                "size": self.size,
                "rendezvous": self.rendezvous,
                "ring": [self.ring.memory, *self.ring.wake],
                "pulses": self.pulses,
                "status": self.status,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Links:
        """Return what `to_json` told."""
        values = json.loads(text)
        memory, *wake = values.pop("ring")
        return cls(ring=RingHandles(memory, tuple(wake)), **values)

    def close(self) -> None:
        """Close the descriptors in this process, and remove the meeting place."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        shutil.rmtree(Path(self.rendezvous.removeprefix("file://")).parent, ignore_errors=True)


def create_links(size: int) -> Links:
    """Make the links of a new group; the caller closes them."""
    folder = tempfile.mkdtemp(prefix="mizzen-ranks-")  # private: mkdtemp makes it 0700
    return Links(
        size=size,
        rendezvous=f"file://{folder}/meet",
        ring=create_ring(size - 1),
        pulses=create_pulses(size),
        status=create_block(size),
    )
