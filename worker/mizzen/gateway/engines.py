"""The routing table: engines that were discovered, their connections, and what is in work there."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from mizzen.gateway.breaker import Breaker, BreakerLimits
from mizzen.gateway.route.index import DEFAULT_BLOCKS, EnginePrefixes, PrefixBudget, names_of
from mizzen.gateway.route.plugins import Pin
from mizzen.gateway.suspicion import Suspicion, SuspicionLimits
from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.gateway.text.tokenizer import FILES
from mizzen.wire.client import Link
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.keys import WireKeys
from mizzen.wire.messages import Blocks, Welcome
from mizzen.wire.stream import EngineStream, StreamLost

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0
"""Between two tries to get an engine's files."""
FOREIGN_REQUEST_TOKENS = 512.0
"""Counted for a request of another gateway until this one knows how large requests are."""
MEMORY = 0.02
"""Weight of the newest request in the mean size of requests."""
NO_PIN = Pin("", "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An engine as discovery reports it."""

    name: str
    uid: str
    endpoint: str
    revision: str = ""
    terminating: bool = False
    """It ends what it has, and gets nothing new."""


class TypicalRequest:
    """How many tokens a request of this gateway has in work on average; one of another counts as much."""

    def __init__(self) -> None:
        self.tokens = FOREIGN_REQUEST_TOKENS

    def saw(self, tokens: float) -> None:
        """Note a request."""
        self.tokens += MEMORY * (tokens - self.tokens)


class Engine:
    """One engine: its connection, tokenizer, the prefixes that it holds, its load and its health."""

    def __init__(
        self,
        found: Found,
        texts: TextModels,
        on_change: Callable[[], None],
        typical: TypicalRequest | None = None,
        breaker: BreakerLimits | None = None,
        suspicion: SuspicionLimits | None = None,
    ) -> None:
        self.found = found
        self.prefixes = EnginePrefixes()
        self.text: TextModel | None = None
        self.requests = 0
        self.tokens = 0.0
        self.gone = False
        """Discovery no longer reports it."""
        self.breaker = Breaker(breaker)
        self.suspicion = Suspicion(suspicion)
        self.waiting: set[EngineStream] = set()
        """Requests without a first token."""
        self._texts = texts
        self._on_change = on_change
        self._typical = typical or TypicalRequest()
        self._full_until = 0.0
        self._prepared: Welcome | None = None
        self._incarnation = ""
        self._problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.link: Link

    def start(
        self,
        gateway: str,
        context: zmq.asyncio.Context,
        keys: WireKeys | None,
        *,
        timeout: float,
        lost: float,
    ) -> None:
        """Connect, and stay connected until `stop`.

        Raises:
            ValueError: the endpoint is malformed, or needs keys.
        """
        self.link = Link(
            self.found.endpoint,
            gateway=gateway,
            context=context,
            keys=keys,
            timeout_seconds=timeout,
            lost_seconds=lost,
            on_change=self._changed,
            on_blocks=self._blocks,
        )
        self._spawn(self.link.run())

    async def stop(self) -> None:
        """Close the connection; its streams fail."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── what routing asks ─────────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """See `Candidate`."""
        return self.found.name

    @property
    def draining(self) -> bool:
        """Whether it gets nothing new for good."""
        return self.gone or self.found.terminating or self.link.draining

    @property
    def serving(self) -> bool:
        """See `Candidate`."""
        link = self.link
        answers = link.welcome is not None and not link.silent
        return answers and self.text is not None and not self.draining

    @property
    def full(self) -> bool:
        """See `Candidate`."""
        if self.requests >= self.room or not self.breaker.allows:
            return True
        return time.monotonic() < self._full_until

    @property
    def suspect(self) -> bool:
        """See `Candidate`."""
        return self.suspicion.suspect

    @property
    def room(self) -> int:
        """Requests that it runs at once, and a quarter more that queue there so that no slot stays empty."""
        running = self.link.welcome.max_running_requests if self.link.welcome else 0
        return running + max(8, running // 4) if running else 0

    @property
    def load(self) -> float:
        """See `Candidate`."""
        stats = self.link.stats
        foreign = max(0, stats.running + stats.waiting - self.requests) if stats else 0
        return self.tokens + foreign * self._typical.tokens

    @property
    def context_length(self) -> int:
        """See `Candidate`."""
        return self.link.welcome.context_length if self.link.welcome else 0

    @property
    def tokenizer_hash(self) -> str:
        """Of the tokenizer that its requests must be made with."""
        return self.text.name if self.text else ""

    @property
    def pin(self) -> Pin:
        """See `Candidate`."""
        welcome = self.link.welcome
        return Pin(welcome.model, welcome.revision, self.tokenizer_hash) if welcome else NO_PIN

    @property
    def state(self) -> str:
        """Its state in the admin API."""
        if self.draining:
            return "draining"
        if self.serving:
            return "serving"
        return "broken" if self._problem or self.link.problem else "connecting"

    @property
    def problem(self) -> str:
        """What is wrong with it."""
        return self._problem or self.link.problem

    @property
    def revision(self) -> str:
        """The revision that it serves."""
        return self.link.welcome.revision if self.link.welcome else self.found.revision

    # ── what happens to it ────────────────────────────────────────────────────────────────────────────────

    def leave_alone(self, seconds: float) -> None:
        """Route nothing there for a while: it has refused a request."""
        self._full_until = time.monotonic() + seconds
        asyncio.get_running_loop().call_later(seconds, self._on_change)

    def take(self, tokens: float) -> None:
        """Count a request as in work."""
        self.requests += 1
        self.tokens += tokens
        self._typical.saw(tokens)

    def release(self, tokens: float) -> None:
        """End the count of a request."""
        self.requests -= 1
        self.tokens = self.tokens - tokens if self.requests else 0.0
        self._on_change()

    def succeeded(self, period: int) -> None:
        """Note that a request got its first token, or its answer."""
        closed = self.breaker.state
        self.breaker.success(period)
        if closed is not self.breaker.state:
            log.info("engine gets requests again", extra={"fields": {"engine": self.name}})
            self._on_change()

    def failed(self, period: int) -> None:
        """Note that a request was lost here, or got no token in time."""
        if not self.breaker.failure(period):
            return
        pause = self.breaker.remaining
        fields = {"engine": self.name, "seconds": round(pause, 2), "times": self.breaker.opened}
        log.warning("engine fails and is left alone", extra={"fields": fields})
        asyncio.get_running_loop().call_later(pause + 0.01, self._on_change)

    def look(self) -> None:
        """Look whether it should have been heard."""
        if self.suspicion.look(self.link):
            fields = {"engine": self.name, "suspect": self.suspect, "waiting": len(self.waiting)}
            log.warning("engine should have been heard", extra={"fields": fields})
            self._on_change()

    def give_up_waiting(self, reason: str) -> None:
        """Fail the requests that have no token yet, so that they are tried elsewhere."""
        for stream in tuple(self.waiting):
            stream.abort()
            stream.fail(StreamLost("suspect", reason))

    def _changed(self) -> None:
        welcome = self.link.welcome
        if welcome is not None and welcome.incarnation != self._incarnation:
            self._incarnation = welcome.incarnation
            self.breaker.reset()
        if welcome is None:
            self.text = self._prepared = None
            self.prefixes.clear()
        elif self._prepared is not welcome:
            self._prepared, self._problem = welcome, ""
            self._spawn(self._prepare(welcome))
        self._on_change()

    def _blocks(self, message: Blocks) -> None:
        self.prefixes.event(names_of(message.stored), names_of(message.evicted), message.reset)

    async def _prepare(self, welcome: Welcome) -> None:
        """Get the tokenizer that requests to this engine must be made with, while it stays connected."""
        pause = FIRST_PAUSE_SECONDS
        while self.link.welcome is welcome:
            try:
                text = await self._fetch(welcome.tokenizer_hash)
            except StreamLost as lost:  # with the connection, which ends this, or a part that did not come
                self._problem = str(lost)
            except (ValueError, MalformedFrame) as error:
                self._unusable(str(error))
                return
            except Exception as error:  # the files are the engine's: whatever they do here must be said
                log.exception("a model's files cannot be read")
                self._unusable(f"{type(error).__name__}: {error}")
                return
            else:
                self._use(welcome, text)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _fetch(self, name: str) -> TextModel:
        """Return a text model that is known already, or made from the engine's files.

        Raises:
            StreamLost: the engine did not send them.
            ValueError, MalformedFrame: they are none of which a text model can be made.
        """
        text = self._texts.get(name)
        if text is None:
            files = await self.link.fetch_files(FILES)
            text = await self._texts.build(name, files)
        return text

    def _unusable(self, reason: str) -> None:
        self._problem = reason
        log.error("engine cannot be used", extra={"fields": {"engine": self.name, "reason": reason}})
        self._on_change()

    def _use(self, welcome: Welcome, text: TextModel) -> None:
        if self.link.welcome is welcome:
            self.text, self._problem = text, ""
            self._texts.add(text)
            log.info("engine is serving", extra={"fields": {"engine": self.name, "revision": self.revision}})
            self._on_change()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class EngineTable:
    """All engines. `on_change` is called whenever routing may have got another answer."""

    def __init__(
        self,
        *,
        gateway: str,
        keys: WireKeys | None,
        timeout_seconds: float,
        lost_seconds: float,
        suspect_seconds: float = 2.0,
        breaker: BreakerLimits | None = None,
        prefix_blocks: int = DEFAULT_BLOCKS,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.synced = False
        """Whether discovery has reported the engines at least once."""
        self.on_change = on_change
        self._gateway = gateway
        self._keys = keys
        self._timeout = timeout_seconds
        self._lost = lost_seconds
        self._suspicion = SuspicionLimits(min(suspect_seconds, timeout_seconds))
        self._breaker = breaker
        self._budget = PrefixBudget(prefix_blocks)
        self._typical = TypicalRequest()
        self._watching: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._texts = TextModels()
        self._engines: dict[tuple[str, str], Engine] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Engine]:
        return iter(tuple(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def sync(self, found: Iterable[Found]) -> None:
        """Take the whole set of engines that discovery knows."""
        wanted = {(one.uid, one.endpoint): one for one in found}
        for key, one in wanted.items():
            engine = self._engines.get(key)
            if engine is not None:
                engine.found, engine.gone = one, False
            elif not one.terminating:
                self._add(key, one)
        for key, engine in self._engines.items():
            engine.gone = key not in wanted
        self.synced = True
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._changed()

    @property
    def serving(self) -> bool:
        """Whether any engine serves."""
        return any(engine.serving for engine in self._engines.values())

    def capacity(self) -> int:
        """Return how many requests may be in work: room where some are taken, and what other engines hold."""
        return sum(e.room if e.serving and not e.full else e.requests for e in self._engines.values())

    def why_closed(self) -> str:
        """Return why no engine takes a request."""
        if not self.serving:
            return "no engine is ready"
        return "all engines are full"

    def choose_text(self, keep: TextModel | None, tried: Collection[Engine]) -> TextModel | None:
        """Return the text model that a request is made with: `keep` while an engine that has it is left.

        Else that of an engine drawn at random, so that revisions get requests by their number of engines.
        """
        left = [e for e in self if e.serving and not e.full and e not in tried]
        if keep is not None and (not left or any(e.tokenizer_hash == keep.name for e in left)):
            return keep
        return random.choice(left).text if left else None

    def longest_context(self, text: TextModel) -> int:
        """Return the longest context among the serving engines of a text model."""
        return max((e.context_length for e in self if e.serving and e.tokenizer_hash == text.name), default=0)

    async def close(self) -> None:
        """Close all connections; their streams fail."""
        watching = [self._watching] if self._watching is not None else []
        for task in watching:
            task.cancel()
        await asyncio.gather(
            *(engine.stop() for engine in self), *self._stopping, *watching, return_exceptions=True
        )
        self._engines.clear()
        self._context.destroy(linger=0)

    def _add(self, key: tuple[str, str], found: Found) -> None:
        engine = Engine(found, self._texts, self._changed, self._typical, self._breaker, self._suspicion)
        try:
            engine.start(self._gateway, self._context, self._keys, timeout=self._timeout, lost=self._lost)
        except ValueError as error:
            log.error("engine left out", extra={"fields": {"engine": found.name, "reason": str(error)}})
            return
        self._engines[key] = engine
        self._share()

    def _share(self) -> None:
        self._budget.share([engine.prefixes for engine in self])

    async def _watch(self) -> None:
        """Suspect engines that should have been heard, and try elsewhere what waits there."""
        pause = self._suspicion.look_every
        last = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            late, last = time.monotonic() - last > 2 * pause, time.monotonic()
            if late:  # this loop was held up itself: let it read what has arrived
                continue
            for engine in self:
                engine.look()
                if engine.suspect and engine.waiting and self._spare(engine):
                    engine.give_up_waiting(f"{engine.name} should have been heard")

    def _spare(self, suspect: Engine) -> bool:
        """Tell whether another engine can take what a suspect one has."""
        return any(e.serving and not e.suspect and not e.full and e.pin == suspect.pin for e in self)

    def _changed(self) -> None:
        for key, engine in tuple(self._engines.items()):
            if engine.gone and not engine.requests:
                del self._engines[key]
                self._share()
                task = asyncio.get_running_loop().create_task(engine.stop())
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)
        self.on_change()
