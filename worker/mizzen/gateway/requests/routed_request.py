# SPDX-License-Identifier: Apache-2.0
"""State of a sequence while engines run it: its request, the engines tried, and its tokens so far."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mizzen.core.kv.block_hashes import BLOCK_TOKENS, block_hashes
from mizzen.core.request import Int32
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.requests.engine_request import engine_sampling, tokenize_prompt
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.images import PromptImageBytes, cached_tokens_of, text_tokens_before
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.gateway.telemetry.request_record import RequestRecord
from mizzen.gateway.text.model import TextModel
from mizzen.wire.messages import Sampling

if TYPE_CHECKING:
    from mizzen.gateway.engines.engine_client import EngineClient


RETRY_SECONDS = 0.1
"""Pause before the first retry of a request that every engine has refused."""


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """State of one sequence, across all engines that run it in turn. The dispatcher updates it."""

    generation: GenerationRequest
    queue_entry: QueueEntry
    session: str = ""
    """Session of the request (a conversation or user); the router prefers one engine for it."""
    salt: bytes = b""
    """Salt of the prefix cache; only requests with equal salts share cached prefixes."""
    priority: int = 0

    text_model: TextModel | None = None
    prompt: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    second_start: int = 0
    """Index in `prompt` as in `EncodedPrompt.second_start`."""
    images: tuple[PromptImageBytes, ...] = ()
    """Images of `prompt`; kept until the request ends, because each engine may request their bytes."""
    sampling: Sampling | None = None
    """Sampling parameters as sent to the engines of `text_model`; None until they are first needed."""
    block_hashes: Sequence[int] = ()
    seed: int | None = None
    """Seed, the same for all engines, so that another engine would sample the same tokens."""
    pinned_model: ModelIdentity | None = None
    """Model that another engine must serve to continue the answer; set with the first output token."""
    generated: array[int] = field(default_factory=lambda: array("i"))
    """Output tokens so far."""

    tried_engines: list[EngineClient] = field(default_factory=list)
    losses: int = 0
    """Number of engines that failed while they ran the request."""
    handovers: int = 0
    """Number of draining engines from which the request moved to another engine."""
    retry_seconds: float = RETRY_SECONDS
    """Pause before the next try if every engine has refused the request."""
    admitted: bool = False
    route_header: str = ""
    """The chosen engine and the reason for the choice, for the response header x-mizzen-route."""
    route_reason: str = ""
    """Reason why the router chose the engine, in one word."""
    record: RequestRecord = field(default_factory=lambda: RequestRecord(request_id="", method="", path=""))
    """Record for the access log and traces; the default is not reported."""

    @property
    def engine_prompt(self) -> Int32:
        """Prompt for an engine, int32 [n]: the request's prompt and the tokens generated so far."""
        if not self.generated:
            return self.prompt
        return np.concatenate([self.prompt, np.frombuffer(self.generated, dtype=np.int32)])

    @property
    def context_tokens(self) -> int:
        """Number of tokens that the context must hold: the prompt and the output.

        The output is assumed to have `max_tokens` tokens if the client set it, and in any case at least one
        token more than has been generated so far.
        """
        requested = self.generation.sampling.max_tokens if self.generation.max_tokens_given else None
        return len(self.prompt) + max(requested or 1, len(self.generated) + 1)

    @property
    def text_block_hashes(self) -> Sequence[int]:
        """Hashes of the full blocks before the first image."""
        return self.block_hashes[: text_tokens_before(self.images, len(self.prompt)) // BLOCK_TOKENS]

    @property
    def _known_text_model(self) -> TextModel:
        if self.text_model is None:
            raise RuntimeError("the request has no prompt yet")
        return self.text_model

    def sampling_with_seed(self) -> Sampling:
        """Return the sampling parameters for an engine, with the sequence's seed; `text_model` must be set.

        Raises:
            ApiError: 400 if the requested output cannot be constrained for this model.
        """
        if self.sampling is None:
            self.sampling = engine_sampling(self.generation, self._known_text_model, self.prompt)
        if self.seed is None:
            self.seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed
        sampling = msgspec.structs.replace(self.sampling, seed=self.seed)
        if self.generated:  # the prompt's log probabilities arrived with the first token
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return sampling

    async def tokenize(self, text: TextModel, context: int = 0) -> None:
        """Tokenize the prompt for engines of a text model; `context` is their context length (0: unknown).

        Raises:
            ApiError: 400 if the chat template rejects the messages, or the prompt is empty.
            TooManyTokens: the prompt is so long that it must exceed the context; raised before tokenization.
        """
        began = time.monotonic()
        encoded = await tokenize_prompt(self.generation, text, context)
        self.prompt, self.second_start, self.images = encoded.ids, encoded.second_start, encoded.images
        self.record.end_phase("tokenize", began)
        self.text_model, self.sampling, self.block_hashes = text, None, ()

    def copy_prompt(self, source: RoutedRequest) -> None:
        """Copy the tokens and images of a sequence with the same prompt."""
        self.text_model, self.prompt, self.images = source.text_model, source.prompt, source.images
        self.second_start, self.block_hashes = source.second_start, source.block_hashes

    @property
    def has_images(self) -> bool:
        """Whether the request has images, also before its prompt is tokenized."""
        return bool(self.images) or self.generation.images is not None

    def hash_blocks(self) -> None:
        """Compute `block_hashes`, as the engines' prefix caches do."""
        self.block_hashes = tuple(block_hashes(cached_tokens_of(self.prompt, self.images), self.salt))

    def discard_output(self) -> None:
        """Discard the tokens generated so far; the client must not have received any of them."""
        del self.generated[:]
        self.pinned_model = None


def context_length_error(routed: RoutedRequest, context: int, least: int = 0) -> ApiError:
    """Return a 400 error for a request that exceeds the context length `context`.

    If the prompt was not tokenized, `least` is a lower bound on its number of tokens; else it is 0.
    """
    if least:
        return invalid(
            f"the context length is {context} tokens, but the prompt has at least {least}",
            routed.generation.prompt_field,
            "context_length_exceeded",
        )
    prompt = len(routed.prompt)
    output = routed.generation.sampling.max_tokens if routed.generation.max_tokens_given else None
    parts = f"{prompt} in the prompt" + (f" and {output} to be generated" if output else "")
    return invalid(
        f"the context length is {context} tokens, but {prompt + (output or 1)} are needed: {parts}",
        routed.generation.prompt_field,
        "context_length_exceeded",
    )
