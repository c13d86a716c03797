"""`mizzen-operator`: one replica leads and works, the others wait for its Lease."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import aiohttp

from mizzen_operator import check, health
from mizzen_operator.autoscale.run import Autoscaler
from mizzen_operator.config import OperatorConfig, parse_config
from mizzen_operator.follow import Caches, brief
from mizzen_operator.kube import Kube, KubeError, TokenBucket, load_configuration
from mizzen_operator.lead import Elector, LeadershipLost
from mizzen_operator.listen import GatewayListener
from mizzen_operator.loop import Loop
from mizzen_operator.metrics import Metrics
from mizzen_operator.queue import Key
from mizzen_operator.reconcile import Reconciler
from mizzen_operator.watches import Watches

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
CATCH_UP_AGAIN_SECONDS = 0.5


def main() -> None:
    """Run the operator until SIGTERM, or `check` one; 1 when leadership was lost, 2 for a wrong option."""
    if sys.argv[1:2] == ["check"]:
        sys.exit(check.main(sys.argv[2:]))
    try:
        config = parse_config(sys.argv[1:], os.environ)
    except ValueError as error:
        sys.exit(f"mizzen-operator: {error}")
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("aiohttp", "aiohttp_retry", "asyncio", "kubernetes"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
    sys.exit(asyncio.run(run(config)))


async def run(config: OperatorConfig) -> int:
    """Run one replica; returns its exit code.

    Raises:
        kubernetes.aio.config.ConfigException: nothing says how to reach the API server.
        OSError: the health port cannot be bound.
    """
    metrics = Metrics()
    watches = Watches(metrics)
    configuration = await load_configuration()
    elector_kube = Kube(configuration, metrics)
    listener = GatewayListener(metrics)
    # What changes is told to the loop, which is made of all the rest.
    caches = Caches(config.namespace, watches, lambda *change: loop.changed(*change))
    bucket = TokenBucket(config.requests_per_second, config.request_burst)
    kube = Kube(configuration, metrics, bucket, caches.get)
    autoscaler = Autoscaler(kube, listener, metrics, lambda key: loop.enqueue(key))
    reconciler = Reconciler(kube, listener, config, metrics, autoscaler)
    loop = Loop(kube, reconciler, config, metrics, [autoscaler.run])

    def heard(key: Key) -> None:
        loop.enqueue(key)
        autoscaler.poke(key)

    listener.on_change = heard
    replica = _Replica(metrics, watches, caches, loop)
    replica.catch_signals()
    server = await health.serve(
        config.health_host, config.health_port, metrics, alive=replica.wrong, ready=lambda: ""
    )
    try:
        watches.begin()
        caches.start()
        return await replica.lead(Elector(elector_kube, config))
    finally:
        await caches.close()
        await server.cleanup()
        await listener.close()
        await kube.close()
        await elector_kube.close()


class _Replica:
    """The life of one replica: wait, lead, stop."""

    def __init__(self, metrics: Metrics, watches: Watches, caches: Caches, loop: Loop) -> None:
        self._metrics = metrics
        self._watches = watches
        self._caches = caches
        self._loop = loop
        self._stop = asyncio.Event()

    def catch_signals(self) -> None:
        """Let SIGTERM and SIGINT stop the replica."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def wrong(self) -> str:
        """What is wrong with this replica; empty when nothing is."""
        stale = self._watches.stale()
        hung = self._loop.hung()
        words = [f"nobody watches {kind}" for kind in stale]
        words += [f"{key.namespace}/{key.name} hangs" for key in hung]
        return "; ".join(words)

    async def lead(self, elector: Elector) -> int:
        """Wait for the Lease and work for as long as it is held."""
        if not await self._unless_stopped(elector.acquire()):
            return 0
        self._metrics.leader.set(1)
        stopped = asyncio.Event()
        work = asyncio.create_task(self._work(stopped), name="loop")
        hold = asyncio.create_task(elector.hold(), name="lease")
        signalled = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({work, hold, signalled}, return_when=asyncio.FIRST_COMPLETED)
            return await self._finish(work, hold, stopped, elector)
        finally:
            self._metrics.leader.set(0)
            for task in (work, hold, signalled):
                task.cancel()
            await asyncio.gather(work, hold, signalled, return_exceptions=True)

    async def _work(self, stopped: asyncio.Event) -> None:
        """Look at nothing before everything is known that was there when the Lease was taken."""
        while not stopped.is_set():
            try:
                await self._caches.catch_up()
                break
            except (KubeError, aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.warning("cannot learn what is there: %s; again soon", brief(error))
                await asyncio.sleep(CATCH_UP_AGAIN_SECONDS)
        await self._loop.run(stopped)

    async def _finish(
        self,
        work: asyncio.Task[None],
        hold: asyncio.Task[None],
        stopped: asyncio.Event,
        elector: Elector,
    ) -> int:
        if hold.done():
            lost = hold.exception()
            logger.error("leadership lost: %s", lost)
            if lost is not None and not isinstance(lost, LeadershipLost):
                raise lost
            return 1  # a fresh process waits for the Lease again; this one might still be in mid-action
        stopped.set()
        done, _ = await asyncio.wait({work}, timeout=STOP_SECONDS)
        hold.cancel()
        await asyncio.gather(hold, return_exceptions=True)
        if not done:
            logger.warning("the work did not end within %s s", STOP_SECONDS)
        await asyncio.wait_for(elector.release(), STOP_SECONDS)
        if done and work.exception() is not None:
            logger.error("the work ended: %s", work.exception())
            return 1
        return 0 if self._stop.is_set() else 1

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, None]) -> bool:
        """Whether `waiting` ended before the replica was told to stop."""
        task = asyncio.create_task(waiting)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        ended = task.done()
        for other in (task, stop):
            other.cancel()
        results = await asyncio.gather(task, stop, return_exceptions=True)
        if ended and isinstance(results[0], BaseException):
            raise results[0]
        return ended


if __name__ == "__main__":
    main()
