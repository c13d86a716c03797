# SPDX-License-Identifier: Apache-2.0
"""Links between ranks: file descriptors that a pod's ranks inherit, and endpoints for the ranks of other
pods.

The supervisor (or `LocalRanks`) creates the links and passes them to each rank on its command line.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from mizzen.common.addresses import join_address
from mizzen.engine.config import EngineOptions
from mizzen.server.config import EngineConfig
from mizzen.server.ranks.heartbeat import create_heartbeats
from mizzen.server.ranks.plan_memory import plan_memory_bytes
from mizzen.server.status_block import create_status_blocks
from mizzen.wire.ranks.plan_ring import RingDescriptors, create_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """File descriptors and endpoints through which the ranks of one pod reach all other ranks."""

    local_ranks: int
    """Number of ranks in this pod."""
    rendezvous: str
    """URL at which the ranks meet to form their process group: file:///path of `rendezvous_file` in a single
    pod, tcp://host:port/group between pods."""
    rendezvous_file: int
    """Descriptor of the rendezvous file, which is in memory and unnamed, so that no file is left behind."""
    ring: RingDescriptors
    """Descriptors of the ring buffer of step plans."""
    heartbeats: int
    """Descriptor of the shared memory with the ranks' heartbeats."""
    status: int
    """Descriptor of the shared memory with the ranks' status blocks."""
    first_rank: int = 0
    """Lowest rank of this pod."""
    plan_endpoint: str = ""
    """Endpoint at which rank 0 serves plans to the ranks of other pods; empty for a single pod."""
    address: str = ""
    """Host name or IP address of this pod; empty for a single pod."""
    public_key: str = ""
    """Public CURVE key of the plan endpoint; empty for a single pod, or if no keys are configured."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All file descriptors that a rank inherits."""
        return (*self.ring.all, self.heartbeats, self.status, self.rendezvous_file)

    def to_json(self) -> str:
        """Return the links as JSON, for a rank's command line."""
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
        """Return the links from the JSON text of `to_json`."""
        values = json.loads(text)
        memory, *wake = values.pop("ring")
        return cls(ring=RingDescriptors(memory, tuple(wake)), **values)

    def close(self) -> None:
        """Close the descriptors in a process that is not a rank."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def close_in_rank(self) -> None:
        """Close the descriptors in a rank's process, except for that of the rendezvous file.

        Torch may use the rendezvous file until the process exits.
        """
        for descriptor in self.descriptors:
            if descriptor != self.rendezvous_file:
                os.close(descriptor)


def create_rank_links(options: EngineOptions) -> RankLinks:
    """Create the links of a pod; the caller closes them.

    Raises:
        ValueError: the largest step plan would not fit the shared memory.
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
    """Return a pod's links, completed by the endpoints through which its ranks reach the ranks of other pods.

    Args:
        links: Links of this pod.
        config: Configuration of the engine.
        group: Id of the group.
        public_key: Public key of the group's connections; empty if no keys are configured.
    """
    host, port = config.leader_address if config.node_rank else config.ranks_address, config.ranks_port
    return replace(
        links,
        first_rank=config.node_rank * config.local_ranks,
        rendezvous=f"tcp://{join_address(host, port + 2)}/{group}",
        plan_endpoint=f"tcp://{join_address(host, port + 1)}",
        address=config.ranks_address,
        public_key=public_key,
    )
