"""Scripts that choose the output of a simulated model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mizzen.core.request import Int32
from mizzen.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScriptContext:
    """Everything a script can see: all tokens of a sequence, as read from its KV."""

    tokens: Int32
    prompt_tokens: int
    """Number of prompt tokens among `tokens`; the rest are output."""
    sampling: SamplingParams
    seed: int


Script = Callable[[ScriptContext], int]
"""Chooses the next token."""


def hashed(vocab_size: int, first: int = 0) -> Script:
    """Return a script whose token is a hash of the whole sequence, in [first, vocab_size).

    It depends on the seed unless the temperature is 0, and not on where preemption split the sequence.
    """

    def choose(context: ScriptContext) -> int:
        seed = context.seed & 0xFFFFFFFF if context.sampling.temperature > 0 else 0
        return first + zlib.crc32(context.tokens.tobytes(), seed) % (vocab_size - first)

    return choose


def echo(end_token: int) -> Script:
    """Return a script that repeats the prompt once and then ends."""

    def choose(context: ScriptContext) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return int(context.tokens[done]) if done < context.prompt_tokens else end_token

    return choose


def fixed(tokens: Sequence[int], end_token: int) -> Script:
    """Return a script that answers every prompt with the same tokens and then ends."""

    def choose(context: ScriptContext) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return int(tokens[done]) if done < len(tokens) else end_token

    return choose


def ends_after(script: Script, count: int, end_token: int) -> Script:
    """Return a script that ends the output of another script after `count` tokens."""

    def choose(context: ScriptContext) -> int:
        done = len(context.tokens) - context.prompt_tokens
        return script(context) if done < count else end_token

    return choose
