# SPDX-License-Identifier: Apache-2.0
"""The gateway process: two HTTP servers on one event loop, and an orderly shutdown.

`mizzen gateway` calls `run`; with several processes, each child calls `serve`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from typing import Protocol

from starlette.types import ASGIApp

from mizzen.common.extras import describe_missing_module
from mizzen.common.json_log import set_up_logging
from mizzen.gateway.app import create_admin_app, create_app
from mizzen.gateway.config import ONLY_PROCESS, GatewayConfig, ProcessNumber
from mizzen.gateway.gateway import Gateway
from mizzen.gateway.http.connection import BoundedProtocol, LingeringProtocol
from mizzen.gateway.http.processes import serve_processes
from mizzen.gateway.http.server import UvicornServer, listen, listen_on_loopback, new_server
from mizzen.gateway.http.tls import ServerTls
from mizzen.gateway.telemetry.ping import answer_pings

log = logging.getLogger(__name__)


class CallServer(Protocol):
    """A running gRPC server."""

    async def stop(self, grace: float | None) -> None:
        """Reject new calls, and end the running ones after `grace` seconds."""
        ...


FINAL_SEND_SECONDS = 5
"""Maximum time for sending an error to the streams that are still open after the drain."""


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status.

    The status is 0 after an orderly shutdown. It is 1 if a server stops unexpectedly, or if the gateway
    cannot start (an address in use, a missing key file); the reason is logged.
    """
    set_up_logging(program="gateway")
    tune_garbage_collector()
    try:
        import uvloop

        return uvloop.run(serve_processes(config) if config.processes > 1 else serve(config))
    except (ValueError, OSError) as error:
        log.error("the gateway cannot start", extra={"fields": {"reason": str(error)}})
        return 1


def tune_garbage_collector() -> None:
    """Make the garbage collector run rarely, and exempt all objects that exist already.

    Streams create many short-lived objects but hardly any cycles. With the default thresholds, collections
    would take a tenth of the CPU time, and some would pause the process for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


async def serve(
    config: GatewayConfig,
    sockets: tuple[socket.socket, socket.socket] | None = None,
    process: ProcessNumber = ONLY_PROCESS,
) -> int:
    """Run a gateway until a signal arrives, and return the exit status.

    Args:
        config: the options.
        sockets: listening sockets of the API and of the admin port; by default, they are opened at the
            addresses in `config`.
        process: number of this process among the gateway's processes.

    Raises:
        OSError: an address cannot be bound.
        ValueError: options, keys or Kubernetes access are invalid.
    """
    gateway = Gateway(config, process)
    tls = ServerTls(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
    if tls is not None:
        gateway.metrics.certificate.set_function(lambda: tls.expires_at)
    if sockets is None:
        sockets = listen(config.host, config.port), listen(config.admin_host, config.admin_port)
    api_socket, admin_socket = sockets
    await gateway.start()
    shutdown_seconds = int(config.drain_timeout_seconds) + FINAL_SEND_SECONDS
    app = create_app(config, gateway)
    calls = await start_calls(config, app, gateway, process)
    api = new_server(app, shutdown_seconds, tls, LingeringProtocol)
    admin = new_server(create_admin_app(gateway), 1)
    further = listen_on_loopback(api_socket, process.count > 1) if config.loopback else []
    tasks = [
        asyncio.create_task(api.serve([api_socket, *further])),
        asyncio.create_task(admin.serve([admin_socket])),
    ]
    pings = await answer_pings(*admin_socket.getsockname()[:2])
    certificates = asyncio.create_task(tls.watch(), name="certificates") if tls else None
    host, port = api_socket.getsockname()[:2]
    admin_port = admin_socket.getsockname()[1]
    fields = {
        "url": f"{'https' if tls else 'http'}://{host}:{port}/v1",
        "admin_port": admin_port,
        "models": list(gateway.model_names),
    }
    log.info("listening", extra={"fields": fields})
    stop = asyncio.Event()
    second_signal = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: second_signal.set() if stop.is_set() else stop.set())
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
    serving = [tasks[0]]
    if calls is not None:
        serving.append(asyncio.create_task(calls.stop(shutdown_seconds), name="gRPC server"))
    await drain(gateway, api, serving, second_signal)
    admin.should_exit = True
    if pings is not None:
        pings.close()
    if certificates is not None:
        certificates.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await gateway.flush()
    if stopped not in done:
        log.error("an HTTP server stopped without a signal")
        return 1
    log.info("stopped")
    return 0


async def start_calls(
    config: GatewayConfig, app: ASGIApp, gateway: Gateway, process: ProcessNumber
) -> CallServer | None:
    """Start the gRPC server if it is turned on.

    Raises:
        OSError: its port is in use.
        ValueError: its packages are not installed.
    """
    if not config.grpc_port:
        return None
    try:
        from mizzen.gateway.grpc.server import start_grpc  # loads slowly, and only with the extra `grpc`
    except ModuleNotFoundError as error:
        raise ValueError(describe_missing_module(error, "--grpc-port", "grpc")) from None
    return await start_grpc(config, app, gateway, shared=process.count > 1)


async def drain(
    gateway: Gateway, api: UvicornServer, serving: list[asyncio.Task[None]], second_signal: asyncio.Event
) -> None:
    """Stop accepting requests, wait for open streams to end, then end the remaining ones with an error.

    The wait ends after `drain_timeout_seconds`, or as soon as `second_signal` is set.
    """
    gateway.draining = True
    log.info("draining", extra={"fields": {"in_flight": gateway.in_flight}})
    api.should_exit = True
    hurried = asyncio.create_task(second_signal.wait())
    ended = asyncio.create_task(asyncio.wait(serving))
    await asyncio.wait(
        (ended, hurried),
        timeout=gateway.config.drain_timeout_seconds,
        return_when=asyncio.FIRST_COMPLETED,
    )
    hurried.cancel()
    for connection in list(api.server_state.connections):
        if isinstance(connection, BoundedProtocol):
            connection.stop_lingering()
    await gateway.close()
    await asyncio.wait((ended,), timeout=FINAL_SEND_SECONDS)
    api.force_exit = True  # otherwise a client that does not read would keep the process alive
