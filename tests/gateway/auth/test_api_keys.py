# SPDX-License-Identifier: Apache-2.0
"""API keys over real HTTP with the official client: key files, authentication and permissions."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mizzen.gateway.auth.api_keys import ApiKeyIndex, InvalidKeyFile, parse_key_files, read_key_files
from mizzen.gateway.auth.tenant import tenant_tag
from tenant_kit import ALICE, BOB, USER, eventually, key_file, replace_file

# ── files of keys ─────────────────────────────────────────────────────────────────────────────────────────


def test_keys_are_hashed_when_read(keys: Path) -> None:
    grants = parse_key_files(read_key_files([str(keys)]))
    assert [grant.name for grant in grants] == ["alice", "bob"]
    assert grants[0].digest == hashlib.sha256(ALICE.encode()).digest()
    assert "sk-" not in repr(grants)
    ring = ApiKeyIndex(grants)
    alice, bob = ring.find_grant(ALICE.encode()), ring.find_grant(BOB.encode())
    assert alice is not None
    assert bob is not None
    assert (alice.name, bob.name) == ("alice", "bob")
    assert ring.find_grant(ALICE[:-1].encode()) is None
    assert ring.find_grant(b"") is None


def test_mounted_secret_is_read_as_a_folder(tmp_path: Path) -> None:
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    (data / "a.yaml").write_text(key_file({"name": "a", "key": "12345678a"}))
    (data / "b.yaml").write_text(key_file({"name": "b", "key": "12345678b"}))
    (tmp_path / "..data").symlink_to(data)
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert [grant.name for grant in parse_key_files(read_key_files([str(tmp_path)]))] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("keys: [", ": this is not YAML"),
        ("keys:\n  - name: a\n    key: !secret-123456 x", "line 3: this is not YAML"),
        ("keys:\n  - 'secret", "this is not YAML"),
        ("keys: \xff\xfe\x00", "this is not YAML"),
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
        ("keys: &x [*x]", "aliases are not allowed"),
        ("keys:\n  - {name: secret, key: 2026-13-45}", "put texts in quotes"),  # PyYAML's ValueError,
        ("keys: [!!bool secret]", "put texts in quotes"),  # KeyError
        ("keys: [!!timestamp secret]", "put texts in quotes"),  # and AttributeError
    ],
)
def test_invalid_key_file_is_named_without_showing_keys(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "team.yaml"
    path.write_text(content)
    with pytest.raises(InvalidKeyFile) as error:
        parse_key_files(read_key_files([str(path)]))
    assert "team.yaml" in str(error.value)
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidKeyFile, match=r"none\.yaml cannot be read: No such file"):
        read_key_files([str(tmp_path / "none.yaml")])


# ── keys over HTTP ────────────────────────────────────────────────────────────────────────────────────────


async def test_only_valid_keys_are_accepted(
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
    assert "check it, or ask for another one" in wrong.value.message
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


async def test_engines_get_distinct_tenant_tags_without_names(live: Any, scripted: Any, keys: Path) -> None:
    engine = scripted()
    gateway = await live(engine, api_keys_file=(str(keys),))
    for key in (ALICE, BOB, ALICE):
        await gateway.client(key).completions.create(model="demo", prompt=[1, 2], max_tokens=1)
    alice, bob, repeated = (request.tenant for request in engine.requests)
    assert alice == repeated == tenant_tag("alice")
    assert bob == tenant_tag("bob") != alice
    assert 0 not in (alice, bob)
    second_gateway = await live(engine)
    await second_gateway.client().completions.create(model="demo", prompt=[1, 2], max_tokens=1)
    assert engine.requests[-1].tenant == 0


async def test_without_keys_every_client_is_served_and_one_warning_logged(
    live: Any, scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await live(scripted())
    for _ in range(3):
        await gateway.client().completions.create(model="demo", prompt="a", max_tokens=1)
    warnings = [record for record in caplog.records if "serves every client" in record.message]
    assert len(warnings) == 1


async def test_key_only_allows_its_models(live: Any, scripted: Any, keys: Path) -> None:
    gateway = await live(scripted(), alias=("other",), api_keys_file=(str(keys),))
    assert {model.id async for model in gateway.client(ALICE).models.list()} == {"demo", "other"}
    bob = gateway.client(BOB)
    assert {model.id async for model in bob.models.list()} == {"demo"}
    with pytest.raises(openai.PermissionDeniedError) as refused:
        await bob.chat.completions.create(model="other", messages=USER)
    assert (refused.value.code, refused.value.param) == ("model_not_allowed", "model")
    with pytest.raises(openai.PermissionDeniedError):
        await bob.models.retrieve("other")


async def test_keys_are_reloaded_without_a_restart(
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
    for unreadable in ("keys: [", "keys: [2026-13-45]"):  # an unreadable file does not change the keys
        caplog.clear()
        replace_file(keys, unreadable)
        await until(lambda: "cannot read API keys" in caplog.text)
    assert await works(carol)
    replace_file(keys, key_file())
    await eventually(lambda: works(carol), False)  # with an empty list of keys, no client is accepted


async def test_running_request_outlives_its_key(live: Any, scripted: Any, keys: Path) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine, api_keys_file=(str(keys),))
    client = gateway.client(ALICE)
    stream = await client.completions.create(model="demo", prompt="a", max_tokens=40, stream=True)
    replace_file(keys, key_file({"name": "carol", "key": "sk-carol-0123456789"}))
    texts = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
    assert texts[-1] == "length"


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


async def test_without_keys_the_priority_of_a_request_is_ignored(live: Any, scripted: Any) -> None:
    for most in (0, 3):
        engine = scripted()
        gateway = await live(engine, keyless_max_priority=most, route_header=most == 0)
        for requested in (2, 8, -5):
            raw = await gateway.client().completions.with_raw_response.create(
                model="demo", prompt="a", max_tokens=1, extra_body={"priority": requested}
            )
            assert engine.requests[-1].priority == 0
            assert ("x-mizzen-route" in raw.headers) is (most == 0)


async def test_health_endpoint_needs_no_key(live: Any, scripted: Any, keys: Path) -> None:
    gateway = await live(scripted(), api_keys_file=(str(keys),))
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{gateway.url}/v1/models")).status_code == 401
        assert (await http.get(f"{gateway.url}/health")).status_code == 200


async def test_key_can_have_an_isolated_prefix_cache(live: Any, scripted: Any, tmp_path: Path) -> None:
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
