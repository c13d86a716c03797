# SPDX-License-Identifier: Apache-2.0
"""Download the files of a plan in concurrent segments, and resume where an earlier try stopped.

Each segment of a file uses one connection. The journal of `PartialFile` records received bytes, so that a
killed process loses at most `CHECKPOINT` bytes per connection. A file gets its final name only after its
checksum has been verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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
from mizzen.fetch.partial_file import PartialFile
from mizzen.fetch.plan import RemoteFile
from mizzen.fetch.progress import FetchProgress
from mizzen.fetch.store import ModelFolder, filesystem_error

SEGMENT = 64 * 1024 * 1024
CHECKPOINT = 8 * 1024 * 1024
MAX_ROUNDS = 2
"""If a file has a wrong checksum after each of this many downloads, the server's copy counts as corrupt."""
POLL_SECONDS = 0.5


class Downloader:
    """Downloader of the files of one plan."""

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
        """Store the settings; `download` starts the downloads.

        Args:
            client: client for the requests.
            credentials: credentials for the server.
            store: model folder to download to.
            progress: counter of received bytes.
            connections: maximum number of concurrent downloads.
            limiter: limit of the download rate.
            segment: number of bytes that one request downloads.
            checkpoint: number of received bytes after which the journal is updated.
        """
        self._client = client
        self._credentials = credentials
        self._store = store
        self._progress = progress
        self._connections = connections
        self._limiter = limiter
        self._segment = segment
        self._checkpoint = checkpoint

    def open_partials(self, files: Iterable[RemoteFile]) -> list[PartialFile]:
        """Return a `PartialFile` for each file, with the bytes that earlier tries received.

        If a file is complete, all of its bytes count as received.
        """
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
        """Download the missing segments, verify all files, and return their digests (`sha256:…`) by path.

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
        """Return the offsets in bytes of a file's incomplete segments."""
        return [
            s for s in partial.segment_starts() if partial.received.get(s, 0) < partial.segment_end(s) - s
        ]

    def _complete_file(self, partial: PartialFile) -> str:
        """Verify a file, give it its final name, and return its digest; after a mismatch, download it again.

        Raises:
            CorruptDownload: the file had the wrong checksum `MAX_ROUNDS` times.
        """
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
                self._progress.report_retry(f"{error}; downloading the file again")
                for start in self._missing_segments(partial):
                    self._fetch_segment(partial, start)
            except OSError as error:
                raise filesystem_error(error, partial.target) from error

    def _fetch_segment(self, partial: PartialFile, start: int) -> None:
        """Download the missing part of the segment at offset `start`, with retries."""
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
        """Write received bytes to the file, and record them in the journal.

        Args:
            partial: file to write to.
            start: offset of the segment.
            at: offset of the first received byte.
            end: offset of the end of the segment.
            parts: received bytes.

        Raises:
            ServerUnavailable: the server sent fewer bytes than requested.
        """
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
    """Skip the first `skip` bytes of `parts`, and yield up to `count` of the bytes that follow."""
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
