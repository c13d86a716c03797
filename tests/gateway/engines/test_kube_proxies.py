# SPDX-License-Identifier: Apache-2.0
"""The API server is reached through the environment's proxy, unless NO_PROXY names its address or network."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mizzen.common.proxies import proxy_for
from mizzen.gateway.engines.engine_pods import EnginePod
from mizzen.gateway.engines.kube_watch import ResourceWatch, connect

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("url", "exceptions", "direct"),
    [
        ("https://10.96.0.1:443", "localhost,.svc,10.0.0.0/8", True),
        ("https://10.96.0.1:443", "10.96.0.1", True),
        ("https://10.96.0.1:443", "10.96.0.1:443", True),
        ("https://10.96.0.1", "10.96.0.1:443", True),
        ("https://10.96.0.1:443", "10.96.0.1:6443", False),
        ("https://10.96.0.1:443", "192.168.0.0/16, 10.96.0.0/33,x/8", False),
        ("https://[fd00::1]:443", "10.0.0.0/8,fd00::/8", True),
        ("https://[fd00::1]:443", "[fd00::1]:443", True),
        ("https://[fd00::1]:443", "fd00::1", True),
        ("https://[fd01::1]:443", "fd00::/16", False),
        ("https://kubernetes.default.svc", ".svc", True),
        ("https://kubernetes.default.svc", "*.svc", True),
        ("https://kubernetes.default.svc", "default.svc", True),
        ("https://svc", ".svc", False),
        ("https://svc", "SVC", True),
        ("https://api.example.com", "ample.com", False),
        ("https://api.example.com", "*", True),
        ("https://api.example.com", "", False),
        ("https://localhost:6443", "", True),
        ("https://127.0.0.9:6443", "", True),
        ("https://[::1]:6443", "", True),
        ("http://api.example.com", "", True),  # HTTPS_PROXY does not hold for http
    ],
)
def test_no_proxy_has_the_meaning_that_kubernetes_clients_give_it(
    url: str, exceptions: str, direct: bool
) -> None:
    for names in (("HTTPS_PROXY", "NO_PROXY"), ("https_proxy", "no_proxy")):
        environment = dict(zip(names, (PROXY, exceptions), strict=True))
        assert proxy_for(url, environment) == (None if direct else PROXY)


def test_a_proxy_without_a_scheme_speaks_http() -> None:
    assert proxy_for("https://a", {"HTTPS_PROXY": "proxy.example:3128"}) == PROXY
    assert proxy_for("http://a", {"HTTP_PROXY": PROXY, "HTTPS_PROXY": "http://other"}) == PROXY


async def serve_proxy(reached: list[str]) -> tuple[asyncio.Server, int]:
    """Serve a proxy that reaches nothing; `reached` gets the request line of each request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append((await reader.readline()).decode().strip())
        while (await reader.readline()).strip():
            pass
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(("exceptions", "through_proxy"), [("192.0.2.0/24", False), ("10.0.0.0/8", True)])
async def test_a_watch_uses_the_proxy_and_names_it_when_it_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exceptions: str,
    through_proxy: bool,
) -> None:
    reached: list[str] = []
    proxy, port = await serve_proxy(reached)
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "http://192.0.2.1:9"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{port}")
    monkeypatch.setenv("NO_PROXY", exceptions)

    watch = ResourceWatch("here", "pods", EnginePod, lambda pods: None, lambda: None)
    async with await connect() as api:
        assert bool(api.configuration.proxy) == through_proxy
    if through_proxy:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.run(), 0.5)
        [record, *_] = [record for record in caplog.records if record.getMessage() == "cannot watch"]
        reason = record.__dict__["fields"]["reason"]
        assert reason.endswith(f"(through the proxy 127.0.0.1:{port})")
        assert reached[0].startswith("GET http://192.0.2.1:9/api/v1/namespaces/here/pods")
    proxy.close()
