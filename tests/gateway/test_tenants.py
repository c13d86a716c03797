"""API keys, their limits, deadlines, bodies, CORS and TLS: real HTTP, the official client."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import json
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mizzen.gateway.tenants import bodies
from mizzen.gateway.tenants.keys import KeyRing, KeysUnusable, parse_files, read_files
from mizzen.gateway.tenants.limits import Bucket
from mizzen.gateway.tenants.tenant import tag_of
from mizzen.gateway.tenants.tls import CertificateUnusable, ServerTls
from mizzen.wire.messages import RefusalCode

USER: list[Any] = [{"role": "user", "content": "What is a mast?"}]
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


def key_file(*keys: dict[str, Any]) -> str:
    return json.dumps({"keys": keys})  # JSON is YAML


def replace_file(path: Path, content: str) -> None:
    """Change a file as Kubernetes does: in one step."""
    path.with_suffix(".new").write_text(content)
    os.replace(path.with_suffix(".new"), path)


async def eventually(check: Callable[[], Awaitable[bool]], wanted: bool = True) -> None:
    """Wait until an asynchronous check says what is wanted."""
    deadline = time.monotonic() + 60
    while await check() != wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"""
keys:
  - name: alice
    key: {ALICE}
  - name: bob
    sha256: {hashlib.sha256(BOB.encode()).hexdigest()}
    models: [demo]
    priority: 1
