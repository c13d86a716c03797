# SPDX-License-Identifier: Apache-2.0
"""Startup progress: loaders report it through shared memory; `/readyz`, logs and terminals show it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mizzen.commands.progress import PlainProgress
from mizzen.commands.readiness import _parse_phase
from mizzen.server.metric_catalogue import Phase
from mizzen.server.ranks import phases
from mizzen.server.ranks.phases import PhaseStatus, phase_progress
from mizzen.server.status_block import StatusReader, StatusWriter, create_status_blocks
from mizzen.weights.checkpoint_files import WeightsError
from mizzen.wire.ranks.group_socket import CannotListen


@pytest.fixture
def block() -> Iterator[int]:
    descriptor = create_status_blocks(2)
    yield descriptor
    os.close(descriptor)


def test_the_progress_of_a_phase_is_that_of_the_slowest_rank(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "PROGRESS_SECONDS", 0.0)
    ranks = [PhaseStatus(StatusWriter(block, rank)) for rank in range(2)]
    readers = [StatusReader(block, rank) for rank in range(2)]

    def share(phase: Phase) -> float | None:
        return phase_progress((reader.read() for reader in readers), phase)

    for rank in ranks:
        rank.begin_phase("weights")
    assert share(Phase.WEIGHTS) is None
    ranks[0].report_progress(30, 40)
    assert share(Phase.WEIGHTS) == 0.75
    ranks[1].report_progress(10, 40)
    assert share(Phase.WEIGHTS) == 0.25
    ranks[0].begin_phase("graphs")
    assert share(Phase.GRAPHS) is None
    ranks[0].report_progress(1, 50)
    assert (share(Phase.WEIGHTS), share(Phase.GRAPHS)) == (0.25, 0.02)


def test_progress_is_published_at_intervals_and_at_the_end(block: int) -> None:
    rank, reader = PhaseStatus(StatusWriter(block, 0)), StatusReader(block, 0)
    rank.begin_phase("weights")
    rank.report_progress(1, 1000)
    assert reader.read()["phase_done"] == 0
    rank.report_progress(1000, 1000)
    assert reader.read()["phase_done"] == 1000


def test_every_startup_phase_is_logged_with_its_duration(
    block: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rank = PhaseStatus(StatusWriter(block, 0))
    for phase in (
        Phase.IMPORT,
        Phase.CONFIG,
        Phase.CONFIG,
        Phase.WEIGHTS,
        Phase.KV,
        Phase.GRAPHS,
        Phase.WARMUP,
    ):
        rank.enter_phase(phase)
    rank.enter_phase(Phase.SERVING)
    fields: list[dict[str, Any]] = [record.__dict__["fields"] for record in caplog.records]
    assert [field["phase"] for field in fields] == ["import", "config", "weights", "kv", "graphs", "warmup"]
    assert all(0 <= field["seconds"] < 5 for field in fields)


def test_a_failed_phase_is_not_logged_as_finished(block: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank = PhaseStatus(StatusWriter(block, 0))
    rank.enter_phase(Phase.WEIGHTS)
    rank.fail("no such file")
    assert caplog.records == []


def test_readyz_shows_the_progress_of_a_phase(start_engine: Any) -> None:
    engine = start_engine(start_seconds=3.0)
    engine.until(lambda: 0 < engine.get("/readyz")[1].get("progress", 0) < 1)
    body = engine.get("/readyz")[1]
    assert (body["state"], body["phase"]) == ("starting", "weights")
    engine.ready()
    assert "progress" not in engine.get("/readyz")[1]
    assert any(line.get("phase") == "weights" and line["seconds"] > 2.5 for line in engine.log)


def test_plain_progress_writes_each_quarter_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = PlainProgress()
    for share in (None, 0.0, 0.1, 0.2, 0.26, 0.3, 0.5, 1.0):
        shown.update("engine: loading weights", share)
    shown.update("engine: warming up")
    assert capsys.readouterr().err.splitlines() == [
        "mizzen: engine: loading weights",
        "mizzen: engine: loading weights, 25%",
        "mizzen: engine: loading weights, 50%",
        "mizzen: engine: loading weights, 100%",
        "mizzen: engine: warming up",
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"state":"starting","phase":"graphs","progress":0.4}', ("capturing CUDA graphs", 0.4)),
        ('{"state":"starting","phase":"weights"}', ("loading weights", None)),
        ('{"state":"starting","phase":"new"}', ("new", None)),
        ("<html>", ("starting", None)),
    ],
)
def test_the_body_of_readyz_is_described_in_words(body: str, words: tuple[str, float | None]) -> None:
    assert _parse_phase(body) == words


def unreadable_file() -> WeightsError:
    """Return the error of a checkpoint whose disk fails."""
    error = WeightsError("model.safetensors cannot be read")
    error.__cause__ = OSError(5, "Input/output error")
    return error


@pytest.mark.parametrize(
    ("phase", "error", "code"),
    [
        ("config", ValueError("--context-length exceeds the model's"), 2),
        ("config", CannotListen("cannot listen on tcp://0.0.0.0:5561"), 1),
        ("config", RuntimeError("another rank did not come"), 1),
        ("weights", WeightsError("model: tensors are missing: lm_head.weight"), 2),
        ("weights", unreadable_file(), 1),
        ("weights", ValueError("a bug"), 1),
        ("kv", ValueError("no memory is left for KV"), 1),
    ],
)
def test_only_errors_that_no_restart_cures_exit_as_invalid_configuration(
    block: int, phase: str, error: Exception, code: int
) -> None:
    rank = PhaseStatus(StatusWriter(block, 0))
    rank.begin_phase(phase)
    rank.fail(str(error))
    assert rank.exit_code(error) == code
