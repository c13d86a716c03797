"""Downloads the files of a plan: in parts, several at once, going on where an earlier try ended.

A file is cut into segments, each got by one connection. What came is noted behind the data, so a process that
is killed loses at most `CHECKPOINT` bytes a connection, and a checksum of the whole file has the last word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from mizzen.fetch.client import Client, Credentials, Pace, Refusal, begins, read, shown
from mizzen.fetch.digests import verify
from mizzen.fetch.errors import Corrupt, Unreachable
from mizzen.fetch.plan import Remote
from mizzen.fetch.progress import Progress
from mizzen.fetch.store import Store, failed

SEGMENT = 64 * 1024 * 1024
CHECKPOINT = 8 * 1024 * 1024
ROUNDS = 2
"""How often a file is got anew whose checksum is wrong, before it is the server's fault."""
POLL_SECONDS = 0.5


@dataclass(slots=True)
class Partial:
    """A file that is being fetched, and which of its bytes are there."""

    remote: Remote
    place: Path
    segment: int
    there: dict[int, int] = field(default_factory=dict)
    """Bytes that are there of each segment that has begun, by its start."""
    lock: Lock = field(default_factory=Lock)

    @property
    def data(self) -> Path:
        """The file's bytes, with holes."""
        return self.place.with_name(self.place.name + ".partial")

    @property
    def notes(self) -> Path:
        """Lines of a segment's start and how much of it is there."""
        return self.place.with_name(self.place.name + ".partial.done")

    @property
    def done(self) -> int:
        """Bytes that are there."""
        return sum(self.there.values())

    def starts(self) -> range:
        """The start of every segment; none of an empty file."""
        return range(0, self.remote.size, self.segment)

    def end(self, start: int) -> int:
        """The end of the segment at `start`."""
        return min(start + self.segment, self.remote.size)

    def recall(self) -> None:
        """Take what an earlier process has left; what makes no sense is not there."""
        self.there = {}
        try:
            size = self.data.stat().st_size if not self.data.is_symlink() else 0
            lines = self.notes.read_text().splitlines()
        except (OSError, ValueError):
            return
        for line in lines:
            words = line.split()
            if len(words) != 2 or not all(word.isdecimal() for word in words):
                continue  # the end of a line may be missing
            start, count = map(int, words)
            if start in self.starts() and start + count <= min(self.end(start), size):
                self.there[start] = max(count, self.there.get(start, 0))

    def note(self, start: int, count: int, descriptor: int) -> None:
        """Note that so many bytes of a segment are there, once they are on the disk."""
        os.fdatasync(descriptor)
        with self.lock, self.notes.open("a") as notes:
            notes.write(f"{start} {count}\n")
            self.there[start] = count

    @property
    def placed(self) -> bool:
        """The file has its own name: all its bytes are there."""
        return self.place.is_file() and self.place.stat().st_size == self.remote.size

    def forget(self) -> None:
        """Throw away what is there."""
        self.there = {}
        self.place.unlink(missing_ok=True)
        self.notes.unlink(missing_ok=True)
        self.data.unlink(missing_ok=True)


