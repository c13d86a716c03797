# SPDX-License-Identifier: Apache-2.0
"""`mizzen serve` with the demo model, started once for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo_model import trained_answers

sys.path.insert(0, str(Path(__file__).parent))

from cli_support import Served, stop


@pytest.fixture(scope="session")
def answers() -> dict[str, str]:
    return trained_answers()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """The server that all tests of this folder share; tests must leave it running and unchanged."""
    started = Served()
    yield started
    stop(started)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Return a function that starts a server for a single test."""
    started: list[Served] = []

    def start(*options: str) -> Served:
        started.append(Served(*options))
        return started[-1]

    yield start
    for server in started:
        stop(server)
