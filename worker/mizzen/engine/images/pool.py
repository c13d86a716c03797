# SPDX-License-Identifier: Apache-2.0
"""Thread that starts processes for decoding, hands images to them, and replaces processes that fail."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from typing import Protocol

from mizzen.engine.images.decode_process import DecodeProcess, ProcessEnded
from mizzen.engine.images.messages import MAX_ERROR_CHARACTERS
from mizzen.engine.images.options import DecoderOptions
from mizzen.engine.images.tasks import DecodedImage, DecodeFailure, DecodeTask

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 1.0
"""Interval at which images that have waited too long are looked for, in seconds."""
MAX_FAILED_STARTS = 2
"""Number of failed starts in succession after which all waiting images fail if there is no process."""

WAITED_TOO_LONG = "the image waited too long, because many images are being decoded: try again later"
"""Error of an image for which no process became free in time."""

UNAVAILABLE = "the image cannot be decoded now, because the decoder does not start: try again later"
"""Error of images that wait while no process can be started."""


class TaskQueue(Protocol):
    """Waiting images, which the pool takes, and their results."""

    def pop_next(self) -> DecodeTask | None:
        """Remove and return the next image; None if no image waits."""
        ...

    def expire(self, now: float) -> None:
        """Fail images that have waited too long."""
        ...

    def fail_waiting(self, error: str, failure: DecodeFailure) -> None:
        """Fail all waiting images."""
        ...

    def fail_all(self, error: str, failure: DecodeFailure) -> None:
        """Fail all images that are not finished."""
        ...

    def finish(self, task: DecodeTask, result: DecodedImage, seconds: float = 0.0) -> None:
        """Store the result of an image on which a process spent `seconds`."""
        ...

    def record_process_end(self) -> None:
        """Count a process that ended while it was needed."""
        ...


class DecodePool:
    """Processes that decode images, and the thread that serves them.

    `wake` and `close` are called from other threads.
    """

    def __init__(self, queue: TaskQueue, options: DecoderOptions) -> None:
        """Start the thread; the first image starts the first process."""
        self.confined: bool | None = None
        """Whether the kernel restricts the system calls of the processes; None before the first start."""
        self._queue = queue
        self._options = options
        self._processes: list[DecodeProcess] = []
        self._retiring: set[DecodeProcess] = set()
        """Processes that end after their current image, because they have been replaced."""
        self._next_task: DecodeTask | None = None
        """Image that was removed from the queue, and waits for a process or for other images to finish."""
        self._failed_starts = 0
        self._no_start_before = 0.0
        self._idle_since = time.monotonic()
        self._closed = False
        self._ended = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mizzen-images", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at the queue."""
        try:
            self._wake_sender.send(b"w")
        except (BlockingIOError, BrokenPipeError):
            pass  # enough bytes are waiting to wake it, or it has ended

    def close(self) -> None:
        """Kill the processes, and end the thread."""
        self._closed = True
        self.wake()
        self._thread.join()
        self._wake_sender.close()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, and all its images have failed."""
        return self._ended

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes."""
        return [process.process_id for process in list(self._processes)]

    def _run(self) -> None:
        try:
            while not self._closed:
                now = time.monotonic()
                self._queue.expire(now)
                self._kill_overdue(now)
                self._assign()
                self._stop_idle(now)
                for key, _ in self._selector.select(self._timeout()):
                    self._handle_event(key.data)
        except Exception:
            log.exception("the thread that decodes images failed; the next image starts another one")
        finally:
            for process in list(self._processes):
                self._remove(process)
            self._ended = True  # an image that is submitted from now on fails in `ImageDecoder.submit`
            self._queue.fail_all(UNAVAILABLE, DecodeFailure.UNAVAILABLE)
            self._selector.close()
            self._wake_receiver.close()

    def _timeout(self) -> float | None:
        """Return the time in seconds until something must be done without an event; None if nothing."""
        now = time.monotonic()
        times = [process.deadline for process in self._processes if not process.idle]
        if self._next_task is not None:
            times.append(now + EXPIRY_SECONDS)
            if self._no_start_before > now:
                times.append(self._no_start_before)
        elif self._processes:
            times.append(self._idle_since + self._options.idle_seconds)
        return max(0.0, min(times) - now) if times else None

    def _handle_event(self, process: DecodeProcess | None) -> None:
        if process is None:
            self._wake_receiver.recv(4096)
            return
        try:
            if process.ready is None:
                self._handle_ready(process)
            else:
                self._handle_reply(process)
        except ProcessEnded as error:
            self._replace(process, str(error))
        except OSError as error:  # the pixels cannot be mapped
            self._replace(process, f"cannot return pixels: {error.strerror}")

    def _handle_ready(self, process: DecodeProcess) -> None:
        ready = process.receive_ready()
        if ready is None:
            return
        self._failed_starts = 0
        if ready.confined is not self.confined:
            if ready.confined:
                log.info("the kernel restricts the system calls of the processes that decode images")
            else:
                log.warning(
                    "the kernel does not restrict the system calls of the processes that decode images"
                )
        self.confined = ready.confined
        for worn in [old for old in self._processes if old.worn and old not in self._retiring][:1]:
            self._retire(worn)

    def _handle_reply(self, process: DecodeProcess) -> None:
        task = process.task
        seconds = time.monotonic() - process.task_start
        result = process.receive_pixels()
        if result is None or task is None:
            return
        pixels, error = result
        failure = DecodeFailure.INVALID if pixels is None else None
        self._queue.finish(task, DecodedImage(task.key, pixels, _printable(error), failure), seconds)
        if process in self._retiring:
            self._retire(process)
        elif process.worn:
            self._start(process.rules)  # its successor; it goes on until that one is ready

    def _retire(self, process: DecodeProcess) -> None:
        """Remove a process that has a successor, after its current image."""
        log.info("replaced process %d, which has decoded images for long", process.process_id)
        if process.idle:
            self._remove(process)
        else:
            self._retiring.add(process)

    def _replace(self, process: DecodeProcess, reason: str) -> None:
        """Remove a process that ended; its image fails."""
        task, seconds = process.task, time.monotonic() - process.task_start
        starting = process.ready is None
        log.warning("process %d, which decodes images, %s", process.process_id, reason)
        self._remove(process)
        self._queue.record_process_end()
        if starting:
            self._record_failed_start(reason)
        if task is not None:
            error = "the image could not be decoded, because the decoder ended: the file may be damaged"
            self._queue.finish(task, task.failed(error, DecodeFailure.CRASH), seconds)

    def _kill_overdue(self, now: float) -> None:
        for process in [busy for busy in self._processes if not busy.idle and busy.deadline <= now]:
            task = process.task
            self._remove(process)
            self._queue.record_process_end()
            if task is None:
                self._record_failed_start("took too long")
                continue
            seconds = self._options.image_seconds
            error = f"the image takes more than {seconds:g} s to decode: send a smaller or simpler image"
            self._queue.finish(task, task.failed(error, DecodeFailure.DEADLINE), now - process.task_start)

    def _record_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        self._no_start_before = time.monotonic() + self._options.retry_seconds
        log.warning("a process that decodes images did not start: %s", reason)
        if self._failed_starts >= MAX_FAILED_STARTS and not any(one.ready for one in self._processes):
            task, self._next_task = self._next_task, None
            if task is not None:
                self._queue.finish(task, task.failed(UNAVAILABLE, DecodeFailure.UNAVAILABLE))
            self._queue.fail_waiting(UNAVAILABLE, DecodeFailure.UNAVAILABLE)

    def _assign(self) -> None:
        """Hand waiting images to idle processes; start processes if there are too few."""
        while True:
            task = self._next_task or self._queue.pop_next()
            self._next_task = None
            if task is None:
                return
            if self._drop_stale(task):
                continue
            self._next_task = task
            if not self._fits(task):
                return
            process = self._idle_process(task.rules)
            if process is None:
                self._start_if_needed(task.rules)
                return
            self._next_task = None
            try:
                process.send(task)
            except ProcessEnded:
                self._next_task = task
                self._replace(process, "ended while it was idle")
            except OSError:
                error = "the image could not be decoded, because memory is short: try again later"
                self._queue.finish(task, task.failed(error, DecodeFailure.BUSY))

    def _drop_stale(self, task: DecodeTask) -> bool:
        """Finish an image that was cancelled or has waited too long; return whether it is so."""
        expired = time.monotonic() >= task.submitted + self._options.queue_seconds
        if expired or task.cancelled:
            self._queue.finish(task, task.failed(WAITED_TOO_LONG, DecodeFailure.BUSY))
        return expired or task.cancelled

    def _fits(self, task: DecodeTask) -> bool:
        """Return whether the image can be decoded beside the current ones."""
        pixels = [busy.task.source_pixels for busy in self._processes if busy.task is not None]
        return not pixels or sum(pixels) + task.source_pixels <= self._options.pixels_in_work

    def _idle_process(self, rules: bytes) -> DecodeProcess | None:
        return next((idle for idle in self._processes if idle.idle and idle.rules == rules), None)

    def _start_if_needed(self, rules: bytes) -> None:
        """Start a process for these rules, unless one is starting or all are busy."""
        if self._starting:
            return
        if len(self._processes) >= self._options.processes:
            others = [process for process in self._processes if process.idle]
            if not others:
                return
            self._remove(others[0])  # it has other rules
        self._start(rules)

    @property
    def _starting(self) -> bool:
        return any(process.ready is None for process in self._processes)

    def _start(self, rules: bytes) -> None:
        """Start a process for these rules, unless one is starting or a start has just failed."""
        if self._starting:
            return
        if time.monotonic() < self._no_start_before:
            return
        try:
            process = DecodeProcess(rules, self._options)
        except OSError as error:
            self._record_failed_start(error.strerror or type(error).__name__)
            return
        self._processes.append(process)
        self._selector.register(process.control, selectors.EVENT_READ, process)

    def _remove(self, process: DecodeProcess) -> None:
        self._selector.unregister(process.control)
        self._processes.remove(process)
        self._retiring.discard(process)
        process.kill()

    def _stop_idle(self, now: float) -> None:
        if self._next_task is not None or any(not process.idle for process in self._processes):
            self._idle_since = now
        elif now - self._idle_since >= self._options.idle_seconds:
            for process in list(self._processes):
                self._remove(process)


def _printable(error: str) -> str:
    """Return an error message of a process, limited in length and to printable characters."""
    return "".join(character for character in error if character.isprintable())[:MAX_ERROR_CHARACTERS]
