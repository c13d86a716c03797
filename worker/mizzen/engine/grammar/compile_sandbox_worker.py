# SPDX-License-Identifier: Apache-2.0
"""The sandbox process: compiles grammars on trial, so that they cannot harm the engine.

    python -m mizzen.engine.grammar.compile_sandbox_worker --fd N --target JSON --limits JSON

`mizzen.engine.grammar.compile_sandbox` starts this process, and sends it a socket for each grammar.
The process loads the vocabulary once, and forks a child for each grammar. The child, which has limits on time
and memory, compiles the grammar and follows it for some tokens. It replies with the computed rules and, if
there is one, an error; then it exits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from typing import Any

from mizzen.common.child_process import limit_memory, run_behind_parent, set_parent_death_signal
from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.limits import SPARE_SECONDS, GrammarLimits
from mizzen.engine.grammar.xgrammar_import import import_xgrammar_without_torch

READY = b"r"
"""First message of the process: the vocabulary is loaded."""


def apply_limits(limits: GrammarLimits, parent: int) -> None:
    """Limit the time and memory of this process, and make the kernel kill it when process `parent` dies."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)  # ends the process, even in native code
    set_timers(limits.compile_seconds, limits)
    set_parent_death_signal(parent)
    limit_memory(limits.compile_bytes)


def set_timers(seconds: float, limits: GrammarLimits) -> None:
    """End this process after `seconds` of CPU time.

    The wall time only removes a process for which the engine no longer waits.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * limits.wall_factor + 2 * SPARE_SECONDS)


def read_job(stream: socket.socket, limits: GrammarLimits) -> Grammar:
    """Read a grammar and its time limit from a socket, up to the end of the stream; apply the time limit."""
    with stream.makefile("rb") as file:
        kind, text, seconds = json.loads(file.read())
    set_timers(seconds, limits)
    return Grammar(GrammarKind(kind), text)


def serve(control: socket.socket, target: dict[str, Any], limits: GrammarLimits) -> None:
    """Receive sockets on `control`, and fork a child for each, until the engine closes `control`."""
    import_xgrammar_without_torch()
    from mizzen.engine.grammar.validity import find_fault
    from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget

    model = GrammarTarget(**{**target, "end_token_ids": tuple(target["end_token_ids"])})
    builder = GrammarBuilder(model, threads=compile_threads(), nesting=limits.nesting)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped automatically
    control.sendall(READY)
    process_id = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as stream:
                if os.fork():
                    continue
                code = 1
                try:
                    control.close()
                    apply_limits(limits, process_id)
                    fault, rules = find_fault(builder, read_job(stream, limits), model.vocab_size, limits)
                    stream.sendall(json.dumps({"fault": fault, "rules": rules}).encode())
                    code = 0
                finally:
                    os._exit(code)


def compile_threads() -> int:
    """Return the number of threads that a compilation may use: half of the CPUs, at most 8."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def main() -> None:
    """Run the sandbox process."""
    parser = argparse.ArgumentParser(description="compiles grammars on trial; started by the engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--target", type=json.loads, required=True)
    parser.add_argument("--limits", type=json.loads, required=True)
    args = parser.parse_args()
    run_behind_parent()
    with socket.socket(fileno=args.fd) as control:
        try:
            serve(control, args.target, GrammarLimits(**args.limits))
        except GrammarError as error:
            control.sendall(json.dumps({"fault": str(error)}).encode())
        except ConnectionError:
            pass  # the engine is gone


if __name__ == "__main__":
    main()
