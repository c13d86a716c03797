"""One container as a local process: start, probes, hooks, end, restarts with back-off."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp

from mizzen_local import process
from mizzen_local.events import now
from mizzen_local.node import handlers
from mizzen_local.node.handlers import Target
from mizzen_local.node.images import UnknownImageError
from mizzen_local.node.probes import Probes
from mizzen_local.node.sources import MissingError

FIRST_BACKOFF, MOST_BACKOFF, CALM_SECONDS = 1.0, 60.0, 600.0
HOOK_SECONDS = 30.0
MOST_MESSAGE, MOST_LOG_MESSAGE = 4096, 2048


@dataclass(frozen=True, slots=True)
class Command:
    """Command, environment and files of a container.

    Attributes:
        arguments: program and arguments.
        environment: its variables, the mark among them.
        folder: its working directory.
        log: file for its output.
        message: its termination message file.
        mark: see `mizzen_local.process.MARK`.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    message: Path
    mark: str


@dataclass(frozen=True, slots=True)
class State:
    """State of a container, as its status reports it.

    Attributes:
        now: `waiting`, `running` or `terminated`, with the fields that the API gives them.
        last: the last termination before this state.
        restarts: how often it was started again.
    """

    now: Mapping[str, Mapping[str, Any]]
    last: Mapping[str, Any] = field(default_factory=dict)
    restarts: int = 0
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a pod that its containers need.

    Attributes:
        prepare: makes the command of a run (counted from 0); may raise MissingError or UnknownImageError.
        address: the pod's address.
        grace: seconds from SIGTERM to SIGKILL, of the pod's spec.
        session: HTTP client for probes.
        changed: called when the container's state changed.
        event: records an event: reason, message, type.
    """

    prepare: Callable[[Mapping[str, Any], int], Awaitable[Command]]
    address: str
    grace: float
    session: aiohttp.ClientSession
    changed: Callable[[], None]
    event: Callable[[str, str, Literal["Normal", "Warning"]], None]


class Container:
    """A container of a pod, over all of its runs."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        around: Surroundings,
        *,
        restart: Literal["Always", "OnFailure", "Never"],
        before: State,
    ) -> None:
        """Prepare, without starting.

        Args:
            spec: the container's spec.
            around: its pod.
            restart: when it is started again.
            before: what an earlier kubelet of this node left of it.
        """
        self.spec = spec
        self.name: str = spec["name"]
        self.state = before
        self.settled = asyncio.Event()
        """Set once it has started (its start-up probe passed), or has ended for good."""
        self._around = around
        self._restart = restart
        self._stopping = False
        self._child: asyncio.subprocess.Process | None = None
        self._exited = asyncio.Event()
        self._probes: Probes | None = None
        self._target: Target | None = None
        self._wake = asyncio.Event()
        self._starting = asyncio.Lock()
        self._backoff = FIRST_BACKOFF

    @property
    def running(self) -> bool:
        """Whether the container's process runs."""
        return "running" in self.state.now

    @property
    def started(self) -> bool:
        """Whether the container runs and its start-up probe has passed."""
        return self.running and self._probes is not None and self._probes.started

    @property
    def ready(self) -> bool:
        """Whether the container is ready."""
        return self.running and self._probes is not None and self._probes.ready

    @property
    def ended(self) -> Mapping[str, Any] | None:
        """Its termination, once it will not be started again."""
        return self.state.now.get("terminated") if self.settled.is_set() else None

    def settle(self) -> None:
        """Leave it at its last end: it ran before the node was restarted, and must not run again."""
        restarts = max(self.state.restarts - 1, 0)
        self.state = replace(self.state, now=dict(self.state.last), last={}, restarts=restarts)
        self.settled.set()

    async def supervise(self) -> None:
        """Run it, again and again as its restart policy says, until it has ended for good."""
        try:
            while not self._stopping:
                begun = time.monotonic()
                if not await self._run():
                    continue
                if self._stopping or not self._again(self.state.now["terminated"]["exitCode"]):
                    break
                await self._back_off(calm=time.monotonic() - begun > CALM_SECONDS)
        finally:
            if "terminated" not in self.state.now:
                # What kubelets write of a container that they cannot tell the end of.
                unknown = {
                    "exitCode": 137,
                    "reason": "ContainerStatusUnknown",
                    "message": "it was not running",
                }
                self.state = replace(self.state, now={"terminated": unknown})
            self.settled.set()
            self._around.changed()

    def _again(self, code: int) -> bool:
        return self._restart == "Always" or (self._restart == "OnFailure" and code != 0)

    def _set(self, kind: str, **fields: Any) -> None:
        self.state = replace(self.state, now={kind: fields})
        self._changed()

    def _changed(self) -> None:
        if self.started:
            self.settled.set()
        self._around.changed()

    async def _run(self) -> bool:
        """One run; False when it could not be started yet."""
        try:
            async with self._starting:  # stop() waits for it, so that nothing starts behind its back
                if self._stopping:
                    return False
                command = await self._around.prepare(self.spec, self.state.restarts)
                child = self._child = await self._spawn(command)
                self._begin(command, child.pid)
        except (MissingError, UnknownImageError, OSError, ValueError) as error:
            await self._not_started(error)
            return False
        probes = self._probes
        helpers = [asyncio.create_task(self._post_start())]
        if probes is not None:
            helpers.append(asyncio.create_task(probes.run()))
        code = await child.wait()
        self._exited.set()
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await asyncio.to_thread(process.kill_marked, command.mark)
        self._set("terminated", **self._termination(command, code))
        return True

    def _begin(self, command: Command, pid: int) -> None:
        """State that is created for each run."""
        self._exited = asyncio.Event()
        ports = {port["name"]: port["containerPort"] for port in self.spec.get("ports", ()) if "name" in port}
        around = self._around
        self._target = Target(around.address, ports, command.folder, command.environment, around.session)
        self._probes = Probes(
            self.spec, self._target, changed=self._changed, unhealthy=self._unhealthy, kill=self._end_run
        )
        self.state = replace(self.state, identity=f"process://{pid}")
        self._set("running", startedAt=now())
        around.event("Started", f"Container {self.name} started, process {pid}", "Normal")

    async def _not_started(self, error: Exception) -> None:
        """Say why a run could not be started, and wait before the next try."""
        reason = {MissingError: "CreateContainerConfigError", UnknownImageError: "ErrImagePull"}.get(
            type(error), "CreateContainerError"
        )
        self._set("waiting", reason=reason, message=str(error))
        self._around.event("Failed", f"{self.name}: {error}", "Warning")
        await self._pause(1.0 if isinstance(error, MissingError) else 10.0)

    async def _spawn(self, command: Command) -> asyncio.subprocess.Process:
        command.log.parent.mkdir(parents=True, exist_ok=True)
        command.message.write_bytes(b"")
        with command.log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                cwd=command.folder,
                env=command.environment,
                start_new_session=True,
            )

    def _termination(self, command: Command, code: int) -> dict[str, Any]:
        message = _read_end(command.message, MOST_MESSAGE)
        if not message and code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = _read_end(command.log, MOST_LOG_MESSAGE)
        ended: dict[str, Any] = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": self.state.now["running"]["startedAt"],
            "finishedAt": now(),
            "containerID": self.state.identity,
        }
        return ended | ({"message": message} if message else {})

    async def _post_start(self) -> None:
        hook = self.spec.get("lifecycle", {}).get("postStart")
        if not hook or self._target is None:
            return
        outcome = await handlers.run(hook, self._target, HOOK_SECONDS)
        if not outcome.ok:
            self._around.event("FailedPostStartHook", outcome.message, "Warning")
            await self._end_run("failed postStart hook", {})

    def _unhealthy(self, kind: str, message: str) -> None:
        self._around.event("Unhealthy", f"{kind} probe failed: {message}", "Warning")

    async def _back_off(self, *, calm: bool) -> None:
        """The first start again comes at once; then the wait doubles until a run was long."""
        self.state = replace(self.state, last=dict(self.state.now))
        if calm:
            self._backoff = FIRST_BACKOFF
        elif self.state.restarts > 0:
            self._set(
                "waiting",
                reason="CrashLoopBackOff",
                message=f"back-off {self._backoff:g}s restarting failed container={self.name}",
            )
            self._around.event("BackOff", f"Back-off restarting failed container {self.name}", "Warning")
            await self._pause(self._backoff)
            self._backoff = min(2 * self._backoff, MOST_BACKOFF)
        if not self._stopping:
            self.state = replace(self.state, restarts=self.state.restarts + 1)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not on when the container is to stop."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            pass

    async def _end_run(self, reason: str, probe: Mapping[str, Any]) -> None:
        """End the present run: hook, SIGTERM, SIGKILL; the restart policy decides what comes then."""
        grace = probe.get("terminationGracePeriodSeconds", self._around.grace)
        self._around.event("Killing", f"Container {self.name} {reason}, it will be ended", "Normal")
        await self._end(float(grace))

    async def stop(self, grace: float) -> None:
        """End it for good.

        Args:
            grace: seconds for its preStop hook and its own end together.
        """
        self._stopping = True
        self._wake.set()
        if self.running:
            self._around.event("Killing", f"Stopping container {self.name}", "Normal")
            await self._end(grace)

    async def _end(self, grace: float) -> None:
        child, deadline = self._child, time.monotonic() + grace
        if child is None or self._exited.is_set():
            return
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook and self._target is not None and grace > 0:
            hooking = asyncio.create_task(handlers.run(hook, self._target, grace))
            await asyncio.wait(
                [hooking, asyncio.create_task(self._exited.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            if hooking.done() and not hooking.result().ok:
                self._around.event("FailedPreStopHook", hooking.result().message, "Warning")
            hooking.cancel()
        if not self._exited.is_set() and grace > 0:
            # As in a container, the first process alone hears SIGTERM; a hook that took all leaves it 2 s.
            _signal(os.kill, child.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self._exited.wait(), max(deadline - time.monotonic(), 2.0))
            except TimeoutError:
                pass
        if not self._exited.is_set():
            _signal(os.killpg, child.pid, signal.SIGKILL)
            await self._exited.wait()

    def kill(self) -> None:
        """SIGKILL, at once, without waiting for the end."""
        self._stopping = True
        self._wake.set()
        if self._child is not None and not self._exited.is_set():
            _signal(os.killpg, self._child.pid, signal.SIGKILL)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        send(pid, number)
    except ProcessLookupError:
        pass


def _read_end(path: Path, most: int) -> str:
    """The last `most` bytes of a file as text; empty when it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most))
            return file.read(most).decode(errors="replace").strip()
    except OSError:
        return ""
