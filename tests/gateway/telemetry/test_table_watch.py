# SPDX-License-Identifier: Apache-2.0
"""Long polls of the admin API for a changed routing table."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from mizzen.gateway.telemetry.table_watch import TableWatch, parse_wait
from mizzen.wire.messages import PROTOCOL
from ports import free_ports
from tenant_kit import ALICE, BOB, key_file, replace_file

TOKEN = {"authorization": "Bearer s3cret"}


@pytest.fixture
def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_ports()}"


async def test_long_poll_returns_when_the_table_changes(live: Any, scripted: Any, tmp_path: Any) -> None:
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    engine = scripted()
    gateway = await live(engine, admin_token_file=str(token))
    url = f"{gateway.admin}/admin/engines"
    async with httpx.AsyncClient(headers=TOKEN, timeout=60) as http:
        table = (await http.get(url)).json()
        while (stats := table["engines"][0]["stats"]) is None:  # connected, but no load received yet
            await asyncio.sleep(0.05)
            table = (await http.get(url)).json()
        assert stats["pagesTotal"] >= stats["pagesUsed"] >= 0
        assert (await http.get(url, params={"version": table["version"], "wait": 0.2})).status_code == 304
        other = await http.get(url, params={"version": "another", "wait": 30})
        assert other.json()["version"] == table["version"]
        wait = {"version": table["version"], "wait": "50"}
        waiting = [asyncio.create_task(http.get(url, params=wait)) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert not any(poll.done() for poll in waiting)
        await asyncio.to_thread(engine.kill)
        answers = [poll.json() for poll in await asyncio.gather(*waiting)]
        assert all(poll["version"] != table["version"] for poll in answers)
        assert all(poll["engines"][0]["state"] != "serving" for poll in answers)
        open_poll = asyncio.create_task(
            http.get(url, params={"version": answers[0]["version"], "wait": "50"})
        )
        await asyncio.sleep(0.1)
        gateway.gateway.table_watch.close()
        assert (await open_poll).status_code in (200, 304)


async def test_long_poll_returns_when_api_keys_become_unreadable(live: Any, tmp_path: Path) -> None:
    token, keys = tmp_path / "admin.token", tmp_path / "keys.yaml"
    token.write_text("s3cret\n")
    replace_file(keys, key_file({"name": "a", "key": ALICE}))
    gateway = await live(
        "tcp://127.0.0.1:9", wait=False, admin_token_file=str(token), api_keys_file=(str(keys),)
    )
    series = "mizzen_gateway_api_keys_unusable"
    async with httpx.AsyncClient(headers=TOKEN, timeout=60) as http:
        url, first_table = f"{gateway.admin}/admin/engines", {"version": "another"}
        twice = {"name": "b", "key": ALICE}
        for content, in_force, problem in (
            (None, 1, ""),
            (key_file({"name": "a", "key": ALICE}, twice), 1, "keys[1] (b): a is the same key"),
            (key_file({"name": "c", "key": BOB}), 1, ""),
            (key_file(), 0, ""),
        ):
            if content is not None:
                replace_file(keys, content)
            query = {"version": first_table["version"], "wait": "50"}
            first_table = (await http.get(url, params=query)).json()
            table = first_table["apiKeys"]
            assert table["inForce"] == in_force
            assert problem in table["problem"]
            assert bool(problem) is bool(table["problem"])
            assert ALICE not in table["problem"]
            metrics = (await http.get(f"{gateway.admin}/metrics")).text
            assert f"{series} {float(bool(problem) or not in_force)}" in metrics


async def test_table_has_no_api_key_status_without_keys(live: Any, tmp_path: Path) -> None:
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    gateway = await live("tcp://127.0.0.1:9", wait=False, admin_token_file=str(token))
    async with httpx.AsyncClient(headers=TOKEN, timeout=60) as http:
        assert (await http.get(f"{gateway.admin}/admin/engines")).json()["apiKeys"] is None
        assert "mizzen_gateway_api_keys_unusable 0.0" in (await http.get(f"{gateway.admin}/metrics")).text


async def test_long_poll_returns_when_a_request_waits_for_an_engine(live: Any, tmp_path: Any) -> None:
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    gateway = await live(
        "tcp://127.0.0.1:9", wait=False, admin_token_file=str(token), queue_timeout_seconds=5.0
    )
    url = f"{gateway.admin}/admin/engines"
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(headers=TOKEN, timeout=60) as http:
        first_table = (await http.get(url)).json()
        assert (first_table["waiting"], first_table["queued"], first_table["inFlight"]) == (0, 0, 0)
        assert first_table["idleSeconds"] >= 0
        poll = asyncio.create_task(http.get(url, params={"version": first_table["version"], "wait": "50"}))
        request = asyncio.create_task(http.post(f"{gateway.url}/v1/chat/completions", json=body))
        table = (await poll).json()
        while not table["waiting"]:  # the first poll may return because the engine is lost
            table = (await http.get(url, params={"version": table["version"], "wait": "50"})).json()
        assert (table["waiting"], table["queued"], table["idleSeconds"]) == (1, 1, 0)
        assert (await request).status_code == 503  # the queue timeout has passed
        last_poll = await http.get(url, params={"version": table["version"], "wait": "50"})
        assert last_poll.json()["waiting"] == 0


async def test_long_poll_returns_when_an_engines_problem_changes(
    live: Any, scripted: Any, free_endpoint: str, tmp_path: Any
) -> None:
    """The engine stays broken: first, no process listens; then one listens, but has another protocol."""
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    gateway = await live(free_endpoint, wait=False, admin_token_file=str(token))
    url = f"{gateway.admin}/admin/engines"
    async with httpx.AsyncClient(headers=TOKEN, timeout=60) as http:
        table = (await http.get(url)).json()
        while table["engines"][0]["state"] != "broken":
            table = (await http.get(url, params={"version": table["version"], "wait": "50"})).json()
        assert table["engines"][0]["otherProtocol"] is False
        wait = {"version": table["version"], "wait": "20"}
        poll = asyncio.create_task(http.get(url, params=wait))
        await asyncio.to_thread(scripted, protocol=PROTOCOL + 1, endpoint=free_endpoint)
        answer = await poll
        assert answer.status_code == 200
        (engine,) = answer.json()["engines"]
    assert engine["state"] == "broken"
    assert f"speaks version {PROTOCOL + 1} of the wire protocol, this gateway versions" in engine["problem"]
    assert engine["otherProtocol"] is True


async def test_long_poll_ends_when_its_client_disconnects() -> None:
    poll = TableWatch()

    async def gone() -> bool:
        return True

    assert await poll.wait(50, lambda: False, gone) is False


def test_wait_option_is_a_bounded_number_of_seconds() -> None:
    assert [parse_wait(text) for text in (None, "", "x", "nan", "inf", "2.5", "1e9")] == [
        0,
        0,
        0,
        0,
        0,
        2.5,
        600,
    ]
