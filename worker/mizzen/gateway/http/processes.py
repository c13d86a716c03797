# SPDX-License-Identifier: Apache-2.0
"""Runs several gateway processes behind one port, as one program.

Like a replica, each process is a complete gateway with its own engine connections, queue and routing, so
limits of requests in progress and queues apply to each process; limits of API keys are shared. The kernel
distributes client connections among the processes (SO_REUSEPORT). The parent serves one admin port for all
processes. It stops all of them when it receives a signal, or when one of them exits by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process

import msgspec

from mizzen.gateway.config import GatewayConfig, ProcessNumber
from mizzen.gateway.http.request_bodies import BodyBudget

log = logging.getLogger(__name__)

KILL_SECONDS = 15.0
"""Grace period after the drain timeout; processes that still run at its end are killed."""


def child_command(
    config: GatewayConfig, api: socket.socket, admin: socket.socket, process: ProcessNumber
) -> list[str]:
    """Return the command line of one process, which inherits both sockets as file descriptors."""
    options = msgspec.json.encode(dataclasses.asdict(config)).decode()
    return [
        sys.executable,
        "-P",
        "-m",
        "mizzen.gateway.http.child_process",
        options,
        str(api.fileno()),
        str(admin.fileno()),
        str(process.index),
        str(process.count),
    ]


class GatewayProcesses:
    """Child processes of one gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._running: list[Process] = []

    async def start(self, sockets: list[tuple[socket.socket, socket.socket]]) -> None:
        """Start one process for each pair of sockets (API, admin), and close the parent's copies."""
        for index, (api, admin) in enumerate(sockets):
            self._running.append(
                await asyncio.create_subprocess_exec(
                    *child_command(self._config, api, admin, ProcessNumber(index, len(sockets))),
                    stdin=asyncio.subprocess.PIPE,  # it closes when the parent exits
                    pass_fds=(api.fileno(), admin.fileno()),
                    start_new_session=True,  # a terminal's Ctrl-C reaches the parent, which passes it on
                )
            )
            api.close()
            admin.close()

    def signal(self, number: int) -> None:
        """Send signal `number` to all processes that still run."""
        for process in self._running:
            if process.returncode is None:
                process.send_signal(number)

    async def wait_first_exit(self) -> int:
        """Wait until any process exits, and return its exit status."""
        waits = [asyncio.create_task(process.wait()) for process in self._running]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()

    async def wait_all(self) -> list[int]:
        """Wait until all processes have exited, and return their exit statuses.

        Processes that still run `KILL_SECONDS` after the drain timeout are killed.
        """
        try:
            async with asyncio.timeout(self._config.drain_timeout_seconds + KILL_SECONDS):
                return [await process.wait() for process in self._running]
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return [await process.wait() for process in self._running]


async def serve_processes(config: GatewayConfig) -> int:
    """Run `config.processes` gateway processes until a signal arrives; return the exit status.

    Raises:
        OSError: an address cannot be bound.
    """
    from mizzen.gateway.http.admin_fanout import (
        AdminFanout,  # imported here because it needs httpx, which a single process does not load
    )
    from mizzen.gateway.http.server import listen, new_server

    admin_socket = listen(config.admin_host, config.admin_port)
    api = [listen(config.host, config.port, shared=True)]
    port = api[0].getsockname()[1]
    api += [listen(config.host, port, shared=True) for _ in range(config.processes - 1)]
    admin = [listen("127.0.0.1", 0) for _ in api]
    bodies = BodyBudget(config.max_bodies_bytes)
    ports = [listener.getsockname()[1] for listener in admin]
    admin_fanout = AdminFanout(ports, bodies, config.max_body_bytes)
    server = new_server(admin_fanout.app(), 1)
    serving = asyncio.create_task(server.serve([admin_socket]))
    admin_port = admin_socket.getsockname()[1]  # the processes ask each other for limits at this port
    processes = GatewayProcesses(dataclasses.replace(config, processes=1, admin_port=admin_port))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stopping(number: int) -> None:
        stop.set()
        processes.signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping, number)
    await processes.start(list(zip(api, admin, strict=True)))
    if stop.is_set():  # the signal came before all processes had started
        processes.signal(signal.SIGTERM)
    fields = {"port": port, "admin_port": admin_port, "processes": config.processes}
    log.info("processes started", extra={"fields": fields})
    ended = asyncio.create_task(processes.wait_first_exit())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        log.error("a gateway process exited by itself", extra={"fields": {"status": ended.result()}})
        processes.signal(signal.SIGTERM)
    statuses = await processes.wait_all()
    stopped.cancel()
    server.should_exit = True
    await asyncio.gather(serving, ended, return_exceptions=True)
    await admin_fanout.close()
    return 0 if stop.is_set() and not any(statuses) else 1


def exit_with_parent() -> None:
    """Watch standard input; when it closes because the parent has exited, send SIGTERM to this process.

    Must be called on the event loop.
    """

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), on_input)