"""
    )
    return path


# ── files of keys ─────────────────────────────────────────────────────────────────────────────────────────


def test_keys_are_hashed_when_they_are_read(keys: Path) -> None:
    grants = parse_files(read_files([str(keys)]))
    assert [grant.name for grant in grants] == ["alice", "bob"]
    assert grants[0].digest == hashlib.sha256(ALICE.encode()).digest()
    assert "sk-" not in repr(grants)
    ring = KeyRing(grants)
    alice, bob = ring.find(ALICE.encode()), ring.find(BOB.encode())
    assert alice is not None
    assert bob is not None
    assert (alice.name, bob.name) == ("alice", "bob")
    assert ring.find(ALICE[:-1].encode()) is None
    assert ring.find(b"") is None


def test_a_mounted_secret_is_a_folder_of_files(tmp_path: Path) -> None:
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    (data / "a.yaml").write_text(key_file({"name": "a", "key": "12345678a"}))
    (data / "b.yaml").write_text(key_file({"name": "b", "key": "12345678b"}))
    (tmp_path / "..data").symlink_to(data)
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert [grant.name for grant in parse_files(read_files([str(tmp_path)]))] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("keys: [", ": this is no YAML"),
        ("keys:\n  - name: a\n    key: !secret-123456 x", "line 3: this is no YAML"),
        ("keys:\n  - 'secret", "this is no YAML"),
        ("keys: \xff\xfe\x00", "this is no YAML"),
        ("keys: 3", "array"),
        ("other: []", "unknown field"),
        (key_file({"key": "secret-123456"}), "`name`"),
        (key_file({"name": "a b", "key": "secret-123456"}), "name"),
        (key_file({"name": "a"}), "keys[0] (a): give key or sha256"),
        (key_file({"name": "a", "key": "secret-123456", "sha256": "0" * 64}), "one of them"),
        (key_file({"name": "a", "key": "short"}), "at least 8 characters"),
        (key_file({"name": "a", "key": "secret with space"}), "no white space"),
        (key_file({"name": "a", "sha256": "xyz"}), "sha256"),
        (key_file({"name": "a", "key": "secret-123456", "tokensPerMinute": 0}), "tokensPerMinute"),
        (key_file({"name": "a", "key": "secret-123456", "priority": 9}), "priority"),
        (key_file({"name": "a", "key": "secret-123456", "limit": 9}), "limit"),
        (key_file(*({"name": "a", "key": f"secret-12345{n}"} for n in range(2))), "choose another"),
        (key_file(*({"name": f"a{n}", "key": "secret-123456"} for n in range(2))), "a0 is the same key"),
        ("keys: &x [*x]", "aliases are not read"),
        ("keys:\n  - {name: secret, key: 2026-13-45}", "put texts in quotes"),  # PyYAML's ValueError,
        ("keys: [!!bool secret]", "put texts in quotes"),  # KeyError
        ("keys: [!!timestamp secret]", "put texts in quotes"),  # and AttributeError
    ],
)
def test_a_bad_file_is_named_and_no_key_is_shown(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "team.yaml"
    path.write_text(content)
    with pytest.raises(KeysUnusable) as error:
        parse_files(read_files([str(path)]))
    assert "team.yaml" in str(error.value)
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysUnusable, match=r"none\.yaml cannot be read: No such file"):
        read_files([str(tmp_path / "none.yaml")])


# ── keys over HTTP ────────────────────────────────────────────────────────────────────────────────────────


async def test_only_holders_of_keys_get_in(
    live: Any, scripted: Any, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = await live(scripted(), api_keys_file=(str(keys),))
    for key in (ALICE, BOB):
        answer = await gateway.client(key).chat.completions.create(model="demo", messages=USER, max_tokens=3)
        assert answer.usage.completion_tokens == 3
    with pytest.raises(openai.AuthenticationError) as wrong:
        await gateway.client("sk-wrong-key").chat.completions.create(model="demo", messages=USER)
    assert (wrong.value.status_code, wrong.value.code) == (401, "invalid_api_key")
    async with httpx.AsyncClient(timeout=60) as http:
        for path in ("/v1/models", "/v1/chat/completions", "/docs", "/nothing"):
            response = await http.get(gateway.url + path)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "missing_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
        basic = await http.get(f"{gateway.url}/v1/models", headers={"authorization": f"Basic {ALICE}"})
        assert basic.status_code == 401
        long = await http.get(f"{gateway.url}/v1/models", headers={"authorization": f"Bearer {'a' * 9000}"})
        assert long.status_code == 401
    assert ALICE not in caplog.text
    assert BOB not in caplog.text
    assert "sk-wrong" not in caplog.text


async def test_engines_know_tenants_apart_and_by_no_name(live: Any, scripted: Any, keys: Path) -> None:
    engine = scripted()
    gateway = await live(engine, api_keys_file=(str(keys),))
    for key in (ALICE, BOB, ALICE):
        await gateway.client(key).completions.create(model="demo", prompt=[1, 2], max_tokens=1)
    alice, bob, again = (request.tenant for request in engine.requests)
    assert alice == again == tag_of("alice")
    assert bob == tag_of("bob") != alice
    assert 0 not in (alice, bob)
    other = await live(engine)
    await other.client().completions.create(model="demo", prompt=[1, 2], max_tokens=1)
    assert engine.requests[-1].tenant == 0


async def test_without_keys_everyone_is_served_and_the_log_says_so_once(
    live: Any, scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await live(scripted())
    for _ in range(3):
        await gateway.client().completions.create(model="demo", prompt="a", max_tokens=1)
    said = [record for record in caplog.records if "serves everyone" in record.message]
    assert len(said) == 1


async def test_a_key_is_for_its_models(live: Any, scripted: Any, keys: Path) -> None:
    gateway = await live(scripted(), alias=("other",), api_keys_file=(str(keys),))
    assert {model.id async for model in gateway.client(ALICE).models.list()} == {"demo", "other"}
    bob = gateway.client(BOB)
    assert {model.id async for model in bob.models.list()} == {"demo"}
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await bob.chat.completions.create(model="other", messages=USER)
    assert (refused.value.code, refused.value.param) == ("model_not_allowed", "model")
    with pytest.raises(openai.PermissionDeniedError):
        await bob.models.retrieve("other")


async def test_keys_come_and_go_without_a_restart(
    live: Any, scripted: Any, keys: Path, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await live(scripted(), api_keys_file=(str(keys),))
    carol = gateway.client("sk-carol-0123456789")

    async def works(client: openai.AsyncOpenAI) -> bool:
        try:
            await client.models.list()
        except openai.AuthenticationError:
            return False
        return True

    assert not await works(carol)
    replace_file(keys, key_file({"name": "carol", "key": "sk-carol-0123456789"}))
    await eventually(lambda: works(carol))
    assert not await works(gateway.client(ALICE))
    for unreadable in ("keys: [", "keys: [2026-13-45]"):  # what cannot be read changes nothing
        caplog.clear()
        replace_file(keys, unreadable)
        await until(lambda: "API keys cannot be read" in caplog.text)
    assert await works(carol)
    replace_file(keys, key_file())
    await eventually(lambda: works(carol), False)  # no key at all lets nobody in


async def test_a_long_request_outlives_its_key(live: Any, scripted: Any, keys: Path) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine, api_keys_file=(str(keys),))
    client = gateway.client(ALICE)
    stream = await client.completions.create(model="demo", prompt="a", max_tokens=40, stream=True)
    replace_file(keys, key_file({"name": "carol", "key": "sk-carol-0123456789"}))
    texts = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
    assert texts[-1] == "length"


# ── limits over HTTP ──────────────────────────────────────────────────────────────────────────────────────


async def test_requests_a_minute(live: Any, scripted: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE, "requestsPerMinute": 2}))
    gateway = await live(scripted(), api_keys_file=(str(path),))
    gateway.gateway.tenants.named("a").requests = Bucket(2, lambda: 0.0)  # time stands still
    client = gateway.client(ALICE)
    raw = client.completions.with_raw_response
    first = await raw.create(model="demo", prompt="a", max_tokens=1)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert "x-ratelimit-limit-tokens" not in first.headers
    await raw.create(model="demo", prompt="a", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as refused:
        await raw.create(model="demo", prompt="a", max_tokens=1)
    response = refused.value.response
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.type == "rate_limit_error"
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "the key a may send 2 requests a minute" in str(refused.value)
    assert [model.id async for model in client.models.list()] == ["demo"]  # looking costs nothing


async def test_gateways_may_share_a_keys_limits(live: Any, scripted: Any, tmp_path: Path, until: Any) -> None:
    path = tmp_path / "keys.yaml"
    limits = {"requestsPerMinute": 9, "tokensPerMinute": 1000, "maxParallel": 1}
    free = {"name": "b", "key": BOB}
    path.write_text(key_file({"name": "a", "key": ALICE, **limits}, free))
    gateway = await live(scripted(), api_keys_file=(str(path),), key_limits_divided_by=4)
    raw = gateway.client(ALICE).completions.with_raw_response
    answer = await raw.create(model="demo", prompt="a", max_tokens=1)
    assert answer.headers["x-ratelimit-limit-requests"] == "3"
    assert answer.headers["x-ratelimit-limit-tokens"] == "250"
    tenants = gateway.gateway.tenants
    assert tenants.named("a").grant.max_parallel == 1
    assert not tenants.named("b").limited
    replace_file(path, key_file({"name": "a", "key": ALICE, **limits, "requestsPerMinute": 40}, free))
    await until(lambda: tenants.named("a").grant.requests_per_minute == 10)  # divided again when read again


async def test_tokens_a_minute_are_charged_exactly(
    live: Any, scripted: Any, tmp_path: Path, until: Any
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE, "tokensPerMinute": 1000}))
    engine = scripted()
    gateway = await live(engine, api_keys_file=(str(path),))
    client = gateway.client(ALICE)
    tenant = gateway.gateway.tenants.named("a")
    tenant.tokens = Bucket(1000, lambda: 0.0)  # time stands still: nothing comes back

    async def charged(**request: Any) -> tuple[int, float]:
        before = tenant.tokens.level
        answer = await client.completions.create(model="demo", **request)
        await until(lambda: gateway.gateway.in_flight == 0)
        return answer.usage.total_tokens, before - tenant.tokens.level

    assert await charged(prompt=[5] * 300, max_tokens=100) == (400, 400)
    assert await charged(prompt=[5] * 20, max_tokens=10, n=3) == (50, 50)
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model="demo", prompt=[5] * 900, max_tokens=1)
    assert int(refused.value.response.headers["retry-after"]) == 22  # 351 tokens are missing
    assert refused.value.response.headers["x-ratelimit-limit-tokens"] == "1000"
    assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == "550"
    with pytest.raises(openai.RateLimitError, match="lower max_tokens") as large:
        await client.completions.create(model="demo", prompt="a", max_tokens=1500)
    assert large.value.code == "request_too_large"
    assert "retry-after" not in large.value.response.headers  # waiting does not help, and clients know
    assert large.value.response.headers["x-should-retry"] == "false"
    # All sequences are looked at before one of them begins: no stream breaks off for want of tokens.
    before = len(engine.requests)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="demo", prompt="a", max_tokens=200, n=3, stream=True)
    assert len(engine.requests) == before
    # A stop string ends an answer within what the engine has given: what the client got is charged.
    engine.does.tokens_a_step = 50
    assert await charged(prompt=[5] * 20, max_tokens=200, stop=text_of(gateway, 12)) == (23, 23)


async def test_embeddings_are_charged_for_their_prompts(
    live: Any, scripted: Any, tmp_path: Path, until: Any
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE, "tokensPerMinute": 100000}))
    gateway = await live(scripted(), api_keys_file=(str(path),))
    tenant = gateway.gateway.tenants.named("a")
    tenant.tokens = Bucket(100000, lambda: 0.0)
    answer = await gateway.client(ALICE).embeddings.create(model="demo", input=[[5] * 30, [6] * 12])
    await until(lambda: gateway.gateway.in_flight == 0)
    assert answer.usage.total_tokens == 42
    assert tenant.tokens.level == 100000 - 42


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"input": [[5] * 30] * 4}),
        ("score", {"text_1": "mast " * 20, "text_2": ["mast " * 20] * 3}),
        ("score", {"query": [5] * 30, "items": [[6]] * 4, "label_token_ids": [7]}),
        ("completions", {"prompt": [[5] * 30] * 4, "max_tokens": 1}),
    ],
    ids=["embeddings", "pairs", "labels", "completions"],
)
async def test_a_request_of_many_prompts_begins_whole_or_not_at_all(
    live: Any, scripted: Any, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """Else a client that tries again would pay each time for the part that its minute has room for."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file({"name": "a", "key": ALICE, "tokensPerMinute": 100}))
    engine = scripted()
    gateway = await live(engine, api_keys_file=(str(keys),))
    tenant = gateway.gateway.tenants.named("a")
    tenant.tokens = Bucket(100, lambda: 0.0)
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"authorization": f"Bearer {ALICE}"}
        url = f"{gateway.url}/v1/{path}"
        answer = await http.post(url, json={"model": "demo", **body}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "request_too_large")
    assert not engine.embeds
    assert not engine.requests
    assert tenant.tokens.level == 100


