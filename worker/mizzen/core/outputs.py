# SPDX-License-Identifier: Apache-2.0
"""Outputs of the scheduler: tokens and side outputs by request, finished requests, cache events and load."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from mizzen.core.request import Finished, Int32, Int64
from mizzen.core.step_plan import Float32


class RequestLogprobs(Struct, frozen=True):
    """Log probabilities at n positions of a request, with m entries per position.

    The entries have the order of `mizzen.core.step_plan.SlotLogprobs`: the token itself comes first.
    """

    rid: int
    ids: Int32
    """Token ids, int32 [n, m]."""
    values: Float32
    """Log probabilities, float32 [n, m]."""
    prompt: bool
    """Whether the tokens belong to the prompt rather than the output.

    Each prompt token from the second on is reported once, in order."""


class RequestVector(Struct, frozen=True):
    """The embedding of a request, or the logits of its labels; the request finishes in the same step."""

    rid: int
    vector: Float32
    """The vector, float32 [size]."""
    prompt_tokens: int
    cached_tokens: int


class RequestSideOutputs(Struct, frozen=True):
    """Log probabilities and embeddings that a step returns, by request."""

    logprobs: tuple[RequestLogprobs, ...] = ()
    vectors: tuple[RequestVector, ...] = ()


class StepOutput(Struct, frozen=True, kw_only=True):
    """Output of a step, as columns with one row for each request that received tokens.

    `tokens` is flat: row i has `counts[i]` tokens, or one if `counts` is None. `offsets[i]` is the index of
    the row's first token within the request's output; from it, a receiver can detect missing tokens.
    `finished` holds the requests that finish with this step; the rows contain their last tokens.
    """

    step: int
    rids: Int64
    offsets: Int32
    tokens: Int32
    counts: Int32 | None
    finished: tuple[Finished, ...]
    side_outputs: RequestSideOutputs = RequestSideOutputs()


class CacheEvents(Struct, frozen=True):
    """Blocks that entered or left the prefix cache since the previous `CacheEvents`.

    A block is given by its 64-bit hash, which identifies the whole prefix up to the end of the block (see
    `mizzen.core.kv.block_hashes`).
    """

    stored: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()


class Load(Struct, frozen=True, kw_only=True):
    """Load of a scheduler, for routing and metrics."""

    running: int
    waiting: int
    waiting_tokens: int
    """Number of known tokens of all waiting requests, including tokens in the prefix cache."""
    pages_total: int
    pages_used: int
    """Number of pages that cannot be allocated now, because running requests or steps in flight use them."""
    pages_cached: int
    """Number of pages that only the prefix cache holds; they are evicted on demand."""


class ExpertUse(Struct, kw_only=True):
    """Use of the experts of a mixture by its tokens."""

    ratios: Mapping[int, float]
    """Tokens of each layer's busiest expert over the mean of its experts, by layer."""
    dropped: int = 0
    """Choices for which a token, other than padding, got no expert, since the engine started."""


class GrammarCounts(Struct, kw_only=True):
    """Counters of structured output (grammars) since the engine started."""

    compiled: int = 0
    """Number of compiled grammars."""
    refused: int = 0
    """Number of refused grammars."""
    hits: int = 0
    """Number of requests that arrived after their grammar had been compiled."""
    compile_seconds: float = 0.0
    """Total time of compilation, in seconds."""
    masks: int = 0
    """Number of computed token bitmasks; each step computes one for each constrained row."""
    mask_seconds: float = 0.0
    """Time in seconds that the engine's loop spent on bitmasks, excluding matching and waiting for tokens."""
