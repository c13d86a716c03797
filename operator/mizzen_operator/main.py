"""`mizzen-operator`: kopf runs each replica; one leads and works, the others wait for its Lease."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine, Mapping
from typing import Any, cast

import kopf
from aiohttp import web
from kubernetes.aio.client import Configuration

from mizzen_operator import check
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.autoscaling.autoscaler import Autoscaler
from mizzen_operator.config import OperatorConfig, parse_config
from mizzen_operator.gateway_client.watch import GatewayWatch
from mizzen_operator.informers.informer import Caches, settings
from mizzen_operator.informers.metadata_poll import Sweep
from mizzen_operator.informers.watch_health import Watches
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError, describe_error
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.kube.rate_limiter import TokenBucket
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.kube.transport import load_configuration
from mizzen_operator.manager import health
from mizzen_operator.manager.controller import Loop
from mizzen_operator.manager.leader_election import Elector, LeadershipLost
from mizzen_operator.metrics import Metrics
from mizzen_operator.readiness.golden_prompts import Verifier
from mizzen_operator.reconciler.collaborators import build_collaborators
from mizzen_operator.reconciler.reconciler import Reconciler
from mizzen_operator.status.service_metrics import ServiceMetrics

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
    for chatty in ("kopf", "aiohttp", "aiohttp_retry", "asyncio", "kubernetes"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
    sys.exit(asyncio.run(run(config)))


async def run(config: OperatorConfig) -> int:
    """Run one replica; returns its exit code.

    Raises:
        kubernetes.aio.config.ConfigException: nothing says how to reach the API server.
        OSError: the health port cannot be bound.
    """
    replica = _Replica(config, await load_configuration())
    try:
        await replica.serve()
        await kopf.operator(
            registry=replica.registry(),
            settings=settings(),
            clusterwide=not config.namespace,
            namespaces=[config.namespace] if config.namespace else [],
            # Else kopf asks DNS for this host's name, and the system for that of a user who may have none.
            identity=cast(Any, config.holder),
            stop_flag=replica.ended,
        )
    except Exception:  # of kopf's own: the work has ended in order, and a fresh process begins anew
        logger.exception("kopf has ended")
        return 1
    finally:
        await replica.close()
    return replica.code


class _Replica:
    """The life of one replica within kopf's: it waits for the Lease, leads, and stops when kopf does."""

    def __init__(self, config: OperatorConfig, configuration: Configuration) -> None:
        self._config = config
        self._metrics = metrics = Metrics()
        self._watches = Watches(metrics)
        self._live = KubeClient(configuration, metrics)
        self._elector = Elector(self._live, config)
        self._listener = GatewayWatch(metrics)
        self._caches = Caches(config.namespace, self._watches, lambda *change: self._loop.changed(*change))
        bucket = TokenBucket(config.requests_per_second, config.request_burst)
        self._kube = KubeClient(configuration, metrics, bucket, self._caches.get)
        autoscaler = Autoscaler(self._kube, self._listener, metrics, lambda key: self._loop.enqueue(key))
        self._verifier = Verifier(self._listener, metrics, lambda key: self._loop.enqueue(key))
        children = UnwatchedChildren()
        self._reconciler = Reconciler(
            build_collaborators(
                self._kube,
                config,
                metrics=metrics,
                service_metrics=ServiceMetrics(metrics.registry),
                autoscaler=autoscaler,
                gateway_watch=self._listener,
                verifier=self._verifier,
                children=children,
            )
        )
        sweep = Sweep(self._kube, config, children, self._edited)
        self._loop = Loop(self._kube, self._reconciler, config, metrics, [autoscaler.run, sweep.run])

        def heard(key: ServiceKey) -> None:
            self._loop.enqueue(key)
            autoscaler.poke(key)

        self._listener.on_change = heard
        self._server: web.AppRunner | None = None
        self._life: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self.ended = asyncio.Event()
        """Nothing is left to do: kopf shall stop."""
        self.code = 0

    def _edited(self, kind: str, name: ObjectName, given: Mapping[str, str]) -> None:
        self._reconciler.invalidate(kind, name, given)
        self._loop.changed(kind, name, given)

    def registry(self) -> kopf.OperatorRegistry:
        """What kopf calls: this replica at its own start and end, the caches in between."""
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._begin)
        kopf.on.cleanup(registry=registry)(self._end)
        self._caches.register(registry)
        return registry

    async def serve(self) -> None:
        """Serve health and metrics.

        Raises:
            OSError: the port cannot be bound.
        """
        host, port = self._config.health_host, self._config.health_port
        self._server = await health.serve(host, port, self._metrics, alive=self._wrong, ready=lambda: "")

    async def close(self) -> None:
        """Close all connections; a second time changes nothing."""
        if self._server is not None:
            await self._server.cleanup()
            self._server = None
        await self._caches.close()
        await self._verifier.close()
        await self._listener.close()
        await self._kube.close()
        await self._live.close()

    async def _begin(self, **_: Any) -> None:
        self._watches.begin()
        self._life = asyncio.create_task(self._run(), name="life")

    async def _end(self, **_: Any) -> None:
        """End the work and give the Lease back, after kopf has stopped to watch."""
        self._stop.set()
        if self._life is not None:
            await self._life
        await self.close()  # else kopf waits for what serves its connections

    async def _run(self) -> None:
        try:
            self.code = await self._lead()
        except Exception:
            logger.exception("unexpected error")
            self.code = 1
        self.ended.set()

    def _wrong(self) -> str:
        """What is wrong with this replica; empty when nothing is."""
        words = [f"nobody watches {kind}" for kind in self._watches.stale()]
        words += [f"{key.namespace}/{key.name} hangs" for key in self._loop.hung()]
        return "; ".join(words)

    async def _lead(self) -> int:
        """Wait for the Lease and work for as long as it is held; returns the exit code."""
        if not await self._unless_stopped(self._elector.acquire()):
            await self._elector.release()  # it may have been taken in the moment of the stop
            return 0
        self._metrics.leader.set(1)
        stopped = asyncio.Event()
        work = asyncio.create_task(self._work(stopped), name="loop")
        hold = asyncio.create_task(self._elector.hold(), name="lease")
        signalled = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({work, hold, signalled}, return_when=asyncio.FIRST_COMPLETED)
            return await self._finish(work, hold, stopped)
        finally:
            self._metrics.leader.set(0)
            for task in (work, hold, signalled):
                task.cancel()
            await asyncio.gather(work, hold, signalled, return_exceptions=True)

    async def _work(self, stopped: asyncio.Event) -> None:
        """Look at nothing before everything is known that was there when the Lease was taken."""
        while not stopped.is_set():
            try:
                await self._caches.catch_up(self._live)
                break
            except KubeError as error:
                logger.warning("cannot learn what is there: %s; again soon", describe_error(error))
                await asyncio.sleep(CATCH_UP_AGAIN_SECONDS)
        await self._loop.run(stopped)

    async def _finish(
        self, work: asyncio.Task[None], hold: asyncio.Task[None], stopped: asyncio.Event
    ) -> int:
        if hold.done():
            lost = hold.exception()
            logger.error("leadership lost: %s", lost)
            if lost is not None and not isinstance(lost, LeadershipLost):
                raise lost
            return 1  # a fresh process waits for the Lease again; this one might still be in mid-action
        stopped.set()
        done, _ = await asyncio.wait({work}, timeout=STOP_SECONDS)
        if not done:
            logger.warning("the work did not end within %s s", STOP_SECONDS)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        hold.cancel()
        await asyncio.gather(hold, return_exceptions=True)
        await self._elector.release()  # not before: another replica would work beside this one
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
