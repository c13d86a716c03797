# SPDX-License-Identifier: Apache-2.0
"""Scripts: functions that choose the output tokens of a simulated model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mizzen.core.request import Int32
from mizzen.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScriptContext:
    """Input of a script: a request's tokens so far, and its parameters."""

    tokens: Int32
    """Prompt and output tokens, as read from the simulated KV cache, int32 [n]."""
    prompt_tokens: int
    """Number of prompt tokens at the start of `tokens`."""
    sampling: SamplingParams
    seed: int


Script = Callable[[ScriptContext], int]
"""Returns the next token of a request."""


def hashed(vocab_size: int, first: int = 0) -> Script:
    """Return a script that hashes the whole sequence to a token in [first, vocab_size).

    The token also depends on the seed, unless the temperature is 0. It does not depend on preemptions.
    """

    def choose(context: ScriptContext) -> int:
        seed = context.seed & 0xFFFFFFFF if context.sampling.temperature > 0 else 0
        return first + zlib.crc32(context.tokens.tobytes(), seed) % (vocab_size - first)

    return choose


def echo(end_token: int) -> Script:
    """Return a script that repeats the prompt once, followed by `end_token`."""

    def choose(context: ScriptContext) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return int(context.tokens[done]) if done < context.prompt_tokens else end_token

    return choose


def fixed(tokens: Sequence[int], end_token: int) -> Script:
    """Return a script that answers every prompt with `tokens`, followed by `end_token`."""

    def choose(context: ScriptContext) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return int(tokens[done]) if done < len(tokens) else end_token

    return choose


def ends_after(script: Script, count: int, end_token: int) -> Script:
    """Return a script that gives the first `count` tokens of another script, followed by `end_token`."""

    def choose(context: ScriptContext) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return script(context) if done < count else end_token

    return choose
