# SPDX-License-Identifier: Apache-2.0
"""Simulates a node, the Deployment controller, and the admin API of gateways.

    python benchmarks/operator_parts/node.py SERVER FOLDER

No containers run: the node binds every pod and reports it as running immediately, and a pod ends as soon as
it is deleted. Every gateway pod has its own address. On these addresses, this process answers
`GET /admin/engines` with the ready engine pods of the service, and holds a long poll until they change.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from operator_parts.api import STRATEGIC, Api, ApiError

SERVICE, COMPONENT = "mizzen.dev/service", "mizzen.dev/component"
ROUTABLE = "mizzen.dev/routable"
FIRST_ADDRESS = int(ipaddress.IPv4Address("127.130.0.1"))
ADMIN_PORT = 8001


class Node:
    """The simulated node, which writes the status of all pods and Deployments."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._addresses: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens: dict[tuple[str, str], str] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._ready: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        self._changed: defaultdict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)
        self._next = 0

    async def run(self) -> None:
        """Simulate pods, Deployments and garbage collection until cancelled."""
        await asyncio.gather(self._pods(), self._deployments(), self._services())

    # ── pods ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _pods(self) -> None:
        async for kind, pod in self._api.watch("/api/v1/pods", labelSelector=COMPONENT):
            self._spawn(self._pod(kind, pod))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"node: {task.exception()!r}", file=sys.stderr, flush=True)

    async def _pod(self, kind: str, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        uid, path = meta["uid"], f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        service = (meta["namespace"], meta["labels"][SERVICE])
        engine = meta["labels"][COMPONENT] == "engine"
        if kind == "DELETED" or "deletionTimestamp" in meta:
            if engine and self._ready[service].pop(uid, None) is not None:
                self._notify(service)
            if kind == "DELETED":
                self._forget(uid)
            else:
                await self._api.quietly(
                    "DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                )
            return
        status = self._status(pod)
        text = json.dumps(status)
        if self._written.get(uid) == text:
            return
        first = uid not in self._written
        self._written[uid] = text
        if first and not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": "sim"}
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": meta["name"]},
                "target": target,
            }
            await self._api.quietly("POST", f"{path}/binding", binding, "application/json")
        if first and not engine:
            await self._serve_admin(uid, service)
        await self._api.quietly(
            "PATCH", f"{path}/status", {"metadata": {"uid": uid}, "status": status}, STRATEGIC
        )
        if engine and uid not in self._ready[service]:
            self._ready[service][uid] = meta["name"]
            self._notify(service)

    def _status(self, pod: dict[str, Any]) -> dict[str, Any]:
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])]
        conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
        ready = all(conditions.get(gate) == "True" for gate in gates)
        container = pod["spec"]["containers"][0]
        return {
            "phase": "Running",
            "podIP": self._address(pod["metadata"]["uid"]),
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "ContainersReady", "status": "True"},
                {"type": "Ready", "status": str(ready)},
            ],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {}},
                }
            ],
        }

    def _address(self, uid: str) -> str:
        if uid not in self._addresses:
            self._addresses[uid] = str(ipaddress.IPv4Address(FIRST_ADDRESS + self._next))
            self._next += 1
        return self._addresses[uid]

    def _forget(self, uid: str) -> None:
        self._written.pop(uid, None)
        self._addresses.pop(uid, None)
        server = self._servers.pop(uid, None)
        if server is not None:
            server.close()

    # ── Deployments ───────────────────────────────────────────────────────────────────────────────────────

    async def _deployments(self) -> None:
        generations: dict[str, int] = {}
        path = "/apis/apps/v1/deployments"
        async for kind, body in self._api.watch(path, labelSelector=COMPONENT):
            meta = body["metadata"]
            if kind == "DELETED":
                generations.pop(meta["uid"], None)
            elif generations.get(meta["uid"]) != meta["generation"]:
                first = meta["uid"] not in generations
                generations[meta["uid"]] = meta["generation"]
                self._spawn(self._deployment(body, first))

    async def _deployment(self, body: dict[str, Any], first: bool) -> None:
        meta, spec = body["metadata"], body["spec"]
        for number in range(spec["replicas"] if first else 0):
            template = spec["template"]
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{meta['name']}-{meta['generation']}-{number}",
                    "namespace": meta["namespace"],
                    "labels": template["metadata"]["labels"],
                },
                "spec": {**template["spec"], "nodeName": "sim"},
            }
            pods = f"/api/v1/namespaces/{meta['namespace']}/pods"
            await self._api.quietly("POST", pods, pod, "application/json")
        status = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), spec["replicas"])
        status |= {"availableReplicas": spec["replicas"], "observedGeneration": meta["generation"]}
        where = f"/apis/apps/v1/namespaces/{meta['namespace']}/deployments/{meta['name']}/status"
        await self._api.quietly("PATCH", where, {"metadata": {"uid": meta["uid"]}, "status": status})

    async def _services(self) -> None:
        """Delete the children of deleted InferenceServices, as the garbage collector would."""
        async for kind, body in self._api.watch("/apis/mizzen.dev/v1alpha1/inferenceservices"):
            if kind == "DELETED":
                self._spawn(self._collect(body["metadata"]["namespace"], body["metadata"]["name"]))

    async def _collect(self, namespace: str, name: str) -> None:
        selector = {"labelSelector": f"{SERVICE}={name}"}
        for collection in (
            f"/apis/apps/v1/namespaces/{namespace}/deployments",
            f"/api/v1/namespaces/{namespace}/pods",
            f"/api/v1/namespaces/{namespace}/secrets",
        ):
            await self._api.request("DELETE", collection, **selector)
        await self._api.quietly("DELETE", f"/api/v1/namespaces/{namespace}/services/{name}-gateway")

    # ── the gateways' admin API ───────────────────────────────────────────────────────────────────────────

    def _notify(self, service: tuple[str, str]) -> None:
        self._changed.pop(service, asyncio.Event()).set()

    async def _serve_admin(self, uid: str, service: tuple[str, str]) -> None:
        namespace, name = service
        path = f"/api/v1/namespaces/{namespace}/secrets/{name}-gateway-keys"
        try:
            secret = await self._api.request("GET", path)
        except ApiError:
            return
        self._tokens[service] = base64.b64decode(secret["data"]["admin.token"]).decode()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await self._answer(reader, writer, service):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                writer.close()

        self._servers[uid] = await asyncio.start_server(connected, self._address(uid), ADMIN_PORT)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: tuple[str, str]
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *headers = head.split("\r\n")
        header = {key.lower(): value.strip() for key, _, value in (h.partition(":") for h in headers)}
        if header.get("authorization") != f"Bearer {self._tokens[service]}":
            writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
            return True
        query = parse_qs(urlsplit(line.split(" ")[1]).query)
        deadline = asyncio.get_running_loop().time() + float(query.get("wait", ["0"])[0])
        while query.get("version", [""])[0] == self._version(service):
            event = self._changed[service]
            try:
                async with asyncio.timeout_at(deadline):
                    await event.wait()
            except TimeoutError:
                writer.write(b"HTTP/1.1 304 Not Modified\r\n\r\n")
                return True
        engines = [
            {
                "service": service[1],
                "name": name,
                "uid": uid,
                "state": "serving",
                "revision": "",
                "requests": 0,
            }
            for uid, name in self._ready[service].items()
        ]
        table = {"synced": True, "version": self._version(service), "waiting": 0, "engines": engines}
        body = json.dumps(table).encode()
        kind = b"Content-Type: application/json\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        return True

    def _version(self, service: tuple[str, str]) -> str:
        return f"{hash(tuple(sorted(self._ready[service]))) & 0xFFFFFFFF:08x}"


async def main(server: str, folder: str) -> None:
    """Simulate until SIGTERM arrives, or until standard input closes because the parent process has ended."""
    api = Api(server, Path(folder), "benchmark-node")
    work = asyncio.create_task(Node(api).run())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    loop.add_reader(sys.stdin, work.cancel)
    print("ready", flush=True)
    try:
        await work
    except asyncio.CancelledError:
        pass
    finally:
        await api.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
