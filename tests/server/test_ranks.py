"""An engine of several ranks under its supervisor: it serves, and ends whole when one of them is gone."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_process import SECONDS, EngineProcess
from mizzen.server.pulse import Pulse, PulseReader, PulseWriter, RankWatch, create_pulses


class Ranks(EngineProcess):
    """`mizzen engine` with two ranks on the CPU."""

    @property
    def follower(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (found,) = (child for child in children if "mizzen.server.follower" in child.cmdline())
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def make(**options: Any) -> Ranks:
        started.append(Ranks(tmp_path, **options))
        return started[-1]

    yield make
    for ranks in started:
        ranks.close()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, r"rank_died: rank 1 \(process {pid}\) was killed by signal 9"),
        (signal.SIGSTOP, r"watchdog: rank 1 \(process {pid}\) has not run for"),
    ],
)
def test_a_rank_that_is_gone_ends_the_engine_with_the_reason(
    number: signal.Signals, reason: str, start: Callable[..., Ranks], connect: Callable[[str], Any]
) -> None:
    engine = start(rank_deadline_seconds=4)
    wire = engine.until(lambda: engine.get("/readyz").get("wire"))
    gateway = connect(wire)
    gateway.generate(1, prompt=[7, 8, 9], max_tokens=1500, ignore_eos=True, temperature=0.5)
    gateway.until(lambda: len(gateway.tokens[1]) > 5, SECONDS)
    follower, others = engine.follower, psutil.Process(engine.process.pid).children(recursive=True)
    follower.send_signal(number)
    assert engine.process.wait(SECONDS) == 1
    told = engine.message.read_text()
    assert told.startswith(reason.format(pid=follower.pid).replace("\\", "")), told
    assert told.strip().split(": ", 1)[1] in engine.log.read_text()
    assert not any(process.is_running() for process in others)


FAULTY = """
import sys, time
if "mizzen.server.follower" in " ".join(sys.orig_argv):
    from mizzen.engine.runner import CpuRunner

    launch = CpuRunner.launch

    def faulty(self, plan):
        if plan.step > 20:
            FAULT
        launch(self, plan)

    CpuRunner.launch = faulty
"""
"""Run by each process as it starts: a follower meets a fault after some steps."""
FAULTS = {
    "memory": (
        "raise MemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        r"rank_failed: rank 1 failed: MemoryError: CUDA out of memory",
    ),
    "hang": (
        "time.sleep(600)",
        r"watchdog: rank 1 \(process \d+\) is at step 20 for \d+\.\d s, others at 2\d",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_or_hangs_ends_the_engine_and_is_blamed(
    fault: str,
    start: Callable[..., Ranks],
    connect: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 fails or waits, too, because its connections close or it has not come."""
    code, reason = FAULTS[fault]
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FAULTY.replace("FAULT\n", f"{code}\n"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    engine = start(rank_deadline_seconds=3)
    wire = engine.until(lambda: engine.get("/readyz").get("wire"))
    gateway = connect(wire)
    gateway.generate(1, prompt=[7, 8, 9], max_tokens=1500, ignore_eos=True, temperature=0.5)
    assert engine.process.wait(SECONDS) == 1
    assert re.match(reason, engine.message.read_text()), engine.message.read_text()


def test_sigterm_ends_all_ranks_well(start: Callable[..., Ranks]) -> None:
    engine = start()
    engine.until(lambda: engine.get("/readyz").get("wire"))
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(SECONDS) == 0
    assert not engine.message.exists()


def test_a_rank_that_cannot_start_ends_the_engine(start: Callable[..., Ranks]) -> None:
    engine = start(kv_cache_tokens=10**12)
    assert engine.process.wait(SECONDS) == 1
    assert "--kv-cache-tokens 1000000000000 needs" in engine.message.read_text()


def test_heads_that_do_not_divide_end_it_before_any_rank_starts(start: Callable[..., Ranks]) -> None:
    engine = start(tensor=3)
    assert engine.process.wait(SECONDS) == 2
    assert "num_attention_heads (4) must be a multiple of the tensor ranks (3)" in engine.message.read_text()


# ── what the watch makes of pulses ──


def pulses(*ranks: tuple[float, int, int]) -> list[Pulse]:
    return [Pulse(alive, launched, done, 100 + i) for i, (alive, launched, done) in enumerate(ranks)]


def test_ranks_that_keep_up_are_left_alone() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    for now in range(1, 60):
        step = 3 * now
        assert watch.look(pulses((now, step, step - 2), (now, step - 1, step - 3)), float(now)) is None


def test_idle_ranks_are_left_alone() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    assert all(watch.look(pulses((now, 9, 9), (now, 9, 9)), float(now)) is None for now in range(1, 60))


def test_ranks_that_do_not_serve_yet_are_left_alone() -> None:
    watch = RankWatch(2, 5.0, 5.0)
    assert watch.look(pulses((1.0, 0, 0), (0.0, 0, 0)), 1000.0) is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda now: pulses((now, 9, 7), (2.0, 7, 7)), r"rank 1 (process 101) has not run for"),
        (lambda now: pulses((now, 9, 7), (now, 7, 7)), r"rank 1 (process 101) is at step 7 for"),
        (lambda now: pulses((now, 9, 7), (now, 9, 7)), r"rank 0 (process 100) has run step 8 for"),
    ],
)
def test_who_holds_up_the_others_is_named(fault: Callable[[float], list[Pulse]], said: str) -> None:
    watch = RankWatch(2, 5.0, 8.0)
    found = [watch.look(fault(now), now) for now in (2.0, 4.0, 6.9)]
    assert found == [None] * 3
    told = [watch.look(fault(now), now) for now in (8.0, 12.0)]
    assert (told[0] or told[1] or "").startswith(said)


@settings(max_examples=100)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60))
def test_no_rank_that_moves_in_time_is_at_fault(steps: list[tuple[int, int]]) -> None:
    """Ranks move by any steps, at least by one each in any four seconds in which they are behind."""
    watch, done = RankWatch(2, 5.0, 5.0), [0, 0]
    for now, moves in enumerate(steps, 1):
        done = [at + move + (now % 4 == 0) for at, move in zip(done, moves, strict=True)]
        found = watch.look(pulses(*((now, at + 1, at) for at in done)), float(now))
        assert found is None


def test_a_pulse_is_read_as_it_was_written() -> None:
    descriptor = create_pulses(2)
    reader, writer = PulseReader(descriptor, 2), PulseWriter(descriptor, 1)
    assert reader.read()[1].alive == 0.0
    writer.start()
    writer.launched(5)
    writer.done(4)
    pulse = reader.read()[1]
    assert (pulse.launched, pulse.done) == (5, 4)
    assert 0 < pulse.alive <= time.monotonic()
    writer.close()
    assert reader.read()[1].alive == 0.0
    assert reader.read()[0].process == 0
