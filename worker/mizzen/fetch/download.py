"""Download the files of a plan in concurrent segments, resuming where an earlier try stopped.

Each segment of a file uses one connection. A journal records received bytes only after they are on disk, so
a killed process loses at most `CHECKPOINT` bytes per connection. A file gets its final name only after its
checksum has been verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from mizzen.fetch.client import (
    Credentials,
    FetchClient,
    RateLimiter,
    RequestRejected,
    check_range,
    read,
    redacted,
)
from mizzen.fetch.digests import verify
from mizzen.fetch.errors import CorruptDownload, ServerUnavailable
from mizzen.fetch.plan import RemoteFile
from mizzen.fetch.progress import FetchProgress
from mizzen.fetch.store import ModelFolder, filesystem_error

SEGMENT = 64 * 1024 * 1024
CHECKPOINT = 8 * 1024 * 1024
MAX_ROUNDS = 2
"""Number of downloads with a wrong checksum after which the server's copy is considered corrupt."""
POLL_SECONDS = 0.5


@dataclass(slots=True)
class PartialFile:
    """A file being downloaded, and the bytes of it that have been received."""

    remote: RemoteFile
    target: Path
    segment: int
    received: dict[int, int] = field(default_factory=dict)
    """Number of received bytes of each started segment, by the segment's start."""
    lock: Lock = field(default_factory=Lock)

    @property
    def data(self) -> Path:
        """Path of the sparse file with the received bytes."""
        return self.target.with_name(self.target.name + ".partial")

    @property
    def journal(self) -> Path:
        """Path of the journal: one line per checkpoint, with a segment's start and its received bytes."""
        return self.target.with_name(self.target.name + ".partial.done")

    @property
    def received_bytes(self) -> int:
        """Total number of received bytes."""
        return sum(self.received.values())

    def segment_starts(self) -> range:
        """Return the start of every segment; an empty file has none."""
        return range(0, self.remote.size, self.segment)

    def segment_end(self, start: int) -> int:
        """Return the end of the segment that begins at `start`."""
        return min(start + self.segment, self.remote.size)

    def load_journal(self) -> None:
        """Load the journal of an earlier process; invalid lines are ignored."""
        self.received = {}
        try:
            size = self.data.stat().st_size if not self.data.is_symlink() else 0
            lines = self.journal.read_text().splitlines()
        except (OSError, ValueError):
            return
        for line in lines:
            words = line.split()
            if len(words) != 2 or not all(word.isdecimal() for word in words):
                continue  # the last line may be incomplete
            start, count = map(int, words)
            if start in self.segment_starts() and start + count <= min(self.segment_end(start), size):
                self.received[start] = max(count, self.received.get(start, 0))

    def record(self, start: int, count: int, descriptor: int) -> None:
        """Sync the data, then record `count` received bytes of the segment at `start`."""
        os.fdatasync(descriptor)
        with self.lock, self.journal.open("a") as file:
            file.write(f"{start} {count}\n")
            self.received[start] = count

    @property
    def is_complete(self) -> bool:
        """Whether the file has its final name and size."""
        return self.target.is_file() and self.target.stat().st_size == self.remote.size

    def discard(self) -> None:
        """Delete all received data."""
        self.received = {}
        self.target.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        self.data.unlink(missing_ok=True)


