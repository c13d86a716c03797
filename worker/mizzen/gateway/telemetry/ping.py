"""Answers pings: datagrams to the admin port's number, echoed by the event loop that serves requests.

The kernel accepts connections even for a stopped process; an echo proves that the process runs, and costs
almost nothing. The sender gets its own few bytes back, so the echo cannot amplify traffic. Datagrams from
other gateways' ping ports are ignored, because two gateways would otherwise echo each other forever.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

log = logging.getLogger(__name__)

MOST_BYTES = 64


class PingProtocol(asyncio.DatagramProtocol):
    """Echoes small datagrams."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.DatagramTransport, transport)
        self._port: int = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Echo a small datagram, unless it comes from a ping port: then it is an echo itself."""
        if len(data) <= MOST_BYTES and addr[1] != self._port:
            self._transport.sendto(data, addr)


async def answer_pings(host: str, port: int) -> asyncio.DatagramTransport | None:
    """Answer pings until the transport is closed; return None if the port is not available.

    Callers rely on pings only after a first answer, so a gateway without them is not treated as dead.
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
