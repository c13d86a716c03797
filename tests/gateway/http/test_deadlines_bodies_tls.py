# SPDX-License-Identifier: Apache-2.0
"""Deadlines, bodies, CORS and TLS over real HTTP, with the official client."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificate_files import write_certificate
from mizzen.gateway.app import create_app
from mizzen.gateway.grpc.server import start_grpc
from mizzen.gateway.http import request_bodies
from mizzen.gateway.http.tls import InvalidCertificate, ServerTls
from ports import free_ports
from tenant_kit import ALICE, BOB, USER, eventually, replace_file

# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def slow(scripted: Any) -> Any:
    engine = scripted()
    engine.does.step_seconds = 0.05
    return engine


@pytest.mark.parametrize(
    ("headers", "body"),
    [({"x-request-timeout": "0.4"}, {}), ({"x-request-timeout": "400ms"}, {}), ({}, {"timeout": 0.4})],
)
async def test_request_ends_at_its_own_deadline(
    live: Any, slow: Any, until: Any, headers: dict[str, str], body: dict[str, Any]
) -> None:
    gateway = await live(slow)
    with pytest.raises(openai.APIStatusError) as timeout_error:
        await gateway.client().completions.create(
            model="demo", prompt="a", max_tokens=1500, extra_headers=headers, extra_body=body
        )
    assert (timeout_error.value.status_code, timeout_error.value.code) == (504, "timeout")
    assert "within its timeout of 0.4 s" in str(timeout_error.value)
    await until(lambda: slow.running == 0)  # the engine received the abort
    assert gateway.gateway.in_flight == 0


async def test_stream_past_its_deadline_ends_with_an_error_event(live: Any, slow: Any) -> None:
    gateway = await live(slow)
    stream = await gateway.client().completions.create(
        model="demo", prompt="a", max_tokens=1500, stream=True, extra_headers={"x-request-timeout": "3"}
    )
    chunks = 0
    with pytest.raises(openai.APIError, match="within its timeout of 3 s"):
        async for _ in stream:
            chunks += 1
    assert chunks > 0


async def test_timeouts_are_bounded_and_validated(live: Any, slow: Any) -> None:
    gateway = await live(slow, max_request_timeout_seconds=1.0)
    with pytest.raises(openai.APIStatusError, match="timeout of 1 s"):
        await gateway.client().completions.create(
            model="demo", prompt="a", max_tokens=1500, extra_body={"timeout": 3600}
        )
    async with httpx.AsyncClient(timeout=60) as http:
        for value in ("0", "-1", "soon", "1h"):
            response = await http.post(
                f"{gateway.url}/v1/completions",
                json={"model": "demo", "prompt": "a", "max_tokens": 1},
                headers={"x-request-timeout": value},
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "x-request-timeout"


async def test_default_timeout_applies_to_all_requests(live: Any, slow: Any) -> None:
    gateway = await live(slow, request_timeout_seconds=0.4)
    with pytest.raises(openai.APIStatusError, match=r"timeout of 0\.4 s"):
        await gateway.client().completions.create(model="demo", prompt="a", max_tokens=1500)


@pytest.mark.parametrize(("headers", "body"), [({"x-request-timeout": "60"}, {}), ({}, {"timeout": 60})])
async def test_request_may_extend_the_default_timeout(
    live: Any, slow: Any, headers: dict[str, str], body: dict[str, Any]
) -> None:
    gateway = await live(slow, request_timeout_seconds=0.4)
    answer = await gateway.client().completions.create(
        model="demo", prompt="a", max_tokens=20, extra_headers=headers, extra_body=body
    )
    assert answer.usage.completion_tokens == 20


async def test_shorter_of_two_timeouts_counts(live: Any, slow: Any) -> None:
    gateway = await live(slow)
    for header, field in (("0.4", 60), ("60", 0.4)):
        with pytest.raises(openai.APIStatusError, match=r"timeout of 0\.4 s"):
            await gateway.client().completions.create(
                model="demo",
                prompt="a",
                max_tokens=1500,
                extra_headers={"x-request-timeout": header},
                extra_body={"timeout": field},
            )


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_total_size_of_bodies_is_bounded(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine, max_bodies_bytes=4000)
    budget = gateway.gateway.body_budget
    body = {"model": "demo", "prompt": "a" * 1500, "max_tokens": 500}
    async with httpx.AsyncClient(timeout=60) as http:
        first = [asyncio.create_task(http.post(f"{gateway.url}/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: engine.running == 2)
        assert 3000 < budget.used < 4000
        refused = await http.post(f"{gateway.url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "bodies_too_large"
        assert int(refused.headers["retry-after"]) >= 1
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        await until(lambda: budget.used == 0)


async def test_one_key_may_use_half_of_the_body_budget(
    live: Any, scripted: Any, keys: Path, until: Any
) -> None:
    """Bodies of white space count, too; otherwise one client could block all others at no cost."""
    engine = scripted()
    engine.does.step_seconds = 0.05
    files = (str(keys),)
    gateway = await live(engine, max_bodies_bytes=8000, max_body_bytes=2000, api_keys_file=files)
    padded = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 500}) + " " * 1500

    async with httpx.AsyncClient(timeout=60) as http:

        def ask(key: str, content: str) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {key}"}
            url = f"{gateway.url}/v1/completions"
            return asyncio.create_task(http.post(url, content=content, headers=headers))

        uploads = [ask(ALICE, padded) for _ in range(2)]
        await until(lambda: engine.running == 2)
        refused = await ask(ALICE, padded)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "bodies_too_large"
        assert int(refused.headers["retry-after"]) >= 1
        small_body = padded.replace("500", "5")
        assert [(await ask(BOB, small_body)).status_code for _ in range(2)] == [200, 200]
        for task in uploads:
            task.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)
        await until(lambda: gateway.gateway.body_budget.used == 0)
        assert (await ask(ALICE, small_body)).status_code == 200


async def test_stalled_body_is_abandoned(live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "BODY_STALL_SECONDS", 0.3)
    gateway = await live(scripted())
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{"
    port = int(gateway.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    status = await asyncio.wait_for(reader.readline(), 30)
    assert b" 408 " in status
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    assert gateway.gateway.body_budget.used == 0


async def test_body_is_counted_as_its_parts_arrive(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(), max_body_bytes=1024)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.post(f"{gateway.url}/v1/completions", content=parts())
    assert response.status_code == 413
    assert gateway.gateway.body_budget.used == 0


# ── browsers ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_cors_is_off_by_default(live: Any, scripted: Any) -> None:
    gateway = await live(scripted())
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.get(f"{gateway.url}/v1/models", headers={"origin": "https://a.example"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control-")]


async def test_cors_for_configured_origins_with_keys(live: Any, scripted: Any, keys: Path) -> None:
    gateway = await live(scripted(), api_keys_file=(str(keys),), cors_origin=("https://a.example",))
    preflight_headers = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    async with httpx.AsyncClient(timeout=60) as http:
        preflight = await http.options(f"{gateway.url}/v1/chat/completions", headers=preflight_headers)
        assert preflight.status_code == 200  # a preflight request has no API key
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        other_origin = await http.options(
            f"{gateway.url}/v1/chat/completions", headers={**preflight_headers, "origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in other_origin.headers
        headers = {"origin": "https://a.example", "authorization": f"Bearer {ALICE}"}
        body = {"model": "demo", "messages": USER, "stream": True, "max_tokens": 3}
        stream = await http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
        assert stream.headers["access-control-allow-origin"] == "https://a.example"
        assert "retry-after" in stream.headers["access-control-expose-headers"]
        assert stream.text.endswith("data: [DONE]\n\n")
        refused = await http.get(f"{gateway.url}/v1/models", headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert (
            refused.headers["access-control-allow-origin"] == "https://a.example"
        )  # so that the page can read the error


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Create a self-signed certificate for 127.0.0.1; return the paths of the certificate and its key."""
    return write_certificate(folder, name, x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


async def test_tls_reloads_a_changed_certificate(live: Any, scripted: Any, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(cert.read_bytes())
    gateway = await live(scripted(), tls_cert=str(cert), tls_key=str(key))
    assert gateway.url.startswith("https://")
    assert 86_000 < gateway.tls.expires_at - time.time() <= 86_400

    async def answers() -> bool:
        context = ssl.create_default_context(cafile=str(trusted))
        async with httpx.AsyncClient(verify=context, timeout=60) as http:
            try:
                await gateway.client(http_client=http).completions.create(
                    model="demo", prompt="a", max_tokens=2
                )
            except openai.APIConnectionError:
                return False
            return True

    assert await answers()
    watch = asyncio.create_task(gateway.tls.watch())
    try:
        certificate(tmp_path, "two")
        await eventually(answers, False)  # clients that trust the old certificate cannot connect any more
        trusted.write_bytes(cert.read_bytes())
        assert await answers()
        replace_file(key, "no key")
        await asyncio.sleep(0.3)
        assert await answers()  # an unusable key does not replace the old one
    finally:
        watch.cancel()
    async with httpx.AsyncClient(timeout=60) as http:
        with pytest.raises(httpx.HTTPError):
            await http.get(gateway.url.replace("https", "http") + "/v1/models")


async def test_grpc_uses_a_changed_certificate(live: Any, scripted: Any, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    port = free_ports()
    gateway = await live(scripted(), tls_cert=str(cert), tls_key=str(key), grpc_port=port)
    server = await start_grpc(gateway.gateway.config, create_app(gateway.gateway.config), gateway.gateway)
    first = cert.read_bytes()

    async def is_serving(trusted: bytes) -> bool:
        credentials = grpc.ssl_channel_credentials(trusted)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            try:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
            except grpc.aio.AioRpcError:
                return False
            return answer.status == health_pb2.HealthCheckResponse.SERVING

    try:
        assert await is_serving(first)
        certificate(tmp_path, "two")
        assert await is_serving(cert.read_bytes())
        assert not await is_serving(first)
    finally:
        await server.stop(0)


async def test_unusable_certificate_is_named(live: Any, scripted: Any, tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "one")
    (tmp_path / "other").mkdir()
    _, other = certificate(tmp_path / "other", "two")
    with pytest.raises(ValueError, match=r"tls\.crt and --tls-key .*tls\.key cannot be used: .*MISMATCH"):
        await live(scripted(), tls_cert=str(cert), tls_key=str(other))
    with pytest.raises(ValueError, match=r"--tls-key .* cannot be read: No such file"):
        await live(scripted(), tls_cert=str(cert), tls_key=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="give both"):
        await live(scripted(), tls_cert=str(cert))


def test_removed_certificate_file_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet may remove old files of a Secret at any time.

    A missing file must raise InvalidCertificate, because `watch` ends at any other exception.
    """
    cert, key = certificate(tmp_path, "one")
    tls, read = ServerTls(str(cert), str(key)), ServerTls._read

    def read_and_lose(tls: ServerTls) -> tuple[bytes, bytes]:
        content = read(tls)
        key.unlink()
        return content

    monkeypatch.setattr(ServerTls, "_read", read_and_lose)
    with pytest.raises(InvalidCertificate, match=r"tls\.key cannot be used: .*No such file"):
        tls._load()
