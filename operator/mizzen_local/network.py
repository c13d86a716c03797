# SPDX-License-Identifier: Apache-2.0
"""The service proxy of a local cluster, in place of kube-proxy.

It listens on each port of each ClusterIP, and forwards TCP connections to the ready pods of the service.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_local.api import ApiClient, Object
from mizzen_local.events import Recorder

log = logging.getLogger(__name__)
CHUNK = 64 * 1024
CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 4096  # per port of a service
LOWEST_PORT = 1024

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Backend:
    """A pod to which connections to a service's port are forwarded.

    Attributes:
        uid: the pod's uid.
        address: the pod's IP address.
        port: the pod's port.
    """

    uid: str
    address: str
    port: int

    def __str__(self) -> str:
        """Return the address and port, as in `10.0.0.1:8000`."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a service.

    Attributes:
        address: ClusterIP of the service.
        port: port number.
    """

    address: str
    port: int

    def __str__(self) -> str:
        """Return the address and port, as in `10.96.0.1:80`."""
        return f"{self.address}:{self.port}"


def is_ready(pod: Object) -> bool:
    """Return whether a pod's condition Ready is True."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def select_backends(service: Object, port: Mapping[str, Any], pods: Sequence[Object]) -> list[Backend]:
    """Return the pods to which connections to a port may be forwarded.

    These are the ready pods that are not terminating. If no such pod exists, the ready pods that are
    terminating are returned; kube-proxy does the same.

    Args:
        service: the service; without a selector it has no backends.
        port: one of the service's ports.
        pods: pods of all namespaces.
    """
    spec, namespace = service["spec"], service["metadata"]["namespace"]
    selector: Mapping[str, str] = spec.get("selector") or {}
    if not selector:
        return []
    running: list[Backend] = []
    terminating: list[Backend] = []
    for pod in pods:
        metadata, address = pod["metadata"], pod.get("status", {}).get("podIP")
        labels = metadata.get("labels", {})
        if metadata["namespace"] != namespace or not address:
            continue
        if pod["status"].get("phase") in ("Succeeded", "Failed") or not selector.items() <= labels.items():
            continue
        if not is_ready(pod) and not spec.get("publishNotReadyAddresses"):
            continue
        number = target_port(port, pod)
        if number is not None:
            group = terminating if metadata.get("deletionTimestamp") else running
            group.append(Backend(metadata["uid"], address, number))
    return running or terminating


def target_port(port: Mapping[str, Any], pod: Object) -> int | None:
    """Return the number of the pod port that a service port targets.

    The result is None if the service port targets a port name that the pod does not have.
    """
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
        for named in container.get("ports", ()):
            if named.get("name") == target:
                return named["containerPort"]
    return None


