"""Tries grammars in processes of their own, so that none can take the engine's time, memory or life.

    python -m mizzen.engine.grammar.tryout --fd N --target JSON --limits JSON

Started by `mizzen.engine.grammar.sandbox`, which sends one end of a socket for each grammar. The process
loads the vocabulary once and forks for each: the child has a deadline and a bound of memory, compiles, walks
some tokens, answers what is wrong (or nothing), and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import sys
import time

import numpy as np
import xgrammar

from mizzen.core.params import Grammar, GrammarKind
from mizzen.engine.grammar.build import Builder, Target
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.limits import GrammarLimits

READY = b"r"
WALK = 24
"""Tokens that a child walks; what is slow is mostly slow from the beginning."""
NO_MEMORY = ("bad_alloc", "Cannot allocate memory", "Resource temporarily unavailable")
"""How the compiler says that memory (or room for a thread) is short."""


def walk(compiled: xgrammar.CompiledGrammar, vocab_size: int, limits: GrammarLimits) -> None:
    """Follow a grammar for some tokens, as an answer would.

    Raises:
        GrammarError: nothing conforms to it, or a mask takes too long.
    """
    matcher, rng = xgrammar.GrammarMatcher(compiled), np.random.default_rng(0)
    bits = np.empty((1, -(-vocab_size // 32)), np.int32)
    for step in range(WALK):
        began = time.process_time()
        matcher.fill_next_token_bitmask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=vocab_size))
        if not len(allowed):
            raise GrammarError(
                "nothing conforms to it" if not step else "its texts cannot be written in this model's tokens"
            )
        matcher.accept_token(int(rng.choice(allowed)))
        took = time.process_time() - began
        if took > limits.mask_seconds:
            raise GrammarError(
                f"to find the tokens that may come next takes {took * 1000:.0f} ms of processor time, and at "
                f"most {limits.mask_seconds * 1000:.0f} may be: make it simpler (repetitions of groups and "
                "large counts cost most)"
            )
        if matcher.is_terminated():
            return


def judge(builder: Builder, grammar: Grammar, vocab_size: int, limits: GrammarLimits) -> str:
    """Return what is wrong with a grammar; empty when it can be used."""
    try:
        compiled = builder.compile(grammar)
        held, most = compiled.memory_size_bytes, limits.compiled_bytes
        if held > most:
            return f"compiled, it takes {held} bytes, and at most {most} may be: make it smaller"
        walk(compiled, vocab_size, limits)
    except MemoryError:
        return memory_fault(limits)
    except GrammarError as error:
        short = any(sign in str(error) for sign in NO_MEMORY)
        return memory_fault(limits) if short else str(error)
    return ""


def memory_fault(limits: GrammarLimits) -> str:
    """Return the reason for a grammar that takes too much memory."""
    return f"to compile it takes more than {limits.compile_bytes >> 20} MiB: make it smaller"


def bound(limits: GrammarLimits) -> None:
    """Bound this process's time and memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
    signal.setitimer(signal.ITIMER_REAL, limits.compile_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        most = held + limits.compile_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def read_job(stream: socket.socket) -> Grammar:
    """Read a grammar: its sender closes its half behind it."""
    with stream.makefile("rb") as file:
        kind, text = json.loads(file.read())
    return Grammar(GrammarKind(kind), text)


def serve(control: socket.socket, target: Target, limits: GrammarLimits) -> None:
    """Fork for each socket that comes, until the engine is gone."""
    builder = Builder(target, threads=threads(), nesting=limits.nesting)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    control.sendall(READY)
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
                    bound(limits)
                    verdict = judge(builder, read_job(stream), target.vocab_size, limits)
                    stream.sendall(json.dumps({"fault": verdict}).encode())
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
    target = Target(**{**args.target, "end_token_ids": tuple(args.target["end_token_ids"])})
    with socket.socket(fileno=args.fd) as control:
        try:
            serve(control, target, GrammarLimits(**args.limits))
        except GrammarError as error:
            control.sendall(json.dumps({"fault": str(error)}).encode())
        except ConnectionError:
            pass  # the engine is gone


if __name__ == "__main__":
    main()
