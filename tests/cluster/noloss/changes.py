# SPDX-License-Identifier: Apache-2.0
"""Changes and faults of services under load: rollouts, scaling, deletions, killed and hung processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

from noloss.kube import SERVICES, Kube, condition

DEADLINE_SECONDS = 300.0
"""Default timeout of every wait; generous, because no measurement depends on it."""
ROUTABLE, ROTATE = "mizzen.dev/routable", "mizzen.dev/rotate-keys"
Which = Literal["rank", "container", "all"]
Pod = dict[str, Any]
RecordFault = Callable[[str, str], None]


class Processes(Protocol):
    """Sends signals to the processes of pods, on this machine or in containers of a node."""

    async def kill(self, pod: Pod, which: Which) -> bool:
        """SIGKILL an engine's rank or a container's first process; return False if no such process exists."""
        ...

    async def stop(self, pod: Pod, which: Which) -> bool:
        """SIGSTOP an engine's rank or all processes of a pod; return False if no such process exists."""
        ...

    async def resume(self, pod: Pod) -> None:
        """SIGCONT all processes of a pod."""
        ...


async def until(
    check: Callable[[], Awaitable[Any]], expectation: str, seconds: float = DEADLINE_SECONDS
) -> None:
    """Wait until `check()` returns something true.

    Raises:
        AssertionError: `check()` was still false after `seconds`; the message names `expectation`.
    """
    deadline = time.monotonic() + seconds
    while not await check():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:.0f} s still not: {expectation}")
        await asyncio.sleep(0.2)


