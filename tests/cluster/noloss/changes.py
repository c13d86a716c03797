"""What happens to services under load: rollouts, scaling, deletions, killed and hung processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from noloss.kube import SERVICES, Kube, condition

DEADLINE_SECONDS = 300.0
"""For everything that is waited for; nothing is measured by it."""
ROUTABLE, ROTATE = "mizzen.dev/routable", "mizzen.dev/rotate-keys"
Which = Literal["rank", "container", "all"]
Pod = dict[str, Any]
Note = Callable[[str, str], None]


class Processes(Protocol):
    """The processes of pods, wherever they run."""

    async def kill(self, pod: Pod, which: Which) -> bool:
        """SIGKILL an engine's rank, or the first process of the container; False when there is none."""
        ...

    async def stop(self, pod: Pod, which: Which) -> bool:
        """SIGSTOP an engine's rank, or all processes of the pod; False when there is none."""
        ...

    async def go_on(self, pod: Pod) -> None:
        """SIGCONT all processes of the pod."""
        ...


async def until(check: Callable[[], Awaitable[Any]], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Wait until `check()` gives something true.

    Raises:
        AssertionError: it never did.
    """
    deadline = time.monotonic() + seconds
    while not await check():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:.0f} s still not: {what}")
        await asyncio.sleep(0.2)


class Changes:
    """Changes services, and waits until all is well again."""

    def __init__(self, kube: Kube, namespace: str, processes: Processes, note: Note) -> None:
        """Prepare.

        Args:
            kube: the API server, reached by a way without faults.
            namespace: of all services.
            processes: what runs in pods.
            note: is told of each fault, before it comes: the service, and `ended`, `hung` or another word.
        """
        self._kube = kube
        self._namespace = namespace
        self._processes = processes
        self._note = note
        self.done: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        """Engines that were deleted, killed or hung, by their service."""
        self._revisions = 0
        self.drained = True
        """Whether each change also waits for what drains; else the next one comes while it does."""

    def _path(self, service: str, subresource: str = "") -> str:
        return f"{SERVICES.format(self._namespace)}/{service}{subresource}"

    async def pods(self, service: str, component: str = "engine") -> list[Pod]:
        """The pods of a service."""
        selector = f"mizzen.dev/service={service},mizzen.dev/component={component}"
        return await self._kube.pods(self._namespace, selector)

    async def service(self, name: str) -> dict[str, Any]:
        """The service as it is."""
        return await self._kube.call("GET", self._path(name))

    async def apply(self, service: dict[str, Any]) -> None:
        """Apply a service as a user does."""
        path = f"{self._path(service['metadata']['name'])}?fieldManager=tests&force=true"
        await self._kube.call("PATCH", path, service, "application/apply-patch+yaml")

    async def is_settled(self, name: str) -> bool:
        """Whether a service is Ready as its spec is now, with no pod too many; see `drained`."""
        now = await self.service(name)
        status = now.get("status", {})
        pods = [
            pod for pod in await self.pods(name) if self.drained or "deletionTimestamp" not in pod["metadata"]
        ]
        return bool(
            condition(now, "Ready")
            and status["observedGeneration"] == now["metadata"]["generation"]
            and status["availableReplicas"] == now["spec"]["replicas"]
            and [pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in pods]
            == [status["updateRevision"]] * now["spec"]["replicas"]
        )

    async def settled(self, name: str) -> None:
        """Wait until a service is."""
        await until(lambda: self.is_settled(name), f"{name} is Ready, with no pod too many")

    # ---- what users do ----

    async def _spec(self, name: str, spec: dict[str, Any]) -> None:
        await self._kube.call("PATCH", self._path(name), {"spec": spec})

    async def rollout(self, name: str) -> None:
        """Change what every group of a service runs."""
        self._revisions += 1
        await self._spec(name, {"engine": {"maxStepMilliseconds": 25 + self._revisions}})
        await self.settled(name)
        self.done["rollouts"] += 1

    async def rollout_and_back(self, name: str) -> None:
        """Change what every group runs, and in the middle of it change it back."""
        before = {pod["metadata"]["name"] for pod in await self.pods(name)}
        old = (await self.service(name))["spec"]["engine"]["maxRunningRequests"]

        async def begun() -> bool:
            there = {pod["metadata"]["name"] for pod in await self.pods(name)}
            return bool(there - before)

        await self._spec(name, {"engine": {"maxRunningRequests": old + 1}})
        await until(begun, f"a rollout of {name} has begun")
        await self._spec(name, {"engine": {"maxRunningRequests": old}})
        await self.settled(name)
        self.done["rollouts"] += 1
        self.done["reverted"] += 1

    async def scale(self, name: str, groups: int) -> None:
        """`kubectl scale`."""
        await self._kube.call("PATCH", self._path(name, "/scale"), {"spec": {"replicas": groups}})
        await self.settled(name)

    async def cycle(self, name: str, high: int, low: int) -> None:
        """Scale down and up again; begins and ends at `high`."""
        await self.scale(name, low)
        await self.scale(name, high)
        self.done["cycles"] += 1

    async def rotate_keys(self, name: str) -> None:
        """Ask for new keys, and wait until they are in use alone."""

        async def said() -> str:
            found = (await self.service(name)).get("status", {}).get("conditions", [])
            kept = [one for one in found if (one["type"], one["reason"]) == ("KeysRotating", "KeysRotated")]
            return kept[0]["message"] if kept else ""

        before, asked = await said(), {"annotations": {ROTATE: str(time.time())}}

        async def others() -> bool:
            return await said() not in ("", before)

        await self._kube.call("PATCH", self._path(name), {"metadata": asked})
        await until(others, f"the keys of {name} are others")
        self.done["rotations"] += 1

    async def delete(self, name: str, component: str = "engine") -> None:
        """`kubectl delete pod`."""
        pod = await self._victim(name, component)
        await self._kube.call("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{_name(pod)}")
        await self._gone(name, pod, component)
        self.kills[name] += component == "engine"
        self.done[f"deleted_{component}"] += 1

    async def evict(self, name: str, component: str = "engine") -> None:
        """`kubectl drain`, of one pod; refusals of the budget are tried again."""
        pod = await self._victim(name, component)
        path = f"/api/v1/namespaces/{self._namespace}/pods/{_name(pod)}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": _name(pod)}}

        async def taken() -> bool:
            try:
                await self._kube.call("POST", path, body, "application/json")
            except AssertionError as error:
                if getattr(error, "code", 0) != 429:
                    raise
                self.done["refused_evictions"] += 1
                return False
            return True

        await until(taken, f"{_name(pod)} may be evicted")
        await self._gone(name, pod, component)
        self.done[f"evicted_{component}"] += 1

    async def _gone(self, name: str, pod: Pod, component: str) -> None:
        async def gone() -> bool:
            there = [one for one in await self.pods(name, component) if _uid(one) == _uid(pod)]
            return not there or (not self.drained and "deletionTimestamp" in there[0]["metadata"])

        await until(gone, f"{_name(pod)} goes")
        await self.settled(name)

    # ---- what processes do ----

    async def _victim(self, name: str, component: str = "engine") -> Pod:
        """The pod that has been spared most, once there is one that is there to stay."""
        found: list[Pod] = []

        async def there() -> bool:
            found[:] = [
                pod
                for pod in await self.pods(name, component)
                if "deletionTimestamp" not in pod["metadata"] and condition(pod, "ContainersReady")
            ]
            return bool(found)

        await until(there, f"{name} has a pod that stays")
        return min(found, key=lambda pod: (_restarts(pod), _name(pod)))

    async def _struck(
        self, name: str, component: str, kind: str, strike: Callable[[Pod], Awaitable[bool]]
    ) -> Pod:
        """The pod whose processes were struck; one that has none just now is passed over."""
        struck: list[Pod] = []

        async def done() -> bool:
            pod = await self._victim(name, component)
            self._note(name, kind)
            if await strike(pod):
                struck.append(pod)
            return bool(struck)

        await until(done, f"{name} has a process to strike")
        return struck[0]

    async def kill(self, name: str, which: Which, component: str = "engine") -> None:
        """SIGKILL a process of a pod."""
        pod = await self._struck(name, component, "ended", lambda pod: self._processes.kill(pod, which))
        await self._replaced(name, pod, component)
        self.kills[name] += component == "engine"
        self.done[f"killed_{component}"] += 1

    async def hang(self, name: str, which: Which, then: Literal["kill", "go_on"]) -> None:
        """SIGSTOP an engine; once gateways have left it, kill it or let it go on."""
        pod = await self._struck(name, "engine", "hung", lambda pod: self._processes.stop(pod, which))

        async def left() -> bool:
            now = [one for one in await self.pods(name) if _uid(one) == _uid(pod)]
            return not now or condition(now[0], ROUTABLE) is False or _restarts(now[0]) > _restarts(pod)

        await until(left, f"gateways leave {_name(pod)}, which hangs")
        if then == "kill":
            await self._processes.kill(pod, "container")
            await self._replaced(name, pod, "engine")
        else:
            await self._processes.go_on(pod)
            await self.settled(name)
        self.kills[name] += 1
        self.done["hung_engine"] += 1

    async def hang_gateway(self, name: str) -> None:
        """SIGSTOP a gateway; once its pod is known not to be ready, let it go on."""
        pod = await self._struck(name, "gateway", "hung", lambda pod: self._processes.stop(pod, "all"))

        async def unready() -> bool:
            now = [one for one in await self.pods(name, "gateway") if _uid(one) == _uid(pod)]
            return not now or condition(now[0], "Ready") is False or _restarts(now[0]) > _restarts(pod)

        await until(unready, f"{_name(pod)} is not ready, for it hangs")
        await self._processes.go_on(pod)
        await self.settled(name)
        self.done["hung_gateway"] += 1

    async def _replaced(self, name: str, pod: Pod, component: str) -> None:
        """Wait until a container that was killed runs again, or its pod is another one, and all is well."""

        async def again() -> bool:
            now = [one for one in await self.pods(name, component) if _uid(one) == _uid(pod)]
            return not now or _restarts(now[0]) > _restarts(pod)

        await until(again, f"{_name(pod)} runs again")
        await self.settled(name)


def _name(pod: Pod) -> str:
    return pod["metadata"]["name"]


def _uid(pod: Pod) -> str:
    return pod["metadata"]["uid"]


def _restarts(pod: Pod) -> int:
    return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", []))
