# SPDX-License-Identifier: Apache-2.0
"""Simulated engines in processes of their own, with the real server side of the wire and a scripted speed.

Steps run at fixed times and generate one token for every running request. The prompt alone determines an
engine's reply (`reply_start`), so a client that tokenizes the prompt knows every byte of the answer.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mizzen.core.outputs import Load, StepOutput
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.images.types import ImageRules
from mizzen.server.image_model import RulesImageModel
from mizzen.wire.limits import WireLimits
from mizzen.wire.messages import PROTOCOL, Welcome
from mizzen.wire.server.engine_server import WireServer

LONGEST_REPLY = 4096


def reply_key(prompt: NDArray[np.int32]) -> int:
    """Return the key of a prompt: a checksum of its tokens."""
    return zlib.crc32(prompt.astype("<i4", copy=False).tobytes())


def reply_start(key: int, replies: int) -> int:
    """Return the index at which the reply to a prompt starts in the fixed list of reply tokens.

    Args:
        key: key of the prompt, from `reply_key`.
        replies: length of the list.
    """
    return key % (replies - LONGEST_REPLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Behaviour that all simulated engines share."""

    files: Mapping[str, bytes]
    replies: NDArray[np.int32]
    vocab_size: int
    step_seconds: float
    max_running: int = 1024
    image_rules: ImageRules | None = None
    """Rules for images that the engines accept, but do not request; None if they accept none."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a request in an engine, in seconds of the machine's monotonic clock."""

    key: int
    received: float
    sent: NDArray[np.float64]
    """Time at which the engine sent each token, [tokens]."""


@dataclass(slots=True)
class Run:
    """State of a running request in an engine."""

    rid: int
    key: int
    received: float
    start: int
    length: int
    prompt: int
    first_step: int


class FakeEngine:
    """A simulated engine; the thread that calls `run` serves requests until `stop` is set."""

    def __init__(self, name: str, script: Script, stop: threading.Event) -> None:
        self._script = script
        self._stop = stop
        files = dict(script.files)
        welcome = Welcome(
            PROTOCOL, name, name, "r", "bench", "bench", {key: len(value) for key, value in files.items()},
            200_000, script.vocab_size, (), 16, script.max_running, False,
            images=script.image_rules is not None,
        )  # fmt: skip
        limits = WireLimits(send_frames=100_000)
        images = None if script.image_rules is None else RulesImageModel(script.image_rules)
        self._server = WireServer(
            "tcp://127.0.0.1:*", None, welcome, files, max_waiting=4096, limits=limits, images=images
        )
        self.endpoint = self._server.endpoint
        self._runs: list[Run] = []
        self._rids = self._places = self._offsets = np.empty(0, np.int64)
        self._steps: list[float] = []
        self.timings: list[Timing] = []

    def run(self) -> None:
        """Serve requests until `stop` is set."""
        due = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if self._runs and now >= due:
                self._step(now)
                due = max(due + self._script.step_seconds, now)
            else:
                self._server.wait(min(max(0.0, due - now), 0.5) if self._runs else 0.5)
            if self._receive() and len(self._runs) == 1:
                due = time.monotonic() + self._script.step_seconds
            load = Load(
                running=len(self._runs), waiting=0, waiting_tokens=0, pages_total=1000, pages_used=0,
                pages_cached=0,
            )  # fmt: skip
            self._server.out.stats(load, len(self._steps), time.monotonic())
        self._server.close()

    def _receive(self) -> bool:
        now = time.monotonic()
        arrivals = self._server.receive(now, 0)
        for request in arrivals.requests:
            self._runs.append(self._new(request, now))
        for rid in arrivals.aborts:
            self._abort(rid)
        if arrivals.requests or arrivals.aborts:
            self._columns()
        return bool(arrivals.requests)

    def _new(self, request: Request, now: float) -> Run:
        key = reply_key(request.prompt)
        return Run(
            request.rid, key, now, reply_start(key, len(self._script.replies)),
            min(request.sampling.max_tokens or LONGEST_REPLY, LONGEST_REPLY), len(request.prompt),
            len(self._steps),
        )  # fmt: skip

    def _abort(self, rid: int) -> None:
        for run in self._runs:
            if run.rid == rid:
                self._server.out.finish([self._end(run, FinishReason.ABORT)], len(self._steps))
        self._runs = [run for run in self._runs if run.rid != rid]

    def _columns(self) -> None:
        """Rebuild the arrays of the next step's output, after the set of running requests has changed."""
        step = len(self._steps)
        self._rids = np.array([run.rid for run in self._runs], np.int64)
        self._offsets = np.array([step - run.first_step for run in self._runs], np.int64)
        self._places = np.array([run.start for run in self._runs], np.int64) + self._offsets
        self._left = min((run.length - (step - run.first_step) for run in self._runs), default=0)

    def _step(self, now: float) -> None:
        step = len(self._steps)
        self._steps.append(now)
        self._left -= 1
        ended: list[Run] = []
        if self._left <= 0:
            ended = [run for run in self._runs if step + 1 - run.first_step >= run.length]
        output = StepOutput(
            step=step, rids=self._rids, offsets=self._offsets.astype(np.int32),
            tokens=self._script.replies[self._places], counts=None,
            finished=tuple(self._end(run, FinishReason.LENGTH) for run in ended),
        )  # fmt: skip
        self._steps[-1] = time.monotonic()
        self._server.out.send(output, now)
        if ended:
            ended_rids = {run.rid for run in ended}
            self._runs = [run for run in self._runs if run.rid not in ended_rids]
            self._columns()
        else:
            self._offsets = self._offsets + 1
            self._places = self._places + 1

    def _end(self, run: Run, reason: FinishReason) -> Finished:
        given = len(self._steps) - run.first_step
        self.timings.append(Timing(run.key, run.received, np.array(self._steps[run.first_step :])))
        return Finished(
            rid=run.rid, reason=reason, prompt_tokens=run.prompt, cached_tokens=0, output_tokens=given
        )  # fmt: skip


def host(names: list[str], script: Script, pipe: Connection, cores: set[int]) -> None:
    """Run engines in threads of this process, and send their endpoints through the pipe.

    The reply to each message "take" from the pipe contains the timings of the requests that ended since the
    previous "take". Any other message ends the process.
    """
    import os

    os.sched_setaffinity(0, cores)
    stop = threading.Event()
    engines = [FakeEngine(name, script, stop) for name in names]
    threads = [threading.Thread(target=engine.run, daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    pipe.send([engine.endpoint for engine in engines])
    while pipe.recv() == "take":
        collected: list[Timing] = []
        for engine in engines:
            timings, engine.timings = engine.timings, []
            collected += timings
        pipe.send(collected)
    stop.set()
    for thread in threads:
        thread.join(5)


class Engines:
    """Context manager for the processes that run simulated engines."""

    def __init__(self, count: int, processes: int, script: Script, cores: set[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            names = [f"engine-{index}" for index in range(number, count, processes)]
            process = context.Process(target=host, args=(names, script, theirs, cores), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.endpoints: list[str] = [endpoint for pipe in self._pipes for endpoint in pipe.recv()]

    def take_timings(self) -> dict[int, Timing]:
        """Return the timings of requests that ended since the previous call, by the key of their prompt."""
        for pipe in self._pipes:
            pipe.send("take")
        return {timing.key: timing for pipe in self._pipes for timing in pipe.recv()}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                pipe.send("end")
                process.join(8)
            except (BrokenPipeError, OSError):
                pass
            if process.is_alive():
                process.kill()
                process.join()
