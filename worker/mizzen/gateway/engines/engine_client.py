"""One engine as the gateway sees it: its connection, tokenizer, cached prefixes, load and health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import zmq.asyncio

from mizzen.gateway.engines.circuit_breaker import BreakerLimits, CircuitBreaker
from mizzen.gateway.engines.connections import EngineConnections
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine, MeanRequestSize
from mizzen.gateway.engines.health import HealthCheck, HealthLimits, StepProgress
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.gateway.routing.prefix_index import EnginePrefixes, decode_hashes
from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.gateway.text.tokenizer import wanted
from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.client.key_offers import KeyOffer
from mizzen.wire.client.stream import EngineStream, StreamLost
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.endpoint import require_safe
from mizzen.wire.messages import Blocks, Welcome

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0
"""Between two tries to get an engine's files."""
NO_MODEL = ModelIdentity("", "", "")


class EngineClient:
    """One engine: its connection, tokenizer, the prefixes that it holds, its load and its health."""

    def __init__(
        self,
        found: DiscoveredEngine,
        texts: TextModels,
        on_change: Callable[[], None],
        mean_request_size: MeanRequestSize | None = None,
        breaker: BreakerLimits | None = None,
        health: HealthLimits | None = None,
        warm: Callable[[EngineClient], Coroutine[Any, Any, None] | None] = lambda engine: None,
    ) -> None:
        """Make the table's view of an engine; `warm` returns what fills its cache, if anything should."""
        self.discovered = found
        self.prefixes = EnginePrefixes()
        self.text_model: TextModel | None = None
        self.requests = 0
        self.tokens_in_flight = 0.0
        self.removed = False
        """Discovery no longer reports it."""
        self.breaker = CircuitBreaker(breaker)
        self.health = HealthCheck(health)
        self.step_progress = StepProgress(health or HealthLimits())
        self.awaiting_first_token: set[EngineStream] = set()
        """Requests without a first token."""
        self.open_verifications = 0
        """Golden prompts that it is asked now."""
        self._texts = texts
        self._on_change = on_change
        self._mean_request_size = mean_request_size or MeanRequestSize()
        self._full_until = 0.0
        self._prepared: Welcome | None = None
        self._incarnation = ""
        self._new_warmup = warm
        self._warmed_incarnation = ""
        self._warmup: asyncio.Task[None] | None = None
        self._unresponsive = False
        self._problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.link: EngineLink
        self._links: EngineConnections

    def start(
        self,
        gateway: str,
        context: zmq.asyncio.Context,
        offers: Callable[[], Sequence[KeyOffer]],
        *,
        timeout: float,
        lost: float,
    ) -> None:
        """Connect, and stay connected until `stop`; `offers` says how, the best first.

        Raises:
            ValueError: the endpoint is malformed, or needs keys.
        """
        require_safe(self.discovered.endpoint, offers()[0].keys)

        def link(ways: Callable[[], Sequence[KeyOffer]], on_change: Callable[[EngineLink], None]) -> EngineLink:
            made = EngineLink(
                self.discovered.endpoint,
                gateway=gateway,
                context=context,
                keys=ways()[0].keys,
                offers=ways,
                timeout_seconds=timeout,
                lost_seconds=lost,
                on_change=lambda: on_change(made),
                on_blocks=lambda message: self._apply_blocks(made, message),
            )
            return made

        self._links = EngineConnections(link, offers, self._link_changed)
        self.link = self._links.current

    async def stop(self) -> None:
        """Close the connection; its streams fail."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self._links.close(), return_exceptions=True)

    @property
    def key_names(self) -> list[str]:
        """Names of the keys that its connections use."""
        return self._links.key_names

    # ── what routing asks ─────────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """See `Candidate`."""
        return self.discovered.name

    @property
    def draining(self) -> bool:
        """Whether it gets nothing new for good."""
        return self.removed or self.discovered.terminating or self.link.draining

    @property
    def serving(self) -> bool:
        """See `Candidate`."""
        return self._usable and not self.discovered.awaiting_verification and not self.warming

    @property
    def warming(self) -> bool:
        """Whether its cache is being filled."""
        return self._warmup is not None

    @property
    def verifying(self) -> bool:
        """Whether it could serve, and waits to be verified."""
        return self._usable and self.discovered.awaiting_verification

    @property
    def _usable(self) -> bool:
        link = self.link
        answers = link.welcome is not None and not link.silent
        return answers and self.text_model is not None and not self.draining

    @property
    def full(self) -> bool:
        """See `Candidate`."""
        if self.requests >= self.max_requests or not self.breaker.allows:
            return True
        return time.monotonic() < self._full_until

    @property
    def suspect(self) -> bool:
        """See `Candidate`."""
        return self.health.suspect

    @property
    def max_requests(self) -> int:
        """Requests that it runs at once, and a quarter more that queue there so that no slot stays empty."""
        running = self.link.welcome.max_running_requests if self.link.welcome else 0
        return running + max(8, running // 4) if running else 0

    @property
    def load(self) -> float:
        """See `Candidate`."""
        stats = self.link.stats
        foreign = max(0, stats.running + stats.waiting - self.requests) if stats else 0
        return self.tokens_in_flight + foreign * self._mean_request_size.tokens

    @property
    def context_length(self) -> int:
        """See `Candidate`."""
        return self.link.welcome.context_length if self.link.welcome else 0

    @property
    def tokenizer_hash(self) -> str:
        """Of the tokenizer that its requests must be made with."""
        return self.text_model.name if self.text_model else ""

    @property
    def model_identity(self) -> ModelIdentity:
        """See `Candidate`."""
        welcome = self.link.welcome
        return ModelIdentity(welcome.model, welcome.revision, self.tokenizer_hash) if welcome else NO_MODEL

    @property
    def state(self) -> str:
        """Its state in the admin API."""
        if self.draining:
            return "draining"
        if self.serving and not self._unresponsive:
            return "suspect" if self.suspect else "serving"
        if self.verifying:
            return "verifying"
        if self._usable and not self._unresponsive:
            return "warming"
        return "broken" if self.problem else "connecting"

    @property
    def problem(self) -> str:
        """What is wrong with it."""
        return (
            self._problem or self.link.problem or ("it should have been heard" if self._unresponsive else "")
        )

    @property
    def other_protocol(self) -> bool:
        """Whether it and this gateway do not understand each other, and never will."""
        return self.link.other_protocol

    @property
    def revision(self) -> str:
        """The revision that it serves."""
        return self.link.welcome.revision if self.link.welcome else self.discovered.revision

    # ── what happens to it ────────────────────────────────────────────────────────────────────────────────

    def back_off(self, seconds: float) -> None:
        """Route nothing there for a while: it has refused a request."""
        self._full_until = time.monotonic() + seconds
        asyncio.get_running_loop().call_later(seconds, self._on_change)

    def add_request(self, tokens: float) -> None:
        """Count a request as in work."""
        self.requests += 1
        self.tokens_in_flight += tokens
        self._mean_request_size.add_request(tokens)

    def remove_request(self, tokens: float) -> None:
        """End the count of a request."""
        self.requests -= 1
        self.tokens_in_flight = self.tokens_in_flight - tokens if self.requests else 0.0
        self._on_change()

    def record_success(self, period: int) -> None:
        """Note that a request got its first token, or its answer."""
        closed = self.breaker.state
        self.breaker.record_success(period)
        if closed is not self.breaker.state:
            log.info("engine gets requests again", extra={"fields": {"engine": self.name}})
            self._on_change()

    def record_failure(self, period: int) -> None:
        """Note that a request was lost here, or got no token in time."""
        if not self.breaker.record_failure(period):
            return
        pause = self.breaker.remaining_seconds
        fields = {"engine": self.name, "seconds": round(pause, 2), "times": self.breaker.open_count}
        log.warning("engine fails and is left alone", extra={"fields": fields})
        asyncio.get_running_loop().call_later(pause + 0.01, self._on_change)

    def check_health(self, spare: bool = False) -> None:
        """Look whether it should have been heard, goes on, and knows newer keys.

        `spare` tells whether another engine could take what it has.
        """
        self._links.refresh()
        if self.health.check(self.link):
            fields = {"engine": self.name, "suspect": self.suspect, "waiting": len(self.awaiting_first_token)}
            log.warning("engine should have been heard", extra={"fields": fields})
            self._on_change()
        hung, self._unresponsive = self._unresponsive, self.suspect and self._silent_beyond_step()
        if hung is not self._unresponsive:
            self._on_change()
        if self.step_progress.check_stuck(self.link, spare):
            fields = {"engine": self.name, "streams": self.link.open_streams}
            log.warning("engine makes no step", extra={"fields": fields})
            self.link.give_up(StreamLost("stuck", f"{self.name} makes no step"))

    def _silent_beyond_step(self) -> bool:
        """Whether its silence cannot be a long step: nothing runs, or it says that steps are shorter."""
        stats = self.link.stats
        if stats is None or self.requests:
            return stats is not None and 0 < stats.patience_seconds < self.link.quiet_seconds
        return not (stats.running or stats.waiting)

    def fail_waiting(self, reason: str) -> None:
        """Fail the requests that have no token yet, so that they are tried elsewhere."""
        for stream in tuple(self.awaiting_first_token):
            stream.abort()
            stream.fail(StreamLost("suspect", reason))

    def _link_changed(self, link: EngineLink) -> None:
        """Take what a connection says; of one that only ends what it has, nothing counts."""
        self.link = self._links.current
        if link is self.link:
            self._changed()

    def _changed(self) -> None:
        welcome = self.link.welcome
        if welcome is not None and welcome.incarnation != self._incarnation:
            self._incarnation = welcome.incarnation
            self.breaker.reset()
            self.stop_warming()
            self._discard_process_state()  # newer keys may reach the new process before the former connection is lost
        if welcome is None:
            self._discard_process_state()
        elif self._prepared is not welcome:
            self._prepared, self._problem = welcome, ""
            self._spawn(self._prepare(welcome))
        self._on_change()

    def _discard_process_state(self) -> None:
        """Void what is known of a process: the next one may have other files, and has an empty cache."""
        self.text_model = self._prepared = None
        self.prefixes.clear()

    def _apply_blocks(self, link: EngineLink, message: Blocks) -> None:
        if link is self.link:
            self.prefixes.apply_event(
                decode_hashes(message.stored), decode_hashes(message.evicted), message.reset
            )

    async def _prepare(self, welcome: Welcome) -> None:
        """Get the tokenizer that requests to this engine must be made with, while it stays connected."""
        pause = FIRST_PAUSE_SECONDS
        while self.link.welcome is welcome:
            try:
                text = await self._fetch(welcome)
            except StreamLost as lost:  # with the connection, which ends this, or a part that did not come
                if self.link.welcome is welcome:
                    self._problem = str(lost)
            except (ValueError, MalformedFrame) as error:
                self._reject_files(welcome, str(error))
                return
            except Exception as error:  # the files are the engine's: whatever they do here must be said
                log.exception("a model's files cannot be read")
                self._reject_files(welcome, f"{type(error).__name__}: {error}")
                return
            else:
                self._use_text_model(welcome, text)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _fetch(self, welcome: Welcome) -> TextModel:
        """Return a text model that is known already, or made from the engine's files.

        Raises:
            StreamLost: the engine did not send them.
            ValueError, MalformedFrame: they are none of which a text model can be made.
        """
        name = welcome.tokenizer_hash
        text = self._texts.get(name)
        if text is None:
            files = await self.link.fetch_files(wanted(welcome.files))
            text = await self._texts.build(name, files)
        return text

    def _reject_files(self, welcome: Welcome, reason: str) -> None:
        if self.link.welcome is not welcome:  # said of another process, or of none
            return
        self._problem = reason
        log.error("engine cannot be used", extra={"fields": {"engine": self.name, "reason": reason}})
        self._on_change()

    def _use_text_model(self, welcome: Welcome, text: TextModel) -> None:
        if self.link.welcome is welcome:
            self.text_model, self._problem = text, ""
            self._texts.add(text)
            self._start_warmup(welcome)
            log.info(
                f"engine is {self.state}", extra={"fields": {"engine": self.name, "revision": self.revision}}
            )
            self._on_change()

    def stop_warming(self) -> None:
        """Let it serve at once."""
        if self._warmup is not None:
            self._warmup.cancel()

    def _start_warmup(self, welcome: Welcome) -> None:
        """Fill the cache of a process that has just begun, once."""
        work = self._new_warmup(self) if self._warmed_incarnation != welcome.incarnation else None
        self._warmed_incarnation = welcome.incarnation
        if work is None:
            return
        task = self._warmup = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._warmup is task:
                self._warmup = None
            self._on_change()

        task.add_done_callback(ended)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
