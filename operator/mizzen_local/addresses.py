"""Loopback addresses of one cluster.

On Linux all of 127.0.0.0/8 is loopback and needs no root. Each cluster on the machine takes a /22 of
127.97.0.0/16 for its pods, and for its services a /16 from 127.128.0.0 on: more than a thousand of them fit.
The claim is an abstract Unix socket that the cluster's processes keep open, so that it ends with them,
however they end.
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
    """The addresses of cluster `index` (0..63) of this machine.

    Attributes:
        index: which ranges are taken.
    """

    index: int

    @property
    def services(self) -> ipaddress.IPv4Network:
        """The range of ClusterIPs."""
        return ipaddress.IPv4Network(f"127.{128 + self.index}.0.0/16")

    @property
    def host(self) -> str:
        """The node's address; the control plane listens on it."""
        return f"127.97.{4 * self.index}.1"

    def pod(self, number: int) -> str:
        """Address of pod `number` (0..1019).

        Raises:
            ValueError: the number is beyond the range.
        """
        if not 0 <= number < 1020:
            raise ValueError(f"pod number {number} is beyond the 1020 addresses of a node")
        return str(ipaddress.IPv4Address(f"127.97.{4 * self.index}.0") + 2 + number)


def claim() -> tuple[Addresses, socket.socket]:
    """Take a free range of this machine; it stays taken while a copy of the socket is open.

    Raises:
        OSError: all ranges are taken.
    """
    for index in random.sample(range(RANGES), RANGES):
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mark.bind(f"\0mizzen-local/{index}")
        except OSError:
            mark.close()
            continue
        return Addresses(index), mark
    raise OSError(
        f"all {RANGES} address ranges of this machine are taken: stop a cluster (mizzen-local down)"
    )


def free_port(host: str, taken: frozenset[int] = frozenset()) -> int:
    """A TCP port of `host` that nothing listens on, outside the kernel's ephemeral ports.

    Raises:
        OSError: none was found.
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
