"""Requests to the scheduler, and how they finish."""

from __future__ import annotations

import enum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mizzen.core.sampling_params import SamplingParams

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class FinishReason(enum.IntEnum):
    """Reason why a request finished. The numbers are part of the wire protocol."""

    STOP = 1
    """An end token of the model or one of `stop_token_ids`."""
    LENGTH = 2
    """`max_tokens` or the context length was reached."""
    ABORT = 3
    """The client disconnected, or the gateway found a stop string."""
    ERROR = 4
    """The engine could not continue; `Finished.message` gives the reason."""


class Pooling(enum.StrEnum):
    """Pooling of a prompt's last hidden states (after the final norm) into its embedding."""

    LAST = "last"
    """The last token's."""
    MEAN = "mean"
    """The mean over all tokens."""


class Request(Struct, frozen=True, kw_only=True):
    """One prompt to continue or embed."""

    rid: int
    """Request id chosen by the caller; unique among the live requests of this scheduler."""
    prompt: Int32
    """Token ids, int32 [n], n >= 1; never modified after submission."""
    sampling: SamplingParams
    seed: int = 0
    """Effective seed, resolved by the caller from `sampling.seed` (0 <= seed < 2**64)."""
    salt: bytes = b""
    """Opaque cache salt; requests share cached prefixes only if their salts are equal."""
    priority: int = 0
    """Priority under the priority policy; a higher one goes first."""
    generated: int = 0
    """Number of trailing tokens of `prompt` that are output of a lost engine: they count towards
    `max_tokens`, `min_tokens` and penalties, and output offsets continue after them."""
    pooling: Pooling | None = None
    """Pooling of the prompt into one vector instead of generation; None generates."""
    normalize: bool = True
    """Whether the pooled vector is scaled to length 1."""
    tenant: int = 0
    """Opaque tenant number; resources that one tenant could exhaust are shared fairly among tenants."""
    arrival: float = 0.0
    """Arrival time in seconds, of the same monotonic clock as `now` of `Scheduler.schedule`."""


class Finished(Struct, frozen=True, kw_only=True):
    """The result of a finished request, with its final token counts."""

    rid: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens whose KV came from the prefix cache at first admission."""
    output_tokens: int
    stop_token: int | None = None
    """Token that ended the request (counted in `output_tokens`) if `reason` is STOP."""
    message: str = ""
    refused: bool = False
    """Whether every engine would reject the request; `message` begins with the field's name. Nothing has
    run."""
    busy: bool = False
    """Whether the engine was too busy; the request may be retried. Nothing has run."""
    at_fault: bool = False
    """Whether the request itself causes the error, in any engine; `message` begins with the field's name."""
