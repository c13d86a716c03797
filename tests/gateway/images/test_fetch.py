# SPDX-License-Identifier: Apache-2.0
"""Images fetched from URLs: hostile URLs, addresses and servers; connections are seen at the socket."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from certificate_files import write_certificate
from image_part_kit import image_part, png
from mizzen.gateway.app import create_app
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.images import fetch as fetching
from mizzen.gateway.images.addresses import AddressPolicy
from mizzen.gateway.images.fetch import FetchFailed, ImageFetcher
from mizzen.gateway.images.image_url import AllowedHosts, parse_image_url
from mizzen.gateway.images.new_fetcher import new_fetcher

HOST, PUBLIC = "img.example.com", "93.184.215.14"
HOSTS = (HOST, "*.cdn.example.net", "rebind.example.com", "93.184.215.15", "127.0.0.1")
FILE = png(56, 56)
LIMIT = 4096

HOSTILE_URLS = [
    # other schemes and forms
    "http://img.example.com/a", "ftp://img.example.com/a", "file:///etc/passwd", "//img.example.com/a",
    "https:img.example.com/a", "https:/img.example.com/a", "https:///img.example.com/a", "https://",
    "https://img.example.com:443:443/a", "HTTPS:\\\\img.example.com/a", "gopher://img.example.com:443/a",
    # user names, and characters that parsers read differently
    "https://u@img.example.com/a", "https://u:p@img.example.com/a", "https://img.example.com@127.0.0.1/a",
    "https://127.0.0.1#@img.example.com/a", "https://127.0.0.1\\@img.example.com/a",
    "https://img.example.com\\@127.0.0.1/a", "https://img.example.com\\.evil.com/a", "https://evil.com\\img.example.com",
    "https://evil.com?@img.example.com/", "https://evil.com;@img.example.com/", "https://[img.example.com]/a",
    "https://img.example.com/a\r\nHost: evil.com", "https://img.example.com/a b", "https://img.example.com/\ta",
    "https://img.example.com/a\x00b", " https://img.example.com/a", "https://img.example.com/a\n",
    "https://img.example.com%2eevil.com/a", "https://img.example.com%00.evil.com/", "https://img%2eexample.com/a",
    "https://img.example.com/\u00e4", "https://img.example.com/{a}", "https://img.example.com/<a>",
    # ports
    "https://img.example.com:80/a", "https://img.example.com:22/", "https://img.example.com:/a",
    "https://img.example.com:0443/a", "https://img.example.com:65536/", "https://img.example.com:443x/",
    # addresses in all spellings
    "https://127.0.0.1/a", "https://127.1/a", "https://2130706433/a", "https://0x7f000001/a", "https://0x7f.1/a",
    "https://0177.0.0.1/a", "https://017700000001/a", "https://127.0.0.1./a", "https://0/a", "https://0.0.0.0/",
    "https://169.254.169.254/latest/meta-data", "https://[::1]/a", "https://[::ffff:127.0.0.1]/a", "https://[fd00::1]/",
    "https://[::ffff:7f00:1]/a", "https://[64:ff9b::7f00:1]/", "https://[fe80::1%25eth0]/a", "https://1.2.3.4.5/a",
    "https://93.184.215.14/a", "https://093.184.215.15/a", "https://93.184.215.15.0x1/", "https://127.0.0.0x1/a",
    "https://\uff11\uff12\uff17.0.0.1/a", "https://\u2460\u2461\u2466.0.0.1/",
    # other hosts
    "https://evil.com/a", "https://localhost/a", "https://img.example.com./a", "https://img.example.com.evil.com/a",
    "https://evilimg.example.com/a", "https://example.com/", "https://cdn.example.net/a", "https://.cdn.example.net/",
    "https://evilcdn.example.net/a", "https://a..cdn.example.net/", "https://-a.cdn.example.net/",
    "https://a_b.cdn.example.net/",
    "https://im\u0261.example.com/a", "https://img\u3002example.com/a", "https://\u0131mg.example.com/a",
    "https://img.example.com\u2024evil.com/", "https://IMG.EXAMPLE.COM\u212a/",
    f"https://{'a' * 64}.cdn.example.net/",
    f"https://{'a.' * 130}cdn.example.net/", "https://img.example.com/" + "a" * 9000,
    # allowed hosts with addresses that are not
    "https://private.cdn.example.net/a", "https://mixed.cdn.example.net/a", "https://mapped.cdn.example.net/a",
    "https://metadata.cdn.example.net/a", "https://nothing.cdn.example.net/a", "https://text.cdn.example.net/a",
    "https://blocked.cdn.example.net/a", "https://scoped.cdn.example.net/a",
]  # fmt: skip
ANSWERS = {
    HOST: [PUBLIC],
    "other.cdn.example.net": [PUBLIC],
    "private.cdn.example.net": ["10.0.0.1"],
    "mixed.cdn.example.net": [PUBLIC, "192.168.1.1"],
    "mapped.cdn.example.net": [PUBLIC, "::ffff:10.0.0.1"],
    "metadata.cdn.example.net": ["169.254.169.254"],
    "nothing.cdn.example.net": [],
    "text.cdn.example.net": ["localhost"],
    "blocked.cdn.example.net": ["8.8.8.8"],
    "scoped.cdn.example.net": ["fe80::1%eth0"],
}
REFUSED_ADDRESSES = (
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9", "169.254.169.254",
    "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "168.63.129.16", "8.8.8.8", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:93.184.215.14",
    "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::1", "3fff::1",
    "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1", "5f00::1", "4000::1", "127.1",
    "x", "",
)  # fmt: skip


def make_tls(folder: Path, *names: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return settings of TLS for a server with a certificate for the names, and for clients that trust it."""
    certificate, key = write_certificate(folder, "test", *map(x509.DNSName, names))
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=str(certificate))


