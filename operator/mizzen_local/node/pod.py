# SPDX-License-Identifier: Apache-2.0
"""Runs one pod: volumes, init containers, containers, status, termination and removal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import aiohttp

from mizzen_local import process
from mizzen_local.api import STRATEGIC, ApiError, Object
from mizzen_local.events import timestamp
from mizzen_local.node.container import Command, ContainerState, PodContainer, PodContext
from mizzen_local.node.environment import PathMap, base_environment, expand_references, resolve_variables
from mizzen_local.node.images import image_command, image_files
from mizzen_local.node.node_context import NodeContext
from mizzen_local.node.sources import MissingError, PodSources
from mizzen_local.node.status import PodStatusInputs, has_failed, is_sidecar, pod_status
from mizzen_local.node.volumes import Volumes, remove_folder
from mizzen_local.pki import write_token_kubeconfig

log = logging.getLogger(__name__)
SERVICE_ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
REFRESH_SECONDS = 10.0
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


class PodRunner:
    """Runs one pod, from its binding to its removal.

    Attributes:
        object: the latest version of the pod from the API server.
    """

    def __init__(self, node: NodeContext, pod: Object, address: str) -> None:
        self.object = pod
        self._node = node
        self._address = address
        self._uid: str = pod["metadata"]["uid"]
        self._folder = node.folder / "pods" / self._uid
        self._start_time = pod.get("status", {}).get("startTime") or timestamp()
        self._sources = PodSources(node.api, pod)
        self._volumes = Volumes(self._folder / "volumes", pod, self._sources)
        self._sandbox_ready = False
        self._initialized = False
        self._dirty = asyncio.Event()
        self._deleted = asyncio.Event()
        self._removed = asyncio.Event()
        self._conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", ())}
        self._written_status: Object = {}
        spec = pod["spec"]
        policy = spec.get("restartPolicy", "Always")
        init_policy = "Never" if policy == "Never" else "OnFailure"
        self._init = [
            self._container(
                item, "Always" if item.get("restartPolicy") == "Always" else init_policy, init=True
            )
            for item in spec.get("initContainers", ())
        ]
        self._main = [self._container(item, policy, init=False) for item in spec["containers"]]
        self._ran_before = policy == "Never" and any(item.state.last for item in self._main)
        for container in self._main if self._ran_before else ():
            container.mark_ended()
        self._supervisors: list[asyncio.Task[None]] = []
        self._reports_nothing = False
        self.update(pod)

    @property
    def log_folder(self) -> Path:
        """Folder of the containers' logs, which is kept after the pod has been removed."""
        metadata = self.object["metadata"]
        name = f"{metadata['namespace']}_{metadata['name']}_{self._uid}"
        return self._node.folder / "logs" / "pods" / name

    def container_state(self, container: str) -> str:
        """Return a container's state: `waiting`, `running` or `terminated`; empty if it does not exist."""
        matches = [item for item in [*self._init, *self._main] if item.name == container]
        return next(iter(matches[0].state.current), "") if matches else ""

    def update(self, pod: Object) -> None:
        """Store a newer version of the pod; if it has a deletion timestamp, begin to terminate the pod."""
        self.object = pod
        if pod["metadata"].get("deletionTimestamp"):
            self._deleted.set()
        self._dirty.set()

    def handle_removal(self) -> None:
        """Kill the containers, because the pod no longer exists in the API."""
        self._removed.set()
        self._deleted.set()
        for container in [*self._init, *self._main]:
            container.kill()

    def _container(
        self, spec: Object, restart: Literal["Always", "OnFailure", "Never"], *, init: bool
    ) -> PodContainer:
        kind = "initContainerStatuses" if init else "containerStatuses"
        context = PodContext(
            prepare=self._prepare,
            address=self._address,
            grace=self.object["spec"].get("terminationGracePeriodSeconds", 30),
            session=self._node.session,
            changed=self._dirty.set,
            event=self._event,
        )
        for item in self.object.get("status", {}).get(kind, ()):
            if item["name"] == spec["name"] and item.get("containerID"):
                return PodContainer(spec, context, restart=restart, initial=_restored_state(item, init=init))
        reason = "PodInitializing" if self.object["spec"].get("initContainers") else "ContainerCreating"
        return PodContainer(
            spec, context, restart=restart, initial=ContainerState({"waiting": {"reason": reason}})
        )

    def _event(self, reason: str, message: str, kind: Literal["Normal", "Warning"]) -> None:
        self._node.recorder.record(self.object, reason, message, kind)

    # ---- lifecycle ----

    async def run(self) -> None:
        """Run the pod; return after it has been deleted, terminated and removed."""
        publish_task = asyncio.create_task(self._publish())
        # A pod may have been deleted before the node sees it; then none of its containers is started.
        life = self._deleted.wait() if self._deleted.is_set() else self._run_containers()
        life_task: asyncio.Task[Any] = asyncio.create_task(life)
        refresh_task = asyncio.create_task(self._refresh_volumes())
        deleted_task = asyncio.create_task(self._deleted.wait())
        try:
            await asyncio.wait([life_task, deleted_task], return_when=asyncio.FIRST_COMPLETED)
            if life_task.done():
                life_task.result()
                await deleted_task
            life_task.cancel()
            await asyncio.gather(life_task, return_exceptions=True)
            grace = self.object["metadata"].get("deletionGracePeriodSeconds", 0)
            await self._stop(0 if self._removed.is_set() else grace)
        finally:
            self.kill()
            tasks = [publish_task, life_task, refresh_task, deleted_task, *self._supervisors]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._remove_pod()

    def kill(self) -> None:
        """Send SIGKILL to all containers that run."""
        for container in [*self._init, *self._main]:
            container.kill()

    async def stop_quietly(self) -> None:
        """Terminate the containers within a second, without writing to the API; used when the node stops."""
        self._reports_nothing = True
        await self._stop(1.0)

    async def _run_containers(self) -> None:
        await self._create_volumes()
        self._sandbox_ready = True
        self._dirty.set()
        if self._ran_before:
            self._initialized = True
            self._dirty.set()
            return
        for container in self._init:
            supervisor = self._supervise(container)
            if is_sidecar(container):
                await container.started_or_ended.wait()
            else:
                await asyncio.wait([supervisor])
                if has_failed(container):
                    return
        self._initialized = True
        self._dirty.set()
        # Cancelling this wait must not cancel the supervisors: `_stop` ends the containers of a deleted pod.
        await asyncio.wait(list(map(self._supervise, self._main)))
        await asyncio.gather(*(item.stop(self._grace) for item in self._init if is_sidecar(item)))

    @property
    def _grace(self) -> float:
        return float(self.object["spec"].get("terminationGracePeriodSeconds", 30))

    def _supervise(self, container: PodContainer) -> asyncio.Task[None]:
        task = asyncio.create_task(container.supervise())
        self._supervisors.append(task)
        return task

    async def _create_volumes(self) -> None:
        """Create the volumes; retry until all objects that they refer to exist."""
        self._folder.mkdir(parents=True, exist_ok=True)
        attempt = 0
        while True:
            try:
                return await self._volumes.refresh(self._with_addresses())
            except (MissingError, ApiError, OSError, aiohttp.ClientError, TimeoutError) as error:
                if attempt > 2:  # no event yet for objects that are created together with the pod
                    self._event("FailedMount", f"volumes: {error}", "Warning")
                await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                attempt += 1

    async def _refresh_volumes(self) -> None:
        """Periodically renew tokens and update the files of Secrets and ConfigMaps."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            if not self._sandbox_ready:
                continue
            try:
                await self._volumes.refresh(self._with_addresses())
            except (MissingError, ApiError, OSError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("%s: volumes were not refreshed: %s", self.object["metadata"]["name"], error)

    async def _stop(self, grace: float) -> None:
        """Within `grace` seconds, terminate the main containers concurrently, then sidecars one by one.

        The sidecar that was started last is terminated first.
        """
        deadline = time.monotonic() + grace
        await asyncio.gather(*(item.stop(grace) for item in self._main))
        for item in reversed(self._init):
            await item.stop(max(deadline - time.monotonic(), 0.0))
        await asyncio.gather(*self._supervisors, return_exceptions=True)

    async def _remove_pod(self) -> None:
        """Write the final status, delete the pod from the API, and remove its folder."""
        if not self._removed.is_set():
            await self._write_status()
            metadata = self.object["metadata"]
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._uid}}
            await self._retry_call(lambda: self._node.api.delete(_path(metadata), options))
        await asyncio.to_thread(remove_folder, self._folder)

    # ---- commands ----

    def _with_addresses(self) -> Object:
        """Return the pod with its addresses added to its status; the API server may not have them yet."""
        host, address = self._node.address, self._address
        addresses = {"podIP": address, "podIPs": [{"ip": address}], "hostIP": host, "hostIPs": [{"ip": host}]}
        return {**self.object, "status": {**self.object.get("status", {}), **addresses}}

    async def _prepare(self, spec: Mapping[str, Any], run: int) -> Command:
        pod, name = self._with_addresses(), spec["name"]
        container_folder = self._folder / "containers" / name
        container_folder.mkdir(parents=True, exist_ok=True)
        message = container_folder / "termination-message"
        path_map = PathMap(self._path_map(spec, message))
        environment = base_environment(container_folder, pod["metadata"]["name"])
        environment |= _api_variables(self._node.server)
        if SERVICE_ACCOUNT_FOLDER in path_map.paths:
            environment["KUBECONFIG"] = str(self._kubeconfig(path_map.paths[SERVICE_ACCOUNT_FOLDER]))
        user_variables = await resolve_variables(pod, spec, self._sources)
        user_variables = {
            key: await self._node.names.rewrite(value, pod) for key, value in user_variables.items()
        }
        environment |= {key: path_map.rewrite(value) for key, value in user_variables.items()}
        # The command of an image is a path on this machine; `command` and `args` contain container paths.
        program = [] if spec.get("command") else image_command(spec["image"])
        unexpanded = [*spec.get("command", ()), *spec.get("args", ())]
        variables = {**_api_variables(self._node.server), **user_variables}
        expanded = [
            await self._node.names.rewrite(expand_references(text, variables), pod) for text in unexpanded
        ]
        arguments = program + [path_map.rewrite(text) for text in expanded]
        folder = Path(path_map.rewrite(spec["workingDir"])) if spec.get("workingDir") else container_folder
        log_file = self.log_folder / name / f"{run}.log"
        mark = environment[process.MARK] = self._node.mark(self._uid, name, str(run))
        return Command(
            arguments=arguments,
            environment=environment,
            folder=folder if folder.is_dir() else container_folder,
            log=log_file,
            message=message,
            mark=mark,
        )

    def _path_map(self, spec: Mapping[str, Any], message: Path) -> dict[str, Path]:
        path_map = {**image_files(), spec.get("terminationMessagePath", "/dev/termination-log"): message}
        for mount in spec.get("volumeMounts", ()):
            path_map[mount["mountPath"].rstrip("/")] = self._volumes.path(mount["name"]) / mount.get(
                "subPath", ""
            )
        return path_map

    def _kubeconfig(self, account: Path) -> Path:
        return write_token_kubeconfig(
            self._folder / "kubeconfig",
            server=self._node.server,
            authority=account / "ca.crt",
            namespace=self.object["metadata"]["namespace"],
            token_file=account / "token",
        )

    # ---- status ----

    async def _publish(self) -> None:
        """Write the status whenever it has changed; one write covers all changes since the previous write."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if not self._reports_nothing:
                await self._write_status()

    async def _write_status(self) -> None:
        inputs = PodStatusInputs(
            pod=self.object,
            init=self._init,
            main=self._main,
            initialized=self._initialized,
            sandbox=self._sandbox_ready,
            address=self._address,
            host=self._node.address,
            began=self._start_time,
        )
        new_status = pod_status(inputs, self._conditions)
        if new_status == self._written_status:
            return
        metadata = self.object["metadata"]
        # Without `$patch`, these lists would be merged with the addresses that an earlier kubelet wrote.
        replacements = {
            key: [{"$patch": "replace"}, *new_status.get(key, ())] for key in ("podIPs", "hostIPs")
        }
        body = {"metadata": {"uid": self._uid}, "status": {**new_status, **replacements}}
        if await self._retry_call(lambda: self._node.api.patch(_path(metadata) + "/status", body, STRATEGIC)):
            self._written_status = new_status
            self._conditions = {item["type"]: item for item in new_status["conditions"]}

    async def _retry_call(self, call: Callable[[], Any]) -> bool:
        """Call the API server, at most 30 times, until the call succeeds; return whether it has succeeded.

        The call is not repeated if the pod no longer exists, or if another pod has its name.
        """
        name = self.object["metadata"]["name"]
        for attempt in range(30):
            try:
                await call()
                return True
            except ApiError as error:
                if error.status in (404, 409, 422):
                    log.info("%s: write to the API server rejected: %s", name, error)
                    return False
                log.warning("%s: write to the API server failed, retrying: %s", name, error)
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("%s: write to the API server failed, retrying: %s", name, error)
            await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
        return False


def has_ended(pod: Object) -> bool:
    """Return whether a pod's phase is final; if so, its containers must not be run again."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _path(metadata: Mapping[str, Any]) -> str:
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def _api_variables(server: str) -> dict[str, str]:
    host, _, port = server.removeprefix("https://").rpartition(":")
    return {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "KUBERNETES_SERVICE_PORT_HTTPS": port,
    }


def _restored_state(before: Mapping[str, Any], *, init: bool) -> ContainerState:
    """Return the initial state of a container that an earlier kubelet ran, and that will be restarted.

    Args:
        before: the container's status, as the earlier kubelet of this node wrote it.
        init: whether the container is an init container, whose restart is not counted.
    """
    state = before.get("state", {})
    last = {"terminated": state["terminated"]} if "terminated" in state else before.get("lastState", {})
    if "running" in state:
        last = {
            "terminated": {
                "exitCode": 137,
                "reason": "Error",
                "message": "the node was restarted",
                "startedAt": state["running"].get("startedAt"),
                "finishedAt": timestamp(),
                "containerID": before.get("containerID", ""),
            }
        }
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    return ContainerState(waiting, last=last, restarts=before.get("restartCount", 0) + (0 if init else 1))