class Downloader:
    """Gets the files of one plan."""

    def __init__(
        self,
        client: Client,
        credentials: Credentials,
        store: Store,
        progress: Progress,
        *,
        connections: int,
        pace: Pace,
        segment: int = SEGMENT,
        checkpoint: int = CHECKPOINT,
    ) -> None:
        """Download with so many connections; segments and checkpoints are numbers of bytes."""
        self._client = client
        self._credentials = credentials
        self._store = store
        self._progress = progress
        self._connections = connections
        self._pace = pace
        self._segment = segment
        self._checkpoint = checkpoint

    def prepare(self, files: Iterable[Remote]) -> list[Partial]:
        """What is there of each file; those that are whole already have all their bytes."""
        partials: list[Partial] = []
        for remote in files:
            partial = Partial(remote, self._store.place(remote.path), self._segment)
            self._store.place(f"{remote.path}.partial")
            if partial.placed:
                partial.there = {start: partial.end(start) - start for start in partial.starts()}
            else:
                partial.recall()
            partials.append(partial)
        return partials

    def run(self, partials: Sequence[Partial]) -> Mapping[str, str]:
        """Get what is missing, check everything; returns each file's sha256 by its path.

        Raises:
            FetchError: it cannot go on; what came so far stays.
        """
        with ThreadPoolExecutor(self._connections) as pool:
            try:
                return self._run(pool, partials)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._client.abandon()
                raise

    def _run(self, pool: ThreadPoolExecutor, partials: Sequence[Partial]) -> Mapping[str, str]:
        digests: dict[str, str] = {}
        waiting: dict[Future[Any], tuple[Partial, bool]] = {}
        missing = {partial.remote.path: len(self._missing(partial)) for partial in partials}
        for partial in partials:
            for start in self._missing(partial):
                waiting[pool.submit(self._segment_of, partial, start)] = (partial, False)
            if not missing[partial.remote.path]:
                waiting[pool.submit(self._accept, partial)] = (partial, True)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED, timeout=POLL_SECONDS)
            self._client.check()
            for future in done:
                partial, checked = waiting.pop(future)
                path, result = partial.remote.path, future.result()
                if checked:
                    digests[path] = result
                    continue
                missing[path] -= 1
                if not missing[path]:
                    waiting[pool.submit(self._accept, partial)] = (partial, True)
        return digests

    def _missing(self, partial: Partial) -> list[int]:
        """Starts of the segments that are not whole."""
        return [s for s in partial.starts() if partial.there.get(s, 0) < partial.end(s) - s]

    def _accept(self, partial: Partial) -> str:
        """Check a whole file, and give it its name; a wrong one is got once more."""
        remote, tried = partial.remote, 0
        while True:
            try:
                data = partial.place if partial.placed else partial.data
                if not remote.size and data == partial.data:
                    data.touch()
                digest = verify(data, remote.path, remote.size, remote.digest, self._client.check)
                if data == partial.data:
                    data.replace(partial.place)
                    partial.notes.unlink(missing_ok=True)
                return digest
            except Corrupt as error:
                tried += 1
                self._progress.add(-partial.done)
                partial.forget()
                if tried == ROUNDS:
                    raise Corrupt(f"{error}, twice: the server's copy is broken") from error
                self._progress.trouble(f"{error}; it is fetched anew")
                for start in self._missing(partial):
                    self._segment_of(partial, start)
            except OSError as error:
                raise failed(error, partial.place) from error

    def _segment_of(self, partial: Partial, start: int) -> None:
        """Get one segment, or what is missing of it."""
        try:
            self._client.persist(lambda: self._once(partial, start), lambda: partial.there.get(start, 0))
        except Refusal as error:
            if error.code in (412, 416):
                raise Corrupt(f"{partial.remote.path} is another file at the server by now") from error
            raise
        except OSError as error:
            raise failed(error, partial.data) from error

    def _once(self, partial: Partial, start: int) -> None:
        remote, end = partial.remote, partial.end(start)
        at = start + partial.there.get(start, 0)
        if at >= end:
            return
        headers = {"Range": f"bytes={at}-{end - 1}"}
        if remote.version:
            headers["If-Match"] = remote.version
        with self._client.stream(remote.url, self._credentials, headers) as response:
            skip = at - begins(remote.url, response, at, end, remote.size)
            self._save(partial, start, at, end, _without(read(response), skip, end - at))

    def _save(self, partial: Partial, start: int, at: int, end: int, parts: Iterable[bytes]) -> None:
        """Write bytes from `at` on, and note them."""
        noted = at
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial.data, flags, 0o644)
        try:
            for part in parts:
                self._client.check()
                self._pace.take(len(part))
                _write(descriptor, part, at)
                at += len(part)
                self._progress.add(len(part))
                if at - noted >= self._checkpoint:
                    partial.note(start, at - start, descriptor)
                    noted = at
            if at < end:
                raise Unreachable(f"{shown(partial.remote.url)} ends {end - at} bytes too early")
        finally:
            if at > noted:
                partial.note(start, at - start, descriptor)
            os.close(descriptor)


def _without(parts: Iterable[bytes], skip: int, count: int) -> Iterator[bytes]:
    """At most `count` of the bytes that come behind the first `skip`."""
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
