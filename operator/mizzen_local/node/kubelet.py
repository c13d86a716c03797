"""The kubelet: the node's object and lease, and one `Pod` for each pod that is bound to the node."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import platform
from pathlib import Path

import aiohttp

from mizzen_local import process
from mizzen_local.addresses import Addresses
from mizzen_local.api import STRATEGIC, ApiError, Object
from mizzen_local.assets import KUBERNETES
from mizzen_local.events import now
from mizzen_local.node.logserver import serve_logs
from mizzen_local.node.pod import Node, Pod, finished
from mizzen_local.node.volumes import remove

log = logging.getLogger(__name__)
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_SECONDS, RENEW_SECONDS = 40, 10.0
CPU_SHARE = 8  # pods are plain processes that share the cores; requests meant for servers must fit a laptop
MOST_PODS = 110
MOST_LOG_BYTES, LOG_CHECK_SECONDS, MOST_LOG_FOLDERS = 64 * 1024 * 1024, 30.0, 200


class Kubelet:
    """Runs the pods of one node until it is cancelled."""

    def __init__(self, node: Node, name: str, addresses: Addresses, gpus: int) -> None:
        self._node = node
        self._name = name
        self._addresses = addresses
        self._gpus = gpus
        self._pods: dict[str, Pod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0

    async def run(self) -> None:
        """Register the node, end what an earlier kubelet left, and follow the pods."""
        await asyncio.to_thread(process.kill_marked, self._node.mark())
        try:
            async with serve_logs(self._node.folder, self._node.address, self._state_of) as port:
                await self._register(port)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._renew())
                    group.create_task(self._tend_logs())
                    group.create_task(self._follow())
        finally:
            await asyncio.gather(*(pod.leave() for pod in self._pods.values()), return_exceptions=True)
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # ---- pods ----

    async def _follow(self) -> None:
        params = {"fieldSelector": f"spec.nodeName={self._name}"}
        async for change, pod in self._node.api.watch("/api/v1/pods", params):
            if change == "SYNCED":
                self._sweep()
                continue
            uid = pod["metadata"]["uid"]
            running = self._pods.get(uid)
            if change == "DELETED":
                if running is not None:
                    running.vanish()
            elif running is not None:
                running.update(pod)
            elif not finished(pod):
                await self._start(uid, pod)

    async def _start(self, uid: str, pod: Object) -> None:
        try:
            address = self._address(uid)
            await self._node.names.add(pod, address)
            runner = Pod(self._node, pod, address)
        except ValueError as error:
            self._node.recorder.record(pod, "FailedCreatePodSandBox", str(error), "Warning")
            return
        self._pods[uid] = runner
        task = asyncio.create_task(runner.run(), name=f"pod {pod['metadata']['name']}")
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._ended(uid, done))

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended in an error", task.get_name(), exc_info=error)
        self._node.names.remove(uid)
        for table in (self._pods, self._tasks, self._numbers):
            table.pop(uid, None)

    def _address(self, uid: str) -> str:
        """An address for a pod; one that was given back comes again as late as can be."""
        taken = set(self._numbers.values())
        for _ in range(1020):
            number, self._next = self._next, (self._next + 1) % 1020
            if number not in taken:
                self._numbers[uid] = number
                return self._addresses.pod(number)
        raise ValueError("the node has no free pod address")

    def _sweep(self) -> None:
        """Remove folders of pods that are no more."""
        folder = self._node.folder / "pods"
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in self._pods:
                remove(path)

    # ---- the node ----

    def _capacity(self) -> dict[str, str]:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            "cpu": str(CPU_SHARE * (os.cpu_count() or 1)),
            "memory": f"{memory // 1024}Ki",
            "ephemeral-storage": "100Gi",
            "pods": str(MOST_PODS),
            "nvidia.com/gpu": str(self._gpus),
        }

    async def _register(self, port: int) -> None:
        labels = {
            "kubernetes.io/hostname": self._name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(
                platform.machine(), platform.machine()
            ),
        }
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._name, "labels": labels}}
        try:
            await self._node.api.create("/api/v1/nodes", body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        await self._renew_once()
        await self._node.api.patch(f"/api/v1/nodes/{self._name}/status", self._status(port), STRATEGIC)

    def _status(self, port: int) -> Object:
        stamp = now()
        healthy = {
            "MemoryPressure": ("False", "KubeletHasSufficientMemory"),
            "DiskPressure": ("False", "KubeletHasNoDiskPressure"),
            "PIDPressure": ("False", "KubeletHasSufficientPID"),
            "Ready": ("True", "KubeletReady"),
        }
        return {
            "status": {
                "capacity": self._capacity(),
                "allocatable": self._capacity(),
                "conditions": [
                    {
                        "type": kind,
                        "status": value,
                        "reason": reason,
                        "message": "mizzen-local runs pods as processes of this machine",
                        "lastHeartbeatTime": stamp,
                        "lastTransitionTime": stamp,
                    }
                    for kind, (value, reason) in healthy.items()
                ],
                "addresses": [
                    {"type": "InternalIP", "address": self._node.address},
                    {"type": "Hostname", "address": self._name},
                ],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
                "nodeInfo": {
                    "machineID": "",
                    "systemUUID": "",
                    "bootID": "",
                    "kernelVersion": platform.release(),
                    "osImage": "local processes",
                    "containerRuntimeVersion": "process://1",
                    "kubeletVersion": f"v{KUBERNETES}",
                    "kubeProxyVersion": "",
                    "operatingSystem": "linux",
                    "architecture": platform.machine(),
                },
            }
        }

    async def _renew(self) -> None:
        """Keep the node's lease fresh."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._renew_once()
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("the node's lease was not renewed: %s", error)

    async def _renew_once(self) -> None:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": stamp,
        }
        try:
            await self._node.api.patch(f"{LEASES}/{self._name}", {"spec": spec})
        except ApiError as error:
            if error.status != 404:
                raise
            body = {"metadata": {"name": self._name}, "spec": spec}
            await self._node.api.create(LEASES, body)

    # ---- logs ----

    def _state_of(self, namespace: str, pod: str, container: str) -> str:
        """Return the state of a container of a live pod; see `StateOf`."""
        for one in self._pods.values():
            metadata = one.object["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, pod):
                return one.state_of(container)
        return ""

    async def _tend_logs(self) -> None:
        """Keep logs within bounds: a log that grew too large starts anew, old pods' logs go."""
        while True:
            await asyncio.sleep(LOG_CHECK_SECONDS)
            live = {pod.log_folder for pod in self._pods.values()}
            await asyncio.to_thread(tend_logs, self._node.folder / "logs" / "pods", live)


def tend_logs(folder: Path, live: set[Path]) -> None:
    """Empty logs that are too large; remove those of the oldest ended pods when there are too many."""
    for path in folder.glob("*/*/*.log"):
        if path.stat().st_size > MOST_LOG_BYTES:
            os.truncate(path, 0)  # it is open for appending, so that writing goes on from the start
    ended = [path for path in folder.glob("*") if path not in live]
    for path in sorted(ended, key=lambda path: path.stat().st_mtime)[: max(0, len(ended) - MOST_LOG_FOLDERS)]:
        remove(path)
