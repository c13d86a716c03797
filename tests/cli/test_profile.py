"""SIGUSR2 makes a served engine write a trace, and harms one that takes none."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import Served

pytestmark = [pytest.mark.xdist_group("cli")]


def say(served: Served) -> None:
    served.client().completions.create(model="demo", prompt="Hello", max_tokens=8, temperature=0)


def test_a_signal_takes_a_trace(serve: Callable[..., Served], tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    served = serve(f"--profile={folder}", "--profile-steps=3")
    served.children()["engine"].send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 120
    while not list(folder.glob("steps-*.json.gz")):
        say(served)
        assert time.monotonic() < deadline, "no trace came"
    say(served)


def test_without_a_folder_the_signal_does_nothing(served: Served) -> None:
    served.children()["engine"].send_signal(signal.SIGUSR2)
    say(served)
