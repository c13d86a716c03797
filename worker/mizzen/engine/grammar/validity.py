"""Says what is wrong with a grammar, by compiling it and walking some tokens of it."""

from __future__ import annotations

import time

import numpy as np
import xgrammar

from mizzen.core.sampling_params import Grammar
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.grammar.xgrammar_backend import Builder

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


def judge(builder: Builder, grammar: Grammar, vocab_size: int, limits: GrammarLimits) -> tuple[str, str]:
    """Return what is wrong with a grammar (nothing: it can be used), and what `Builder.try_out` returned."""
    try:
        compiled, tried = builder.try_out(grammar)
        held, most = compiled.memory_size_bytes, limits.compiled_bytes
        if held > most:
            return f"compiled, it takes {held} bytes, and at most {most} may be: make it smaller", ""
        walk(compiled, vocab_size, limits)
    except MemoryError:
        return memory_fault(limits), ""
    except GrammarError as error:
        short = any(sign in str(error) for sign in NO_MEMORY)
        return memory_fault(limits) if short else str(error), ""
    return "", tried


def memory_fault(limits: GrammarLimits) -> str:
    """Return the reason for a grammar that takes too much memory."""
    return f"to compile it takes more than {limits.compile_bytes >> 20} MiB: make it smaller"