def response(content: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


ANSWERED = {
    "/ok": response(FILE, "Content-Type: image/png", "Set-Cookie: a=b"),
    "/until-close": b"HTTP/1.1 200 OK\r\n\r\n" + FILE,
    "/chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(FILE), FILE),
}
FAULTY = {
    "/redirect": response(b"", "Location: https://img.example.com/ok", status="302 Found"),
    "/missing": response(FILE, status="404 Not Found"),
    "/encoded": response(FILE, "Content-Encoding: gzip"),
    "/announced": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n",
    "/long": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(LIMIT + 1),
    "/long-chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"800\r\n%b\r\n" % bytes(2048) * 9,
    "/short": response(FILE)[:-5],
    "/garbage": b"SSH-2.0-server\r\n" * 9,
    "/headers": b"HTTP/1.1 200 OK\r\n" + b"X-A: a\r\n" * 9999,
    "/two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "/nothing": b"",
}


class Web:
    """A TLS server at an address of loopback, and the connections that this process opens."""

    def __init__(self) -> None:
        self.connected: list[Any] = []
        self.requests: list[bytes] = []
        self.resolved: list[str] = []

    async def resolve(self, host: str) -> list[str]:
        self.resolved.append(host)
        if host == "rebind.example.com":  # the second answer differs
            return [PUBLIC] if self.resolved.count(host) == 1 else ["127.0.0.1"]
        return ANSWERS[host]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(request)
        path = request.split()[1].decode()
        if path == "/drip":
            for _ in range(100):
                writer.write(b"HTTP/1.1 200 OK\r\n"[:1])
                await asyncio.sleep(0.05)
        writer.write({**ANSWERED, **FAULTY}.get(path, b""))
        writer.close()


@pytest.fixture
async def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Web]:
    server_tls, client_tls = make_tls(tmp_path, HOST, "rebind.example.com")
    served, loop = Web(), asyncio.get_running_loop()
    server = await asyncio.start_server(served.answer, "127.0.0.1", 0, ssl=server_tls)
    port = server.sockets[0].getsockname()[1]
    connect = loop.sock_connect

    async def redirect(sock: Any, address: Any) -> None:
        served.connected.append(address[:2])
        await connect(sock, ("127.0.0.1", port))

    monkeypatch.setattr(loop, "sock_connect", redirect, raising=False)
    served.tls = client_tls
    served.fetcher = ImageFetcher(
        AllowedHosts(HOSTS), AddressPolicy(["8.8.8.0/24"]), resolve=served.resolve, tls=client_tls
    )
    yield served
    server.close()


async def fetch(web: Any, url: str, tenant: str = "") -> bytes:
    return await web.fetcher.fetch(url, LIMIT, tenant, lambda size: None)


async def test_no_hostile_url_leads_to_a_connection(web: Any) -> None:
    assert len(HOSTILE_URLS) >= 60
    for url in HOSTILE_URLS:
        with pytest.raises(FetchFailed):
            await fetch(web, url)
    assert web.connected == []
    assert set(web.resolved) <= {*ANSWERS}


@pytest.mark.parametrize("address", REFUSED_ADDRESSES)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not AddressPolicy(["8.8.8.0/24"]).allows(address)


def test_public_addresses_are_allowed() -> None:
    for address in (PUBLIC, "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::8a"):
        assert AddressPolicy().allows(address)