class Changes:
    """Changes services or breaks their pods; each method waits until its service has settled again."""

    def __init__(self, kube: Kube, namespace: str, processes: Processes, record_fault: RecordFault) -> None:
        """Change the services of one namespace.

        Args:
            kube: client of the API server that bypasses the fault proxy.
            namespace: namespace of all services.
            processes: sends signals to the pods' processes.
            record_fault: called before each fault with the service's name and the kind of the fault, `ended`
                or `hung`.
        """
        self._kube = kube
        self._namespace = namespace
        self._processes = processes
        self._record_fault = record_fault
        self.done: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        """For each service, the number of its engines that were deleted, killed or made to hang."""
        self._revisions = 0
        self.await_termination = True
        """Whether each change also waits until draining pods are gone, before the next change begins."""

    def _path(self, service: str, subresource: str = "") -> str:
        return f"{SERVICES.format(self._namespace)}/{service}{subresource}"

    async def pods(self, service: str, component: str = "engine") -> list[Pod]:
        """Return the pods of one component of a service."""
        selector = f"mizzen.dev/service={service},mizzen.dev/component={component}"
        return await self._kube.pods(self._namespace, selector)

    async def service(self, name: str) -> dict[str, Any]:
        """Return the current InferenceService."""
        return await self._kube.call("GET", self._path(name))

    async def apply(self, service: dict[str, Any]) -> None:
        """Apply a service by server-side apply."""
        path = f"{self._path(service['metadata']['name'])}?fieldManager=tests&force=true"
        await self._kube.call("PATCH", path, service, "application/apply-patch+yaml")

    async def is_settled(self, name: str) -> bool:
        """Return whether a service is Ready at its current spec, with exactly the pods of that spec.

        If `await_termination` is set, terminating pods count as extra pods; otherwise they are ignored.
        """
        now = await self.service(name)
        status = now.get("status", {})
        pods = [
            pod
            for pod in await self.pods(name)
            if self.await_termination or "deletionTimestamp" not in pod["metadata"]
        ]
        return bool(
            condition(now, "Ready")
            and status["observedGeneration"] == now["metadata"]["generation"]
            and status["availableReplicas"] == now["spec"]["replicas"]
            and [pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in pods]
            == [status["updateRevision"]] * now["spec"]["replicas"]
        )

    async def wait_until_settled(self, name: str) -> None:
        """Wait until `is_settled` returns True for a service."""
        await until(lambda: self.is_settled(name), f"{name} is Ready, with exactly the pods of its spec")

    # ---- changes by users ----

    async def _patch_spec(self, name: str, spec: dict[str, Any]) -> None:
        await self._kube.call("PATCH", self._path(name), {"spec": spec})

    async def roll_out(self, name: str) -> None:
        """Change the spec of a service so that all of its groups are replaced."""
        self._revisions += 1
        await self._patch_spec(name, {"engine": {"maxStepMilliseconds": 25 + self._revisions}})
        await self.wait_until_settled(name)
        self.done["rollouts"] += 1

    async def roll_out_and_revert(self, name: str) -> None:
        """Start a rollout to a changed spec, and revert the spec once the first new pod exists."""
        before = {pod["metadata"]["name"] for pod in await self.pods(name)}
        old = (await self.service(name))["spec"]["engine"]["maxRunningRequests"]

        async def begun() -> bool:
            return bool({pod["metadata"]["name"] for pod in await self.pods(name)} - before)

        await self._patch_spec(name, {"engine": {"maxRunningRequests": old + 1}})
        await until(begun, f"a rollout of {name} has begun")
        await self._patch_spec(name, {"engine": {"maxRunningRequests": old}})
        await self.wait_until_settled(name)
        self.done["rollouts"] += 1
        self.done["reverted"] += 1

    async def scale(self, name: str, groups: int) -> None:
        """Set the number of groups, as `kubectl scale` does."""
        await self._kube.call("PATCH", self._path(name, "/scale"), {"spec": {"replicas": groups}})
        await self.wait_until_settled(name)

    async def scale_down_and_up(self, name: str, high: int, low: int) -> None:
        """Scale a service from `high` groups to `low`, and back to `high`."""
        await self.scale(name, low)
        await self.scale(name, high)
        self.done["cycles"] += 1

    async def rotate_keys(self, name: str) -> None:
        """Request a rotation of the keys, and wait until only the new keys are in use."""

        async def rotation_message() -> str:
            conditions = (await self.service(name)).get("status", {}).get("conditions", [])
            rotated = ("KeysRotating", "KeysRotated")
            return next((c["message"] for c in conditions if (c["type"], c["reason"]) == rotated), "")

        before, metadata = await rotation_message(), {"annotations": {ROTATE: str(time.time())}}

        async def rotated() -> bool:
            return await rotation_message() not in ("", before)

        await self._kube.call("PATCH", self._path(name), {"metadata": metadata})
        await until(rotated, f"the keys of {name} are rotated")
        self.done["rotations"] += 1

    async def delete(self, name: str, component: str = "engine") -> None:
        """Delete one pod of a component, as `kubectl delete pod` does."""
        pod = await self._pick_victim(name, component)
        await self._kube.call("DELETE", f"/api/v1/namespaces/{self._namespace}/pods/{_name(pod)}")
        await self._wait_until_gone(name, pod, component)
        self.kills[name] += component == "engine"
        self.done[f"deleted_{component}"] += 1

    async def evict(self, name: str, component: str = "engine") -> None:
        """Evict one pod of a component, as `kubectl drain` does; retry if the disruption budget refuses."""
        pod = await self._pick_victim(name, component)
        path = f"/api/v1/namespaces/{self._namespace}/pods/{_name(pod)}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": _name(pod)}}

        async def evicted() -> bool:
            try:
                await self._kube.call("POST", path, body, "application/json")
            except AssertionError as error:
                if getattr(error, "code", 0) != 429:
                    raise
                self.done["refused_evictions"] += 1
                return False
            return True

        await until(evicted, f"{_name(pod)} may be evicted")
        await self._wait_until_gone(name, pod, component)
        self.done[f"evicted_{component}"] += 1

    async def _wait_until_gone(self, name: str, pod: Pod, component: str) -> None:
        async def gone() -> bool:
            now = await self._find(name, component, pod)
            return now is None or (not self.await_termination and "deletionTimestamp" in now["metadata"])

        await until(gone, f"{_name(pod)} is gone")
        await self.wait_until_settled(name)

    async def _find(self, name: str, component: str, pod: Pod) -> Pod | None:
        """Return the current state of a pod, or None if it no longer exists."""
        return next((p for p in await self.pods(name, component) if _uid(p) == _uid(pod)), None)

    # ---- faults of processes ----

    async def _pick_victim(self, name: str, component: str = "engine") -> Pod:
        """Wait for a pod that is ready and not terminating; return the one with the fewest restarts."""
        candidates: list[Pod] = []

        async def any_ready() -> bool:
            candidates[:] = [
                pod
                for pod in await self.pods(name, component)
                if "deletionTimestamp" not in pod["metadata"] and condition(pod, "ContainersReady")
            ]
            return bool(candidates)

        await until(any_ready, f"{name} has a ready pod that is not terminating")
        return min(candidates, key=lambda pod: (_restarts(pod), _name(pod)))

    async def _strike(
        self, name: str, component: str, kind: str, send_signal: Callable[[Pod], Awaitable[bool]]
    ) -> Pod:
        """Send a signal to a pod's processes and return the pod; skip pods that have no such process."""
        signalled: list[Pod] = []

        async def done() -> bool:
            pod = await self._pick_victim(name, component)
            self._record_fault(name, kind)
            if await send_signal(pod):
                signalled.append(pod)
            return bool(signalled)

        await until(done, f"{name} has a process to send the signal to")
        return signalled[0]

    async def kill(self, name: str, which: Which, component: str = "engine") -> None:
        """SIGKILL a process of one pod of a component."""
        pod = await self._strike(name, component, "ended", lambda pod: self._processes.kill(pod, which))
        await self._wait_until_replaced(name, pod, component)
        self.kills[name] += component == "engine"
        self.done[f"killed_{component}"] += 1

    async def hang(self, name: str, which: Which, then: Literal["kill", "resume"]) -> None:
        """SIGSTOP an engine; once gateways no longer route to it, kill or resume it."""
        pod = await self._strike(name, "engine", "hung", lambda pod: self._processes.stop(pod, which))

        async def unroutable() -> bool:
            now = await self._find(name, "engine", pod)
            return now is None or condition(now, ROUTABLE) is False or _restarts(now) > _restarts(pod)

        await until(unroutable, f"gateways no longer route to {_name(pod)}, which hangs")
        if then == "kill":
            await self._processes.kill(pod, "container")
            await self._wait_until_replaced(name, pod, "engine")
        else:
            await self._processes.resume(pod)
            await self.wait_until_settled(name)
        self.kills[name] += 1
        self.done["hung_engine"] += 1

    async def hang_gateway(self, name: str) -> None:
        """SIGSTOP a gateway, and resume it once its pod is not ready."""
        pod = await self._strike(name, "gateway", "hung", lambda pod: self._processes.stop(pod, "all"))

        async def unready() -> bool:
            now = await self._find(name, "gateway", pod)
            return now is None or condition(now, "Ready") is False or _restarts(now) > _restarts(pod)

        await until(unready, f"{_name(pod)}, which hangs, is not ready")
        await self._processes.resume(pod)
        await self.wait_until_settled(name)
        self.done["hung_gateway"] += 1

    async def _wait_until_replaced(self, name: str, pod: Pod, component: str) -> None:
        """Wait until a killed container has restarted or its pod is gone, and the service has settled."""

        async def restarted() -> bool:
            now = await self._find(name, component, pod)
            return now is None or _restarts(now) > _restarts(pod)

        await until(restarted, f"{_name(pod)} has restarted")
        await self.wait_until_settled(name)


def _name(pod: Pod) -> str:
    return pod["metadata"]["name"]


def _uid(pod: Pod) -> str:
    return pod["metadata"]["uid"]


def _restarts(pod: Pod) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))
