# SPDX-License-Identifier: Apache-2.0
"""Status block: shared memory in which a rank publishes its status to the supervisor.

The block has a fixed layout in an anonymous file whose descriptor the rank inherits. The rank publishes
snapshots; the supervisor can read the latest complete snapshot even if the rank hangs in a collective, is
stopped or keeps its interpreter busy. A sequence number (odd while a snapshot is being written) and a
checksum distinguish complete snapshots from torn ones on any memory model.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from array import array
from dataclasses import dataclass

from mizzen.server.metric_catalogue import FIELDS, INDEX

TEXT_BYTES = 2048
_HEADER = struct.Struct("<QQ")  # sequence, checksum
_VALUES = 8 * len(FIELDS)
BLOCK_BYTES = _HEADER.size + _VALUES + TEXT_BYTES
_READ_ATTEMPTS = 200


def create_status_blocks(ranks: int) -> int:
    """Return the file descriptor of zeroed shared memory for `ranks` blocks; the caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("mizzen-status")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, BLOCK_BYTES * ranks)
    return descriptor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Status of one rank: its values by field name (`mizzen.server.metric_catalogue.FIELDS`), and its text.

    The text is the reason for the rank's failure or, for rank 0, the endpoint that gateways connect to.
    """

    values: array[float]
    text: str

    def __getitem__(self, name: str) -> float:
        return self.values[INDEX[name]]


class StatusWriter:
    """Writer of one rank's block; changes of `values` become visible to readers at the next `publish`."""

    def __init__(self, descriptor: int, rank: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._start = rank * BLOCK_BYTES
        self._sequence = 0
        self.values = array("d", bytes(_VALUES))
        self._text = bytes(TEXT_BYTES)

    def set_text(self, text: str) -> None:
        """Set the text of the next snapshot, truncated to `TEXT_BYTES` of UTF-8."""
        cut = text.encode(errors="replace")[:TEXT_BYTES].decode(errors="ignore").encode()
        self._text = cut.ljust(TEXT_BYTES, b"\0")

    def publish(self) -> None:
        """Publish `values` and the text as the snapshot that readers see."""
        memory, start = self._memory, self._start
        payload = self.values.tobytes() + self._text
        checksum = zlib.crc32(payload)
        body = start + _HEADER.size
        _HEADER.pack_into(memory, start, self._sequence + 1, checksum)
        memory[body : body + len(payload)] = payload
        self._sequence += 2
        _HEADER.pack_into(memory, start, self._sequence, checksum)


class StatusReader:
    """Reader of one rank's block, used by the supervisor."""

    def __init__(self, descriptor: int, rank: int) -> None:
        self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._start = rank * BLOCK_BYTES
        self._last = Snapshot(array("d", bytes(_VALUES)), "")

    def read(self) -> Snapshot:
        """Return the newest complete snapshot; before the first one, a snapshot of zeros."""
        start = self._start
        for _ in range(_READ_ATTEMPTS):
            raw = self._memory[start : start + BLOCK_BYTES]
            sequence, checksum = _HEADER.unpack_from(raw)
            if not sequence:
                break
            payload = raw[_HEADER.size :]
            if sequence % 2 == 0 and zlib.crc32(payload) == checksum:
                text = payload[_VALUES:].rstrip(b"\0").decode(errors="replace")
                self._last = Snapshot(array("d", payload[:_VALUES]), text)
                break
        return self._last
