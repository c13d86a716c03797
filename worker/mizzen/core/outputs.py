"""Outputs of the scheduler: tokens by request, finished requests, cache events and load."""

from __future__ import annotations

from msgspec import Struct

from mizzen.core.request import Finished, Int32, Int64
from mizzen.core.step_plan import Float32


class RequestLogprobs(Struct, frozen=True):
    """Log probabilities of n tokens of a request; see `mizzen.core.step_plan.SlotLogprobs`."""

    rid: int
    ids: Int32
    """Token ids, int32 [n, m]."""
    values: Float32
    """Log probabilities, float32 [n, m]."""
    prompt: bool
    """Whether the tokens are the prompt's, from the second on, each once and in order; else the output's."""


class RequestVector(Struct, frozen=True):
    """The embedding of a request, which finishes in the same step."""

    rid: int
    vector: Float32
    """float32 [hidden size]."""
    prompt_tokens: int
    cached_tokens: int


class RequestSideOutputs(Struct, frozen=True):
    """Outputs of a step other than tokens, by request."""

    logprobs: tuple[RequestLogprobs, ...] = ()
    vectors: tuple[RequestVector, ...] = ()


class StepOutput(Struct, frozen=True, kw_only=True):
    """New tokens of a step as columns, one row for each request that received tokens.

    `tokens` (int32) is flat: row i has `counts[i]` of them (1 each if `counts` is None). `offsets[i]` is the
    index of the row's first token within the request's output, so that a receiver can detect a gap.
    `finished` holds the requests that finish with this step; their last tokens are in the rows.
    """

    step: int
    rids: Int64
    offsets: Int32
    tokens: Int32
    counts: Int32 | None
    finished: tuple[Finished, ...]
    side_outputs: RequestSideOutputs = RequestSideOutputs()


class CacheEvents(Struct, frozen=True):
    """Blocks that entered or left the prefix cache since the last events, as chained 64-bit hashes.

    See `mizzen.core.kv.block_hashes`: a hash identifies the whole prefix up to the block's end.
    """

    stored: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()


class Load(Struct, frozen=True, kw_only=True):
    """Load of a scheduler, for routing and metrics."""

    running: int
    waiting: int
    waiting_tokens: int
    """Number of prompt tokens of waiting requests, including cached ones."""
    pages_total: int
    pages_used: int
    """Number of pages held by running requests."""
    pages_cached: int
    """Number of pages held by the prefix cache alone, which are evicted on demand."""


class GrammarCounts(Struct, kw_only=True):
    """Counters of structured output since the engine started."""

    compiled: int = 0
    refused: int = 0
    hits: int = 0
    """Number of requests whose grammar was compiled already."""
    compile_seconds: float = 0.0
    masks: int = 0
    """Number of token bitmasks, one per constrained row and step."""
    mask_seconds: float = 0.0
    """Seconds that the engine's loop spent on bitmasks, without matching and waiting for tokens."""