MANY = {"model": "demo", "input": ["海" * 100] * 300}
"""More than are in work at once, of three times as many tokens as characters: four are expected of one."""


async def test_a_request_that_has_begun_is_served_whatever_it_costs_in_the_end(
    live: Any, scripted: Any, tmp_path: Path, until: Any
) -> None:
    """Else it fails half-way, charged, and so does each retry; what it used too much is a debt."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file({"name": "a", "key": ALICE, "tokensPerMinute": 8000}))
    gateway = await live(scripted(), api_keys_file=(str(keys),))
    tenant = gateway.gateway.tenants.named("a")
    tenant.tokens = Bucket(8000, lambda: 0.0)
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"authorization": f"Bearer {ALICE}"}
        url = f"{gateway.url}/v1/embeddings"
        answer = await http.post(url, json=MANY, headers=headers)
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]["total_tokens"]
        assert used > 8000
        await until(lambda: gateway.gateway.in_flight == 0)
        assert tenant.tokens.level == 8000 - used
        assert (await http.post(url, json=MANY, headers=headers)).status_code == 429


async def test_what_is_reserved_for_inputs_that_never_began_is_given_back(
    live: Any, scripted: Any, tmp_path: Path, until: Any
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file({"name": "a", "key": ALICE, "tokensPerMinute": 10000}))
    engine = scripted()
    engine.does.refuse = RefusalCode.INVALID
    gateway = await live(engine, api_keys_file=(str(keys),))
    tenant = gateway.gateway.tenants.named("a")
    tenant.tokens = Bucket(10000, lambda: 0.0)
    bodies = {
        "embeddings": MANY,
        "score": {"model": "demo", "query": "a", "items": ["海" * 100] * 300, "label_token_ids": [7]},
        "completions": {"model": "demo", "prompt": ["海" * 100] * 300, "max_tokens": 1},
    }
    async with httpx.AsyncClient(timeout=60) as http:
        for path, body in bodies.items():
            answer = await http.post(
                f"{gateway.url}/v1/{path}", json=body, headers={"authorization": f"Bearer {ALICE}"}
            )
            assert answer.status_code == 400, answer.text
            await until(lambda: gateway.gateway.in_flight == 0)
            assert tenant.tokens.level == 10000, path


async def test_tokens_that_a_stream_has_yet_to_use_are_nobody_elses(
    live: Any, scripted: Any, tmp_path: Path, until: Any
) -> None:
    """A second request is refused with a status, instead of one of both breaking off in its stream."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file({"name": "a", "key": ALICE, "tokensPerMinute": 1100}))
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "mute", 0  # choices wait for the first one's tokens
    gateway = await live(engine, api_keys_file=(str(keys),))
    tenant = gateway.gateway.tenants.named("a")
    tenant.tokens = Bucket(1100, lambda: 0.0)
    body = {"model": "demo", "prompt": [5], "max_tokens": 200, "n": 4, "stream": True}
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"authorization": f"Bearer {ALICE}"}
        url = f"{gateway.url}/v1/completions"
        first = asyncio.create_task(http.post(url, json=body, headers=headers))
        await until(lambda: gateway.gateway.in_flight == 1)
        assert (await http.post(url, json=body, headers=headers)).status_code == 429
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await until(lambda: gateway.gateway.in_flight == 0)
    assert tenant.tokens.level == 1100


