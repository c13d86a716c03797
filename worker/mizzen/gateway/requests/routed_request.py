"""A request on its way: what it asks for, where it has been, and what it was given."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mizzen.core.request import Int32
from mizzen.gateway.admission.admission import Ticket
from mizzen.gateway.requests.engine_request import prompt_ids, wire_sampling
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.routing.interfaces import Pin
from mizzen.gateway.telemetry.request_record import Record
from mizzen.gateway.text.model import TextModel
from mizzen.wire.messages import Sampling

if TYPE_CHECKING:
    from mizzen.gateway.engines.engine_table import Engine


PAUSE_SECONDS = 0.1
"""Before a request that every engine has refused is tried again."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A request, over all its engines."""

    wish: Wish
    ticket: Ticket
    session: str = ""
    """Requests of one session (a conversation, a user) go to one engine where nothing speaks against it."""
    salt: bytes = b""
    """Only requests of equal salts share cached prefixes."""
    priority: int = 0

    text: TextModel | None = None
    prompt: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    sampling: Sampling | None = None
    """As the engines of `text` understand it; set with the prompt."""
    blocks: Sequence[int] = ()
    seed: int | None = None
    """Drawn once, so that another engine draws the tokens that the first one would have drawn."""
    pin: Pin | None = None
    """What an engine must serve to go on with the answer; set with its first token."""
    given: array[int] = field(default_factory=lambda: array("i"))
    """The answer's tokens so far."""

    tried: list[Engine] = field(default_factory=list)
    losses: int = 0
    """Engines that failed while they had the request."""
    handovers: int = 0
    """Engines that were leaving anyway while they had it."""
    pause_seconds: float = PAUSE_SECONDS
    """Before it is tried again, when every engine has refused it."""
    admitted: bool = False
    route: str = ""
    """Where it went and why, for the response's header."""
    reason: str = ""
    """What decided the route: one word."""
    record: Record | None = None
    """What the access log and traces get to know of the request."""

    @property
    def tokens(self) -> Int32:
        """What an engine is to continue: the prompt, and what was given already."""
        if not self.given:
            return self.prompt
        return np.concatenate([self.prompt, np.frombuffer(self.given, dtype=np.int32)])

    @property
    def needed_tokens(self) -> int:
        """Context that it needs: its prompt and as much answer as was asked for, 1 beyond what is there."""
        asked = self.wish.sampling.max_tokens if self.wish.max_tokens_given else None
        return len(self.prompt) + max(asked or 1, len(self.given) + 1)

    @property
    def _known(self) -> TextModel:
        if self.text is None:
            raise RuntimeError("the request has no prompt yet")
        return self.text

    def sampling_in_force(self) -> Sampling:
        """Return the sampling that an engine gets, with the seed in force; `text` must be known.

        Raises:
            ApiError: 400 when the model cannot give the form that is asked for.
        """
        if self.sampling is None:
            self.sampling = wire_sampling(self.wish, self._known, self.prompt)
        if self.seed is None:
            self.seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed
        sampling = msgspec.structs.replace(self.sampling, seed=self.seed)
        if self.given:  # the prompt's log probabilities came with the first token
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return sampling

    async def tokenize(self, text: TextModel, context: int = 0) -> None:
        """Make the prompt for engines of a text model, and of a context length (0 where none is known).

        Raises:
            ApiError: 400, it cannot be made.
            TooManyTokens: it is longer than the context, which was clear before it was made.
        """
        began = time.monotonic()
        self.prompt = await prompt_ids(self.wish, text, context)
        if self.record is not None:
            self.record.phase("tokenize", began)
        self.text, self.sampling, self.blocks = text, None, ()

    def start_over(self) -> None:
        """Forget the answer: nothing of it has reached the client."""
        del self.given[:]
        self.pin = None