class Forwarder:
    """Forwards connections to one port of a service; without backends it does not listen."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.backends: list[Backend] = []
        self._server: asyncio.Server | None = None
        self._open_connections: dict[Backend, int] = {}
        self._next_backend = 0
        self._connection_count = 0

    async def set_backends(self, backends: list[Backend]) -> None:
        """Replace the backends for new connections; open connections are not affected.

        Raises:
            OSError: the proxy cannot listen on the port.
        """
        self.backends = backends
        if backends and self._server is None:
            self._server = await asyncio.start_server(
                self._serve, self.port.address, self.port.port, backlog=512, limit=CHUNK
            )
        elif not backends:
            self.close()

    def close(self) -> None:
        """Stop listening; open connections are not affected."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def order_backends(self) -> list[Backend]:
        """Return the backends to try: fewest open connections first, ties in round-robin order."""
        self._next_backend += 1
        count = len(self.backends)
        rotated = [self.backends[(self._next_backend + offset) % count] for offset in range(count)]
        return sorted(rotated, key=lambda backend: self._open_connections.get(backend, 0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connection_count >= MAX_CONNECTIONS:
            _reset(writer)
            return
        self._connection_count += 1
        try:
            connected = await self._connect_backend()
            if connected is None:
                _reset(writer)
                return
            backend, upstream = connected
            self._open_connections[backend] = self._open_connections.get(backend, 0) + 1
            try:
                await _relay((reader, writer), upstream)
            finally:
                self._open_connections[backend] -= 1
                if not self._open_connections[backend]:
                    del self._open_connections[backend]
        finally:
            self._connection_count -= 1

    async def _connect_backend(self) -> tuple[Backend, Stream] | None:
        for backend in self.order_backends():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    stream = await asyncio.open_connection(backend.address, backend.port, limit=CHUNK)
                return backend, stream
            except (OSError, TimeoutError) as error:
                log.info("service at %s: cannot connect to its pod at %s: %s", self.port, backend, error)
        return None


async def _relay(client: Stream, backend: Stream) -> None:
    """Copy data in both directions until both ends have sent EOF; on an error, reset both connections."""
    copies = [
        asyncio.create_task(_copy_stream(client[0], backend[1])),
        asyncio.create_task(_copy_stream(backend[0], client[1])),
    ]
    try:
        done, _ = await asyncio.wait(copies, return_when=asyncio.FIRST_EXCEPTION)
        broken = any(task.exception() for task in done)
    finally:
        for task in copies:
            task.cancel()
    for writer in (client[1], backend[1]):
        if broken:
            _reset(writer)
        else:
            writer.close()


async def _copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset a TCP connection, so that the peer does not mistake a truncated stream for a complete one."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        except OSError:
            pass
    writer.transport.abort()


class ServiceProxy:
    """Watches services and pods, and keeps one forwarder per port of each service."""

    def __init__(self, api: ApiClient, recorder: Recorder, pod_selector: Mapping[str, str]) -> None:
        """Create the proxy; `run` starts it.

        Args:
            api: client of the API server.
            recorder: recorder of Events about ports that cannot be forwarded.
            pod_selector: query parameters with which pods are listed; they must select only pods that `api`
                may read.
        """
        self._api = api
        self._recorder = recorder
        self._pod_params = pod_selector
        self._services: dict[str, Object] = {}
        self._pods: dict[str, Object] = {}
        self._forwarders: dict[Port, Forwarder] = {}
        self._refused: dict[str, str] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Forward connections until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch("/api/v1/services", {}, self._services))
                group.create_task(self._watch("/api/v1/pods", self._pod_params, self._pods))
                group.create_task(self._update_forwarders())
        finally:
            for forwarder in self._forwarders.values():
                forwarder.close()

    async def _watch(self, path: str, params: Mapping[str, str], table: dict[str, Object]) -> None:
        async for change, item in self._api.watch(path, params):
            if change == "SYNCED":
                continue
            if change == "DELETED":
                table.pop(item["metadata"]["uid"], None)
                self._refused.pop(item["metadata"]["uid"], None)
            else:
                table[item["metadata"]["uid"]] = item
            self._changed.set()

    async def _update_forwarders(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted_forwarders()
            for port in self._forwarders.keys() - wanted.keys():
                self._forwarders.pop(port).close()
            for port, (service, backends) in wanted.items():
                forwarder = self._forwarders.setdefault(port, Forwarder(port))
                try:
                    await forwarder.set_backends(backends)
                except OSError as error:
                    self._report_refused_port(
                        service, f"cannot listen on {port.address}:{port.port}: {error}"
                    )

    def _wanted_forwarders(self) -> dict[Port, tuple[Object, list[Backend]]]:
        wanted: dict[Port, tuple[Object, list[Backend]]] = {}
        pods = list(self._pods.values())
        for service in self._services.values():
            spec = service["spec"]
            address = spec.get("clusterIP", "None")
            if address in ("None", "") or not spec.get("selector"):
                continue
            for port in spec.get("ports", ()):
                if port.get("protocol", "TCP") != "TCP":
                    self._report_refused_port(
                        service, f"port {port['port']} is {port['protocol']}; only TCP is forwarded"
                    )
                elif port["port"] < LOWEST_PORT:
                    self._report_refused_port(
                        service,
                        f"port {port['port']} is refused: mizzen-local runs without root and forwards ports "
                        f"from {LOWEST_PORT} up; choose one of those",
                    )
                else:
                    wanted[Port(address, port["port"])] = (service, select_backends(service, port, pods))
        return wanted

    def _report_refused_port(self, service: Object, message: str) -> None:
        name = f"{service['metadata']['namespace']}/{service['metadata']['name']}"
        if self._refused.get(service["metadata"]["uid"]) == message:
            return
        self._refused[service["metadata"]["uid"]] = message
        log.warning("service %s: %s", name, message)
        self._recorder.record(service, "PortRefused", message, "Warning")
