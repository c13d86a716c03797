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


class StubLink:
    """Connection that a test controls; its files arrive when the test releases them."""

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

    def says(self, incarnation: str, tokenizer: str) -> None:
        self.welcome = SimpleNamespace(
            incarnation=incarnation,
            tokenizer_hash=tokenizer,
            model="demo",
            revision="r",
            context_length=10,
            max_running_requests=4,
            files={},
        )
        self._on_change(self)

    def ends(self) -> None:
        self.welcome = None
        self._on_change(self)


class StubTexts(TextModels):
    """Makes a text model of any files, except those of a tokenizer named "broken"."""

    async def get_or_build(self, name: str, files: Mapping[str, bytes]) -> TextModel:
        if name == "broken":
            raise ValueError("no tokenizer can be made of them")
        model: Any = SimpleNamespace(name=name)
        self.add(model)
        return model


class Rotated:
    """Engine whose keys can be rotated; `links` are its connections, newest last."""

    def __init__(self, warm: Callable[[EngineClient], Any] = lambda engine: None) -> None:
        self.links: list[StubLink] = []
        self.ways: list[Any] = ["old"]
        self.engine = EngineClient(
            DiscoveredEngine(name="e", uid="u", endpoint="ipc://e"), StubTexts(), lambda: None, warm=warm
        )
        self.all = EngineConnections(self._make, lambda: self.ways, self.engine._link_changed)
        self.engine._links, self.engine.link = self.all, self.all.current

    def _make(self, ways: Callable[[], Any], on_change: Callable[[Any], None]) -> Any:
        self.links.append(StubLink(ways()[0], on_change))
        return self.links[-1]

    def rotate(self) -> StubLink:
        """Offer newer keys, and return the connection that tries them."""
        self.ways.insert(0, f"new {len(self.ways)}")
        self.all.refresh()
        return self.links[-1]


async def serving(text: str, until: Any) -> Rotated:
    found = Rotated()
    found.links[0].says("first", text)
    found.links[0].files.set()
    await until(lambda: found.engine.serving)
    return found


@pytest.mark.parametrize("usable", [True, False])
async def test_restarted_engine_with_other_files_gets_no_prompt_of_the_old_tokenizer(
    until: Any, usable: bool
) -> None:
    """The new process welcomes the newer connection before the old one is known to be lost."""
    found = await serving("a", until)
    engine = found.engine
    engine.prefixes.apply_event([1, 2], [])
    second, name = found.rotate(), "b" if usable else "broken"
    second.says("second", name)
    assert engine.link is second
    assert (engine.serving, engine.tokenizer_hash, engine.prefixes.match_prefix([1, 2])) == (False, "", 0)
    found.links[0].ends()
    second.files.set()
    await until(lambda: engine.serving if usable else engine.state == "broken")
    assert engine.tokenizer_hash == ("b" if usable else "")
    await engine.stop()


@pytest.mark.parametrize("lost", [True, False])
async def test_problem_of_the_old_process_is_not_reported_for_the_new_one(until: Any, lost: bool) -> None:
    found = Rotated()
    first = found.links[0]
    first.says("first", "broken")
    await asyncio.sleep(0)  # it waits for the files
    second = found.rotate()
    second.says("second", "b")
    second.files.set()
    await until(lambda: found.engine.serving)
    first.lost = lost
    first.files.set()
    await until(lambda: len(found.engine._tasks) == 0)
    assert (found.engine.state, found.engine.problem) == ("serving", "")
    await found.engine.stop()


async def test_key_rotation_without_a_restart_keeps_tokenizer_and_prefixes(until: Any) -> None:
    found = await serving("a", until)
    found.engine.prefixes.apply_event([1, 2], [])
    found.rotate().says("first", "a")
    assert found.engine.link is found.links[1]
    assert found.engine.serving
    assert found.engine.prefixes.match_prefix([1, 2]) == 2
    await found.engine.stop()


async def test_restarted_engine_with_the_same_files_is_warmed_again(until: Any) -> None:
    """A warm-up ends with the process whose cache it fills."""
    begun: list[str] = []
    ended: list[str] = []

    async def fill(incarnation: str) -> None:
        begun.append(incarnation)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(incarnation)

    found = Rotated(lambda engine: fill(engine._incarnation))
    first = found.links[0]
    first.files.set()
    first.says("first", "a")
    await until(lambda: begun == ["first"])
    second = found.rotate()
    second.says("second", "a")
    assert not found.engine.serving
    await until(lambda: begun == ["first", "second"])
    assert ended == ["first"]
    assert found.engine.warming
    assert not found.engine.serving
    found.engine.stop_warming()
    await until(lambda: found.engine.serving)
    await found.engine.stop()