async def test_a_file_comes_from_the_checked_address(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for path in ANSWERED:
        assert await fetch(web, f"https://IMG.example.com:443{path}#part") == FILE
    assert web.connected == [(PUBLIC, 443)] * len(ANSWERED)
    assert web.requests[0].startswith(b"GET /ok HTTP/1.1\r\nHost: img.example.com\r\n")
    sent = b"".join(web.requests).lower()
    assert b"cookie" not in sent
    assert b"authorization" not in sent


async def test_a_host_is_resolved_once_for_each_fetch(web: Any) -> None:
    assert await fetch(web, "https://rebind.example.com/ok") == FILE
    assert web.connected == [(PUBLIC, 443)]
    with pytest.raises(FetchFailed, match="not public"):
        await fetch(web, "https://rebind.example.com/ok")
    assert web.connected == [(PUBLIC, 443)]
    assert web.resolved == ["rebind.example.com"] * 2


async def test_the_certificate_must_be_that_of_the_host(web: Any) -> None:
    with pytest.raises(FetchFailed, match="certificate"):
        await fetch(web, "https://other.cdn.example.net/ok")
    web.fetcher = ImageFetcher(AllowedHosts(HOSTS), AddressPolicy(), resolve=web.resolve)
    with pytest.raises(FetchFailed, match="self-signed"):
        await fetch(web, "https://img.example.com/ok")
    assert web.requests == []


@pytest.mark.parametrize("path", FAULTY)
async def test_faulty_servers_end_the_fetch(web: Any, path: str) -> None:
    with pytest.raises(FetchFailed):
        await fetch(web, f"https://img.example.com{path}")
    assert web.connected == [(PUBLIC, 443)]


async def test_a_fetch_has_a_deadline_and_keys_have_few_at_a_time(
    web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 0.5)
    began = time.monotonic()
    url = "https://img.example.com/drip"
    slow = [asyncio.create_task(fetch(web, url, "alice")) for _ in range(fetching.MAX_TENANT_FETCHES)]
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(fetch(web, "https://img.example.com/ok", "alice"))
    assert await fetch(web, "https://img.example.com/ok", "bob") == FILE
    assert not waiting.done()  # the key alice has its maximum number of fetches
    waiting.cancel()
    for failure in await asyncio.gather(*slow, return_exceptions=True):
        assert isinstance(failure, FetchFailed)
    assert time.monotonic() - began < 4
    assert await fetch(web, "https://img.example.com/ok", "alice") == FILE


def test_urls_have_one_reading() -> None:
    url = parse_image_url("https://Img.Example.com?a=%20&b=/../c")
    assert (url.host, url.target) == ("img.example.com", "/?a=%20&b=/../c")


def test_options_are_checked() -> None:
    base = {"served_name": "demo", "image_urls": "allowed"}
    for wrong in (
        "*",
        "*.",
        "localhost",
        "a.b.",
        "*.1.2.3.4",
        "1.2.3",
        "[::1]",
        "A.b",
        "a.*.b",
        "https://a.b",
    ):
        with pytest.raises(ValueError, match="--image-hosts"):
            new_fetcher(GatewayConfig(**base, image_hosts=(wrong,)))
    with pytest.raises(ValueError, match="--image-blocked-network"):
        new_fetcher(GatewayConfig(**base, image_hosts=("a.b",), image_blocked_network=("10.0.0.0/99",)))
    for config in ({"image_urls": "allowed"}, {"image_hosts": ("a.b",)}):
        with pytest.raises(ValueError, match="belong together"):
            GatewayConfig(served_name="demo", **config)


async def test_a_gateway_fetches_images_and_hides_why_it_cannot(
    live: Any, scripted: Any, qwen_files: Any, web: Any
) -> None:
    engine = scripted(qwen_files, images=True)
    gateway = await live(engine, image_urls="allowed", image_hosts=HOSTS, max_image_bytes=LIMIT)
    gateway.gateway.image_fetcher = web.fetcher

    async def send(*urls: str) -> httpx.Response:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": [image_part(FILE), *parts]}],
            "max_tokens": 2,
        }
        transport = httpx.ASGITransport(gateway_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post("/v1/chat/completions", json=body)

    gateway_app = create_app(gateway.gateway.config, gateway.gateway)
    fetched = await send("https://img.example.com/ok", "https://img.example.com/chunked")
    assert fetched.status_code == 200, fetched.text
    assert fetched.json()["usage"]["prompt_tokens"] > 12
    for url in (
        "https://127.0.0.1/a",
        "https://private.cdn.example.net/a",
        "https://img.example.com/missing",
    ):
        refused = await send("https://img.example.com/ok", url)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "messages[0].content[2]")
        assert error["message"] == "messages[0].content[2]: the image could not be fetched"
    assert set(web.connected) == {(PUBLIC, 443)}
    assert gateway.gateway.body_budget.used == 0
