# SPDX-License-Identifier: Apache-2.0
"""Runs one container as a local process: start, probes, hooks, termination, and restarts with back-off."""

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
from mizzen_local.events import timestamp
from mizzen_local.node import handlers
from mizzen_local.node.handlers import Target
from mizzen_local.node.images import UnknownImageError
from mizzen_local.node.probes import Probes
from mizzen_local.node.sources import MissingError

FIRST_BACKOFF, MAX_BACKOFF, BACKOFF_RESET_SECONDS = 1.0, 60.0, 600.0
HOOK_SECONDS = 30.0
MAX_MESSAGE_BYTES, MAX_LOG_MESSAGE_BYTES = 4096, 2048


@dataclass(frozen=True, slots=True)
class Command:
    """Command, environment and files of one run of a container.

    Attributes:
        arguments: program and arguments.
        environment: environment variables, including `mizzen_local.process.MARK`.
        folder: working directory.
        log: file for the output.
        message: file of the termination message.
        mark: value of `mizzen_local.process.MARK`, which identifies all processes of the run.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    message: Path
    mark: str


@dataclass(frozen=True, slots=True)
class ContainerState:
    """State of a container, as reported in its pod's status.

    Attributes:
        current: `state` of the status: its one key is `waiting`, `running` or `terminated`, and the value has
            the fields of that state.
        last: `lastState` of the status: the last termination before the current state; empty before the first
            termination.
        restarts: number of restarts.
        identity: `containerID` of the status; empty before the first start.
    """

    current: Mapping[str, Mapping[str, Any]]
    last: Mapping[str, Any] = field(default_factory=dict)
    restarts: int = 0
    identity: str = ""


@dataclass(frozen=True, slots=True)
class PodContext:
    """Values and callbacks of a pod that its containers use.

    Attributes:
        prepare: builds the command of a run, given the container's spec and the number of the run, which
            starts at 0; raises MissingError or UnknownImageError if the command cannot be built.
        address: IP address of the pod.
        grace: the pod's termination grace period in seconds.
        session: HTTP client for probes and hooks.
        changed: called when the state of a container has changed.
        event: records an Event of the pod, given the Event's reason, message and type.
    """

    prepare: Callable[[Mapping[str, Any], int], Awaitable[Command]]
    address: str
    grace: float
    session: aiohttp.ClientSession
    changed: Callable[[], None]
    event: Callable[[str, str, Literal["Normal", "Warning"]], None]


class PodContainer:
    """A container of a pod: runs its process, and restarts it."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        pod: PodContext,
        *,
        restart: Literal["Always", "OnFailure", "Never"],
        initial: ContainerState,
    ) -> None:
        """Create the container; `supervise` starts it.

        Args:
            spec: the container's spec.
            pod: context of its pod.
            restart: restart policy of this container.
            initial: state in which an earlier kubelet of this node left the container; for a new container,
                the state `waiting`.
        """
        self.spec = spec
        self.name: str = spec["name"]
        self.state = initial
        self.started_or_ended = asyncio.Event()
        """Event that is set when the start-up probe has passed or the container has ended for good."""
        self._pod = pod
        self._restart = restart
        self._stopping = False
        self._child: asyncio.subprocess.Process | None = None
        self._exited = asyncio.Event()
        self._probes: Probes | None = None
        self._target: Target | None = None
        self._wake = asyncio.Event()
        self._backoff = FIRST_BACKOFF

    @property
    def running(self) -> bool:
        """Whether the container's process runs."""
        return "running" in self.state.current

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
        """Fields of the container's final termination; None while the container runs or may be restarted."""
        return self.state.current.get("terminated") if self.started_or_ended.is_set() else None

    def mark_ended(self) -> None:
        """Mark the container as ended for good, with its last termination as the final state.

        Call this if the container ran before the node was restarted, and its restart policy is Never.
        """
        restarts = max(self.state.restarts - 1, 0)
        self.state = replace(self.state, current=dict(self.state.last), last={}, restarts=restarts)
        self.started_or_ended.set()

    async def supervise(self) -> None:
        """Run the container, and restart it as its restart policy says, until it has ended for good."""
        try:
            while not self._stopping:
                start = time.monotonic()
                if not await self._run_once():
                    continue
                if self._stopping or not self._should_restart(self.state.current["terminated"]["exitCode"]):
                    break
                await self._back_off(ran_long=time.monotonic() - start > BACKOFF_RESET_SECONDS)
        finally:
            if "terminated" not in self.state.current:
                # The kubelet reports this for a container whose termination it did not observe.
                unknown = {
                    "exitCode": 137,
                    "reason": "ContainerStatusUnknown",
                    "message": "it was not running",
                }
                self.state = replace(self.state, current={"terminated": unknown})
            self.started_or_ended.set()
            self._pod.changed()

    def _should_restart(self, exit_code: int) -> bool:
        return self._restart == "Always" or (self._restart == "OnFailure" and exit_code != 0)

    def _set_state(self, kind: str, **fields: Any) -> None:
        self.state = replace(self.state, current={kind: fields})
        self._on_change()

    def _on_change(self) -> None:
        if self.started:
            self.started_or_ended.set()
        self._pod.changed()

    async def _run_once(self) -> bool:
        """Run the container once; return False if it could not be started."""
        try:
            command = await self._pod.prepare(self.spec, self.state.restarts)
            if self._stopping:
                return False
            child = self._child = await self._spawn(command)
            self._begin_run(command, child.pid)
            # If `stop` or `kill` was called while the process was being started, it found no process to end.
            if self._stopping:
                _send_signal(os.killpg, child.pid, signal.SIGKILL)
        except (MissingError, UnknownImageError, OSError, ValueError) as error:
            await self._report_start_failure(error)
            return False
        probes = self._probes
        helper_tasks = [asyncio.create_task(self._post_start())]
        if probes is not None:
            helper_tasks.append(asyncio.create_task(probes.run()))
        exit_code = await child.wait()
        self._exited.set()
        for helper_task in helper_tasks:
            helper_task.cancel()
        await asyncio.gather(*helper_tasks, return_exceptions=True)
        await asyncio.to_thread(process.kill_marked, command.mark)
        self._set_state("terminated", **self._termination(command, exit_code))
        return True

    def _begin_run(self, command: Command, pid: int) -> None:
        """Set the container's state to `running` once its process has started, and create its probes."""
        self._exited = asyncio.Event()
        ports = {port["name"]: port["containerPort"] for port in self.spec.get("ports", ()) if "name" in port}
        self._target = Target(
            self._pod.address, ports, command.folder, command.environment, self._pod.session
        )
        self._probes = Probes(
            self.spec, self._target, changed=self._on_change, unhealthy=self._unhealthy, kill=self._end_run
        )
        self.state = replace(self.state, identity=f"process://{pid}")
        self._set_state("running", startedAt=timestamp())
        self._pod.event("Started", f"Container {self.name} started, process {pid}", "Normal")

    async def _report_start_failure(self, error: Exception) -> None:
        """Report why the container could not be started, and wait before the next attempt."""
        reason = {MissingError: "CreateContainerConfigError", UnknownImageError: "ErrImagePull"}.get(
            type(error), "CreateContainerError"
        )
        self._set_state("waiting", reason=reason, message=str(error))
        self._pod.event("Failed", f"{self.name}: {error}", "Warning")
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

    def _termination(self, command: Command, exit_code: int) -> dict[str, Any]:
        message = _read_tail(command.message, MAX_MESSAGE_BYTES)
        if not message and exit_code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = _read_tail(command.log, MAX_LOG_MESSAGE_BYTES)
        ended: dict[str, Any] = {
            "exitCode": exit_code if exit_code >= 0 else 128 - exit_code,
            "reason": "Completed" if exit_code == 0 else "Error",
            "startedAt": self.state.current["running"]["startedAt"],
            "finishedAt": timestamp(),
            "containerID": self.state.identity,
        }
        return ended | ({"message": message} if message else {})

    async def _post_start(self) -> None:
        hook = self.spec.get("lifecycle", {}).get("postStart")
        if not hook or self._target is None:
            return
        outcome = await handlers.run(hook, self._target, HOOK_SECONDS)
        if not outcome.ok:
            self._pod.event("FailedPostStartHook", outcome.message, "Warning")
            await self._end_run("failed postStart hook", {})

    def _unhealthy(self, kind: str, message: str) -> None:
        self._pod.event("Unhealthy", f"{kind} probe failed: {message}", "Warning")

    async def _back_off(self, *, ran_long: bool) -> None:
        """Wait before a restart, unless it is the first or follows a long run.

        Each wait is twice as long as the previous one, up to MAX_BACKOFF. After a long run, the waits begin
        with FIRST_BACKOFF again.
        """
        self.state = replace(self.state, last=dict(self.state.current))
        if ran_long:
            self._backoff = FIRST_BACKOFF
        elif self.state.restarts > 0:
            self._set_state(
                "waiting",
                reason="CrashLoopBackOff",
                message=f"back-off {self._backoff:g}s restarting failed container={self.name}",
            )
            self._pod.event("BackOff", f"Back-off restarting failed container {self.name}", "Warning")
            await self._pause(self._backoff)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        if not self._stopping:
            self.state = replace(self.state, restarts=self.state.restarts + 1)

    async def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the container is to be stopped."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            pass

    async def _end_run(self, reason: str, probe: Mapping[str, Any]) -> None:
        """Terminate the current run; the restart policy decides whether another one follows."""
        grace = probe.get("terminationGracePeriodSeconds", self._pod.grace)
        self._pod.event("Killing", f"Container {self.name} {reason}, it will be ended", "Normal")
        await self._terminate(float(grace))

    async def stop(self, grace: float) -> None:
        """Terminate the container and do not restart it.

        Args:
            grace: seconds until SIGKILL; the preStop hook runs within this time.
        """
        self._stopping = True
        self._wake.set()
        if self.running:
            self._pod.event("Killing", f"Stopping container {self.name}", "Normal")
            await self._terminate(grace)

    async def _terminate(self, grace: float) -> None:
        child, deadline = self._child, time.monotonic() + grace
        if child is None or self._exited.is_set():
            return
        hook = self.spec.get("lifecycle", {}).get("preStop")
        if hook and self._target is not None and grace > 0:
            hook_task = asyncio.create_task(handlers.run(hook, self._target, grace))
            await asyncio.wait(
                [hook_task, asyncio.create_task(self._exited.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            if hook_task.done() and not hook_task.result().ok:
                self._pod.event("FailedPreStopHook", hook_task.result().message, "Warning")
            hook_task.cancel()
        if not self._exited.is_set() and grace > 0:
            # As in a container, only the first process gets SIGTERM. It has at least 2 s, even if the hook
            # has used up the grace period.
            _send_signal(os.kill, child.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self._exited.wait(), max(deadline - time.monotonic(), 2.0))
            except TimeoutError:
                pass
        if not self._exited.is_set():
            _send_signal(os.killpg, child.pid, signal.SIGKILL)
            await self._exited.wait()

    def kill(self) -> None:
        """Send SIGKILL at once, without waiting for the process to end; do not restart the container."""
        self._stopping = True
        self._wake.set()
        if self._child is not None and not self._exited.is_set():
            _send_signal(os.killpg, self._child.pid, signal.SIGKILL)


def _send_signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        send(pid, number)
    except ProcessLookupError:
        pass


def _read_tail(path: Path, max_bytes: int) -> str:
    """Return the last `max_bytes` bytes of a file as text; empty if the file does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            return file.read(max_bytes).decode(errors="replace").strip()
    except OSError:
        return ""
