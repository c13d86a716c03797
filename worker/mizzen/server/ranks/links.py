"""What ties the ranks of a pod together: descriptors that they inherit, and where they meet all others."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from mizzen.engine.config import EngineOptions
from mizzen.server.config import EngineConfig
from mizzen.server.ranks.heartbeat import create_pulses
from mizzen.server.ranks.plan_memory import plan_room
from mizzen.server.status_block import create_block
from mizzen.wire.ranks.plan_ring import RingDescriptors, create_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The same for all ranks of a pod."""

    size: int
    """Ranks of this pod."""
    rendezvous: str
    """file:///path of `meeting`, the same in all ranks; between pods tcp://host:port/group."""
    meeting: int
    """A file in memory that all ranks write to at start-up. It has no name, so nothing is left of it."""
    ring: RingDescriptors
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
        return (*self.ring.all, self.pulses, self.status, self.meeting)

    def to_json(self) -> str:
        """Return it as an argument of a rank's command line."""
        return json.dumps(
            {
                "size": self.size,
                "rendezvous": self.rendezvous,
                "meeting": self.meeting,
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
        return cls(ring=RingDescriptors(memory, tuple(wake)), **values)

    def close(self) -> None:
        """Close the descriptors in this process, which is no rank."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def close_met(self) -> None:
        """Close them in a rank: all but where it met, which torch may write to until the process ends."""
        for descriptor in self.descriptors:
            if descriptor != self.meeting:
                os.close(descriptor)


def create_links(options: EngineOptions) -> Links:
    """Make the links of a new pod; the caller closes them.

    Raises:
        ValueError: the options ask for steps too large to share.
    """
    size, room = options.local_ranks, plan_room(options)
    meeting = os.memfd_create("mizzen-ranks")
    return Links(
        size=size,
        rendezvous=f"file:///proc/self/fd/{meeting}",  # a rank inherits it under the same number
        meeting=meeting,
        ring=create_ring(size - 1, room),
        pulses=create_pulses(size),
        status=create_block(size),
    )


def between_pods(links: Links, config: EngineConfig, group: str, key: str) -> Links:
    """Return the links of a pod whose ranks meet those of others, in a group of this name under this key."""
    host, port = config.leader_address if config.node_rank else config.ranks_address, config.ranks_port
    host = f"[{host}]" if ":" in host else host
    return replace(
        links,
        first=config.node_rank * config.local_ranks,
        rendezvous=f"tcp://{host}:{port + 2}/{group}",
        plans=f"tcp://{host}:{port + 1}",
        address=config.ranks_address,
        key=key,
    )
