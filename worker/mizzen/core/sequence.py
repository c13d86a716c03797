"""The scheduler's state of one request.

Pages of a running request, by column of its page-table row:

    0              node.end           full                held
    | cached,         | own, full,       | own, to be      |
    | locked          | not cached       | filled          |

Columns below `node.end` hold exactly the pages of the prefix cache from the root to `node`, which the request
has locked; the request owns the rest. During prefill, full pages move from the request to the prefix cache at
the launch of each chunk: steps run in order, so a later step finds their KV. Pages of the output move when
the request finishes. If the cache already held the same tokens, the row is pointed at the cache's pages and
the request's own pages are freed.
"""

from __future__ import annotations

import enum

import numpy as np

from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.request import Int32, Request


class SequencePhase(enum.Enum):
    """Phase of a request in the scheduler."""

    WAITING = enum.auto()
    """New or retracted; holds neither slot nor pages."""
    PREFILL = enum.auto()
    """Holds a slot and pages for all its known tokens, not all of which are computed."""
    DECODE = enum.auto()
    """Decodes one token in every step."""
    LEAVING = enum.auto()
    """Its last step (by length) is in flight."""
    ENDED = enum.auto()


class SequenceState:
    """State of one request. Counters that change every step are kept in arrays (`DecodeBatch`)."""

    __slots__ = (
        "admissions_before", "admitted", "cached_tokens", "computed", "decodes_from", "first_sample",
        "full_prefill", "has_options", "last_step", "limit", "node", "pages_held", "phase", "prefix_hint",
        "prompt_tokens", "rank", "reported_logprobs", "request", "rid", "serial", "slot", "starved",
        "stop_bits", "stop_tokens", "token_bytes", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, serial: int, limit: int, stops: frozenset[int]) -> None:
        self.request = request
        self.rid = request.rid
        self.prompt_tokens = len(request.prompt) - request.generated
        self.rank = 0
        """Priority of the request under the priority policy, else 0."""
        self.starved = False
        """Whether it was overtaken so often that it goes first and is not preempted."""
        self.serial = serial
        """Number in order of arrival."""
        self.limit = limit
        """Number of prompt plus output tokens at which it finishes."""
        self.stop_tokens = stops
        self.stop_bits = 0
        self.has_options = False
        """Whether it has `SlotOptions`."""
        self.full_prefill = False
        """Whether every prompt position must be computed for it, without the prefix cache."""
        self.reported_logprobs = 0
        """Number of prompt tokens whose log probabilities were reported."""
        self.phase = SequencePhase.WAITING
        self.admissions_before = 0
        """Admissions that did not overtake this request: those before it joined the queue, those of requests
        ahead of it then, and those while it decoded."""
        self.decodes_from = 0
        """Number of admissions of all requests when it began to decode."""
        self.admitted = False
        """Whether it was admitted at least once."""
        self.cached_tokens = 0
        self.tokens: Int32 = np.ascontiguousarray(request.prompt, dtype=np.int32)
        """Known tokens when it joined the queue, int32 [n]: the prompt, after a retraction also the
        output."""
        self.token_bytes = b""
        """`tokens` as bytes; created for the first prefix-cache lookup, dropped with the last chunk."""
        self.prefix_hint: RadixNode | None = None
        """Node at which the last prefix-cache lookup ended, while it waits."""
        self.slot = -1
        self.node: RadixNode | None = None
        self.pages_held = 0
        """Number of page-table columns filled at admission; a decode holds as many as its tokens need."""
        self.computed = 0
        """Number of tokens whose KV exists after all launched steps (while decoding: see `DecodeBatch`)."""
        self.first_sample = 0
        """Step that samples its first token in this slot; 0 before that."""
        self.last_step = 0
        """Last launched step that contains it (not updated while decoding)."""

    def tokens_as_bytes(self) -> bytes:
        """Return `tokens` as bytes (native int32); cached."""
        if not self.token_bytes:
            self.token_bytes = self.tokens.tobytes()
        return self.token_bytes
