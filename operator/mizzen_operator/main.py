# SPDX-License-Identifier: Apache-2.0
"""Entry point of `mizzen-operator`: builds one replica and runs it under kopf until SIGTERM.

The replica that holds the Lease reconciles; the others keep their stores up to date and wait for it.
"""

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
from mizzen_operator.informers.discovery import wait_until_served
from mizzen_operator.informers.informer import Informers, kopf_settings
from mizzen_operator.informers.metadata_poll import MetadataPoller
from mizzen_operator.informers.watch_health import WatchHealth
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError, describe_error
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.kube.rate_limiter import TokenBucket
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.kube.transport import load_configuration
from mizzen_operator.manager import health
from mizzen_operator.manager.controller import Controller
from mizzen_operator.manager.leader_election import Elector, LeadershipLost
from mizzen_operator.metrics import Metrics
from mizzen_operator.readiness.golden_prompts import Verifier
from mizzen_operator.reconciler.collaborators import build_collaborators
from mizzen_operator.reconciler.reconciler import Reconciler
from mizzen_operator.status.service_metrics import ServiceMetrics

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""Maximum time for which a stopped controller waits for the reconciles in progress to finish."""
CATCH_UP_RETRY_SECONDS = 0.5


def main() -> None:
    """Run the subcommand `check` if it is given; else run the operator until SIGTERM.

    The operator's exit code is 0 after SIGTERM; 2 if an option is unknown; and 1 if an option has an invalid
    value, or if the operator lost its leadership or failed.
    """
    if sys.argv[1:2] == ["check"]:
        sys.exit(check.main(sys.argv[2:]))
    try:
        config = parse_config(sys.argv[1:], os.environ)
    except ValueError as error:
        sys.exit(f"mizzen-operator: {error}")
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for library in ("kopf", "aiohttp", "aiohttp_retry", "asyncio", "kubernetes"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))
    sys.exit(asyncio.run(run(config)))


async def run(config: OperatorConfig) -> int:
    """Run one replica; return its exit code.

    Raises:
        kubernetes.aio.config.ConfigException: there is no configuration for the API server.
        OSError: the health port cannot be bound.
    """
    replica = _Replica(config, await load_configuration())
    try:
        await replica.serve()
        await kopf.operator(
            registry=replica.registry(),
            settings=kopf_settings(),
            clusterwide=not config.namespace,
            namespaces=[config.namespace] if config.namespace else [],
            # By default, kopf resolves the host's name by DNS and looks up a user name that may not exist.
            identity=cast(Any, config.holder),
            stop_flag=replica.ended,
        )
    except Exception:  # kopf itself failed: reconciles have ended in order, and a new process starts over
        logger.exception("kopf stopped with an error")
        return 1
    finally:
        await replica.close()
    return replica.code


class _Replica:
    """One replica of the operator, from kopf's startup to its cleanup: wait for the Lease, lead, stop."""

    def __init__(self, config: OperatorConfig, configuration: Configuration) -> None:
        self._config = config
        self._metrics = metrics = Metrics()
        self._watch_health = WatchHealth(metrics)
        self._api_server = KubeClient(configuration, metrics)
        """Client without stores, which reads everything from the API server."""
        self._elector = Elector(self._api_server, config)
        rate_limiter = TokenBucket(config.requests_per_second, config.request_burst)
        self._kube = KubeClient(configuration, metrics, rate_limiter, lambda kind: self._informers.get(kind))
        self._gateway_watch = GatewayWatch(metrics)
        self._autoscaler = Autoscaler(self._kube, self._gateway_watch, metrics, self._enqueue)
        self._verifier = Verifier(self._gateway_watch, metrics, self._enqueue)
        children = UnwatchedChildren()
        self._reconciler = Reconciler(
            build_collaborators(
                self._kube,
                config,
                metrics=metrics,
                service_metrics=ServiceMetrics(metrics.registry),
                autoscaler=self._autoscaler,
                gateway_watch=self._gateway_watch,
                verifier=self._verifier,
                children=children,
            )
        )
        metadata_poller = MetadataPoller(self._kube, config, children, self._on_child_changed)
        background_tasks = [self._autoscaler.run, metadata_poller.run]
        self._controller = Controller(self._kube, self._reconciler, config, metrics, background_tasks)
        self._informers = Informers(config.namespace, self._watch_health, self._controller.on_object_changed)
        self._gateway_watch.on_change = self._on_gateway_changed
        self._server: web.AppRunner | None = None
        self._leading: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when the replica has ended by itself, to make kopf stop."""
        self.code = 0
        """Exit code of the process."""

    def _enqueue(self, key: ServiceKey) -> None:
        self._controller.enqueue(key)

    def _on_gateway_changed(self, key: ServiceKey) -> None:
        self._controller.enqueue(key)
        self._autoscaler.decide_now(key)

    def _on_child_changed(self, kind: str, name: ObjectName, object_labels: Mapping[str, str]) -> None:
        self._reconciler.invalidate(kind, name, object_labels)
        self._controller.on_object_changed(kind, name, object_labels)

    def registry(self) -> kopf.OperatorRegistry:
        """Return a registry with kopf's handlers: for startup, cleanup, and the events of the informers."""
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self._on_startup)
        kopf.on.cleanup(registry=registry)(self._on_cleanup)
        self._informers.register(registry)
        return registry

    async def serve(self) -> None:
        """Start the HTTP server of /healthz, /readyz and /metrics.

        Raises:
            OSError: the port cannot be bound.
        """
        host, port = self._config.health_host, self._config.health_port
        self._server = await health.serve(
            host, port, self._metrics, alive=self._liveness_problem, ready=lambda: ""
        )

    async def close(self) -> None:
        """Close all connections; a second call does nothing."""
        if self._server is not None:
            await self._server.cleanup()
            self._server = None
        await self._informers.close()
        await self._verifier.close()
        await self._gateway_watch.close()
        await self._kube.close()
        await self._api_server.close()

    async def _on_startup(self, **_: Any) -> None:
        await wait_until_served(self._api_server)
        self._watch_health.start()
        self._leading = asyncio.create_task(self._run(), name="replica")

    async def _on_cleanup(self, **_: Any) -> None:
        """Stop the controller and release the Lease; kopf has already stopped its watches."""
        self._stop.set()
        if self._leading is not None:
            await self._leading
        await self.close()  # otherwise kopf waits for its tasks, which wait on their connections

    async def _run(self) -> None:
        try:
            self.code = await self._lead()
        except Exception:
            logger.exception("unexpected error in the leading replica")
            self.code = 1
        self.ended.set()

    def _liveness_problem(self) -> str:
        """Return why this replica should be restarted; empty if it works."""
        problems = [f"no watch of {kind} is alive" for kind in self._watch_health.stale_kinds()]
        hung = self._controller.hung_services()
        problems += [f"the reconcile of {key.namespace}/{key.name} hangs" for key in hung]
        return "; ".join(problems)

    async def _lead(self) -> int:
        """Wait for the Lease, and run the controller while it is held; return the exit code."""
        try:
            if not await self._unless_stopped(self._elector.acquire()):
                await self._elector.release()  # the Lease may have been acquired at the moment of the stop
                return 0
        except LeadershipLost as error:
            logger.error("cannot lead: %s", error)
            return 1
        self._metrics.leader.set(1)
        stopped = asyncio.Event()
        work = asyncio.create_task(self._run_controller(stopped), name="controller")
        lease = asyncio.create_task(self._elector.keep_renewing(), name="lease")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({work, lease, stop}, return_when=asyncio.FIRST_COMPLETED)
            return await self._finish(work, lease, stopped)
        finally:
            self._metrics.leader.set(0)
            for task in (work, lease, stop):
                task.cancel()
            await asyncio.gather(work, lease, stop, return_exceptions=True)

    async def _run_controller(self, stopped: asyncio.Event) -> None:
        """Wait until the stores have caught up with the API server, then run the controller."""
        while not stopped.is_set():
            try:
                await self._informers.catch_up(self._api_server)
                break
            except KubeError as error:
                logger.warning("cannot list the watched objects: %s; retrying", describe_error(error))
                await asyncio.sleep(CATCH_UP_RETRY_SECONDS)
        await self._controller.run(stopped)

    async def _finish(
        self, work: asyncio.Task[None], lease: asyncio.Task[None], stopped: asyncio.Event
    ) -> int:
        """Stop leading once the controller or the renewal has ended, or on SIGTERM; return the exit code.

        Args:
            work: task of the controller.
            lease: task that renews the Lease.
            stopped: event that stops the controller.
        """
        if lease.done():
            lost = lease.exception()
            logger.error("leadership lost: %s", lost)
            if lost is not None and not isinstance(lost, LeadershipLost):
                raise lost
            return 1  # this process may be in the middle of an action; a new one waits for the Lease
        stopped.set()
        done, _ = await asyncio.wait({work}, timeout=STOP_SECONDS)
        if not done:
            logger.warning("the reconciles in progress did not end within %s s", STOP_SECONDS)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        lease.cancel()
        await asyncio.gather(lease, return_exceptions=True)
        await self._elector.release()  # only now: otherwise two replicas might reconcile concurrently
        if done and work.exception() is not None:
            logger.error("the controller failed: %s", work.exception())
            return 1
        return 0 if self._stop.is_set() else 1

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, None]) -> bool:
        """Await `waiting`, but cancel it if the replica is stopped; return False if it was cancelled."""
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
