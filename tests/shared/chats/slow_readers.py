# SPDX-License-Identifier: Apache-2.0
"""Streams over connections with small buffers, for tests of clients that do not read their answers."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

BUFFER_BYTES = 1 << 14
"""Size of the send and receive buffers."""


def request_unread(gateway: Any, path: str, body: dict[str, Any], key: str = "none") -> socket.socket:
    """Post a request over a connection with small buffers, and do not read the response."""
    gateway._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    content = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    host, port = gateway.url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    client.setblocking(False)
    return client


async def read_stream(client: socket.socket) -> list[dict[str, Any]]:
    """Read an event stream from a socket to its end; return the JSON of its events."""
    received = bytearray()
    async with asyncio.timeout(60):
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            received += piece
    at, text = received.index(b"\r\n\r\n") + 4, bytearray()
    while size := int(received[at : (line := received.index(b"\r\n", at))], 16):
        text += received[line + 2 : line + 2 + size]
        at = line + 4 + size
    events = [line.removeprefix(b"data: ") for line in bytes(text).split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    return [json.loads(event) for event in events[:-1]]
