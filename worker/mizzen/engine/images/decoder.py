# SPDX-License-Identifier: Apache-2.0
"""Decodes images in confined processes, so that hostile files cannot harm or delay the engine.

The engine's thread submits images and drains results; a second thread (`DecodePool`) serves the processes.
Tenants share the time of the processes; the images of a tenant are decoded in order.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from threading import Lock

from mizzen.engine.images.messages import MESSAGE_BYTES, DecodeJob
from mizzen.engine.images.options import DecoderOptions
from mizzen.engine.images.pool import UNAVAILABLE, WAITED_TOO_LONG, DecodePool
from mizzen.engine.images.tasks import DecodedImage, DecodeFailure, DecodeTask, ImageCounts
from mizzen.engine.shared_time_queue import SharedTimeQueue
from mizzen.images.types import ImageRules, InvalidImage, PixelLimits


class ImageDecoder:
    """Decodes images in other processes.

    Its public methods are called from one thread; only `close` blocks.
    """

    def __init__(
        self, options: DecoderOptions | None = None, on_result: Callable[[], None] | None = None
    ) -> None:
        """Configure the decoder; the first image starts its thread and a process.

        Args:
            options: Limits; the defaults if None.
            on_result: Function that is called, from any thread, when `drain` has something to return. It
                must not block or raise.
        """
        self._options = options or DecoderOptions()
        self._on_result = on_result
        self._counts = ImageCounts()
        self._tasks: dict[bytes, DecodeTask] = {}
        """Images that wait or are being decoded, without cancelled ones, in order of submission."""
        self._waiting_bytes = 0
        """Size of the files of all images that wait or are being decoded, including cancelled ones."""
        self._unfinished = 0
        """Number of these images."""
        self._results: list[DecodedImage] = []
        self._lock = Lock()
        """Guards the queue, the tasks, the results and the counters."""
        self._queue: SharedTimeQueue[DecodeTask] = SharedTimeQueue()
        self._pool: DecodePool | None = None
        self._closed = False
        self._pickled_rules: tuple[ImageRules, bytes] | None = None

    def submit(
        self,
        key: bytes,
        content: bytes,
        rules: ImageRules,
        header_size: tuple[int, int],
        limits: PixelLimits | None = None,
        *,
        tenant: int = 0,
    ) -> None:
        """Decode an image; `drain` later returns its result. A key that is waiting already is ignored.

        Args:
            key: Name of the image in results, such as its digest.
            content: The file.
            rules: Rules of the model.
            header_size: Width and height in pixels, as displayed, according to the file's header.
            limits: Bounds of the request on the resized image.
            tenant: Number of the tenant that waits for the image.

        Raises:
            RuntimeError: the decoder is closed.
        """
        if self._closed:
            raise RuntimeError("the image decoder is closed")
        with self._lock:
            if key in self._tasks:
                return
        try:
            job = _make_job(content, rules, header_size, limits or PixelLimits())
        except InvalidImage as error:
            self._reject(key, str(error), DecodeFailure.INVALID)
            return
        if not self._has_room(len(content)):
            self._reject(key, "the image cannot be decoded now, as too many images wait: try again later")
            return
        task = DecodeTask(key, content, self._pickle(rules), job, tenant, time.monotonic())
        pool = self._running_pool()
        with self._lock:
            self._tasks[key] = task
            self._unfinished += 1
            self._waiting_bytes += len(content)
            self._queue.add_waiter(tenant, task)
        pool.wake()
        if pool.ended:  # perhaps before the image was added
            self.fail_all(UNAVAILABLE, DecodeFailure.UNAVAILABLE)

    def drain(self) -> list[DecodedImage]:
        """Return the images that were finished since the last call."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def cancel(self, key: bytes) -> None:
        """Drop an image, whose result `drain` does not return any longer; unknown keys are ignored."""
        with self._lock:
            self._results = [result for result in self._results if result.key != key]
            task = self._tasks.pop(key, None)
            if task is None:
                return
            task.cancelled = True
            if not task.taken:  # otherwise, `finish` releases it
                self._queue.remove(task)
                self._release(task)

    def close(self) -> None:
        """Stop the processes and the thread; images that are not finished are dropped."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def pending(self) -> int:
        """Number of submitted images whose results have not been drained."""
        with self._lock:
            return len(self._tasks) + len(self._results)

    @property
    def counts(self) -> ImageCounts:
        """Counters since the decoder was created; a copy."""
        with self._lock:
            counts = self._counts
            return ImageCounts(counts.decoded, dict(counts.failed), counts.seconds, counts.restarts)

    @property
    def confined(self) -> bool | None:
        """Whether the kernel restricts the processes' system calls; None before the first process."""
        return self._pool.confined if self._pool is not None else None

    @property
    def process_ids(self) -> list[int]:
        """Ids of the running processes."""
        return self._pool.process_ids if self._pool is not None else []

    def _running_pool(self) -> DecodePool:
        if self._pool is not None and self._pool.ended:
            self._pool.close()
            self._pool = None
        if self._pool is None:
            self._pool = DecodePool(self, self._options)
        return self._pool

    def _has_room(self, size: int) -> bool:
        options = self._options
        with self._lock:
            return (
                self._unfinished < options.max_waiting
                and self._waiting_bytes + size <= options.max_waiting_bytes
            )

    def _reject(self, key: bytes, error: str, failure: DecodeFailure = DecodeFailure.BUSY) -> None:
        with self._lock:
            self._add_result(DecodedImage(key, None, error, failure))
        self._notify()

    def _pickle(self, rules: ImageRules) -> bytes:
        """Return the pickled rules; an engine has only one model, so the last ones are kept."""
        if self._pickled_rules is None or self._pickled_rules[0] is not rules:
            pickled = pickle.dumps(rules)
            if len(pickled) > MESSAGE_BYTES:
                raise ValueError(f"the image rules have {len(pickled)} bytes, more than {MESSAGE_BYTES}")
            self._pickled_rules = rules, pickled
        return self._pickled_rules[1]

    def _add_result(self, result: DecodedImage) -> None:
        if result.failure is None:
            self._counts.decoded += 1
        else:
            self._counts.failed[result.failure] += 1
        self._results.append(result)

    def _release(self, task: DecodeTask) -> None:
        self._unfinished -= 1
        self._waiting_bytes -= len(task.content)

    def _notify(self) -> None:
        if self._on_result is not None:
            self._on_result()

    # ── in the thread of the pool ─────────────────────────────────────────────────────────────────────────

    def pop_next(self) -> DecodeTask | None:
        """Remove and return the next image for a process."""
        with self._lock:
            popped = self._queue.pop_next()
            if popped is None:
                return None
            popped[1].taken = True
            return popped[1]

    def expire(self, now: float) -> None:
        """Fail images that have waited too long."""
        with self._lock:
            limit = now - self._options.queue_seconds
            late = [task for task in self._queue.items() if task.submitted <= limit]
            for task in late:
                self._queue.remove(task)
                task.taken = True  # `finish` releases it, even if it is cancelled meanwhile
        for task in late:
            self.finish(task, task.failed(WAITED_TOO_LONG, DecodeFailure.BUSY))

    def fail_waiting(self, error: str, failure: DecodeFailure) -> None:
        """Fail all waiting images."""
        while (task := self.pop_next()) is not None:
            self.finish(task, task.failed(error, failure))

    def fail_all(self, error: str, failure: DecodeFailure) -> None:
        """Fail all images that are not finished."""
        with self._lock:
            for task in self._queue.items():
                self._queue.remove(task)
            tasks, self._tasks = self._tasks, {}
            for key in tasks:
                self._add_result(DecodedImage(key, None, error, failure))
            self._unfinished = self._waiting_bytes = 0
        if tasks and not self._closed:
            self._notify()

    def finish(self, task: DecodeTask, result: DecodedImage, seconds: float = 0.0) -> None:
        """Store the result of an image on which a process spent `seconds`."""
        with self._lock:
            self._queue.charge(task.tenant, seconds)
            self._counts.seconds += seconds
            self._release(task)
            if task.cancelled:
                return
            del self._tasks[task.key]
            self._add_result(result)
        self._notify()

    def record_process_end(self) -> None:
        """Count a process that ended while it was needed."""
        with self._lock:
            self._counts.restarts += 1


def _make_job(
    content: bytes, rules: ImageRules, header_size: tuple[int, int], limits: PixelLimits
) -> DecodeJob:
    """Return the description of an image.

    Raises:
        InvalidImage: the model does not accept the image's size, or the file is empty.
    """
    if not content:
        raise InvalidImage("the image is empty")
    return DecodeJob(
        content_bytes=len(content),
        header_size=header_size,
        min_pixels=limits.min_pixels,
        max_pixels=limits.max_pixels,
        shape=rules.geometry(*header_size, limits).pixel_shape,
    )