def text_of(gateway: Any, token: int) -> str:
    [engine] = gateway.gateway.engines
    return engine.text.tokenizer.decode([token], False)


async def test_requests_at_once(live: Any, scripted: Any, tmp_path: Path, until: Any) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE, "maxParallel": 2}, {"name": "b", "key": BOB}))
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "mute", 0
    engine.does.step_seconds = 0.02
    gateway = await live(engine, api_keys_file=(str(path),))
    client = gateway.client(ALICE)
    streams = [
        asyncio.create_task(client.completions.create(model="demo", prompt="a", max_tokens=900, stream=True))
        for _ in range(2)
    ]
    tenant = gateway.gateway.tenants.named("a")
    await until(lambda: tenant.running == 2)
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model="demo", prompt="a", max_tokens=1)
    assert refused.value.code == "too_many_parallel_requests"
    assert [model.id async for model in gateway.client(BOB).models.list()] == ["demo"]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await until(lambda: tenant.running == 0)  # a client that goes away gives its place back


async def test_priority_is_bounded_by_the_key_and_reaches_the_engine(
    live: Any, scripted: Any, keys: Path
) -> None:
    engine = scripted()
    gateway = await live(engine, api_keys_file=(str(keys),))

    async def ask(key: str, **extra: Any) -> int:
        await gateway.client(key).completions.create(
            model="demo", prompt="a", max_tokens=1, extra_body=extra or None
        )
        return engine.requests[-1].priority

    assert await ask(BOB) == 1
    assert await ask(BOB, priority=-3) == -3
    assert await ask(ALICE) == 0
    with pytest.raises(openai.PermissionDeniedError, match="priority must be at most 1 with the key bob"):
        await ask(BOB, priority=2)
    with pytest.raises(openai.BadRequestError, match="priority"):
        await ask(BOB, priority=9)


