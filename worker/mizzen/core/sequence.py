"""A request on its way through the scheduler.

The pages of a running request, by column of its row in the page table:

    0              node.end           filled              held
    | in the tree,    | own, full,       | own, to be      |
    | locked          | not in the tree  | filled          |

Columns below `node.end` hold exactly the pages of the tree from the root to `node`, which the request has
locked; the request owns the rest. While the prompt is run, full pages move from the own to the tree's side at
the launch of each chunk: steps run in order, so a later step finds their KV. What a request generates moves
when it ends. If the tree held the same tokens already, the row is pointed at the tree's pages and the own
ones are released.
"""

from __future__ import annotations

import enum

import numpy as np

from mizzen.core.kv.radix_node import Node
from mizzen.core.request import Int32, Request


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    """Holds nothing; new, or retracted."""
    PREFILL = enum.auto()
    """Holds a slot and pages for all its known tokens, not all of which have been run."""
    DECODE = enum.auto()
    """Part of every step."""
    LEAVING = enum.auto()
    """Its last step, known ahead, is in flight."""
    ENDED = enum.auto()


class Sequence:
    """One request's state. Rows of arrays hold what changes with every step."""

    __slots__ = (
        "admissions_before", "admitted", "asks", "cached_tokens", "computed", "data", "decodes_from",
        "first_sample", "known", "last_step", "limit", "node", "pages_held", "phase", "prompt_tokens",
        "rank", "reported", "request", "rid", "serial", "slot", "stop_bits", "stops", "tokens", "urgent",
        "whole",
    )  # fmt: skip

    def __init__(self, request: Request, serial: int, limit: int, stops: frozenset[int]) -> None:
        self.request = request
        self.rid = request.rid
        self.prompt_tokens = len(request.prompt) - request.generated
        self.rank = 0
        """Its priority, for policies that look at it."""
        self.urgent = False
        """Whether it was overtaken so often that it goes before all, and stays."""
        self.serial = serial
        """Order of arrival."""
        self.limit = limit
        """Prompt plus output tokens at which it ends."""
        self.stops = stops
        self.stop_bits = 0
        self.asks = False
        """Whether it wants more than temperature and filters."""
        self.whole = False
        """Whether each position of its prompt has to be run for it, and none comes from the prefix cache."""
        self.reported = 0
        """Prompt tokens whose log probabilities were reported."""
        self.phase = Phase.WAITING
        self.admissions_before = 0
        """Admissions of all requests when it joined the queue, of those who were ahead of it then, and of all
        while it decoded: whoever was admitted beside has overtaken it."""
        self.decodes_from = 0
        """Admissions of all requests when it began to decode."""
        self.admitted = False
        """Whether it ever was."""
        self.cached_tokens = 0
        self.tokens: Int32 = np.ascontiguousarray(request.prompt, dtype=np.int32)
        """Known when it joined the queue: the prompt, after a retraction also the output so far."""
        self.data = b""
        """`tokens` as bytes; made when the prefix cache is first asked, dropped with the last chunk."""
        self.known: Node | None = None
        """Where the last look for its prefix in the cache ended, while it waits."""
        self.slot = -1
        self.node: Node | None = None
        self.pages_held = 0
        """Columns of the page table filled at admission; decodes hold as many as their tokens need."""
        self.computed = 0
        """Tokens whose KV exists after all launched steps (while decoding: see `DecodeBatch`)."""
        self.first_sample = 0
        """The step that samples its first token in this slot; 0 before."""
        self.last_step = 0
        """The last step that runs it (while decoding: the last one launched)."""

    def data_bytes(self) -> bytes:
        """Return `tokens` as bytes."""
        if not self.data:
            self.data = self.tokens.tobytes()
        return self.data
