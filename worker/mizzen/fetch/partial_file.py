# SPDX-License-Identifier: Apache-2.0
"""A partially downloaded file and its journal, from which a later process resumes the download.

The journal records received bytes only after they are on disk. `Downloader` fills the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from mizzen.fetch.plan import RemoteFile


@dataclass(slots=True)
class PartialFile:
    """A file that is being downloaded, with the ranges of bytes that have been received."""

    remote: RemoteFile
    target: Path
    segment: int
    received: dict[int, int] = field(default_factory=dict)
    """Maps the offset of each segment that was begun to the number of bytes received for it."""
    lock: Lock = field(default_factory=Lock)

    @property
    def data(self) -> Path:
        """Path of the sparse file that contains the received bytes."""
        return self.target.with_name(self.target.name + ".partial")

    @property
    def journal(self) -> Path:
        """Path of the journal; each line has the offset of a segment and the number of its received bytes."""
        return self.target.with_name(self.target.name + ".partial.done")

    @property
    def received_bytes(self) -> int:
        """Total number of received bytes."""
        return sum(self.received.values())

    def segment_starts(self) -> range:
        """Return the offsets of all segments; an empty file has no segments."""
        return range(0, self.remote.size, self.segment)

    def segment_end(self, start: int) -> int:
        """Return the offset of the end of the segment at offset `start`."""
        return min(start + self.segment, self.remote.size)

    def load_journal(self) -> None:
        """Set `received` from the journal of an earlier process; ignore invalid lines."""
        self.received = {}
        try:
            size = self.data.stat().st_size if not self.data.is_symlink() else 0
            lines = self.journal.read_text().splitlines()
        except (OSError, ValueError):
            return
        for line in lines:
            words = line.split()
            if len(words) != 2 or not all(word.isdecimal() for word in words):
                continue  # a killed process may leave an incomplete last line
            start, count = map(int, words)
            if start in self.segment_starts() and start + count <= min(self.segment_end(start), size):
                self.received[start] = max(count, self.received.get(start, 0))

    def record(self, start: int, count: int, descriptor: int) -> None:
        """Sync the data to disk, then record that `count` bytes of the segment at `start` were received.

        `descriptor` is the open data file.
        """
        os.fdatasync(descriptor)
        with self.lock, self.journal.open("a") as file:
            file.write(f"{start} {count}\n")
            self.received[start] = count

    @property
    def is_complete(self) -> bool:
        """Whether the file has its final name and size."""
        return self.target.is_file() and self.target.stat().st_size == self.remote.size

    def discard(self) -> None:
        """Delete all received data, including a complete file."""
        self.received = {}
        self.target.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        self.data.unlink(missing_ok=True)
