# SPDX-License-Identifier: Apache-2.0
"""Engines that restart during a key rotation: state of the old process is discarded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from mizzen.gateway.engines.connections import EngineConnections
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.wire.client.stream import StreamLost
from mizzen.wire.messages import PROTOCOL, Welcome


class StubLink:
    """A fake connection to an engine; a fetch of files completes when the test sets `files`."""

    def __init__(self, offer: str, on_change: Callable[[Any], None]) -> None:
        self.offer = offer
        self.welcome: Any = None
        self.silent = self.draining = False
        self.open_streams, self.problem, self.stats = 0, "", None
        self.lost = False
        self.files = asyncio.Event()
        self._on_change = on_change

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def fetch_files(self, names: Any) -> dict[str, bytes]:
        await self.files.wait()
        if self.lost:
            raise StreamLost("connection", "the connection is lost")
        return {}

    def welcome_from(self, incarnation: str, tokenizer: str) -> None:
        self.welcome = Welcome(
            protocol=PROTOCOL,
            engine="e",
            incarnation=incarnation,
            revision="r",
            model="demo",
            tokenizer_hash=tokenizer,
            files={},
            context_length=10,
            vocab_size=16,
            end_token_ids=(),
            page_size=16,
            max_running_requests=4,
            draining=False,
        )
        self._on_change(self)

    def disconnect(self) -> None:
        self.welcome = None
        self._on_change(self)


class StubTexts(TextModels):
    """Fake text models; building the model of the tokenizer hash "broken" fails."""

    async def get_or_build(self, name: str, files: Mapping[str, bytes]) -> TextModel:
        if name == "broken":
            raise ValueError("no tokenizer can be made of them")
        model: Any = SimpleNamespace(name=name)
        self.add(model)
        return model


class RotatedEngine:
    """A gateway's view of one engine, with keys that can be rotated.

    `links` are the connections to the engine, newest last.
    """

    def __init__(self, warm: Callable[[EngineClient], Any] = lambda engine: None) -> None:
        self.links: list[StubLink] = []
        self.ways: list[Any] = ["old"]
        self.engine = EngineClient(
            DiscoveredEngine(name="e", uid="u", endpoint="ipc://e"),
            StubTexts(),
            lambda: None,
            new_warmup=warm,
        )
        self.all = EngineConnections(self._make, lambda: self.ways, self.engine._link_changed)
        self.engine._links, self.engine.link = self.all, self.all.current

    def _make(self, ways: Callable[[], Any], on_change: Callable[[Any], None]) -> Any:
        self.links.append(StubLink(ways()[0], on_change))
        return self.links[-1]

    def rotate(self) -> StubLink:
        """Add a newer pair of keys, and return the connection that is opened with them."""
        self.ways.insert(0, f"new {len(self.ways)}")
        self.all.refresh()
        return self.links[-1]


async def serving(text: str, until: Any) -> RotatedEngine:
    rotated = RotatedEngine()
    rotated.links[0].welcome_from("first", text)
    rotated.links[0].files.set()
    await until(lambda: rotated.engine.serving)
    return rotated


@pytest.mark.parametrize("usable", [True, False])
async def test_restarted_engine_with_other_files_gets_no_prompt_of_the_old_tokenizer(
    until: Any, usable: bool
) -> None:
    """The new process answers on the newer connection before the loss of the old connection is detected."""
    rotated = await serving("a", until)
    engine = rotated.engine
    engine.prefixes.apply_event([1, 2], [])
    second, name = rotated.rotate(), "b" if usable else "broken"
    second.welcome_from("second", name)
    assert engine.link is second
    assert (engine.serving, engine.tokenizer_hash, engine.prefixes.match_prefix([1, 2])) == (False, "", 0)
    rotated.links[0].disconnect()
    second.files.set()
    await until(lambda: engine.serving if usable else engine.state == "broken")
    assert engine.tokenizer_hash == ("b" if usable else "")
    await engine.stop()


@pytest.mark.parametrize("lost", [True, False])
async def test_problem_of_the_old_process_is_not_reported_for_the_new_one(until: Any, lost: bool) -> None:
    rotated = RotatedEngine()
    first = rotated.links[0]
    first.welcome_from("first", "broken")
    await asyncio.sleep(0)  # the engine now waits for the files
    second = rotated.rotate()
    second.welcome_from("second", "b")
    second.files.set()
    await until(lambda: rotated.engine.serving)
    first.lost = lost
    first.files.set()
    await until(lambda: len(rotated.engine._tasks) == 0)
    assert (rotated.engine.state, rotated.engine.problem) == ("serving", "")
    await rotated.engine.stop()


async def test_key_rotation_without_a_restart_keeps_tokenizer_and_prefixes(until: Any) -> None:
    rotated = await serving("a", until)
    rotated.engine.prefixes.apply_event([1, 2], [])
    rotated.rotate().welcome_from("first", "a")
    assert rotated.engine.link is rotated.links[1]
    assert rotated.engine.serving
    assert rotated.engine.prefixes.match_prefix([1, 2]) == 2
    await rotated.engine.stop()


async def test_restarted_engine_with_the_same_files_is_warmed_again(until: Any) -> None:
    """When an engine restarts, the warm-up of its old process is cancelled, and the new process is warmed."""
    started_warmups: list[str] = []
    ended_warmups: list[str] = []

    async def fill(incarnation: str) -> None:
        started_warmups.append(incarnation)
        try:
            await asyncio.Event().wait()
        finally:
            ended_warmups.append(incarnation)

    rotated = RotatedEngine(lambda engine: fill(engine._incarnation))
    first = rotated.links[0]
    first.files.set()
    first.welcome_from("first", "a")
    await until(lambda: started_warmups == ["first"])
    second = rotated.rotate()
    second.files.set()
    second.welcome_from("second", "a")
    assert not rotated.engine.serving
    await until(lambda: started_warmups == ["first", "second"])
    assert ended_warmups == ["first"]
    assert rotated.engine.warming
    assert not rotated.engine.serving
    rotated.engine.stop_warming()
    await until(lambda: rotated.engine.serving)
    await rotated.engine.stop()
