# SPDX-License-Identifier: Apache-2.0
"""Limits of a key (requests and tokens per minute, parallel requests) over HTTP with the official client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from mizzen.gateway.auth.gateway_peers import HttpPeer
from mizzen.gateway.auth.limit_sharing import LOAN_PATH, LoanRequest
from mizzen.gateway.auth.rate_limits import TokenBucket
from mizzen.wire.messages import RefusalCode
from tenant_kit import ALICE, BOB, key_file, replace_file


@pytest.fixture
def metered(live: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts a gateway whose only key has a limit of tokens per minute.

    The clock of the limit stands still, so no tokens are refilled.
    """

    async def start(engine: Any, tokens: int) -> tuple[Any, Any]:
        path = tmp_path / "keys.yaml"
        path.write_text(key_file({"name": "a", "key": ALICE, "tokensPerMinute": tokens}))
        gateway = await live(engine, api_keys_file=(str(path),))
        tenant = gateway.gateway.tenants.get("a")
        tenant.tokens = TokenBucket(tokens, lambda: 0.0)
        return gateway, tenant

    return start


async def test_requests_per_minute_are_limited(live: Any, scripted: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE, "requestsPerMinute": 2}))
    gateway = await live(scripted(), api_keys_file=(str(path),))
    gateway.gateway.tenants.get("a").requests = TokenBucket(2, lambda: 0.0)  # the clock stands still
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
    assert [model.id async for model in client.models.list()] == ["demo"]  # listing models is not limited


async def test_gateways_share_the_limits_of_a_key(
    live: Any, scripted: Any, tmp_path: Path, until: Any
) -> None:
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
    assert tenants.get("a").grant.max_parallel == 1
    assert not tenants.get("b").rate_limited
    replace_file(path, key_file({"name": "a", "key": ALICE, **limits, "requestsPerMinute": 40}, free))
    await until(
        lambda: tenants.get("a").grant.requests_per_minute == 10
    )  # the new limit is divided between gateways, too


async def test_tokens_per_minute_are_charged_exactly(metered: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    gateway, tenant = await metered(engine, 1000)
    client = gateway.client(ALICE)

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
    assert (
        "retry-after" not in large.value.response.headers
    )  # the client must not retry, because waiting does not help
    assert large.value.response.headers["x-should-retry"] == "false"
    # The tokens of all sequences are reserved before the first one begins, so no stream is interrupted.
    before = len(engine.requests)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="demo", prompt="a", max_tokens=200, n=3, stream=True)
    assert len(engine.requests) == before
    # If a stop string cuts an answer, only the tokens up to it are charged, not all that were generated.
    engine.does.tokens_a_step = 50
    assert await charged(prompt=[5] * 20, max_tokens=200, stop=text_of(gateway, 12)) == (23, 23)


async def test_embeddings_are_charged_for_their_prompts(metered: Any, scripted: Any, until: Any) -> None:
    gateway, tenant = await metered(scripted(), 100000)
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
async def test_request_with_many_prompts_starts_completely_or_not_at_all(
    metered: Any, scripted: Any, path: str, body: dict[str, Any]
) -> None:
    """If only some prompts started, the client would be charged for them again at each retry."""
    engine = scripted()
    gateway, tenant = await metered(engine, 100)
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"authorization": f"Bearer {ALICE}"}
        url = f"{gateway.url}/v1/{path}"
        answer = await http.post(url, json={"model": "demo", **body}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "request_too_large")
    assert not engine.embeds
    assert not engine.requests
    assert tenant.tokens.level == 100


MANY = {"model": "demo", "input": ["海" * 100] * 300}
"""Body with more inputs than can run at once. Each character takes three tokens, so the request costs more
than the reserved estimate of a quarter token per character."""


async def test_started_request_is_served_whatever_its_final_cost(
    metered: Any, scripted: Any, until: Any
) -> None:
    """Tokens beyond the reservation become a debt; otherwise the request and its retries would all fail."""
    gateway, tenant = await metered(scripted(), 8000)
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


async def test_reservations_of_unstarted_inputs_are_refunded(metered: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.refuse = RefusalCode.INVALID
    gateway, tenant = await metered(engine, 10000)
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


async def test_tokens_reserved_for_a_stream_are_not_available_to_others(
    metered: Any, scripted: Any, until: Any
) -> None:
    """A second request is refused before it starts, so that neither stream is interrupted."""
    engine = scripted()
    engine.does.fault, engine.does.fault_after = (
        "mute",
        0,
    )  # the other choices wait until the first one has tokens
    gateway, tenant = await metered(engine, 1100)
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
    return engine.text_model.tokenizer.decode([token], False)


async def test_parallel_requests_are_limited(live: Any, scripted: Any, tmp_path: Path, until: Any) -> None:
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
    tenant = gateway.gateway.tenants.get("a")
    await until(lambda: tenant.running == 2)
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model="demo", prompt="a", max_tokens=1)
    assert refused.value.code == "too_many_parallel_requests"
    assert [model.id async for model in gateway.client(BOB).models.list()] == ["demo"]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await until(lambda: tenant.running == 0)  # a disconnected client no longer counts as running


async def test_gateways_lend_each_other_unused_limits_over_http(
    live: Any, scripted: Any, tmp_path: Path
) -> None:
    path, token = tmp_path / "keys.yaml", tmp_path / "token"
    path.write_text(key_file({"name": "a", "key": ALICE, "requestsPerMinute": 12, "maxParallel": 2}))
    token.write_text("secret")
    options = {"api_keys_file": (str(path),), "admin_token_file": str(token)}
    first, second = await live(scripted(), **options), await live(scripted(), **options)
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for name, gateway, other in (("one", first, second), ("two", second, first)):
            tenant = gateway.gateway.tenants.get("a")
            tenant.requests = TokenBucket(12, lambda: 0.0)  # the clock stands still
            peer = HttpPeer(session, f"{other.admin}{LOAN_PATH}?process=0", lambda: "secret")
            sharing = gateway.gateway.tenants.sharing
            sharing.set_members(name, {"two" if name == "one" else "one": peer}, joins=False)
            tenant.requests = TokenBucket(12, lambda: 0.0, share=0.5)
        assert await count_admitted(first.client(ALICE), 12) == 12
        assert await count_admitted(second.client(ALICE), 1) == 0
        wrong = HttpPeer(session, f"{second.admin}{LOAN_PATH}", lambda: "wrong")
        with pytest.raises(OSError, match="401"):
            await wrong.ask(LoanRequest("one", "a", "requests", 1))
        async with session.post(f"{second.admin}{LOAN_PATH}", data=b"{", headers=BEARER) as malformed:
            assert malformed.status == 400
        async with session.post(f"{second.admin}{LOAN_PATH}", data=b"{}", headers=BEARER) as incomplete:
            assert incomplete.status == 400


BEARER = {"Authorization": "Bearer secret"}


async def count_admitted(client: openai.AsyncOpenAI, requests: int) -> int:
    """Send requests one after the other, and return the number of admitted requests."""
    admitted = 0
    for _ in range(requests):
        try:
            await client.completions.create(model="demo", prompt="a", max_tokens=1)
            admitted += 1
        except openai.RateLimitError:
            pass
    return admitted
