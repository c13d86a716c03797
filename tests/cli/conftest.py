"""`mizzen serve` of the demo model, started once for the folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_support import ROOT, Answers, Served, stop


@pytest.fixture(scope="session")
def answers() -> Answers:
    found: dict[str, str] = {}
    for path in sorted((ROOT / "scripts/demo_data").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found |= dict.fromkeys(entry["questions"], entry["answer"])
    return Answers(found)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A server that all tests share; they leave it as it is."""
    started = Served()
    yield started
    stop(started)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers of a test's own."""
    started: list[Served] = []

    def start(*options: str) -> Served:
        started.append(Served(*options))
        return started[-1]

    yield start
    for one in started:
        stop(one)
