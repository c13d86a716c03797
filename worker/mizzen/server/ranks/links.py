"""What ties the ranks of a pod together: descriptors that they inherit, and where they meet all others."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from mizzen.engine.config import EngineOptions
from mizzen.server.config import EngineConfig
from mizzen.server.ranks.heartbeat import create_heartbeats
from mizzen.server.ranks.plan_memory import plan_memory_bytes
from mizzen.server.status_block import create_status_blocks
from mizzen.wire.ranks.plan_ring import RingDescriptors, create_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """The same for all ranks of a pod."""

    local_ranks: int
    """Ranks of this pod."""
    rendezvous: str
    """file:///path of `meeting`, the same in all ranks; between pods tcp://host:port/group."""
    rendezvous_file: int
    """A file in memory that all ranks write to at start-up. It has no name, so nothing is left of it."""
    ring: RingDescriptors
    """Plans."""
    heartbeats: int
    """How far each rank is."""
    status: int
    """The ranks' status blocks."""
    first_rank: int = 0
    """This pod's first rank."""
    plan_endpoint: str = ""
    """Where rank 0 hands plans to ranks of other pods; empty where there are none."""
    address: str = ""
    """This pod's own address, likewise."""
    public_key: str = ""
    """Public key of the pair that plans go under, likewise."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a rank inherits."""
        return (*self.ring.all, self.heartbeats, self.status, self.rendezvous_file)

    def to_json(self) -> str:
        """Return it as an argument of a rank's command line."""
        return json.dumps(
            {
                "local_ranks": self.local_ranks,
                "rendezvous": self.rendezvous,
                "rendezvous_file": self.rendezvous_file,
                "ring": [self.ring.memory, *self.ring.wake],
                "heartbeats": self.heartbeats,
                "status": self.status,
                "first_rank": self.first_rank,
                "plan_endpoint": self.plan_endpoint,
                "address": self.address,
                "public_key": self.public_key,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RankLinks:
        """Return what `to_json` told."""
        values = json.loads(text)
        memory, *wake = values.pop("ring")
        return cls(ring=RingDescriptors(memory, tuple(wake)), **values)

    def close(self) -> None:
        """Close the descriptors in this process, which is no rank."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def close_in_rank(self) -> None:
        """Close them in a rank: all but where it met, which torch may write to until the process ends."""
        for descriptor in self.descriptors:
            if descriptor != self.rendezvous_file:
                os.close(descriptor)


def create_rank_links(options: EngineOptions) -> RankLinks:
    """Make the links of a new pod; the caller closes them.

    Raises:
        ValueError: the options ask for steps too large to share.
    """
    local_ranks, room = options.local_ranks, plan_memory_bytes(options)
    rendezvous_file = os.memfd_create("mizzen-ranks")
    return RankLinks(
        local_ranks=local_ranks,
        rendezvous=f"file:///proc/self/fd/{rendezvous_file}",  # a rank inherits it under the same number
        rendezvous_file=rendezvous_file,
        ring=create_ring(local_ranks - 1, room),
        heartbeats=create_heartbeats(local_ranks),
        status=create_status_blocks(local_ranks),
    )


def connect_pods(links: RankLinks, config: EngineConfig, group: str, public_key: str) -> RankLinks:
    """Return the links of a pod whose ranks meet those of others, in a group of this name under this key."""
    host, port = config.leader_address if config.node_rank else config.ranks_address, config.ranks_port
    host = f"[{host}]" if ":" in host else host
    return replace(
        links,
        first_rank=config.node_rank * config.local_ranks,
        rendezvous=f"tcp://{host}:{port + 2}/{group}",
        plan_endpoint=f"tcp://{host}:{port + 1}",
        address=config.ranks_address,
        public_key=public_key,
    )
