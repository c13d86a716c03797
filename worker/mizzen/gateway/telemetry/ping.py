# SPDX-License-Identifier: Apache-2.0
"""Answers pings: the event loop that serves requests echoes UDP datagrams on the admin API's port number.

The kernel accepts TCP connections even for a stopped process; an echo proves that the process runs, and costs
almost nothing. The sender gets its own few bytes back, so the echo cannot amplify traffic. Datagrams from
another gateway's ping port are ignored, because two gateways would otherwise echo each other forever.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

log = logging.getLogger(__name__)

MOST_BYTES = 64


class PingProtocol(asyncio.DatagramProtocol):
    """Protocol that echoes small datagrams."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport and its port."""
        self._transport = cast(asyncio.DatagramTransport, transport)
        self._port: int = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Echo a small datagram, unless it comes from a ping port and so may be an echo itself."""
        if len(data) <= MOST_BYTES and addr[1] != self._port:
            self._transport.sendto(data, addr)


async def answer_pings(host: str, port: int) -> asyncio.DatagramTransport | None:
    """Start answering pings; return the transport, which the caller must close, or None if the port is taken.

    Senders rely on pings only after a first answer, so a gateway that answers none does not count as dead.
    """
    try:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            PingProtocol, local_addr=(host, port)
        )
    except OSError as error:
        fields = {"host": host, "port": port, "reason": error.strerror}
        log.warning("cannot answer pings", extra={"fields": fields})
        return None
    return transport
