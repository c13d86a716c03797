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
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.requests.engine_request import engine_sampling, tokenize_prompt
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.gateway.telemetry.request_record import RequestRecord
from mizzen.gateway.text.model import TextModel
from mizzen.wire.messages import Sampling

if TYPE_CHECKING:
    from mizzen.gateway.engines.engine_client import EngineClient


RETRY_SECONDS = 0.1
"""Before a request that every engine has refused is tried again."""


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """A request, over all its engines."""

    generation: GenerationRequest
    queue_entry: QueueEntry
    session: str = ""
    """Requests of one session (a conversation, a user) go to one engine where nothing speaks against it."""
    salt: bytes = b""
    """Only requests of equal salts share cached prefixes."""
    priority: int = 0

    text_model: TextModel | None = None
    prompt: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    sampling: Sampling | None = None
    """As the engines of `text` understand it; set with the prompt."""
    block_hashes: Sequence[int] = ()
    seed: int | None = None
    """Drawn once, so that another engine draws the tokens that the first one would have drawn."""
    pinned_model: ModelIdentity | None = None
    """What an engine must serve to go on with the answer; set with its first token."""
    generated: array[int] = field(default_factory=lambda: array("i"))
    """The answer's tokens so far."""

    tried_engines: list[EngineClient] = field(default_factory=list)
    losses: int = 0
    """Engines that failed while they had the request."""
    handovers: int = 0
    """Engines that were leaving anyway while they had it."""
    retry_seconds: float = RETRY_SECONDS
    """Before it is tried again, when every engine has refused it."""
    admitted: bool = False
    route_header: str = ""
    """Where it went and why, for the response's header."""
    route_reason: str = ""
    """What decided the route: one word."""
    record: RequestRecord | None = None
    """What the access log and traces get to know of the request."""

    @property
    def engine_prompt(self) -> Int32:
        """What an engine is to continue: the prompt, and what was given already."""
        if not self.generated:
            return self.prompt
        return np.concatenate([self.prompt, np.frombuffer(self.generated, dtype=np.int32)])

    @property
    def context_tokens(self) -> int:
        """Context that it needs: its prompt and as much answer as was asked for, 1 beyond what is there."""
        asked = self.generation.sampling.max_tokens if self.generation.max_tokens_given else None
        return len(self.prompt) + max(asked or 1, len(self.generated) + 1)

    @property
    def _known_text_model(self) -> TextModel:
        if self.text_model is None:
            raise RuntimeError("the request has no prompt yet")
        return self.text_model

    def sampling_with_seed(self) -> Sampling:
        """Return the sampling that an engine gets, with the seed in force; `text` must be known.

        Raises:
            ApiError: 400 when the model cannot give the form that is asked for.
        """
        if self.sampling is None:
            self.sampling = engine_sampling(self.generation, self._known_text_model, self.prompt)
        if self.seed is None:
            self.seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed
        sampling = msgspec.structs.replace(self.sampling, seed=self.seed)
        if self.generated:  # the prompt's log probabilities came with the first token
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return sampling

    async def tokenize(self, text: TextModel, context: int = 0) -> None:
        """Make the prompt for engines of a text model, and of a context length (0 where none is known).

        Raises:
            ApiError: 400, it cannot be made.
            TooManyTokens: it is longer than the context, which was clear before it was made.
        """
        began = time.monotonic()
        self.prompt = await tokenize_prompt(self.generation, text, context)
        if self.record is not None:
            self.record.end_phase("tokenize", began)
        self.text_model, self.sampling, self.block_hashes = text, None, ()

    def discard_output(self) -> None:
        """Forget the answer: nothing of it has reached the client."""
        del self.generated[:]
        self.pinned_model = None
