# SPDX-License-Identifier: Apache-2.0
"""Finding the rank that is the root cause among several failed ranks, and killing all ranks."""

from __future__ import annotations

import os
from array import array
from typing import Any

import pytest

from mizzen.server.failed_rank import find_failed_rank
from mizzen.server.metric_catalogue import FIELDS, INDEX, Phase
from mizzen.server.ranks.processes import RankProcess, kill_ranks
from mizzen.server.status_block import Snapshot


def serving() -> Snapshot:
    values = array("d", bytes(8 * len(FIELDS)))
    values[INDEX["phase"]] = Phase.SERVING
    return Snapshot(values, "")


def failing(since: float, text: str = "RuntimeError: Connection closed by peer") -> Snapshot:
    snapshot = serving()
    snapshot.values[INDEX["phase"]] = Phase.FAILED
    snapshot.values[INDEX["phase_since"]] = since
    return Snapshot(snapshot.values, text)


CASES = {
    "a killed rank made others fail": (
        {0: 1, 2: -9},
        {0: failing(5.0), 1: serving(), 2: serving()},
        2,
    ),
    "the earliest failure": ({0: 1, 1: 1, 2: 1}, {0: failing(5.1), 1: failing(5.2), 2: failing(5.0)}, 2),
    "the earliest failure, although its process is still running": (
        {0: 1},
        {0: failing(5.1), 1: failing(5.0), 2: serving()},
        1,
    ),
    "a lost device, whichever rank failed first": (
        {0: 1, 1: -6, 2: 1},
        {0: failing(5.0), 1: serving(), 2: failing(5.1, "CUDA error: uncorrectable ECC error")},
        2,
    ),
    "an exit without a reported failure": ({1: 0}, {0: serving(), 1: serving()}, 1),
    "a rank killed after it reported a failure": ({1: -9}, {0: serving(), 1: failing(5.0)}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_failed_rank_is_found(case: str) -> None:
    codes, statuses, expected = CASES[case]
    assert find_failed_rank(codes, statuses) == expected


class StubbornProcess:
    """A fake process that exits only in `wait`; `calls` records signals and waits in order."""

    def __init__(self, calls: list[str]) -> None:
        self.pid, self.calls = 1, calls

    def send_signal(self, number: int) -> None:
        self.calls.append("signal")

    def kill(self) -> None:
        self.calls.append("signal")

    def wait(self, seconds: float) -> int:
        self.calls.append("wait")
        return -9


def test_all_ranks_are_signaled_before_any_is_waited_for() -> None:
    calls: list[str] = []
    process: Any = StubbornProcess(calls)
    ranks = [RankProcess(number, process, os.open(os.devnull, os.O_WRONLY)) for number in range(3)]
    kill_ranks(ranks)
    assert calls[:3] == ["signal"] * 3
    assert [rank.code for rank in ranks] == [-9] * 3
