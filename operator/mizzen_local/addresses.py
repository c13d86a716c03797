# SPDX-License-Identifier: Apache-2.0
"""Loopback addresses for the node, pods and services of a cluster.

On Linux all of 127.0.0.0/8 is loopback, and a process can listen there without root. Each cluster on the
machine claims an index, which selects a /22 of 127.97.0.0/16 for the node and 1020 pods, and a /16 for
ClusterIPs, from 127.128.0.0/16 upwards. The claim is an abstract Unix socket that the cluster's processes
keep open. The kernel releases the claim when the last of these processes ends, even if it crashes.
"""

from __future__ import annotations

import ipaddress
import random
import socket
from dataclasses import dataclass

RANGES = 64
FIRST_PORT, LAST_PORT = 10_240, 32_000  # below the kernel's ephemeral ports


@dataclass(frozen=True, slots=True)
class Addresses:
    """The address ranges of one cluster on this machine.

    Attributes:
        index: number of the cluster on this machine, 0 to 63; it selects the ranges.
    """

    index: int

    @property
    def service_range(self) -> ipaddress.IPv4Network:
        """IP range of the cluster's ClusterIPs."""
        return ipaddress.IPv4Network(f"127.{128 + self.index}.0.0/16")

    @property
    def host(self) -> str:
        """IP address of the node, on which the control plane listens too."""
        return f"127.97.{4 * self.index}.1"

    def pod_address(self, number: int) -> str:
        """Return the IP address of a pod.

        Args:
            number: number of the pod on the node, 0 to 1019.

        Raises:
            ValueError: the number is outside that range.
        """
        if not 0 <= number < 1020:
            raise ValueError(f"pod number {number} is beyond the 1020 addresses of a node")
        return str(ipaddress.IPv4Address(f"127.97.{4 * self.index}.0") + 2 + number)


def claim_addresses() -> tuple[Addresses, socket.socket]:
    """Claim a free index for a cluster.

    Returns:
        The addresses, and the socket that holds the claim; the claim lasts while any process has the socket
        open.

    Raises:
        OSError: all 64 indexes are claimed.
    """
    for index in random.sample(range(RANGES), RANGES):
        claim_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim_socket.bind(f"\0mizzen-local/{index}")
        except OSError:
            claim_socket.close()
            continue
        return Addresses(index), claim_socket
    raise OSError(
        f"all {RANGES} address ranges of this machine are taken: stop a cluster (mizzen-local down)"
    )


def find_free_port(host: str, taken: frozenset[int] = frozenset()) -> int:
    """Return a free TCP port below the kernel's range of ephemeral ports.

    Args:
        host: IP address on which the port must be free.
        taken: ports not to return.

    Raises:
        OSError: 200 random ports were all in use or in `taken`.
    """
    for _ in range(200):
        port = random.randint(FIRST_PORT, LAST_PORT)
        if port in taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port on {host} between {FIRST_PORT} and {LAST_PORT}")
