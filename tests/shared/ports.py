# SPDX-License-Identifier: Apache-2.0
"""Free TCP ports for processes that a test starts."""

from __future__ import annotations

import itertools
import os
import socket

from mizzen.common.addresses import address_family

FIRST_PORT, PORTS, PORTS_EACH = 20_000, 12_000, 600
"""First port and size of the range of ports, and number of ports for each pytest worker.

The range is below the kernel's ephemeral ports, because the kernel may give an ephemeral port to another
process at any time.
"""

_next = itertools.count()


def free_ports(address: str = "127.0.0.1", count: int = 1) -> int:
    """Return the first of `count` consecutive ports at which no process listens.

    Each pytest worker has its own ports, and returns a port again only after all of its other ports. So a
    returned port stays free until the process that the test starts listens at it.

    Raises:
        OSError: the worker's range has no `count` consecutive free ports.
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
    with socket.socket(address_family(address)) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