async def test_without_keys_nobody_gets_a_high_priority_unless_all_may(live: Any, scripted: Any) -> None:
    for most, wanted in ((0, (0, 0, -5)), (3, (2, 3, -5))):
        engine = scripted()
        gateway = await live(engine, keyless_max_priority=most, route_header=most == 0)
        for asked, given in zip((2, 8, -5), wanted, strict=True):
            raw = await gateway.client().completions.with_raw_response.create(
                model="demo", prompt="a", max_tokens=1, extra_body={"priority": asked}
            )
            assert engine.requests[-1].priority == given
            assert ("x-mizzen-route" in raw.headers) is (most == 0)
        with pytest.raises(openai.BadRequestError, match="priority"):
            await gateway.client().completions.create(model="demo", prompt="a", extra_body={"priority": 9})


async def test_health_needs_no_key_and_tells_whether_requests_are_served(
    live: Any, scripted: Any, keys: Path
) -> None:
    gateway = await live(scripted(), api_keys_file=(str(keys),))
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{gateway.url}/v1/models")).status_code == 401
        assert (await http.get(f"{gateway.url}/health")).status_code == 200
        gateway.gateway.draining = True
        assert (await http.get(f"{gateway.url}/health")).status_code == 503


async def test_a_key_may_have_a_prefix_cache_of_its_own(live: Any, scripted: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    alone = [{"name": f"k{n}", "key": f"sk-isolated-{n}", "isolateCache": True} for n in range(2)]
    path.write_text(key_file({"name": "a", "key": ALICE}, {"name": "b", "key": BOB}, *alone))
    engine = scripted()
    gateway = await live(engine, api_keys_file=(str(path),))
    for key in (ALICE, BOB, "sk-isolated-0", "sk-isolated-1", "sk-isolated-0"):
        await gateway.client(key).completions.create(model="demo", prompt="a", max_tokens=1)
    salts = [request.salt for request in engine.requests]
    assert salts[:2] == [b"", b""]
    assert salts[2] == salts[4] != salts[3]
    assert len(set(salts)) == 3


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
async def test_a_request_ends_at_its_own_deadline(
    live: Any, slow: Any, until: Any, headers: dict[str, str], body: dict[str, Any]
) -> None:
    gateway = await live(slow)
    with pytest.raises(openai.APIStatusError) as late:
        await gateway.client().completions.create(
            model="demo", prompt="a", max_tokens=1500, extra_headers=headers, extra_body=body
        )
    assert (late.value.status_code, late.value.code) == (504, "timeout")
    assert "within its timeout of 0.4 s" in str(late.value)
    await until(lambda: slow.running == 0)  # the engine was told
    assert gateway.gateway.in_flight == 0


async def test_a_stream_that_is_late_ends_with_an_error_event(live: Any, slow: Any) -> None:
    gateway = await live(slow)
    stream = await gateway.client().completions.create(
        model="demo", prompt="a", max_tokens=1500, stream=True, extra_headers={"x-request-timeout": "3"}
    )
    chunks = 0
    with pytest.raises(openai.APIError, match="within its timeout of 3 s"):
        async for _ in stream:
            chunks += 1
    assert chunks > 0


async def test_timeouts_are_bounded_and_checked(live: Any, slow: Any) -> None:
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


async def test_a_timeout_may_be_everyones(live: Any, slow: Any) -> None:
    gateway = await live(slow, request_timeout_seconds=0.4)
    with pytest.raises(openai.APIStatusError, match=r"timeout of 0\.4 s"):
        await gateway.client().completions.create(model="demo", prompt="a", max_tokens=1500)


@pytest.mark.parametrize(("headers", "body"), [({"x-request-timeout": "60"}, {}), ({}, {"timeout": 60})])
async def test_whoever_asks_for_more_time_than_everyone_gets_has_it(
    live: Any, slow: Any, headers: dict[str, str], body: dict[str, Any]
) -> None:
    gateway = await live(slow, request_timeout_seconds=0.4)
    answer = await gateway.client().completions.create(
        model="demo", prompt="a", max_tokens=20, extra_headers=headers, extra_body=body
    )
    assert answer.usage.completion_tokens == 20


async def test_the_shorter_one_of_two_timeouts_counts(live: Any, slow: Any) -> None:
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


async def test_all_bodies_together_are_bounded(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine, max_bodies_bytes=4000)
    budget = gateway.gateway.bodies
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


async def test_one_key_holds_half_of_all_bodies_at_most(
    live: Any, scripted: Any, keys: Path, until: Any
) -> None:
    """White space is a body too: it costs its sender nothing, and would keep all others out."""
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

        held = [ask(ALICE, padded) for _ in range(2)]
        await until(lambda: engine.running == 2)
        refused = await ask(ALICE, padded)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "bodies_too_large"
        assert int(refused.headers["retry-after"]) >= 1
        other = padded.replace("500", "5")
        assert [(await ask(BOB, other)).status_code for _ in range(2)] == [200, 200]
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until(lambda: gateway.gateway.bodies.used == 0)
        assert (await ask(ALICE, other)).status_code == 200


async def test_a_body_that_stalls_is_given_up(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "STALL_SECONDS", 0.3)
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
    assert gateway.gateway.bodies.used == 0


async def test_a_body_that_comes_in_parts_is_counted_as_it_comes(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(), max_body_bytes=1024)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.post(f"{gateway.url}/v1/completions", content=parts())
    assert response.status_code == 413
    assert gateway.gateway.bodies.used == 0


# ── browsers ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_cors_is_off_by_default(live: Any, scripted: Any) -> None:
    gateway = await live(scripted())
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.get(f"{gateway.url}/v1/models", headers={"origin": "https://a.example"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control-")]


async def test_cors_for_some_origins_with_keys(live: Any, scripted: Any, keys: Path) -> None:
    gateway = await live(scripted(), api_keys_file=(str(keys),), cors_origin=("https://a.example",))
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    async with httpx.AsyncClient(timeout=60) as http:
        preflight = await http.options(f"{gateway.url}/v1/chat/completions", headers=asked)
        assert preflight.status_code == 200  # a browser sends no key with it
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        other = await http.options(
            f"{gateway.url}/v1/chat/completions", headers={**asked, "origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in other.headers
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
        )  # so that the page sees why


# ── TLS ───────────────────────────────────────────────────────────────────────────────────────────────────


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "tls.crt", folder / "tls.key"
    replace_file(cert_path, made.public_bytes(serialization.Encoding.PEM).decode())
    replace_file(
        key_path,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )
    return cert_path, key_path


async def test_tls_with_a_certificate_that_changes(live: Any, scripted: Any, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(cert.read_bytes())
    gateway = await live(scripted(), tls_cert=str(cert), tls_key=str(key))
    assert gateway.url.startswith("https://")
    assert 86_000 < gateway.tls.expires - time.time() <= 86_400

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
        await eventually(answers, False)  # the old one is trusted, and is served no more
        trusted.write_bytes(cert.read_bytes())
        assert await answers()
        replace_file(key, "no key")
        await asyncio.sleep(0.3)
        assert await answers()  # what cannot be used changes nothing
    finally:
        watch.cancel()
    async with httpx.AsyncClient(timeout=60) as http:
        with pytest.raises(httpx.HTTPError):
            await http.get(gateway.url.replace("https", "http") + "/v1/models")


async def test_a_certificate_that_cannot_be_used_is_named(live: Any, scripted: Any, tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "one")
    (tmp_path / "other").mkdir()
    _, other = certificate(tmp_path / "other", "two")
    with pytest.raises(ValueError, match=r"tls\.crt and --tls-key .*tls\.key cannot be used: .*MISMATCH"):
        await live(scripted(), tls_cert=str(cert), tls_key=str(other))
    with pytest.raises(ValueError, match=r"--tls-key .* cannot be read: No such file"):
        await live(scripted(), tls_cert=str(cert), tls_key=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="give both"):
        await live(scripted(), tls_cert=str(cert))


def test_a_file_that_goes_while_it_is_read_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet removes former files of a Secret at any time; `watch` goes on after this error alone."""
    cert, key = certificate(tmp_path, "one")
    tls, read = ServerTls(str(cert), str(key)), ServerTls._read

    def read_and_lose(tls: ServerTls) -> tuple[bytes, bytes]:
        content = read(tls)
        key.unlink()
        return content

    monkeypatch.setattr(ServerTls, "_read", read_and_lose)
    with pytest.raises(CertificateUnusable, match=r"tls\.key cannot be used: .*No such file"):
        tls._load()