class Downloader:
    """Downloads the files of one plan."""

    def __init__(
        self,
        client: FetchClient,
        credentials: Credentials,
        store: ModelFolder,
        progress: FetchProgress,
        *,
        connections: int,
        limiter: RateLimiter,
        segment: int = SEGMENT,
        checkpoint: int = CHECKPOINT,
    ) -> None:
        """Download with up to `connections` connections; `segment` and `checkpoint` are in bytes."""
        self._client = client
        self._credentials = credentials
        self._store = store
        self._progress = progress
        self._connections = connections
        self._limiter = limiter
        self._segment = segment
        self._checkpoint = checkpoint

    def open_partials(self, files: Iterable[RemoteFile]) -> list[PartialFile]:
        """Return the state of each file, as left by earlier tries; complete files count as received."""
        partials: list[PartialFile] = []
        for remote in files:
            partial = PartialFile(remote, self._store.path_of(remote.path), self._segment)
            self._store.path_of(f"{remote.path}.partial")
            if partial.is_complete:
                partial.received = {
                    start: partial.segment_end(start) - start for start in partial.segment_starts()
                }
            else:
                partial.load_journal()
            partials.append(partial)
        return partials

    def download(self, partials: Sequence[PartialFile]) -> Mapping[str, str]:
        """Download the missing segments, verify all files, and return their SHA-256 by path.

        Raises:
            FetchError: the download failed; the data received so far is kept.
        """
        with ThreadPoolExecutor(self._connections) as pool:
            try:
                return self._download(pool, partials)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._client.abandon()
                raise

    def _download(self, pool: ThreadPoolExecutor, partials: Sequence[PartialFile]) -> Mapping[str, str]:
        digests: dict[str, str] = {}
        waiting: dict[Future[Any], tuple[PartialFile, bool]] = {}
        missing = {partial.remote.path: len(self._missing_segments(partial)) for partial in partials}
        for partial in partials:
            for start in self._missing_segments(partial):
                waiting[pool.submit(self._fetch_segment, partial, start)] = (partial, False)
            if not missing[partial.remote.path]:
                waiting[pool.submit(self._complete_file, partial)] = (partial, True)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED, timeout=POLL_SECONDS)
            self._client.raise_if_stopped()
            for future in done:
                partial, checked = waiting.pop(future)
                path, result = partial.remote.path, future.result()
                if checked:
                    digests[path] = result
                    continue
                missing[path] -= 1
                if not missing[path]:
                    waiting[pool.submit(self._complete_file, partial)] = (partial, True)
        return digests

    def _missing_segments(self, partial: PartialFile) -> list[int]:
        """Return the starts of the incomplete segments."""
        return [
            s for s in partial.segment_starts() if partial.received.get(s, 0) < partial.segment_end(s) - s
        ]

    def _complete_file(self, partial: PartialFile) -> str:
        """Verify a file and give it its final name; if the checksum is wrong, download it once more."""
        remote, tried = partial.remote, 0
        while True:
            try:
                data = partial.target if partial.is_complete else partial.data
                if not remote.size and data == partial.data:
                    data.touch()
                digest = verify(data, remote.path, remote.size, remote.digest, self._client.raise_if_stopped)
                if data == partial.data:
                    data.replace(partial.target)
                    partial.journal.unlink(missing_ok=True)
                return digest
            except CorruptDownload as error:
                tried += 1
                self._progress.add_bytes(-partial.received_bytes)
                partial.discard()
                if tried == MAX_ROUNDS:
                    raise CorruptDownload(f"{error}, twice: the server's copy is corrupt") from error
                self._progress.report_retry(f"{error}; fetching it again")
                for start in self._missing_segments(partial):
                    self._fetch_segment(partial, start)
            except OSError as error:
                raise filesystem_error(error, partial.target) from error

    def _fetch_segment(self, partial: PartialFile, start: int) -> None:
        """Download the missing part of one segment, with retries."""
        try:
            self._client.retry(
                lambda: self._request_range(partial, start), lambda: partial.received.get(start, 0)
            )
        except RequestRejected as error:
            if error.code in (412, 416):
                raise CorruptDownload(f"{partial.remote.path} changed on the server") from error
            raise
        except OSError as error:
            raise filesystem_error(error, partial.data) from error

    def _request_range(self, partial: PartialFile, start: int) -> None:
        remote, end = partial.remote, partial.segment_end(start)
        at = start + partial.received.get(start, 0)
        if at >= end:
            return
        headers = {"Range": f"bytes={at}-{end - 1}"}
        if remote.version:
            headers["If-Match"] = remote.version
        with self._client.stream(remote.url, self._credentials, headers) as response:
            skip = at - check_range(remote.url, response, at, end, remote.size)
            self._write_range(partial, start, at, end, _clip(read(response), skip, end - at))

    def _write_range(
        self, partial: PartialFile, start: int, at: int, end: int, parts: Iterable[bytes]
    ) -> None:
        """Write bytes from the offset `at` on, and record them in the journal."""
        recorded = at
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial.data, flags, 0o644)
        try:
            for part in parts:
                self._client.raise_if_stopped()
                self._limiter.acquire(len(part))
                _write(descriptor, part, at)
                at += len(part)
                self._progress.add_bytes(len(part))
                if at - recorded >= self._checkpoint:
                    partial.record(start, at - start, descriptor)
                    recorded = at
            if at < end:
                raise ServerUnavailable(f"{redacted(partial.remote.url)} ended {end - at} bytes too early")
        finally:
            if at > recorded:
                partial.record(start, at - start, descriptor)
            os.close(descriptor)


def _clip(parts: Iterable[bytes], skip: int, count: int) -> Iterator[bytes]:
    """Yield up to `count` bytes after skipping the first `skip` bytes."""
    for part in parts:
        rest = part[skip:]
        skip = max(0, skip - len(part))
        rest = rest[:count]
        count -= len(rest)
        if rest:
            yield rest
        if not count:
            return


def _write(descriptor: int, part: bytes, at: int) -> None:
    view = memoryview(part)
    while view:
        count = os.pwrite(descriptor, view, at)
        at += count
        view = view[count:]
