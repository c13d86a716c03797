"""What ties the ranks of a pod together: descriptors that they inherit, and where they meet all others."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from mizzen.server.config import EngineConfig
from mizzen.server.pulse import create_pulses
from mizzen.server.status import create_block
from mizzen.wire.plan_ring import RingHandles, create_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The same for all ranks of a pod."""

    size: int
    """Ranks of this pod."""
    rendezvous: str
    """file:///path of a file that all ranks write to at start-up; between pods tcp://host:port/group."""
    ring: RingHandles
    """Plans."""
    pulses: int
    """How far each rank is."""
    status: int
    """The ranks' status blocks."""
    first: int = 0
    """This pod's first rank."""
    plans: str = ""
    """Where rank 0 hands plans to ranks of other pods; empty where there are none."""
    address: str = ""
    """This pod's own address, likewise."""
    key: str = ""
    """Public key of the pair that plans go under, likewise."""

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
                "first": self.first,
                "plans": self.plans,
                "address": self.address,
                "key": self.key,
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
        if self.rendezvous.startswith("file://"):
            shutil.rmtree(Path(self.rendezvous.removeprefix("file://")).parent, ignore_errors=True)


def create_links(size: int) -> Links:
    """Make the links of a new pod with so many ranks; the caller closes them."""
    folder = tempfile.mkdtemp(prefix="mizzen-ranks-")  # private: mkdtemp makes it 0700
    return Links(
        size=size,
        rendezvous=f"file://{folder}/meet",
        ring=create_ring(size - 1),
        pulses=create_pulses(size),
        status=create_block(size),
    )


def between_pods(links: Links, config: EngineConfig, group: str, key: str) -> Links:
    """Return the links of a pod whose ranks meet those of others, in a group of this name under this key."""
    host, port = config.leader_address if config.node_rank else config.ranks_address, config.ranks_port
    host = f"[{host}]" if ":" in host else host
    shutil.rmtree(Path(links.rendezvous.removeprefix("file://")).parent, ignore_errors=True)
    return replace(
        links,
        first=config.node_rank * config.local_ranks,
        rendezvous=f"tcp://{host}:{port + 2}/{group}",
        plans=f"tcp://{host}:{port + 1}",
        address=config.ranks_address,
        key=key,
    )
