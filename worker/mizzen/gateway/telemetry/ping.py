"""Answers pings: datagrams to the admin port's number, which the loop that serves requests sends back.

The kernel takes connections also for a process that has stopped; such an answer needs the process itself, and
costs almost nothing. Whoever asks gets its own few bytes back and no more, so nobody gains by asking; nor by
asking in the name of another gateway, which would answer the answer, and so on for ever.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

log = logging.getLogger(__name__)

MOST_BYTES = 64


class PingProtocol(asyncio.DatagramProtocol):
    """Sends small datagrams back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.DatagramTransport, transport)
        self._port: int = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Send a small datagram back, unless it comes from where gateways answer: then it is an answer."""
        if len(data) <= MOST_BYTES and addr[1] != self._port:
            self._transport.sendto(data, addr)


async def answer_pings(host: str, port: int) -> asyncio.DatagramTransport | None:
    """Answer pings until the transport is closed; None where the port is not to be had.

    Whoever asks goes by the answers only once there was one, so a gateway without them is none the worse.
    """
    try:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            PingProtocol, local_addr=(host, port)
        )
    except OSError as error:
        fields = {"host": host, "port": port, "reason": error.strerror}
        log.warning("pings are not answered", extra={"fields": fields})
        return None
    return transport
