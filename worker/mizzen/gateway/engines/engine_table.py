# SPDX-License-Identifier: Apache-2.0
"""Routing table: the discovered engines of one service, with their state and load.

Discovery calls `sync`; the dispatcher and the router read it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

import zmq.asyncio

from mizzen.gateway.engines.circuit_breaker import BreakerLimits
from mizzen.gateway.engines.discovered_engine import DiscoveredEngine, MeanRequestSize
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.engines.health import HealthLimits
from mizzen.gateway.errors import unavailable
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.gateway.routing.prefix_index import DEFAULT_BLOCKS, PrefixBudget
from mizzen.gateway.routing.warmup import CacheWarmer
from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.gateway.text.model_properties import ModelProperties
from mizzen.wire.client.key_offers import KeyOffer, key_offers, offer_names
from mizzen.wire.curve_keys import KeyRing

log = logging.getLogger(__name__)


class EngineTable:
    """All engines of a service. `on_change` is called whenever their state or capacity may have changed."""

    def __init__(
        self,
        *,
        gateway: str,
        keys: KeyRing | None,
        timeout_seconds: float,
        lost_seconds: float,
        suspect_seconds: float = 2.0,
        stuck_seconds: float = 60.0,
        breaker: BreakerLimits | None = None,
        prefix_blocks: int = DEFAULT_BLOCKS,
        cache_warmer: CacheWarmer | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.synced = False
        """True once discovery has reported the engines."""
        self.on_change = on_change
        self._gateway = gateway
        self._keys = keys
        self._timeout = timeout_seconds
        self._lost = lost_seconds
        self._health_limits = HealthLimits(
            min(suspect_seconds, timeout_seconds), stuck_seconds, timeout_seconds
        )
        self._breaker = breaker
        self.cache_warmer = cache_warmer
        """Warmer of new engines' caches; None if caches are not warmed."""
        self._budget = PrefixBudget(prefix_blocks)
        self._mean_request_size = MeanRequestSize()
        self._watching: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._texts = TextModels()
        self._engines: dict[tuple[str, str], EngineClient] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[EngineClient]:
        return iter(tuple(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def sync(self, discovered: Iterable[DiscoveredEngine]) -> None:
        """Apply the complete set of engines that discovery reports."""
        reported = {(info.uid, info.endpoint): info for info in discovered}
        for key, info in reported.items():
            engine = self._engines.get(key)
            if engine is not None:
                engine.discovered, engine.removed = info, False
            elif not info.terminating:
                self._add(key, info)
        for key, engine in self._engines.items():
            engine.removed = key not in reported
        self.synced = True
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._changed()

    @property
    def key_names(self) -> list[str]:
        """Sorted names of the keys that connections may use."""
        return offer_names(self._keys)

    def use_keys(self, keys: KeyRing | None) -> None:
        """Use `keys` for new connections; connections with other keys close after their last request."""
        if keys == self._keys:
            return
        self._keys = keys
        for engine in self:
            engine.check_health()
        self._changed()

    def _offers(self, endpoint: str) -> tuple[KeyOffer, ...]:
        return key_offers(endpoint, self._keys)

    @property
    def serving(self) -> bool:
        """True if any engine serves."""
        return any(engine.serving for engine in self._engines.values())

    @property
    def uses_block_hashes(self) -> bool:
        """True if block hashes of prompts are of use: there are several engines, or caches are warmed."""
        return len(self) > 1 or (self.cache_warmer is not None and self.cache_warmer.enabled)

    @property
    def _has_capacity(self) -> bool:
        return any(engine.serving and not engine.full for engine in self._engines.values())

    def capacity(self) -> int:
        """Return how many requests may be in flight on all engines together.

        An engine that takes requests contributes its maximum; any other engine contributes the number of its
        requests in flight.
        """
        return sum(e.max_requests if e.serving and not e.full else e.requests for e in self._engines.values())

    def unavailable_reason(self) -> str:
        """Return the reason why no engine can take a request now."""
        if not self.serving:
            return "no engine is ready"
        return "all engines are full"

    def find_sole_model(self) -> ModelIdentity | None:
        """Return the identity of the model of all serving engines; None if there are several, or none."""
        models = {engine.model_identity for engine in self._engines.values() if engine.serving}
        return models.pop() if len(models) == 1 else None

    def require_images(self) -> None:
        """Check that a serving engine accepts images, or that none serves.

        Raises:
            ApiError: 503 if engines serve, but none of them accepts images.
        """
        serving = [engine for engine in self._engines.values() if engine.serving]
        if serving and not any(engine.accepts_images for engine in serving):
            raise unavailable("no engine that accepts images is ready", code="no_image_engine")

    def choose_text_model(
        self, keep: TextModel | None, tried: Collection[EngineClient], images: bool = False
    ) -> TextModel | None:
        """Return the text model with which to tokenize a request.

        The candidates are the engines that can take a request and are not in `tried`. If a candidate uses
        `keep`, or if there is no candidate, the result is `keep`, which may be None. Otherwise, it is the
        text model of a random candidate, so that each revision gets requests in proportion to its number of
        engines.

        If a request has `images`, and serving engines accept them, only these are candidates: during an
        upgrade, other engines may be of a release that does not.
        """
        left = [e for e in self if e.serving and not e.full and e not in tried]
        if images and any(e.accepts_images for e in self if e.serving):
            left = [e for e in left if e.accepts_images]
        if keep is not None and (not left or any(e.tokenizer_hash == keep.name for e in left)):
            return keep
        return random.choice(left).text_model if left else None

    @property
    def max_context_length(self) -> int:
        """Longest context of any engine, in tokens; 0 if no engine has reported its context length."""
        return max((engine.context_length for engine in self._engines.values()), default=0)

    def longest_context(self, text: TextModel) -> int:
        """Return the longest context, in tokens, of the serving engines that use `text`; 0 if none does."""
        return max((e.context_length for e in self if e.serving and e.tokenizer_hash == text.name), default=0)

    def find_served(self) -> tuple[TextModel, ModelProperties] | None:
        """Return the text model of a serving engine and its model's properties; None if no engine serves."""
        found = ((e.text_model, e.properties) for e in self if e.serving)
        return next(((text, properties) for text, properties in found if text is not None), None)

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

    def _add(self, key: tuple[str, str], discovered: DiscoveredEngine) -> None:
        engine = EngineClient(
            discovered,
            self._texts,
            self._changed,
            self._mean_request_size,
            self._breaker,
            self._health_limits,
            self._new_warmup,
        )
        try:
            offers = partial(self._offers, discovered.endpoint)
            engine.start(self._gateway, self._context, offers, timeout=self._timeout, lost=self._lost)
        except ValueError as error:
            fields = {"engine": discovered.name, "reason": str(error)}
            log.error("cannot connect to engine; ignoring it", extra={"fields": fields})
            return
        self._engines[key] = engine
        self._divide_budget()

    def _new_warmup(self, engine: EngineClient) -> Coroutine[Any, Any, None] | None:
        """Return the coroutine that warms an engine's cache.

        Returns None if caches are not warmed, if no prefix is missing, or if the engine must serve at once
        because no other engine has capacity.
        """
        if (
            self.cache_warmer is None
            or not self._has_capacity
            or not self.cache_warmer.missing_prefixes(engine)
        ):
            return None
        return self.cache_warmer.fill_cache(engine, lambda: not self._has_capacity)

    def _divide_budget(self) -> None:
        self._budget.divide([engine.prefixes for engine in self])

    async def _watch(self) -> None:
        """Check the health of engines at intervals; retry waiting requests of suspect engines on others."""
        pause = self._health_limits.check_interval
        last = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            late, last = time.monotonic() - last > 2 * pause, time.monotonic()
            if late:  # this event loop itself was blocked: first read the messages that arrived
                continue
            self._stop_unneeded_warmups()
            for engine in self:
                replaceable = self._has_substitute(engine)
                engine.check_health(replaceable)
                if engine.suspect and engine.awaiting_first_token and replaceable:
                    engine.fail_waiting(f"{engine.name} does not respond")

    def _stop_unneeded_warmups(self) -> None:
        """Let warming engines serve at once if no other engine has capacity."""
        warming = [engine for engine in self._engines.values() if engine.warming]
        if warming and not self._has_capacity:
            for engine in warming:
                engine.stop_warming()

    def _has_substitute(self, engine: EngineClient) -> bool:
        """Return whether another engine can take over an engine's requests."""
        others = (e for e in self if e is not engine and e.model_identity == engine.model_identity)
        return any(e.serving and not e.suspect and not e.full for e in others)

    def _changed(self) -> None:
        for key, engine in tuple(self._engines.items()):
            if engine.removed and not engine.requests:
                del self._engines[key]
                self._divide_budget()
                task = asyncio.get_running_loop().create_task(engine.stop())
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)
        self._stop_unneeded_warmups()
        self.on_change()
