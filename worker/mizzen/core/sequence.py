# SPDX-License-Identifier: Apache-2.0
"""The scheduler's state of one request.

Pages of a running request, by column of its page-table row:

    0              node.end           full                held
    | cached,         | own, full,       | own, to be      |
    | locked          | not cached       | filled          |

Columns below `node.end` hold exactly the prefix cache's pages from the root to `node`, which the request has
locked. The request owns the pages of all later columns. At the launch of each prefill chunk, full pages move
from the request to the prefix cache: steps run in order, so a later step finds their KV. Pages of the output
move when the request finishes. If the cache already holds pages with the same tokens, the row is changed to
these pages, and the request's own pages are freed.
"""

from __future__ import annotations

import enum

import numpy as np

from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.request import Finished, FinishReason, Int32, Request

UNLIMITED = 1 << 62
"""Value of `SequenceState.matchable_tokens` without a limit."""


class SequencePhase(enum.Enum):
    """Phase of a request in the scheduler."""

    WAITING = enum.auto()
    """New or retracted; the request holds neither slot nor pages."""
    PREFILL = enum.auto()
    """The request holds a slot and pages for its known tokens, but not all of their KV is computed."""
    DECODE = enum.auto()
    """The request decodes one token in every step."""
    LEAVING = enum.auto()
    """The step in which the request reaches its length limit is in flight."""
    ENDED = enum.auto()
    """The request has finished."""


class SequenceState:
    """Scheduling state of one request; counters that change in every step are in `DecodeBatch` instead.

    The *known* tokens of a request are the prompt and the output tokens that the scheduler has received.
    """

    __slots__ = (
        "admissions_before", "admitted", "cached_tokens", "computed", "decodes_from", "first_sample",
        "has_options", "last_step", "limit", "matchable_tokens", "node", "pages_held", "phase", "prefix_hint",
        "prompt_tokens", "rank", "reported_logprobs", "request", "rid", "serial", "slot", "starved",
        "stop_bits", "stop_tokens", "token_bytes", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, serial: int, limit: int, stops: frozenset[int]) -> None:
        self.request = request
        self.rid = request.rid
        self.prompt_tokens = len(request.prompt) - request.generated
        self.rank = 0
        """Priority of the request under the priority policy; 0 under all other policies."""
        self.starved = False
        """Whether the request was overtaken so often that it now goes first and is not preempted."""
        self.serial = serial
        """Number of the request in order of arrival."""
        self.limit = limit
        """Number of prompt plus output tokens at which the request finishes."""
        self.stop_tokens = stops
        """Ids of all tokens that end the request."""
        self.stop_bits = 0
        """Bit mask of the set `stop_tokens` in the `StopTable`."""
        self.has_options = False
        """Whether the request has `SlotOptions`."""
        self.matchable_tokens = UNLIMITED
        """Maximum number of leading tokens that may come from the prefix cache, because hidden states are
        needed at all later positions; `UNLIMITED` if only the next token is needed."""
        self.reported_logprobs = 0
        """Number of prompt tokens after the first whose log probabilities were reported or not requested."""
        self.phase = SequencePhase.WAITING
        self.admissions_before = 0
        """Number of admissions that do not count as overtaking this request: admissions before it joined the
        queue, admissions of requests that were then ahead of it, and admissions while it decoded."""
        self.decodes_from = 0
        """Total number of admissions when this request began to decode."""
        self.admitted = False
        """Whether the request was admitted at least once."""
        self.cached_tokens = 0
        """Number of prompt tokens that came from the prefix cache at the first admission."""
        self.tokens: Int32 = np.ascontiguousarray(request.prompt, dtype=np.int32)
        """Known tokens when the request joined the queue, int32 [n]: the prompt, followed by the output if
        the request was retracted."""
        self.token_bytes = b""
        """`tokens` as bytes (native int32); empty before the first prefix-cache lookup and after prefill."""
        self.prefix_hint: RadixNode | None = None
        """Node at which the last prefix-cache lookup of the waiting request ended."""
        self.slot = -1
        """Slot of the running request; -1 if it has none."""
        self.node: RadixNode | None = None
        """Last prefix-cache node whose pages the running request uses; the request has locked it."""
        self.pages_held = 0
        """Number of page-table columns that were filled at admission; decoding may fill more."""
        self.computed = 0
        """Number of tokens whose KV exists once all launched steps are complete; not updated while the
        request decodes (see `DecodeBatch.computed_tokens`)."""
        self.first_sample = 0
        """Number of the step that samples the first token in this slot; 0 until that step is launched."""
        self.last_step = 0
        """Number of the last launched step that contains the request; not updated while it decodes."""

    def tokens_as_bytes(self) -> bytes:
        """Return `tokens` as bytes (native int32), which are kept for further calls."""
        if not self.token_bytes:
            self.token_bytes = self.tokens.tobytes()
        return self.token_bytes

    def result(self, reason: FinishReason, known: int, stop_token: int | None) -> Finished:
        """Return the result of the finished request; `known` is its number of known tokens."""
        return Finished(
            rid=self.rid,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=known - self.prompt_tokens,
            stop_token=stop_token,
        )
