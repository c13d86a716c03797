"""Keeps a table clear of what the ranks of its engine log: warnings and errors alone are passed on.

Ranks are processes that log to the error output they are started with. A process of its own reads it, so
that no rank ever waits for one that is measured.
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


def passed_on(line: str) -> str | None:
    """Return what to show of a line; None of what nobody waits for.

    A ValueError is a wrong option, whose message says all: it goes without its traceback.
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
    """Filter the error output of all processes that are started meanwhile, as long as they live."""
    if ranks < 2:
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    reader = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    try:
        with reader.stdin as pipe:
            os.dup2(pipe.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ranks say why they end
    for line in sys.stdin:
        if (shown := passed_on(line)) is not None:
            print(shown, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
