"""Tries grammars in processes of their own, so that none can take the engine's time, memory or life.

    python -m mizzen.engine.grammar.sandbox_worker --fd N --target JSON --limits JSON

Started by `mizzen.engine.grammar.sandbox`, which sends one end of a socket for each grammar. The process
loads the vocabulary once and forks for each: the child has a deadline and a bound of memory, compiles, walks
some tokens, answers what is wrong (or nothing) and the rules that it worked out, and ends.
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
from mizzen.engine.grammar.quick_checks import import_light

READY = b"r"
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def bound(limits: GrammarLimits, parent: int) -> None:
    """Bound this process's time and memory; end it with its parent, also with one that has ended already."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
    signal.setitimer(signal.ITIMER_REAL, limits.compile_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the kernel was told
            os._exit(1)
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        most = held + limits.compile_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def read_job(stream: socket.socket) -> Grammar:
    """Read a grammar, and give it as long as its sender says, who closes its half behind it."""
    with stream.makefile("rb") as file:
        kind, text, seconds = json.loads(file.read())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return Grammar(GrammarKind(kind), text)


def serve(control: socket.socket, target: dict[str, Any], limits: GrammarLimits) -> None:
    """Fork for each socket that comes, until the engine is gone."""
    import_light()
    from mizzen.engine.grammar.validity import judge
    from mizzen.engine.grammar.xgrammar_backend import Builder, Target

    model = Target(**{**target, "end_token_ids": tuple(target["end_token_ids"])})
    builder = Builder(model, threads=threads(), nesting=limits.nesting)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    control.sendall(READY)
    own = os.getpid()
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
                    bound(limits, own)
                    fault, tried = judge(builder, read_job(stream), model.vocab_size, limits)
                    stream.sendall(json.dumps({"fault": fault, "tried": tried}).encode())
                    code = 0
                finally:
                    os._exit(code)


def threads() -> int:
    """Return how many threads one compilation may use."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def main() -> None:
    """Run as the sandbox's process."""
    parser = argparse.ArgumentParser(description="tries grammars; started by the engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--target", type=json.loads, required=True)
    parser.add_argument("--limits", type=json.loads, required=True)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine gets them too, and ends this by closing its end
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
