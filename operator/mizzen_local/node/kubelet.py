# SPDX-License-Identifier: Apache-2.0
"""The kubelet: maintains the Node and its Lease, and runs a `PodRunner` for each pod bound to the node."""

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
from mizzen_local.events import timestamp
from mizzen_local.node.logserver import serve_logs
from mizzen_local.node.node_context import NodeContext
from mizzen_local.node.pod import PodRunner, has_ended
from mizzen_local.node.volumes import remove_folder

log = logging.getLogger(__name__)
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_SECONDS, RENEW_SECONDS = 40, 10.0
CPU_OVERCOMMIT = 8  # advertised per real core, so that CPU requests meant for servers fit on a laptop
MAX_PODS = 110
MAX_LOG_BYTES, LOG_CHECK_SECONDS, MAX_LOG_FOLDERS = 64 * 1024 * 1024, 30.0, 200


class Kubelet:
    """The kubelet of one node."""

    def __init__(self, node: NodeContext, name: str, addresses: Addresses, gpus: int) -> None:
        self._node = node
        self._name = name
        self._addresses = addresses
        self._gpus = gpus
        self._pods: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._address_numbers: dict[str, int] = {}
        self._next_number = 0

    async def run(self) -> None:
        """Kill an earlier kubelet's processes, register the node, and run its pods until cancelled."""
        await asyncio.to_thread(process.kill_marked, self._node.mark())
        try:
            async with serve_logs(self._node.folder, self._node.address, self._container_state) as port:
                await self._register(port)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._renew_lease())
                    group.create_task(self._limit_logs())
                    group.create_task(self._watch_pods())
        finally:
            await asyncio.gather(*(pod.stop_quietly() for pod in self._pods.values()), return_exceptions=True)
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # ---- pods ----

    async def _watch_pods(self) -> None:
        params = {"fieldSelector": f"spec.nodeName={self._name}"}
        async for change, pod in self._node.api.watch("/api/v1/pods", params):
            if change == "SYNCED":
                self._remove_stale_folders()
                continue
            uid = pod["metadata"]["uid"]
            running = self._pods.get(uid)
            if change == "DELETED":
                if running is not None:
                    running.handle_removal()
            elif running is not None:
                running.update(pod)
            elif not has_ended(pod):
                await self._start_pod(uid, pod)

    async def _start_pod(self, uid: str, pod: Object) -> None:
        try:
            address = self._assign_address(uid)
            await self._node.names.add(pod, address)
            runner = PodRunner(self._node, pod, address)
        except ValueError as error:
            self._node.recorder.record(pod, "FailedCreatePodSandBox", str(error), "Warning")
            return
        self._pods[uid] = runner
        task = asyncio.create_task(runner.run(), name=f"pod {pod['metadata']['name']}")
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._on_pod_ended(uid, done))

    def _on_pod_ended(self, uid: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("%s failed", task.get_name(), exc_info=error)
        self._node.names.remove(uid)
        for table in (self._pods, self._tasks, self._address_numbers):
            table.pop(uid, None)

    def _assign_address(self, uid: str) -> str:
        """Return a free address for a pod; a released address is reused as late as possible."""
        taken = set(self._address_numbers.values())
        for _ in range(1020):
            number, self._next_number = self._next_number, (self._next_number + 1) % 1020
            if number not in taken:
                self._address_numbers[uid] = number
                return self._addresses.pod_address(number)
        raise ValueError("the node has no free pod address")

    def _remove_stale_folders(self) -> None:
        """Remove the folders of pods that no longer exist."""
        folder = self._node.folder / "pods"
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in self._pods:
                remove_folder(path)

    # ---- the node ----

    def _capacity(self) -> dict[str, str]:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            "cpu": str(CPU_OVERCOMMIT * (os.cpu_count() or 1)),
            "memory": f"{memory // 1024}Ki",
            "ephemeral-storage": "100Gi",
            "pods": str(MAX_PODS),
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
        await self._write_lease()
        await self._node.api.patch(f"/api/v1/nodes/{self._name}/status", self._status(port), STRATEGIC)

    def _status(self, port: int) -> Object:
        stamp = timestamp()
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

    async def _renew_lease(self) -> None:
        """Renew the node's Lease periodically."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._write_lease()
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("the node's lease was not renewed: %s", error)

    async def _write_lease(self) -> None:
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

    def _container_state(self, namespace: str, pod: str, container: str) -> str:
        """Return a container's state: `waiting`, `running` or `terminated`; empty if its pod does not run."""
        for runner in self._pods.values():
            metadata = runner.object["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, pod):
                return runner.container_state(container)
        return ""

    async def _limit_logs(self) -> None:
        """Periodically limit the size of logs and the number of ended pods whose logs are kept."""
        while True:
            await asyncio.sleep(LOG_CHECK_SECONDS)
            live = {pod.log_folder for pod in self._pods.values()}
            await asyncio.to_thread(limit_logs, self._node.folder / "logs" / "pods", live)


def limit_logs(folder: Path, live: set[Path]) -> None:
    """Truncate logs that are too large, and delete the logs of all but the newest MAX_LOG_FOLDERS ended pods.

    Args:
        folder: folder with one subfolder of logs per pod.
        live: subfolders of pods that still run.
    """
    for path in folder.glob("*/*/*.log"):
        if path.stat().st_size > MAX_LOG_BYTES:
            os.truncate(path, 0)  # the container has it open for appending, so it continues at the new end
    ended = [path for path in folder.glob("*") if path not in live]
    for path in sorted(ended, key=lambda path: path.stat().st_mtime)[: max(0, len(ended) - MAX_LOG_FOLDERS)]:
        remove_folder(path)
