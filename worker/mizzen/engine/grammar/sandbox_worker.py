"""Tries grammars in separate processes, so that none can take the engine's time, memory or life.

    python -m mizzen.engine.grammar.sandbox_worker --fd N --target JSON --limits JSON

Started by `mizzen.engine.grammar.sandbox`, which sends one end of a socket for each grammar. The process
loads the vocabulary once and forks for each grammar: the child has a deadline and a memory limit, compiles,
walks some tokens, answers with the error (or none) and the rules that it computed, and exits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.grammar.quick_checks import import_xgrammar_without_torch

READY = b"r"
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def apply_limits(limits: GrammarLimits, parent: int) -> None:
    """Limit this process's time and memory; kill it when its parent dies, or has died already."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
    signal.setitimer(signal.ITIMER_REAL, limits.compile_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        limit_bytes = used_bytes + limits.compile_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def read_job(stream: socket.socket) -> Grammar:
    """Read a grammar and set its sender's time limit; the sender closes its half of the socket afterwards."""
    with stream.makefile("rb") as file:
        kind, text, seconds = json.loads(file.read())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return Grammar(GrammarKind(kind), text)


def serve(control: socket.socket, target: dict[str, Any], limits: GrammarLimits) -> None:
    """Fork for each socket received, until the engine is gone."""
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
                    fault, rules = find_fault(builder, read_job(stream), model.vocab_size, limits)
                    stream.sendall(json.dumps({"fault": fault, "tried": rules}).encode())
                    code = 0
                finally:
                    os._exit(code)


def compile_threads() -> int:
    """Return the number of threads that one compilation may use."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def main() -> None:
    """Run the sandbox process."""
    parser = argparse.ArgumentParser(description="tries grammars; started by the engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--target", type=json.loads, required=True)
    parser.add_argument("--limits", type=json.loads, required=True)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # the engine gets them too, and stops this process by closing its end
    os.nice(5)
    with socket.socket(fileno=args.fd) as control:
        try:
            serve(control, args.target, GrammarLimits(**args.limits))
        except GrammarError as error:
            control.sendall(json.dumps({"fault": str(error)}).encode())
        except ConnectionError:
            pass  # the engine is gone


if __name__ == "__main__":
    main()
