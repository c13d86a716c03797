# SPDX-License-Identifier: Apache-2.0
"""Filters the logs of the measured engine's ranks, so that only warnings and errors reach the terminal.

Ranks log to the standard error that they inherit. A separate process reads it, so that no rank ever waits for
the measuring process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

QUIET = ("debug", "info")


def filter_line(line: str) -> str | None:
    """Return a log line as it should be shown; None for debug and info records, which are hidden.

    The traceback of a ValueError is removed: this error means that an option is invalid, and its message is
    enough.
    """
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "level" not in record:
        return line
    if record["level"] in QUIET:
        return None
    if record.get("traceback", "").rstrip().rpartition("\n")[2].startswith("ValueError:"):
        del record["traceback"]
        return json.dumps(record, ensure_ascii=False) + "\n"
    return line


@contextmanager
def quiet_ranks(ranks: int) -> Iterator[None]:
    """Filter the standard error of all processes that are started inside the context, until they end."""
    if ranks < 2:
        yield
        return
    sys.stderr.flush()
    original = os.dup(2)
    reader = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    try:
        with reader.stdin as pipe:
            os.dup2(pipe.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # keep reading: ranks report why they end
    for line in sys.stdin:
        if (shown := filter_line(line)) is not None:
            print(shown, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
