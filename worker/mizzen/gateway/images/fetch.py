# SPDX-License-Identifier: Apache-2.0
"""Fetch images from https URLs, without reaching hosts that only the gateway can reach (SSRF).

The host must be allowed. It is resolved once, each of its addresses must be public, and the connection goes
to one of these addresses, with the host's certificate. There are no redirects, proxies, credentials or
cookies. Errors do not say why a fetch failed, so that clients cannot explore the network.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11

from mizzen.gateway.images.addresses import AddressPolicy
from mizzen.gateway.images.image_url import AllowedHosts, ParsedImageUrl, is_address, parse_image_url

log = logging.getLogger(__name__)

FETCH_SECONDS = 5.0
"""Time for a whole fetch: waiting for a place, resolving, connecting and reading."""
MAX_FETCHES = 64
"""Maximum number of fetches in progress."""
MAX_TENANT_FETCHES = 8
"""Maximum number of fetches in progress for one API key."""
RESOLVER_THREADS = 8
READ_BYTES = 64 * 1024
HTTPS_PORT = 443
HEADERS = [
    ("Accept", "image/*"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
    ("User-Agent", "mizzen"),
]

Resolve = Callable[[str], Awaitable[list[str]]]
"""Function that returns the IP addresses of a host."""


class FetchFailed(Exception):
    """An image could not be fetched; the message is for the operator's log only."""


class SystemResolver:
    """The system's resolver, in own threads, so that slow answers delay nothing else."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(RESOLVER_THREADS, "mizzen-resolve")

    async def resolve(self, host: str) -> list[str]:
        """Return the addresses of a host.

        Raises:
            OSError: the host cannot be resolved.
        """
        found = await asyncio.get_running_loop().run_in_executor(
            self._pool,
            lambda: socket.getaddrinfo(host, HTTPS_PORT, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP),
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(slots=True)
class TenantPlaces:
    """Places for the fetches of one API key."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_TENANT_FETCHES))
    users: int = 0
    """Number of fetches that have a place or wait for one."""


class ImageFetcher:
    """Fetches images from allowed hosts."""

    def __init__(
        self,
        hosts: AllowedHosts,
        addresses: AddressPolicy,
        *,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create a fetcher.

        Args:
            hosts: hosts from which images may be fetched.
            addresses: decides about the addresses of hosts.
            resolve: resolves hosts; the system's resolver by default.
            tls: settings of TLS; by default the certificate authorities of the system are trusted.
        """
        self._hosts = hosts
        self._addresses = addresses
        self._resolve = resolve or SystemResolver().resolve
        self._tls = tls or ssl.create_default_context()
        self._places = asyncio.Semaphore(MAX_FETCHES)
        self._tenants: dict[str, TenantPlaces] = {}

    async def fetch(self, text: str, limit: int, tenant: str, received: Callable[[int], None]) -> bytes:
        """Return the file at a URL.

        Args:
            text: the URL.
            limit: maximum size of the file in bytes.
            tenant: name of the API key; empty for requests without a key.
            received: called with the number of bytes of each part that arrives, before it is kept.

        Raises:
            FetchFailed: the URL is not allowed, or the file could not be fetched in time.
            Exception: raised by `received`.
        """
        try:
            async with asyncio.timeout(FETCH_SECONDS), self._place(tenant):
                url = parse_image_url(text)
                address = await self._find_address(url.host)
                return await self._download(url, address, limit, received)
        except TimeoutError:
            raise FetchFailed(f"it took longer than {FETCH_SECONDS:g} s") from None
        except (ValueError, OSError, h11.ProtocolError) as error:
            raise FetchFailed(f"{type(error).__name__}: {error}") from None

    @asynccontextmanager
    async def _place(self, tenant: str) -> AsyncIterator[None]:
        """Wait for one of the tenant's places for fetches, and then for one of the process."""
        tenant_places = self._tenants.setdefault(tenant, TenantPlaces())
        tenant_places.users += 1
        try:
            async with tenant_places.free, self._places:
                yield
        finally:
            tenant_places.users -= 1
            if not tenant_places.users:
                del self._tenants[tenant]

    async def _find_address(self, host: str) -> str:
        """Return the first address of an allowed host after checking all its addresses.

        Raises:
            FetchFailed: the host or one of its addresses is not allowed.
        """
        if host not in self._hosts:
            raise FetchFailed(f"{host} is not one of --image-hosts")
        addresses = [host] if is_address(host) else await self._resolve(host)
        refused = [address for address in addresses if not self._addresses.allows(address)]
        if refused or not addresses:
            raise FetchFailed(f"{host} has addresses that are not public: {', '.join(refused)}")
        return addresses[0]

    async def _download(
        self, url: ParsedImageUrl, address: str, limit: int, received: Callable[[int], None]
    ) -> bytes:
        reader, writer = await asyncio.open_connection(
            address, HTTPS_PORT, ssl=self._tls, server_hostname=url.host, limit=READ_BYTES
        )
        try:
            connection = h11.Connection(h11.CLIENT)
            request = h11.Request(method="GET", target=url.target, headers=[("Host", url.host), *HEADERS])
            writer.write(connection.send(request) or b"")
            writer.write(connection.send(h11.EndOfMessage()) or b"")
            return await _read_response(connection, reader, limit, received)
        finally:
            writer.transport.abort()


async def _read_response(
    connection: h11.Connection, reader: asyncio.StreamReader, limit: int, received: Callable[[int], None]
) -> bytes:
    """Return the body of the response that arrives.

    Raises:
        FetchFailed: the status is not 200, the body is encoded, or longer than `limit` bytes.
        h11.ProtocolError: the response is not valid HTTP.
    """
    content = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Response):
            _check_response(event, limit)
        elif isinstance(event, h11.Data):
            if len(content) + len(event.data) > limit:
                raise FetchFailed(f"the file has more than {limit} bytes")
            received(len(event.data))
            content += event.data
        elif isinstance(event, h11.EndOfMessage):
            return bytes(content)
        elif not isinstance(event, h11.InformationalResponse):
            raise FetchFailed("the server closed the connection")


def _check_response(response: h11.Response, limit: int) -> None:
    headers = dict(response.headers)
    if response.status_code != 200:
        raise FetchFailed(f"the server answered {response.status_code}")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise FetchFailed("the file is encoded")
    if int(headers.get(b"content-length", b"0")) > limit:
        raise FetchFailed(f"the file has more than {limit} bytes")
