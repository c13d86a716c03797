# SPDX-License-Identifier: Apache-2.0
"""CURVE keys are rotated while streams run: no stream fails, and removed keys open no connection."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from mizzen.common.options import flag
from mizzen.wire.client.key_offers import key_offers, offer_names
from mizzen.wire.curve_keys import KeyFileError, KeyFolder, key_pair_name, load_ring
from ports import free_ports

Pairs = dict[str, tuple[bytes, bytes]]


def new_key_pairs() -> Pairs:
    return {side: zmq.curve_keypair() for side in ("engine", "gateway")}


class MountedKeys:
    """A key folder that changes atomically like a mounted Secret, by replacing one symbolic link."""

    def __init__(self, path: Path, side: str) -> None:
        self.path, self._side, self._count = path, side, 0
        path.mkdir()

    def write(self, generation: int, current: Pairs, following: Pairs | None = None) -> None:
        files = {"generation": str(generation).encode()}
        for prefix, pairs in (("", current), ("next.", following)):
            for side, (public, secret) in (pairs or {}).items():
                files[f"{prefix}{side}.public"] = public
                if side == self._side:
                    files[f"{prefix}{side}.secret"] = secret
            if pairs and self._side == "gateway":
                files[f"{prefix}admin.token"] = b"token of " + pairs["gateway"][0]
        self._count += 1
        content = self.path / f"..{self._count}"
        content.mkdir()
        for name, data in files.items():
            (content / name).write_bytes(data)
            link = self.path / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        (self.path / "..new").symlink_to(content.name)
        (self.path / "..new").replace(self.path / "..data")
        for old in self.path.glob("..[0-9]*"):
            if old != content:
                shutil.rmtree(old)


class Engine:
    """A simulated engine, with its processes and its own key folder."""

    def __init__(self, folder: Path, model: Path, keys: MountedKeys) -> None:
        folder.mkdir()
        self.keys, self.endpoint = keys, f"ipc://{folder}/wire"
        options = {
            "model": model,
            "served_name": "demo",
            "wire_bind": self.endpoint,
            "http_port": free_ports(),
            "keys": keys.path,
            "step_milliseconds": 10,
            "termination_message": folder / "end",
        }
        words = [word for name, value in options.items() for word in (flag(name), str(value))]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mizzen.server.simulate", *words], stderr=log
            )


@pytest.fixture
def engines(tmp_path: Path, model_folder: Path) -> Iterator[Callable[[Pairs], Engine]]:
    started: list[Engine] = []

    def start(pairs: Pairs) -> Engine:
        number = len(started)
        mount = MountedKeys(tmp_path / f"engine-keys-{number}", "engine")
        mount.write(0, pairs)
        started.append(Engine(tmp_path / f"engine-{number}", model_folder, mount))
        return started[-1]

    yield start
    for engine in started:
        engine.process.terminate()
    for engine in started:
        engine.process.wait(60)


class StreamingClients:
    """Clients that start one stream after another until the test stops them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = False
        self.completed = 0
        self.failed: list[str] = []

    async def run(self, length: int) -> None:
        body = {
            "model": "demo",
            "prompt": "The ship",
            "max_tokens": length,
            "stream": True,
            "ignore_eos": True,
        }
        async with httpx.AsyncClient(timeout=120) as client:
            while not self._stop:
                async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                    lines = [line async for line in answer.aiter_lines() if line]
                if answer.status_code != 200 or lines[-1] != "data: [DONE]" or "error" in "".join(lines):
                    self.failed.append(f"{answer.status_code}: {lines[-2:]}")
                self.completed += 1

    def stop(self) -> None:
        self._stop = True


