# SPDX-License-Identifier: Apache-2.0
"""Serves /healthz, /readyz and /metrics of the operator."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from mizzen_operator.metrics import Metrics

HealthCheck = Callable[[], str]
"""Function that returns a description of a problem; an empty string if there is no problem."""


async def serve(
    host: str, port: int, metrics: Metrics, *, alive: HealthCheck, ready: HealthCheck
) -> web.AppRunner:
    """Start the HTTP server; call `cleanup()` of the returned runner to stop it.

    Args:
        host: address to listen on.
        port: port to listen on.
        metrics: metrics exposed at /metrics.
        alive: check of /healthz, which answers 503 if there is a problem.
        ready: check of /readyz, which answers 503 if there is a problem.

    Raises:
        OSError: the address cannot be bound.
    """

    def answer(check: HealthCheck) -> Callable[[web.Request], web.StreamResponse]:
        def handler(_: web.Request) -> web.StreamResponse:
            problem = check()
            return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

        return handler

    async def healthz(request: web.Request) -> web.StreamResponse:
        return answer(alive)(request)

    async def readyz(request: web.Request) -> web.StreamResponse:
        return answer(ready)(request)

    async def exposition(_: web.Request) -> web.StreamResponse:
        return web.Response(
            body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app = web.Application(client_max_size=1024)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", exposition)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
