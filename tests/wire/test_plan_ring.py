# SPDX-License-Identifier: Apache-2.0
"""The ring in shared memory delivers complete plans, in order, to readers of any speed, and then ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.core.step_plan import PageWrites, PrefillChunk, StepPlan
from mizzen.wire.ranks.plan_encoding import MalformedPlan, encode_plan
from mizzen.wire.ranks.plan_ring import (
    PlanChannelStalled,
    RingDescriptors,
    RingReader,
    RingWriter,
    _RingMemory,
    create_ring,
    frame_size,
)

SECONDS = 60.0


def plan(step: int, tokens: int = 0) -> StepPlan:
    chunk = PrefillChunk(slot=1, start=0, tokens=np.arange(tokens, dtype=np.int32), last=True)
    return StepPlan(
        step=step,
        decode=np.arange(step % 7, dtype=np.int32),
        decode_version=step,
        pages=PageWrites(),
        prefill=(chunk,) if tokens else (),
    )


@pytest.fixture
def ring() -> Iterator[RingDescriptors]:
    handles = create_ring(2, capacity=4096)
    yield handles
    handles.close()


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 250), max_size=40), ahead=st.integers(0, 2))
def test_every_reader_receives_every_plan_in_order(sizes: list[int], ahead: int) -> None:
    handles = create_ring(2, capacity=4096)
    try:
        writer, readers = RingWriter(handles), [RingReader(handles, i) for i in range(2)]
        waiting: list[int] = []
        for step, size in enumerate([*sizes, None], 1):
            writer.end() if size is None else writer.send(plan(step, size))
            waiting.append(-1 if size is None else size)
            while len(waiting) > (0 if size is None else ahead):
                expected = waiting.pop(0)
                for reader in readers:
                    received = reader.receive(SECONDS)
                    if expected < 0:
                        assert received is None
                        assert reader.ended
                    else:
                        assert received is not None
                        assert sum(len(chunk.tokens) for chunk in received.prefill) == expected
    finally:
        handles.close()


def test_frames_are_not_overwritten_before_all_readers_have_read_them(ring: RingDescriptors) -> None:
    writer = RingWriter(ring, timeout_seconds=0.2)
    fast, slow = RingReader(ring, 0), RingReader(ring, 1)
    sent_plans = 0
    with pytest.raises(PlanChannelStalled, match=r"rank 2 has read no plan for 0\.2 s"):
        while True:
            writer.send(plan(sent_plans + 1, 100))
            sent_plans += 1
            assert fast.receive(SECONDS) is not None
    assert sent_plans > 4
    for step in range(1, sent_plans + 1):
        received = slow.receive(SECONDS)
        assert received is not None
        assert received.step == step
    writer.send(plan(sent_plans + 1, 100))


def test_sleeping_reader_is_woken(ring: RingDescriptors) -> None:
    reader, received = RingReader(ring, 0), []
    thread = threading.Thread(target=lambda: received.append(reader.receive(SECONDS)))
    thread.start()
    RingWriter(ring).send(plan(5))
    thread.join(SECONDS)
    assert [received_plan.step for received_plan in received] == [5]


def test_receive_returns_none_after_its_timeout(ring: RingDescriptors) -> None:
    reader = RingReader(ring, 0)
    assert reader.receive(0.01) is None
    assert not reader.ended


def test_error_for_a_too_large_plan_names_the_option(ring: RingDescriptors) -> None:
    with pytest.raises(ValueError, match="lower --prefill-chunk-tokens"):
        RingWriter(ring).send(plan(1, 2000))


def test_frame_that_is_not_a_plan_is_rejected(ring: RingDescriptors) -> None:
    RingWriter(ring)._write(b"x" * 80)
    with pytest.raises(MalformedPlan):
        RingReader(ring, 0).receive(SECONDS)


def write_invisibly(
    handles: RingDescriptors, writer: RingWriter, frame: StepPlan | None
) -> tuple[int, bytes]:
    """Write a frame, but restore the old bytes at its position; return that position and the frame's bytes.

    Readers see this on a CPU with weakly ordered stores: the write counter is new, and the data is still old.
    """
    ring = _RingMemory(handles)
    at, old_data = int(ring.written[0]), bytes(ring.data)
    writer.end() if frame is None else writer.send(frame)
    size = int(ring.written[0]) - at
    shown = ring.get(at, size)
    ring.data[:] = old_data
    return at, shown


@pytest.mark.parametrize("laps", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_frame_whose_bytes_become_visible_late_is_read_again(
    laps: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the bytes are visible, their position holds zeros, or a valid frame from an earlier lap."""
    monkeypatch.setattr("mizzen.wire.ranks.plan_ring.REREAD_SECONDS", SECONDS)
    frames = 4
    size = frame_size(len(encode_plan(plan(7, 50))))
    handles = create_ring(1, capacity=frames * size)
    try:
        writer, reader, step = RingWriter(handles), RingReader(handles, 0), 0
        for step in range(1, laps * frames + 1):
            writer.send(plan(7 * step, 50))
            assert reader.receive(SECONDS) is not None
        at, shown = write_invisibly(handles, writer, None if last else plan(7 * (step + 1), 50))
        shows = threading.Timer(0.2, lambda: _RingMemory(handles).put(at, shown))
        shows.start()
        received = reader.receive(SECONDS)
        shows.join()
        assert reader.ended == last
        assert (received and received.step) == (None if last else 7 * (step + 1))
    finally:
        handles.close()


def test_another_process_reads_the_ring(ring: RingDescriptors) -> None:
    code = (
        "import sys; from mizzen.wire.ranks.plan_ring import RingDescriptors, RingReader\n"
        "memory, *wake = map(int, sys.argv[1:])\n"
        "reader = RingReader(RingDescriptors(memory, tuple(wake)), 1)\n"
        "while not reader.ended:\n"
        "    plan = reader.receive(60)\n"
        "    if plan: print(plan.step, sum(len(c.tokens) for c in plan.prefill))\n"
    )
    words = [str(number) for number in ring.all]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], pass_fds=ring.all, stdout=subprocess.PIPE, text=True
    ) as process:
        writer, second_reader = RingWriter(ring, timeout_seconds=SECONDS), RingReader(ring, 0)
        for step in range(1, 200):
            writer.send(plan(step, step))
            assert second_reader.receive(SECONDS) is not None
        writer.end()
        out, _ = process.communicate(timeout=SECONDS)
    assert out.split() == [word for step in range(1, 200) for word in (str(step), str(step))]


RESTLESS_READER = """
import os, sys
from mizzen.wire.ranks.plan_ring import RingDescriptors, _RingMemory

ring = _RingMemory(RingDescriptors(int(sys.argv[1]), tuple(map(int, sys.argv[2:]))))
while not ring.written[0] & (1 << 62):
    ring.sleeps[:] = 1
    ring.sleeps[:] = 0
"""
"""Program that sets and clears the sleep flags all the time, as if all readers kept falling asleep."""


def test_readers_may_fall_asleep_while_a_plan_is_written() -> None:
    handles = create_ring(7)
    command = [sys.executable, "-c", RESTLESS_READER, *map(str, handles.all)]
    restless = subprocess.Popen(command, pass_fds=handles.all)
    try:
        writer, readers = RingWriter(handles), [RingReader(handles, i) for i in range(7)]
        for _ in range(20_000):
            writer.send(plan(1))
            for reader in readers:
                reader._ring.read[reader._reader] = writer._at  # count the plan as read without reading it
        assert restless.poll() is None
    finally:
        restless.kill()
        restless.wait()
        handles.close()
