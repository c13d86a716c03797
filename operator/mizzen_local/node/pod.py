"""One pod: volumes, init containers, containers, status, and its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from mizzen_local import process
from mizzen_local.api import STRATEGIC, Api, ApiError, Object
from mizzen_local.events import Recorder, now
from mizzen_local.node.container import Command, Container, State, Surroundings
from mizzen_local.node.environment import Places, base_environment, expand, variables
from mizzen_local.node.images import IMAGE_FILES, entry_point
from mizzen_local.node.names import Names
from mizzen_local.node.sources import MissingError, Sources
from mizzen_local.node.status import View, fatal, is_sidecar, status
from mizzen_local.node.volumes import Volumes, remove
from mizzen_local.pki import write_token_kubeconfig

log = logging.getLogger(__name__)
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
REFRESH_SECONDS = 10.0
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Node:
    """Resources that all pods of a node share.

    Attributes:
        api: the API server, as the node's own user.
        session: HTTP client of probes.
        recorder: for events.
        folder: the cluster's folder.
        address: the node's address.
        server: URL of the API server.
        authority: the API server's CA, PEM.
        names: of pods, as the cluster's DNS would tell them.
    """

    api: Api
    session: aiohttp.ClientSession
    recorder: Recorder
    folder: Path
    address: str
    server: str
    authority: Path
    names: Names = field(default_factory=Names)

    def mark(self, *names: str) -> str:
        """The mark of all pods' processes, of a pod's (its uid), of one run of one container (name, run)."""
        return "/".join([str(self.folder), "pods", *names, ""])


class Pod:
    """The one who runs a pod, from its binding to its removal.

    Attributes:
        object: the pod as the API last gave it.
    """

    def __init__(self, node: Node, pod: Object, address: str) -> None:
        self.object = pod
        self._node = node
        self._address = address
        self._uid: str = pod["metadata"]["uid"]
        self._folder = node.folder / "pods" / self._uid
        self._began = pod.get("status", {}).get("startTime") or now()
        self._sources = Sources(node.api, pod)
        self._volumes = Volumes(self._folder / "volumes", pod, self._sources)
        self._sandbox = False
        self._initialized = False
        self._dirty = asyncio.Event()
        self._deleted = asyncio.Event()
        self._gone = asyncio.Event()
        self._conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", ())}
        self._written: Object = {}
        spec = pod["spec"]
        policy = spec.get("restartPolicy", "Always")
        for_init = "Never" if policy == "Never" else "OnFailure"
        self._init = [
            self._container(item, "Always" if item.get("restartPolicy") == "Always" else for_init, init=True)
            for item in spec.get("initContainers", ())
        ]
        self._main = [self._container(item, policy, init=False) for item in spec["containers"]]
        self._lost = policy == "Never" and any(item.state.last for item in self._main)
        for container in self._main if self._lost else ():
            container.settle()
        self._supervising: list[asyncio.Task[None]] = []
        self._silent = False
        self.update(pod)

    @property
    def log_folder(self) -> Path:
        """Folder of its containers' logs; it outlives the pod."""
        metadata = self.object["metadata"]
        name = f"{metadata['namespace']}_{metadata['name']}_{self._uid}"
        return self._node.folder / "logs" / "pods" / name

    def state_of(self, container: str) -> str:
        """`waiting`, `running` or `terminated`; empty where it has no container of the name."""
        found = [one for one in [*self._init, *self._main] if one.name == container]
        return next(iter(found[0].state.now), "") if found else ""

    def update(self, pod: Object) -> None:
        """Take a newer version of the pod."""
        self.object = pod
        if pod["metadata"].get("deletionTimestamp"):
            self._deleted.set()
        self._dirty.set()

    def vanish(self) -> None:
        """The pod is gone from the API: end it at once."""
        self._gone.set()
        self._deleted.set()
        for container in [*self._init, *self._main]:
            container.kill()

    def _container(
        self, spec: Object, restart: Literal["Always", "OnFailure", "Never"], *, init: bool
    ) -> Container:
        kind = "initContainerStatuses" if init else "containerStatuses"
        around = Surroundings(
            prepare=self._prepare,
            address=self._address,
            grace=self.object["spec"].get("terminationGracePeriodSeconds", 30),
            session=self._node.session,
            changed=self._dirty.set,
            event=self._event,
        )
        for item in self.object.get("status", {}).get(kind, ()):
            if item["name"] == spec["name"] and item.get("containerID"):
                return Container(spec, around, restart=restart, before=_left_over(item, init=init))
        reason = "PodInitializing" if self.object["spec"].get("initContainers") else "ContainerCreating"
        return Container(spec, around, restart=restart, before=State({"waiting": {"reason": reason}}))

    def _event(self, reason: str, message: str, kind: Literal["Normal", "Warning"]) -> None:
        self._node.recorder.record(self.object, reason, message, kind)

    # ---- its life ----

    async def run(self) -> None:
        """Run the pod to its end, and to its removal when it is deleted."""
        publishing = asyncio.create_task(self._publish())
        # A pod may be deleted before the node hears of it: then nothing of it runs.
        life = self._deleted.wait() if self._deleted.is_set() else self._live()
        living: asyncio.Task[Any] = asyncio.create_task(life)
        refreshing = asyncio.create_task(self._refresh())
        deleted = asyncio.create_task(self._deleted.wait())
        try:
            await asyncio.wait([living, deleted], return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
                await deleted
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            grace = self.object["metadata"].get("deletionGracePeriodSeconds", 0)
            await self._stop(0 if self._gone.is_set() else grace)
        finally:
            self.kill()
            helpers = [publishing, living, refreshing, deleted, *self._supervising]
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        await self._remove()

    def kill(self) -> None:
        """SIGKILL whatever runs."""
        for container in [*self._init, *self._main]:
            container.kill()

    async def leave(self) -> None:
        """End its processes softly, because the node itself ends; the API hears nothing of it."""
        self._silent = True
        await self._stop(1.0)

    async def _live(self) -> None:
        await self._volumes_ready()
        self._sandbox = True
        self._dirty.set()
        if self._lost:
            self._initialized = True
            self._dirty.set()
            return
        for container in self._init:
            supervising = self._supervise(container)
            if is_sidecar(container):
                await container.settled.wait()
            else:
                await asyncio.wait([supervising])
                if fatal(container):
                    return
        self._initialized = True
        self._dirty.set()
        # To wait is not to own: when the pod is deleted, containers go on until they are stopped.
        await asyncio.wait(list(map(self._supervise, self._main)))
        await asyncio.gather(*(item.stop(self._grace) for item in self._init if is_sidecar(item)))

    @property
    def _grace(self) -> float:
        return float(self.object["spec"].get("terminationGracePeriodSeconds", 30))

    def _supervise(self, container: Container) -> asyncio.Task[None]:
        task = asyncio.create_task(container.supervise())
        self._supervising.append(task)
        return task

    async def _volumes_ready(self) -> None:
        """Make the volumes; what they refer to may come later than the pod."""
        self._folder.mkdir(parents=True, exist_ok=True)
        attempt = 0
        while True:
            try:
                return await self._volumes.refresh(self._view())
            except (MissingError, ApiError, OSError, aiohttp.ClientError, TimeoutError) as error:
                if attempt > 2:  # what is made at the same moment is no matter for an event
                    self._event("FailedMount", f"volumes: {error}", "Warning")
                await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                attempt += 1

    async def _refresh(self) -> None:
        """Keep tokens fresh, and what Secrets and ConfigMaps gave current."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            if not self._sandbox:
                continue
            try:
                await self._volumes.refresh(self._view())
            except (MissingError, ApiError, OSError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("%s: volumes were not refreshed: %s", self.object["metadata"]["name"], error)

    async def _stop(self, grace: float) -> None:
        """End containers together, then sidecars in reverse; they share the grace."""
        deadline = time.monotonic() + grace
        await asyncio.gather(*(item.stop(grace) for item in self._main))
        for item in reversed(self._init):
            await item.stop(max(deadline - time.monotonic(), 0.0))
        await asyncio.gather(*self._supervising, return_exceptions=True)

    async def _remove(self) -> None:
        """Say how it ended, and let the API forget it."""
        if not self._gone.is_set():
            await self._write_status()
            metadata = self.object["metadata"]
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._uid}}
            await self._try(lambda: self._node.api.delete(_path(metadata), options))
        await asyncio.to_thread(remove, self._folder)

    # ---- its commands ----

    def _view(self) -> Object:
        """The pod with the addresses that its status may not hold yet."""
        host, address = self._node.address, self._address
        known = {"podIP": address, "podIPs": [{"ip": address}], "hostIP": host, "hostIPs": [{"ip": host}]}
        return {**self.object, "status": {**self.object.get("status", {}), **known}}

    async def _prepare(self, spec: Mapping[str, Any], run: int) -> Command:
        pod, name = self._view(), spec["name"]
        home = self._folder / "containers" / name
        home.mkdir(parents=True, exist_ok=True)
        message = home / "termination-message"
        places = Places(self._places(spec, message))
        environment = base_environment(home, pod["metadata"]["name"])
        environment |= _api_variables(self._node.server)
        if ACCOUNT in places.places:
            environment["KUBECONFIG"] = str(self._kubeconfig(places.places[ACCOUNT]))
        given = await variables(pod, spec, self._sources)
        given = {key: await self._node.names.rewrite(value, pod) for key, value in given.items()}
        environment |= {key: places.rewrite(value) for key, value in given.items()}
        # The image's own program is a path of this machine already; the spec's are the container's.
        program = [] if spec.get("command") else entry_point(spec["image"])
        given_words = [*spec.get("command", ()), *spec.get("args", ())]
        known = {**_api_variables(self._node.server), **given}
        words = [await self._node.names.rewrite(expand(text, known), pod) for text in given_words]
        arguments = program + [places.rewrite(text) for text in words]
        folder = Path(places.rewrite(spec["workingDir"])) if spec.get("workingDir") else home
        log_file = self.log_folder / name / f"{run}.log"
        mark = environment[process.MARK] = self._node.mark(self._uid, name, str(run))
        return Command(arguments, environment, folder if folder.is_dir() else home, log_file, message, mark)

    def _places(self, spec: Mapping[str, Any], message: Path) -> dict[str, Path]:
        places = {**IMAGE_FILES, spec.get("terminationMessagePath", "/dev/termination-log"): message}
        for mount in spec.get("volumeMounts", ()):
            places[mount["mountPath"].rstrip("/")] = self._volumes.path(mount["name"]) / mount.get(
                "subPath", ""
            )
        return places

    def _kubeconfig(self, account: Path) -> Path:
        return write_token_kubeconfig(
            self._folder / "kubeconfig",
            server=self._node.server,
            authority=account / "ca.crt",
            namespace=self.object["metadata"]["namespace"],
            token_file=account / "token",
        )

    # ---- its status ----

    async def _publish(self) -> None:
        """Write the status whenever it changed, the latest alone."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if not self._silent:
                await self._write_status()

    async def _write_status(self) -> None:
        view = View(
            pod=self.object,
            init=self._init,
            main=self._main,
            initialized=self._initialized,
            sandbox=self._sandbox,
            address=self._address,
            host=self._node.address,
            began=self._began,
        )
        wanted = status(view, self._conditions)
        if wanted == self._written:
            return
        metadata = self.object["metadata"]
        # These lists would be merged with addresses that an earlier kubelet of this node gave.
        whole = {key: [{"$patch": "replace"}, *wanted.get(key, ())] for key in ("podIPs", "hostIPs")}
        body = {"metadata": {"uid": self._uid}, "status": {**wanted, **whole}}
        if await self._try(lambda: self._node.api.patch(_path(metadata) + "/status", body, STRATEGIC)):
            self._written = wanted
            self._conditions = {item["type"]: item for item in wanted["conditions"]}

    async def _try(self, call: Callable[[], Any]) -> bool:
        """Call the API until it answers; False when the pod is no more, or another one of its name."""
        for attempt in range(30):
            try:
                await call()
                return True
            except ApiError as error:
                if error.status in (404, 409, 422):
                    log.info("%s: %s", self.object["metadata"]["name"], error)
                    return False
                log.warning("%s: %s", self.object["metadata"]["name"], error)
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("%s: %s", self.object["metadata"]["name"], error)
            await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
        return False


def finished(pod: Object) -> bool:
    """Whether a pod has ended, so that nothing is to be run."""
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


def _left_over(before: Mapping[str, Any], *, init: bool) -> State:
    """Return the state of a container that an earlier kubelet of this node ran: to be restarted."""
    state = before.get("state", {})
    last = {"terminated": state["terminated"]} if "terminated" in state else before.get("lastState", {})
    if "running" in state:
        last = {
            "terminated": {
                "exitCode": 137,
                "reason": "Error",
                "message": "its node was restarted",
                "startedAt": state["running"].get("startedAt"),
                "finishedAt": now(),
                "containerID": before.get("containerID", ""),
            }
        }
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    return State(waiting, last=last, restarts=before.get("restartCount", 0) + (0 if init else 1))
