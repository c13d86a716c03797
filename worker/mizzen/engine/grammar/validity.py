# SPDX-License-Identifier: Apache-2.0
"""Finds errors and excessive costs of a grammar: compiles it, and matches some random tokens against it.

Runs in child processes of the sandbox.
"""

from __future__ import annotations

import time

import numpy as np
import xgrammar

from mizzen.core.sampling_params import Grammar
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.limits import GrammarLimits
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder

WALKED_TOKENS = 24
"""Maximum number of tokens that are matched as a test; most slow grammars are slow from the first token."""
OUT_OF_MEMORY_SIGNS = ("bad_alloc", "Cannot allocate memory", "Resource temporarily unavailable")
"""Parts of compiler error messages that indicate a lack of memory, including memory for a thread."""


def walk_grammar(compiled: xgrammar.CompiledGrammar, vocab_size: int, limits: GrammarLimits) -> None:
    """Match up to WALKED_TOKENS tokens against a grammar, each chosen at random from the allowed tokens.

    Raises:
        GrammarError: No text conforms to the grammar, its texts cannot be written in the model's tokens, or
            filling a bitmask takes too long.
    """
    matcher, rng = xgrammar.GrammarMatcher(compiled), np.random.default_rng(0)
    bits = np.empty((1, -(-vocab_size // 32)), np.int32)
    for step in range(WALKED_TOKENS):
        start_time = time.thread_time()
        matcher.fill_next_token_bitmask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=vocab_size))
        if not len(allowed):
            raise GrammarError(
                "nothing conforms to it" if not step else "its texts cannot be written in this model's tokens"
            )
        matcher.accept_token(int(rng.choice(allowed)))
        elapsed = time.thread_time() - start_time
        if elapsed > limits.mask_seconds:
            raise GrammarError(
                f"finding the next allowed tokens takes {elapsed * 1000:.0f} ms of CPU time, more "
                f"than the maximum of {limits.mask_seconds * 1000:.0f} ms: make it simpler (repetitions of "
                "groups and large counts cost most)"
            )
        if matcher.is_terminated():
            return


def find_fault(
    builder: GrammarBuilder, grammar: Grammar, vocab_size: int, limits: GrammarLimits
) -> tuple[str, str]:
    """Return the error of a grammar (empty if it can be used), and its rules in xgrammar's JSON form.

    The rules are those of `GrammarBuilder.check_and_compile`; they are empty if there is an error.
    """
    try:
        compiled, rules = builder.check_and_compile(grammar)
        size, limit = compiled.memory_size_bytes, limits.compiled_bytes
        if size > limit:
            return f"compiled, it takes {size} bytes, more than the maximum of {limit}: make it smaller", ""
        walk_grammar(compiled, vocab_size, limits)
    except MemoryError:
        return memory_error_text(limits), ""
    except GrammarError as error:
        out_of_memory = any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)
        return memory_error_text(limits) if out_of_memory else str(error), ""
    return "", rules


def memory_error_text(limits: GrammarLimits) -> str:
    """Return the error for a grammar whose compilation takes too much memory."""
    return f"compiling it takes more than {limits.compile_bytes >> 20} MiB: make it smaller"
