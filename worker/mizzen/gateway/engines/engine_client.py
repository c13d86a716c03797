# SPDX-License-Identifier: Apache-2.0
"""The gateway's client of one engine: connection, tokenizer, cached prefixes, load and health.

The routing table owns it; the router sees it as a `Candidate`.
"""

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
from mizzen.gateway.engines.engine_files import load_text_model
from mizzen.gateway.engines.health import HealthCheck, HealthLimits, StepProgress
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.gateway.routing.prefix_index import EnginePrefixes, decode_hashes
from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.gateway.text.model_properties import ModelProperties
from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.client.key_offers import KeyOffer
from mizzen.wire.client.stream import EngineStream, StreamLost
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.endpoint import require_safe
from mizzen.wire.messages import Blocks, Welcome

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0
"""Longest pause between two attempts to fetch an engine's tokenizer files."""
NO_MODEL = ModelIdentity("", "", "")


class EngineClient:
    """One engine: its connection, tokenizer, cached prefixes, load and health."""

    def __init__(
        self,
        discovered: DiscoveredEngine,
        texts: TextModels,
        on_change: Callable[[], None],
        mean_request_size: MeanRequestSize | None = None,
        breaker: BreakerLimits | None = None,
        health: HealthLimits | None = None,
        new_warmup: Callable[[EngineClient], Coroutine[Any, Any, None] | None] = lambda engine: None,
    ) -> None:
        """Create an unconnected client; `new_warmup` may return a coroutine that fills the engine's cache."""
        self.discovered = discovered
        self.prefixes = EnginePrefixes()
        self.text_model: TextModel | None = None
        self.properties = ModelProperties()
        self.requests = 0
        self.tokens_in_flight = 0.0
        self.removed = False
        """True if discovery no longer reports the engine."""
        self.breaker = CircuitBreaker(breaker)
        self.health = HealthCheck(health)
        self.step_progress = StepProgress(health or HealthLimits())
        self.awaiting_first_token: set[EngineStream] = set()
        """Streams whose first token has not arrived yet."""
        self.open_verifications = 0
        """Number of golden prompts in progress."""
        self._texts = texts
        self._on_change = on_change
        self._mean_request_size = mean_request_size or MeanRequestSize()
        self._full_until = 0.0
        self._prepared: Welcome | None = None
        self._incarnation = ""
        self._new_warmup = new_warmup
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
        """Connect until `stop` is called; `offers` returns the endpoints and keys to try, best first.

        An engine that sends nothing counts as silent after `timeout` and as lost after `lost` seconds.

        Raises:
            ValueError: the endpoint is malformed, or requires keys and the first offer has none.
        """
        require_safe(self.discovered.endpoint, offers()[0].keys)

        def link(
            offers: Callable[[], Sequence[KeyOffer]], on_change: Callable[[EngineLink], None]
        ) -> EngineLink:
            engine_link = EngineLink(
                self.discovered.endpoint,
                gateway=gateway,
                context=context,
                keys=offers()[0].keys,
                offers=offers,
                timeout_seconds=timeout,
                lost_seconds=lost,
                on_change=lambda: on_change(engine_link),
                on_blocks=lambda message: self._apply_blocks(engine_link, message),
            )
            return engine_link

        self._links = EngineConnections(link, offers, self._link_changed)
        self.link = self._links.current

    async def stop(self) -> None:
        """Close the connection; its streams fail."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, self._links.close(), return_exceptions=True)

    @property
    def key_names(self) -> list[str]:
        """Names of the keys that the connections to the engine use."""
        return self._links.key_names

    # ── routing ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """Name of the engine, the same in every gateway; on Kubernetes, the name of its pod."""
        return self.discovered.name

    @property
    def draining(self) -> bool:
        """True if the engine gets no new requests from now on."""
        return self.removed or self.discovered.terminating or self.link.draining

    @property
    def serving(self) -> bool:
        """True if the engine takes requests: connected, tokenizer loaded, verified, warm, not draining."""
        return self._usable and not self.discovered.awaiting_verification and not self.warming

    @property
    def warming(self) -> bool:
        """True while the engine's cache is being filled, before it serves."""
        return self._warmup is not None

    @property
    def verifying(self) -> bool:
        """True if the engine could serve but awaits verification."""
        return self._usable and self.discovered.awaiting_verification

    @property
    def _usable(self) -> bool:
        link = self.link
        answers = link.welcome is not None and not link.silent
        return answers and self.text_model is not None and not self.draining

    @property
    def full(self) -> bool:
        """True if the engine has its maximum number of requests, is backing off, or its breaker is open."""
        occupied = self.requests >= self.max_requests or not self.breaker.allows
        return occupied or time.monotonic() < self._full_until

    @property
    def suspect(self) -> bool:
        """True if the engine has been silent for too long and has not answered a ping."""
        return self.health.suspect

    @property
    def max_requests(self) -> int:
        """Maximum number of requests in flight on the engine: one per slot, and some more to refill slots."""
        running = self.link.welcome.max_running_requests if self.link.welcome else 0
        return running + max(8, running // 4) if running else 0

    @property
    def load(self) -> float:
        """Estimated number of tokens in flight on the engine, from all gateways."""
        stats = self.link.stats
        foreign = max(0, stats.running + stats.waiting - self.requests) if stats else 0
        return self.tokens_in_flight + foreign * self._mean_request_size.tokens

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and output together; 0 if unknown."""
        return self.link.welcome.context_length if self.link.welcome else 0

    @property
    def accepts_images(self) -> bool:
        """True if requests for the engine may have images."""
        return self.link.accepts_images

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer for requests to the engine; "" if the tokenizer is not loaded yet."""
        return self.text_model.name if self.text_model else ""

    @property
    def model_identity(self) -> ModelIdentity:
        """Identity of the model that the engine serves; `NO_MODEL` if the engine is not connected."""
        welcome = self.link.welcome
        return ModelIdentity(welcome.model, welcome.revision, self.tokenizer_hash) if welcome else NO_MODEL

    @property
    def state(self) -> str:
        """State of the engine, as the admin API reports it."""
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
        """Reason why the engine cannot serve; "" if no problem is known."""
        return self._problem or self.link.problem or ("it does not respond" if self._unresponsive else "")

    @property
    def other_protocol(self) -> bool:
        """True if the engine and this gateway speak incompatible protocol versions."""
        return self.link.other_protocol

    @property
    def revision(self) -> str:
        """Revision of the service that the engine runs."""
        return self.link.welcome.revision if self.link.welcome else self.discovered.revision

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────

    def back_off(self, seconds: float) -> None:
        """Route no requests to the engine for `seconds`, because it was too busy or refused a request."""
        self._full_until = time.monotonic() + seconds
        asyncio.get_running_loop().call_later(seconds, self._on_change)

    def add_request(self, tokens: float) -> None:
        """Count a request of `tokens` tokens as in flight."""
        self.requests += 1
        self.tokens_in_flight += tokens
        self._mean_request_size.add_request(tokens)

    def remove_request(self, tokens: float) -> None:
        """Stop counting a request of `tokens` tokens as in flight."""
        self.requests -= 1
        self.tokens_in_flight = self.tokens_in_flight - tokens if self.requests else 0.0
        self._on_change()

    def record_success(self, period: int) -> None:
        """Record that a request of the breaker's `period` got its first token or its complete answer."""
        previous = self.breaker.state
        self.breaker.record_success(period)
        if previous is not self.breaker.state:
            log.info("engine recovered, its circuit breaker closed", extra={"fields": {"engine": self.name}})
            self._on_change()

    def record_failure(self, period: int) -> None:
        """Record that a request of the breaker's `period` was lost, or got no token in time."""
        if not self.breaker.record_failure(period):
            return
        pause, times = self.breaker.remaining_seconds, self.breaker.open_count
        fields = {"engine": self.name, "seconds": round(pause, 2), "times": times}
        log.warning("engine keeps failing, its circuit breaker opened", extra={"fields": fields})
        asyncio.get_running_loop().call_later(pause + 0.01, self._on_change)

    def check_health(self, replaceable: bool = False) -> None:
        """Try newer keys, check whether the engine responds, and fail its requests if it is stuck.

        `replaceable` is true if another engine could take over the requests.
        """
        self._links.refresh()
        if self.health.check(self.link):
            fields = {"engine": self.name, "suspect": self.suspect, "waiting": len(self.awaiting_first_token)}
            text = "engine does not respond" if self.suspect else "engine responds again"
            log.warning(text, extra={"fields": fields})
            self._on_change()
        was_unresponsive, self._unresponsive = self._unresponsive, self.suspect and self._silent_beyond_step()
        if was_unresponsive is not self._unresponsive:
            self._on_change()
        if self.step_progress.check_stuck(self.link, replaceable):
            fields = {"engine": self.name, "streams": self.link.open_streams}
            log.warning("engine makes no progress", extra={"fields": fields})
            self.link.give_up(StreamLost("stuck", f"{self.name} makes no progress"))

    def _silent_beyond_step(self) -> bool:
        """Return whether the engine is idle, or has been silent for longer than a step may take."""
        stats = self.link.stats
        if stats is None or self.requests:
            return stats is not None and 0 < stats.patience_seconds < self.link.quiet_seconds
        return not (stats.running or stats.waiting)

    def fail_waiting(self, reason: str) -> None:
        """Fail the requests that have received no token yet, so that they are retried on other engines."""
        for stream in tuple(self.awaiting_first_token):
            stream.abort()
            stream.fail(StreamLost("suspect", reason))

    def _link_changed(self, link: EngineLink) -> None:
        """React to a change of the current link; ignore former links, which only finish their requests."""
        self.link = self._links.current
        if link is self.link:
            self._changed()

    def _changed(self) -> None:
        welcome = self.link.welcome
        if welcome is not None and welcome.incarnation != self._incarnation:
            self._incarnation = welcome.incarnation
            self.breaker.reset()
            self.stop_warming()
            # Newer keys may reach the new process before the old connection is lost.
            self._discard_process_state()
        if welcome is None:
            self._discard_process_state()
        elif self._prepared is not welcome:
            self._prepared, self._problem = welcome, ""
            self._spawn(self._prepare(welcome))
        self._on_change()

    def _discard_process_state(self) -> None:
        """Discard the tokenizer and the cached prefixes, which may differ in a new engine process."""
        self.text_model = self._prepared = None
        self.prefixes.clear()

    def _apply_blocks(self, link: EngineLink, message: Blocks) -> None:
        if link is self.link:
            stored, evicted = decode_hashes(message.stored), decode_hashes(message.evicted)
            self.prefixes.apply_event(stored, evicted, message.reset)

    async def _prepare(self, welcome: Welcome) -> None:
        """Fetch the engine's tokenizer; retry until that succeeds or the connection ends."""
        pause = FIRST_PAUSE_SECONDS
        while self.link.welcome is welcome:
            try:
                text, properties = await load_text_model(self.link, self._texts, welcome)
            except StreamLost as lost:  # the connection ended, or a part of a file did not arrive
                if self.link.welcome is welcome:
                    self._problem = str(lost)
            except (ValueError, MalformedFrame) as error:
                self._reject_files(welcome, str(error))
                return
            except Exception as error:  # the files come from the engine: any failure must be reported
                log.exception("cannot read an engine's tokenizer files")
                self._reject_files(welcome, f"{type(error).__name__}: {error}")
                return
            else:
                self._use_text_model(welcome, text, properties)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _reject_files(self, welcome: Welcome, reason: str) -> None:
        if self.link.welcome is not welcome:  # the files belong to a previous process
            return
        self._problem = reason
        log.error("cannot use engine", extra={"fields": {"engine": self.name, "reason": reason}})
        self._on_change()

    def _use_text_model(self, welcome: Welcome, text: TextModel, properties: ModelProperties) -> None:
        if self.link.welcome is welcome:
            self.text_model, self.properties, self._problem = text, properties, ""
            self._texts.add(text)
            self._start_warmup(welcome)
            fields = {"engine": self.name, "revision": self.revision}
            log.info(f"engine is {self.state}", extra={"fields": fields})
            self._on_change()

    def stop_warming(self) -> None:
        """Stop the warm-up, so that the engine serves at once."""
        if self._warmup is not None:
            self._warmup.cancel()

    def _start_warmup(self, welcome: Welcome) -> None:
        """Start to fill the engine's cache, unless this was already done for the same engine process."""
        work = self._new_warmup(self) if self._warmed_incarnation != welcome.incarnation else None
        self._warmed_incarnation = welcome.incarnation
        if work is None:
            return
        task = self._warmup = self._spawn(work)

        def ended(task: asyncio.Task[None]) -> None:
            if self._warmup is task:
                self._warmup = None
            self._on_change()

        task.add_done_callback(ended)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
