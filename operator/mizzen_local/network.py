"""Services of a local cluster: a TCP proxy on each ClusterIP and port, to the ready pods behind it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_local.api import Api, Object
from mizzen_local.events import Recorder

log = logging.getLogger(__name__)
CHUNK = 64 * 1024
CONNECT_SECONDS = 5.0
MOST_CONNECTIONS = 4096  # of one port of one service
LOWEST_PORT = 1024

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Backend:
    """One pod behind a port of a service.

    Attributes:
        uid: the pod's uid.
        address: its address.
        port: the port there.
    """

    uid: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one service.

    Attributes:
        address: the ClusterIP.
        port: the service's port.
    """

    address: str
    port: int


def ready(pod: Object) -> bool:
    """Whether a pod's condition Ready holds."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def backends(service: Object, port: Mapping[str, Any], pods: Sequence[Object]) -> list[Backend]:
    """The pods that a connection to a port may go to.

    Ready pods that do not terminate; when there are none, ready ones that do, as kube-proxy has it.

    Args:
        service: has a selector.
        port: one of its ports.
        pods: pods of any namespace.
    """
    spec, namespace = service["spec"], service["metadata"]["namespace"]
    selector: Mapping[str, str] = spec.get("selector") or {}
    if not selector:
        return []
    staying: list[Backend] = []
    leaving: list[Backend] = []
    for pod in pods:
        metadata, address = pod["metadata"], pod.get("status", {}).get("podIP")
        labels = metadata.get("labels", {})
        if metadata["namespace"] != namespace or not address:
            continue
        if pod["status"].get("phase") in ("Succeeded", "Failed") or not selector.items() <= labels.items():
            continue
        if not ready(pod) and not spec.get("publishNotReadyAddresses"):
            continue
        number = target_port(port, pod)
        if number is not None:
            group = leaving if metadata.get("deletionTimestamp") else staying
            group.append(Backend(metadata["uid"], address, number))
    return staying or leaving


def target_port(port: Mapping[str, Any], pod: Object) -> int | None:
    """The pod's port that a service's port leads to; None when the pod has none of that name."""
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
        for offered in container.get("ports", ()):
            if offered.get("name") == target:
                return offered["containerPort"]
    return None


class Forwarder:
    """Listens on one port of a service while there are pods for it; without any, it refuses."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.backends: list[Backend] = []
        self._server: asyncio.Server | None = None
        self._load: dict[Backend, int] = {}
        self._turn = 0
        self._connections = 0

    async def follow(self, found: list[Backend]) -> None:
        """Take the pods of now; connections that are open go on.

        Raises:
            OSError: the address cannot be listened on.
        """
        self.backends = found
        if found and self._server is None:
            self._server = await asyncio.start_server(
                self._serve, self.port.address, self.port.port, backlog=512, limit=CHUNK
            )
        elif not found:
            self.close()

    def close(self) -> None:
        """Listen no longer; connections that are open go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def order(self) -> list[Backend]:
        """Backends to try: the least busy first, in turn among equals."""
        self._turn += 1
        count = len(self.backends)
        turned = [self.backends[(self._turn + offset) % count] for offset in range(count)]
        return sorted(turned, key=lambda backend: self._load.get(backend, 0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= MOST_CONNECTIONS:
            _reset(writer)
            return
        self._connections += 1
        try:
            opened = await self._open()
            if opened is None:
                _reset(writer)
                return
            backend, upstream = opened
            self._load[backend] = self._load.get(backend, 0) + 1
            try:
                await _join((reader, writer), upstream)
            finally:
                self._load[backend] -= 1
                if not self._load[backend]:
                    del self._load[backend]
        finally:
            self._connections -= 1

    async def _open(self) -> tuple[Backend, Stream] | None:
        for backend in self.order():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    stream = await asyncio.open_connection(backend.address, backend.port, limit=CHUNK)
                return backend, stream
            except (OSError, TimeoutError) as error:
                log.info("%s: %s:%s: %s", self.port, backend.address, backend.port, error)
        return None


async def _join(near: Stream, far: Stream) -> None:
    """Copy both ways until both ends have said all; an error on either ends both."""
    copies = [
        asyncio.create_task(_copy(near[0], far[1])),
        asyncio.create_task(_copy(far[0], near[1])),
    ]
    try:
        done, _ = await asyncio.wait(copies, return_when=asyncio.FIRST_EXCEPTION)
        broken = any(task.exception() for task in done)
    finally:
        for task in copies:
            task.cancel()
    for writer in (near[1], far[1]):
        if broken:
            _reset(writer)
        else:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, so that the other end does not take a cut stream for a whole one."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        except OSError:
            pass
    writer.transport.abort()


class Network:
    """Follows services and pods, and keeps a forwarder for each port."""

    def __init__(self, api: Api, recorder: Recorder, pod_selector: Mapping[str, str]) -> None:
        """Prepare.

        Args:
            api: the API server.
            recorder: for events about refused ports.
            pod_selector: query parameters of the pods' list that this user may read.
        """
        self._api = api
        self._recorder = recorder
        self._params = pod_selector
        self._services: dict[str, Object] = {}
        self._pods: dict[str, Object] = {}
        self._forwarders: dict[Port, Forwarder] = {}
        self._refused: dict[str, str] = {}
        self._dirty = asyncio.Event()

    async def run(self) -> None:
        """Forward until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch("/api/v1/services", {}, self._services))
                group.create_task(self._watch("/api/v1/pods", self._params, self._pods))
                group.create_task(self._apply())
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
            self._dirty.set()

    async def _apply(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            wanted = self._wanted()
            for port in self._forwarders.keys() - wanted.keys():
                self._forwarders.pop(port).close()
            for port, (service, found) in wanted.items():
                forwarder = self._forwarders.setdefault(port, Forwarder(port))
                try:
                    await forwarder.follow(found)
                except OSError as error:
                    self._refuse(service, f"cannot listen on {port.address}:{port.port}: {error}")

    def _wanted(self) -> dict[Port, tuple[Object, list[Backend]]]:
        wanted: dict[Port, tuple[Object, list[Backend]]] = {}
        pods = list(self._pods.values())
        for service in self._services.values():
            spec = service["spec"]
            address = spec.get("clusterIP", "None")
            if address in ("None", "") or not spec.get("selector"):
                continue
            for port in spec.get("ports", ()):
                if port.get("protocol", "TCP") != "TCP":
                    self._refuse(service, f"port {port['port']} is {port['protocol']}; only TCP is forwarded")
                elif port["port"] < LOWEST_PORT:
                    self._refuse(
                        service,
                        f"port {port['port']} is refused: mizzen-local runs without root and forwards ports "
                        f"from {LOWEST_PORT} up; choose one of those",
                    )
                else:
                    wanted[Port(address, port["port"])] = (service, backends(service, port, pods))
        return wanted

    def _refuse(self, service: Object, message: str) -> None:
        name = f"{service['metadata']['namespace']}/{service['metadata']['name']}"
        if self._refused.get(service["metadata"]["uid"]) == message:
            return
        self._refused[service["metadata"]["uid"]] = message
        log.warning("service %s: %s", name, message)
        self._recorder.record(service, "PortRefused", message, "Warning")
