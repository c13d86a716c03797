# SPDX-License-Identifier: Apache-2.0
"""Warm-up: replays the hottest prefixes into a new engine's cache before the engine serves.

Other engines serve meanwhile. A warm-up never delays requests: it ends at its time limit, at the first error,
or as soon as no other engine has capacity.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mizzen.core.request import Int32
from mizzen.gateway.routing.hot_prefixes import HotPrefix, HotPrefixes
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.wire.client.stream import EngineOverloaded, EngineRefused, StreamLost
from mizzen.wire.messages import Sampling

if TYPE_CHECKING:
    from mizzen.gateway.engines.engine_client import EngineClient

log = logging.getLogger(__name__)

MAX_TOKENIZERS = 2
"""Maximum number of tokenizers whose prefixes are kept: those of the current and the next revision."""
PRIORITY = -8
"""Priority of replays: the lowest, because the engine may already run requests of other gateways."""
STORE_FACTOR = 4
"""Ratio of kept blocks to replayed blocks; above 1, because a prefix is cold before it becomes hot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmLimits:
    """Limits of a warm-up."""

    tokens: int = 0
    """Maximum number of tokens to replay; 0 turns warm-ups off."""
    seconds: float = 10.0
    """Longest duration of a warm-up."""
    concurrency: int = 4
    """Number of prefixes that are replayed at once."""


class CacheWarmer:
    """Keeps the hottest prefixes of one service's prompts, and fills the caches of new engines with them."""

    def __init__(self, limits: WarmLimits, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._stores: OrderedDict[str, HotPrefixes] = OrderedDict()

    @property
    def enabled(self) -> bool:
        """True if warm-ups are turned on."""
        return self._limits.tokens > 0

    def count_prompt(self, tokenizer: str, hashes: Sequence[int], prompt: Int32, salt: bytes) -> None:
        """Count a prompt, so that its prefixes become hotter.

        Args:
            tokenizer: hash of the tokenizer that made the prompt.
            hashes: hashes of the prompt's full blocks, in order.
            prompt: token ids, int32 [n].
            salt: salt with which the hashes were computed.
        """
        if not self.enabled or not hashes:
            return
        store = self._stores.get(tokenizer)
        if store is None:
            store = self._stores[tokenizer] = HotPrefixes(STORE_FACTOR * self._limits.tokens // 64)
            while len(self._stores) > MAX_TOKENIZERS:
                self._stores.popitem(last=False)
        self._stores.move_to_end(tokenizer)
        store.count_prompt(hashes, prompt, salt)

    def missing_prefixes(self, engine: EngineClient) -> list[HotPrefix]:
        """Return the hottest prefixes that an engine's cache does not hold completely, hottest first."""
        store = self._stores.get(engine.tokenizer_hash)
        if store is None:
            return []
        context = engine.context_length
        hot_prefixes = [
            prefix for prefix in store.find_hottest(self._limits.tokens) if len(prefix.tokens) < context
        ]
        return [
            prefix
            for prefix in hot_prefixes
            if engine.prefixes.match_prefix(prefix.block_hashes) < len(prefix.block_hashes)
        ]

    async def fill_cache(self, engine: EngineClient, needed: Callable[[], bool]) -> None:
        """Fill an engine's cache within the time limit; errors end the warm-up and are only logged.

        Args:
            engine: connected engine that gets no requests yet.
            needed: returns whether the engine must serve at once, which ends the warm-up.
        """
        started_at, result = time.monotonic(), "needed"
        prefixes = iter(self.missing_prefixes(engine))
        workers = [
            asyncio.create_task(self._replay_rest(engine, prefixes, needed))
            for _ in range(self._limits.concurrency)
        ]
        try:
            async with asyncio.timeout(self._limits.seconds):
                stopped = await asyncio.gather(*workers)
            result = "needed" if any(stopped) else "done"
        except TimeoutError:
            result = "deadline"
        except (StreamLost, EngineRefused, EngineOverloaded) as error:
            fields = {"engine": engine.name, "reason": str(error)}
            log.warning("cache warm-up of engine failed", extra={"fields": fields})
            result = "failed"
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._metrics.warmups.labels(result).inc()
            fields = {
                "engine": engine.name,
                "result": result,
                "seconds": round(time.monotonic() - started_at, 3),
            }
            log.info("cache warm-up of engine ended", extra={"fields": fields})

    async def _replay_rest(
        self, engine: EngineClient, prefixes: Iterator[HotPrefix], needed: Callable[[], bool]
    ) -> bool:
        """Replay the remaining prefixes, but stop once `needed` returns True; return whether it did."""
        for prefix in prefixes:
            if needed():
                return True
            await self._replay(engine, prefix)
            self._metrics.warmed_tokens.inc(len(prefix.tokens))
        return False

    async def _replay(self, engine: EngineClient, prefix: HotPrefix) -> None:
        """Have an engine prefill a prefix, and discard the single output token.

        Raises:
            EngineOverloaded, EngineRefused, StreamLost: the engine did not complete the request.
        """
        stream = engine.link.generate(
            prefix.tokens.astype("<i4", copy=False).tobytes(),
            Sampling(temperature=0.0, max_tokens=1, seed=0),
            salt=prefix.salt,
            priority=PRIORITY,
            queue_seconds=self._limits.seconds,
        )
        try:
            finish = None
            while finish is None:
                _, finish = await stream.next()
        finally:
            stream.abort()
