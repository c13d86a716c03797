"""What the scheduler is asked to do, and how a request can end."""

from __future__ import annotations

import enum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mizzen.core.sampling_params import SamplingParams

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class FinishReason(enum.IntEnum):
    """Why a request ended. The numbers are part of the wire protocol."""

    STOP = 1
    """An end token of the model or one of `stop_token_ids`."""
    LENGTH = 2
    """`max_tokens` or the context length was reached."""
    ABORT = 3
    """The client went away, or the gateway had enough (a stop string)."""
    ERROR = 4
    """The engine could not go on; `Finished.message` says why."""


class Pooling(enum.StrEnum):
    """Which of a prompt's last hidden states (after the final norm) make its embedding."""

    LAST = "last"
    """The last token's."""
    MEAN = "mean"
    """The mean over all tokens."""


class Request(Struct, frozen=True, kw_only=True):
    """One prompt to be continued."""

    rid: int
    """Chosen by the caller; unique among the requests that live in this scheduler."""
    prompt: Int32
    """Token ids [n], n >= 1; never changed after submission."""
    sampling: SamplingParams
    seed: int = 0
    """The seed in force, resolved by the caller from `sampling.seed` (0 <= seed < 2**64)."""
    salt: bytes = b""
    """Opaque; requests share cached prefixes only when their salts are equal."""
    priority: int = 0
    """Higher goes first, for policies that look at it."""
    generated: int = 0
    """So many last tokens of `prompt` are output already, of an engine that was lost: they count towards
    `max_tokens`, `min_tokens` and penalties, and the output's offsets go on behind them."""
    pooling: Pooling | None = None
    """Give one vector of the prompt's hidden states instead of tokens."""
    normalize: bool = True
    """Scale that vector to length 1."""
    tenant: int = 0
    """Opaque; what would let one starve others is shared among tenants."""
    arrival: float = 0.0
    """Seconds of a monotonic clock, the same as `now` of `Scheduler.next`."""


class Finished(Struct, frozen=True, kw_only=True):
    """The end of a request, with its final counts of tokens."""

    rid: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache, at first admission."""
    output_tokens: int
    stop_token: int | None = None
    """The token that ended the request (counted in `output_tokens`), when `reason` is STOP."""
    message: str = ""
    refused: bool = False
    """It would be refused everywhere: `message` begins with the field's name. Nothing has run."""
    busy: bool = False
    """It was turned away now, and may be asked for again. Nothing has run."""
    at_fault: bool = False
    """The request itself made it end in error, in any engine. `message` begins with the field's name."""
