# SPDX-License-Identifier: Apache-2.0
"""The status block in shared memory: readers always see complete snapshots."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mizzen.server.metric_catalogue import FIELDS, HISTOGRAMS, INDEX, METRICS
from mizzen.server.status_block import BLOCK_BYTES, StatusReader, StatusWriter, create_status_blocks


@pytest.fixture
def block() -> Iterator[int]:
    descriptor = create_status_blocks(2)
    yield descriptor
    os.close(descriptor)


def test_an_unpublished_block_reads_as_zeros(block: int) -> None:
    snapshot = StatusReader(block, 0).read()
    assert snapshot["phase"] == snapshot["heartbeat"] == 0
    assert snapshot.text == ""


def test_a_snapshot_is_visible_only_after_publish(block: int) -> None:
    writer, reader = StatusWriter(block, 1), StatusReader(block, 1)
    writer.values[INDEX["steps"]] = 5
    writer.set_text("ünï" * 2000)
    assert reader.read()["steps"] == 0
    writer.publish()
    assert reader.read()["steps"] == 5
    assert reader.read().text.startswith("ünïünï")
    assert StatusReader(block, 0).read()["steps"] == 0  # the block of another rank


def test_a_torn_snapshot_is_ignored(block: int) -> None:
    writer, reader = StatusWriter(block, 0), StatusReader(block, 0)
    writer.values[INDEX["steps"]] = 5
    writer.publish()
    assert reader.read()["steps"] == 5
    memory = mmap.mmap(block, 0)
    memory[40:48] = b"\1" * 8  # as if the writer had stopped in the middle of a write
    assert reader.read()["steps"] == 5
    writer.values[INDEX["steps"]] = 6
    writer.publish()
    assert reader.read()["steps"] == 6
    assert len(memory) == 2 * BLOCK_BYTES


def test_concurrent_writes_never_yield_a_mixed_snapshot(block: int) -> None:
    code = (
        "import sys\n"
        "from mizzen.server.status_block import StatusWriter\n"
        "writer = StatusWriter(int(sys.argv[1]), 0)\n"
        "for number in range(1, 20001):\n"
        "    for place in range(len(writer.values)): writer.values[place] = number\n"
        "    writer.set_text(str(number))\n"
        "    writer.publish()\n"
    )
    reader, snapshots = StatusReader(block, 0), set()
    process = subprocess.Popen([sys.executable, "-c", code, str(block)], pass_fds=(block,))
    try:
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            snapshot = reader.read()
            if snapshot.text:
                assert set(snapshot.values) == {float(snapshot.text)}
                snapshots.add(snapshot.text)
    finally:
        process.kill()
        process.wait(60)
    assert reader.read().text == "20000"
    assert len(snapshots) > 10


def test_fields_and_metric_names_of_the_catalogue_are_unique() -> None:
    assert len(set(FIELDS)) == len(FIELDS)
    names = [metric.name for metric in METRICS] + [histogram.name for histogram in HISTOGRAMS]
    assert len(set(names)) == len(names)
    assert all(metric.help for metric in METRICS)
    assert all(list(histogram.buckets) == sorted(histogram.buckets) for histogram in HISTOGRAMS)