async def test_streams_continue_through_two_key_rotations(
    live: Any, until: Any, engines: Callable[[Pairs], Engine], tmp_path: Path
) -> None:
    """Retries and resuming are off, so an interrupted connection would fail a stream."""
    pairs = new_key_pairs()
    running_engines = [engines(pairs), engines(pairs)]
    mount = MountedKeys(tmp_path / "gateway-keys", "gateway")
    mount.write(0, pairs)
    gateway = await live(
        *running_engines,
        wait=False,
        keys=str(mount.path),
        admin_token_file=str(mount.path / "admin.token"),
        max_attempts=1,
        max_resumes=0,
    )
    table = gateway.gateway.table
    await until(lambda: sum(engine.serving for engine in table) == 2, 120)
    crowd = StreamingClients(gateway.url)
    running = [asyncio.create_task(crowd.run(length)) for length in (20, 60, 150, 300)]

    async def admin(of: Pairs) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=60) as client:
            token = (b"token of " + of["gateway"][0]).decode()
            answer = await client.get(
                f"{gateway.admin}/admin/engines", headers={"Authorization": f"Bearer {token}"}
            )
        return answer.json() if answer.status_code == 200 else {}

    async def all_use(of: Pairs, token: Pairs) -> None:
        name = key_pair_name(of["engine"][0], of["gateway"][0])
        async with asyncio.timeout(120):
            while True:
                response = await admin(token)
                if (
                    response
                    and name in response["keys"]
                    and all(e["keys"] == [name] for e in response["engines"])
                ):
                    return
                await asyncio.sleep(0.1)

    await all_use(pairs, pairs)
    for generation in (0, 1):
        later = new_key_pairs()
        streams_before = crowd.completed
        # The gateway gets the new keys first in one rotation and last in the other; both must work.
        order = [mount, *(engine_processes.keys for engine_processes in running_engines)]
        for holder in order if generation else reversed(order):
            holder.write(generation, pairs, later)
            await until(lambda seen=crowd.completed: crowd.completed > seen)
        await all_use(later, pairs)
        assert await admin(later), "the next token is taken before it is the only one"
        for holder in reversed(order) if generation else order:
            holder.write(generation + 1, later)
            await until(lambda seen=crowd.completed: crowd.completed > seen)
        async with asyncio.timeout(120):
            while await admin(pairs):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await all_use(later, later)
        assert crowd.completed > streams_before
        pairs = later
    crowd.stop()
    await asyncio.gather(*running)
    assert crowd.failed == []
    assert all(not link.open_streams for engine in table for link in [engine.link])


async def test_dropped_keys_open_no_connection(
    live: Any, until: Any, engines: Callable[[Pairs], Engine], tmp_path: Path
) -> None:
    pairs, later = new_key_pairs(), new_key_pairs()
    engine = engines(pairs)
    old = MountedKeys(tmp_path / "old", "gateway")
    old.write(0, pairs)
    gateway = await live(engine, wait=False, keys=str(old.path))
    await until(lambda: all(entry.serving for entry in gateway.gateway.table), 120)
    engine.keys.write(1, later)
    await until(lambda: not any(entry.serving for entry in gateway.gateway.table), 120)
    [table_engine] = gateway.gateway.table
    await until(lambda: table_engine.problem != "", 120)
    old.write(1, later)  # the new keys connect, without a restart of gateway or engine
    await until(lambda: table_engine.serving, 120)


def test_key_offers_start_with_the_newest_keys_of_both_sides(tmp_path: Path) -> None:
    pairs, later = new_key_pairs(), new_key_pairs()
    mount = MountedKeys(tmp_path / "keys", "gateway")
    mount.write(4, pairs, later)
    ring = load_ring(mount.path, "gateway")
    ways = key_offers("tcp://10.0.0.1:5557", ring)
    assert [way.endpoint.rpartition(":")[2] for way in ways] == ["5558", "5558", "5557", "5557"]
    expected_names = [
        key_pair_name(e["engine"][0], g["gateway"][0]) for e in (later, pairs) for g in (later, pairs)
    ]
    assert [way.name for way in ways] == expected_names
    assert offer_names(ring) == sorted(expected_names)
    mount.write(5, later)
    [way] = key_offers("tcp://10.0.0.1:5557", load_ring(mount.path, "gateway"))
    assert (way.endpoint, way.name) == ("tcp://10.0.0.1:5558", expected_names[0])


def test_invalid_key_folder_changes_nothing(tmp_path: Path) -> None:
    mount = MountedKeys(tmp_path / "keys", "engine")
    mount.write(0, new_key_pairs())
    folder = KeyFolder(mount.path, "engine")
    ring_before = folder.ring
    for content in (b"\xff1", b"one"):
        (mount.path / "..data" / "generation").write_bytes(content)
        assert not folder.refresh()
        assert folder.ring == ring_before
    with pytest.raises(KeyFileError, match="generation must contain a whole number, not 'one'"):
        load_ring(mount.path, "engine")
    (mount.path / "..data" / "engine.public").write_bytes(b"short")
    with pytest.raises(KeyFileError, match=r"engine\.public contains 5 characters"):
        load_ring(mount.path, "engine")
    assert "secret" not in repr(ring_before.own[0]) and ring_before.own[0].secret.decode() not in repr(
        ring_before
    )
