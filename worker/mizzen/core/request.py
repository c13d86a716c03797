# SPDX-License-Identifier: Apache-2.0
"""Requests to the scheduler, and the results with which they finish."""

from __future__ import annotations

import enum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mizzen.common.request_timeline import RequestTimeline
from mizzen.core.images.types import PromptImage
from mizzen.core.sampling_params import SamplingParams

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class FinishReason(enum.IntEnum):
    """Reason why a request finished. The numbers are part of the wire protocol."""

    STOP = 1
    """An end token of the model or one of `stop_token_ids` was sampled."""
    LENGTH = 2
    """`max_tokens` or the context length was reached."""
    ABORT = 3
    """The client disconnected, or the gateway found a stop string."""
    ERROR = 4
    """The engine could not continue; `Finished.message` gives the reason."""


class Pooling(enum.StrEnum):
    """Method that combines the hidden states of a prompt (after the final norm) into an embedding."""

    LAST = "last"
    """Hidden state of the last token."""
    MEAN = "mean"
    """Mean of the hidden states of all tokens."""
    CLS = "cls"
    """Hidden state of the first token."""


class Request(Struct, frozen=True, kw_only=True):
    """A prompt to continue or to embed."""

    rid: int
    """Request id chosen by the caller; unique among the requests that wait or run."""
    prompt: Int32
    """Token ids, int32 [n], n >= 1; must not be modified after submission."""
    sampling: SamplingParams
    seed: int = 0
    """Effective seed, resolved by the caller from `sampling.seed` (0 <= seed < 2**64)."""
    salt: bytes = b""
    """Opaque cache salt; requests share cached prefixes only if their salts are equal."""
    priority: int = 0
    """Priority under the priority policy; a higher one goes first."""
    generated: int = 0
    """Number of tokens at the end of `prompt` that another engine had generated before that engine was lost.

    They count towards `max_tokens`, `min_tokens` and penalties, and output offsets continue after them."""
    pooling: Pooling | None = None
    """Pooling for an embedding request; None for a generation request."""
    normalize: bool = True
    """Whether the embedding is scaled to length 1."""
    classify: bool = False
    """Whether the result has the logits of a classifier's labels, computed from the pooled hidden state,
    instead of an embedding; `normalize` then has no effect."""
    second_start: int = 0
    """Index of the first token of the second part of a pair, from which token types are 1; 0 without one."""
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in order of their positions."""
    rotary: Int32 | None = None
    """Rotary positions (time, height, width) of the first tokens of `prompt`, up to the last image or
    further, int32 [3, m]; None if all three equal the sequence position."""
    rotary_offset: int = 0
    """Difference between the rotary position and the sequence position of all tokens after `rotary`."""
    tenant: int = 0
    """Opaque tenant number, by which limited resources are shared fairly."""
    arrival: float = 0.0
    """Time of arrival in seconds; the clock is that of the `now` argument of `Scheduler.schedule`."""
    timeline: RequestTimeline | None = None
    """Times of the request, which the scheduler updates; None if the request is not traced."""


class Finished(Struct, frozen=True, kw_only=True):
    """The result of a finished request, with its final token counts."""

    rid: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens whose KV came from the prefix cache when the request was first admitted."""
    output_tokens: int
    stop_token: int | None = None
    """Token that ended the request (counted in `output_tokens`) if `reason` is STOP."""
    message: str = ""
    refused: bool = False
    """Whether the request was rejected as invalid, before any of it ran; any engine would reject it.
    `message` begins with the name of the invalid field."""
    busy: bool = False
    """Whether the request was rejected because the engine is too busy, before any of it ran; a retry may
    succeed."""
    at_fault: bool = False
    """Whether the request itself caused the error, so that it would fail in any engine. `message` begins with
    the name of the offending field."""
