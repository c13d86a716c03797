"""TCP ports for processes that a test starts."""

from __future__ import annotations

import itertools
import os
import socket

FIRST_PORT, PORTS, PORTS_EACH = 20_000, 12_000, 600
"""Below those that the kernel gives away: one of these may be a stranger's before a process listens at it."""

_next = itertools.count()


def free_ports(address: str = "127.0.0.1", count: int = 1) -> int:
    """Return the first of some consecutive ports that nothing listens at.

    Each process of the tests has ports of its own, and gives all others away before one comes again: what it
    has given away is free until whoever was to listen there does.

    Raises:
        OSError: there are none.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + worker % (PORTS // PORTS_EACH) * PORTS_EACH
    for _ in range(PORTS_EACH):
        port = first + next(_next) % PORTS_EACH
        if port + count > first + PORTS_EACH or not all(_free(address, port + i) for i in range(count)):
            continue
        for _ in range(count - 1):
            next(_next)
        return port
    raise OSError(f"no {count} free ports")


def _free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
