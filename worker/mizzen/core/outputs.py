"""What the scheduler gives back: the tokens of a step by request, ends, cache events, and load."""

from __future__ import annotations

from msgspec import Struct

from mizzen.core.request import Finished, Int32, Int64
from mizzen.core.step_plan import Float32


class RequestLogprobs(Struct, frozen=True):
    """Log probabilities of n tokens of a request; see `mizzen.core.step_plan.SlotLogprobs`."""

    rid: int
    ids: Int32
    """[n, m]."""
    values: Float32
    """[n, m]."""
    prompt: bool
    """Of the prompt's tokens from the second on, each once and in order; else of the output's."""


class RequestVector(Struct, frozen=True):
    """The embedding of a request; its end comes with the same step."""

    rid: int
    vector: Float32
    """[hidden size]."""
    prompt_tokens: int
    cached_tokens: int


class Reports(Struct, frozen=True):
    """What a step gives beside tokens, to those who asked."""

    logprobs: tuple[RequestLogprobs, ...] = ()
    vectors: tuple[RequestVector, ...] = ()


class StepOutput(Struct, frozen=True, kw_only=True):
    """New tokens of a step, by column; one row a request that got tokens.

    `tokens` is flat: row i holds `counts[i]` of them (1 each when `counts` is None). `offsets[i]` is the
    index, within the request's output, of the row's first token, so that a receiver can see a gap. `finished`
    holds the requests that end with this step; their last tokens are in the rows.
    """

    step: int
    rids: Int64
    offsets: Int32
    tokens: Int32
    counts: Int32 | None
    finished: tuple[Finished, ...]
    reports: Reports = Reports()


class CacheEvents(Struct, frozen=True):
    """Blocks that entered or left the prefix cache since the last events, as chained 64-bit hashes.

    See `mizzen.core.kv.block_hashes`: a hash stands for the whole prefix up to the block's end.
    """

    stored: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()


class Load(Struct, frozen=True, kw_only=True):
    """How busy a scheduler is, for routing and metrics."""

    running: int
    waiting: int
    waiting_tokens: int
    """Prompt tokens of waiting requests, cached ones not taken off."""
    pages_total: int
    pages_used: int
    """Held by running requests."""
    pages_cached: int
    """Held by the prefix cache alone; free on demand."""


class GrammarCounts(Struct, kw_only=True):
    """What structured output cost since the engine began."""

    compiled: int = 0
    refused: int = 0
    hits: int = 0
    """Requests whose grammar was known already."""
    compile_seconds: float = 0.0
    masks: int = 0
    """Masks of tokens, one a constrained row and step."""
    mask_seconds: float = 0.0
    """The engine's loop spent on them, in matching and waiting for tokens not counted."""
