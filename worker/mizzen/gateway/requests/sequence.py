"""One generated sequence of a request: placed in an engine, read piece by piece, counted and closed.

Exchanges of the APIs run their sequences through this class.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.requests.answer import AnswerBuilder, AnswerPiece
from mizzen.gateway.requests.attempt import Attempt
from mizzen.gateway.requests.fan_out import count_placement
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.requests.token_logprobs import ScoredToken, decode_prompt_logprobs
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.telemetry.metrics import ModelMetrics
from mizzen.gateway.text.model import TextModel
from mizzen.wire.client.stream import EngineRefused, StreamLost, TokenLogprobs
from mizzen.wire.messages import Finish

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

FINISH_WAIT_SECONDS = 2.0
"""Time that usage waits for an engine's final counts after an abort."""


MAX_RESPONSE_TOKENS = 1 << 21
"""Tokens that all choices of a response without streaming may have."""
MAX_RESPONSE_LOGPROBS = 1 << 21
"""Log probabilities, each about 120 bytes, that one response may hold before any of it is sent."""


class ResponseBudget:
    """Bounds the tokens and log probabilities that one response holds until it is sent."""

    def __init__(self) -> None:
        self._count = 0
        self._tokens = 0

    def add_tokens(self, generation: GenerationRequest, tokens: int) -> None:
        """Count output tokens, with their log probabilities if requested.

        Raises:
            ApiError: 400 if there are too many.
        """
        self._tokens += tokens
        if self._tokens > MAX_RESPONSE_TOKENS:
            text = f"stream: without it a response holds at most {MAX_RESPONSE_TOKENS} tokens"
            raise invalid(
                f"{text}: ask for a stream, or for shorter or fewer choices", "stream", "out_of_range"
            )
        self.add_logprobs(generation, tokens)

    def add_logprobs(self, generation: GenerationRequest, tokens: int) -> None:
        """Count the log probabilities of `tokens` tokens, if requested.

        Raises:
            ApiError: 400 if there are too many.
        """
        if generation.sampling.logprobs is None:
            return
        self._count += tokens * (1 + generation.sampling.logprobs)
        if self._count > MAX_RESPONSE_LOGPROBS:
            text = f"logprobs: the response would hold more than {MAX_RESPONSE_LOGPROBS} log probabilities"
            raise invalid(
                f"{text}: ask for fewer, or for shorter or fewer choices", "logprobs", "out_of_range"
            )


class InterTokenTimer:
    """Counts output tokens, and measures the time between their deliveries."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._last: float | None = None

    def observe(self, tokens: int) -> None:
        """Record a delivery of tokens."""
        now = time.monotonic()
        self._metrics.output_tokens.inc(tokens)
        if self._last is not None and tokens:
            self._metrics.between_tokens_seconds.observe((now - self._last) / tokens)
        self._last = now


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Prompt at the beginning of an answer."""

    text: str
    logprobs: list[ScoredToken]
    """Its tokens with log probabilities, if requested."""


class GeneratedSequence:
    """Sequence that engines run: placed, read piece by piece, closed. `close` must be called."""

    def __init__(
        self,
        gateway: Gateway,
        dispatcher: Dispatcher,
        routed: RoutedRequest,
        index: int,
        began: float,
        budget: ResponseBudget,
    ) -> None:
        self.generation = routed.generation
        self._budget = budget
        self.index = index
        """Index of its choice in the response."""
        self.finish: Finish | None = None
        """The engine's finish, once known."""
        self.cached_tokens = 0
        self._gateway = gateway
        self._dispatcher = dispatcher
        self._began = began
        self._routed = routed
        self._attempt: Attempt | None = None
        self._siblings: SiblingSequences | None = None
        """Siblings that count it as running."""
        self._answer: AnswerBuilder | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        """OpenAI's finish_reason, once it has ended."""
        self._metrics = gateway.metrics.for_model(routed.generation.model)
        self._token_timer = InterTokenTimer(self._metrics)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers with the engine and the reason of its route."""
        shown = self._routed.route_header and self._gateway.config.route_header
        return [(b"x-mizzen-route", self._routed.route_header.encode())] if shown else []

    @property
    def tenant(self) -> str:
        """Name of the request's API key."""
        return self._routed.queue_entry.tenant.name

    # ── the prompt ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def text_model(self) -> TextModel:
        """Text side of the model that answers.

        Raises:
            ApiError: 503 if the sequence has not been placed.
        """
        if self._routed.text_model is None:
            raise unavailable("no engine is ready")
        return self._routed.text_model

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self._routed.prompt.tolist()

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self._routed.prompt)

    @property
    def prompt_text(self) -> str:
        """Prompt as text: that of the client, or decoded from its tokens."""
        if isinstance(self.generation.prompt, str):
            return self.generation.prompt
        return self.text_model.tokenizer.decode(self.prompt, self.generation.skip_special_tokens)

    @property
    def echo(self) -> EchoedPrompt | None:
        """Prompt to begin the answer with, if requested."""
        if not self.generation.echo:
            return None
        tokenizer, skip = self.text_model.tokenizer, self.generation.skip_special_tokens
        logprobs = (
            decode_prompt_logprobs(tokenizer, self.prompt, self._prompt_logprobs, skip)
            if self.generation.logprobs
            else []
        )
        return EchoedPrompt(self.prompt_text, logprobs)

    def copy_prompt(self, other: GeneratedSequence) -> None:
        """Copy the prompt from another sequence of the same request, which has been placed."""
        source = other._routed
        self._routed.text_model, self._routed.prompt, self._routed.block_hashes = (
            source.text_model,
            source.prompt,
            source.block_hashes,
        )
        self._prompt_logprobs = other._prompt_logprobs

    # ── the answer ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def output_tokens(self) -> int:
        """Number of output tokens so far."""
        return 0 if self._answer is None else self._answer.output_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Number of output tokens that are reasoning."""
        return 0 if self._answer is None else self._answer.reasoning_tokens

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the output tokens, if requested."""
        return (
            0.0 if self._answer is None else self._answer.total_logprob / max(1, self._answer.output_tokens)
        )

    async def place(self) -> None:
        """Wait until an engine has returned the first tokens, unless one has.

        Raises:
            ApiError: it cannot be served, or not in time.
        """
        if self._answer is not None:
            return
        self._gateway.restart_queue_timeout(self._routed.queue_entry)
        self._attempt = await self._dispatcher.place(self._routed)
        self._siblings, self._routed.queue_entry.siblings = self._routed.queue_entry.siblings, None
        if self._siblings is not None:
            self._siblings.sequence_started()
        count_placement(self._gateway, self._routed)
        self._start_answer()
        if self.generation.echo:
            self._budget.add_logprobs(self.generation, self.prompt_tokens)

    async def next_piece(self) -> AnswerPiece:
        """Return the next piece; one with a finish reason is the last.

        Raises:
            StreamLost, EngineRefused: the engine has lost it.
        """
        attempt, answer = self._require_placed()
        tokens, finish = await attempt.next_tokens()
        piece = answer.add(tokens, finish, attempt.take_logprobs() if self.generation.logprobs else [])
        self._token_timer.observe(len(piece.token_ids))
        self.finish_reason = piece.finish_reason
        return piece

    async def collect(self) -> list[AnswerPiece]:
        """Place it and return its whole answer. A lost engine only costs time, because nothing was sent yet.

        Raises:
            ApiError: it cannot be served.
        """
        await self.place()
        while True:
            attempt, _ = self._require_placed()
            pieces: list[AnswerPiece] = []
            try:
                while not pieces or pieces[-1].finish_reason is None:
                    pieces.append(await self.next_piece())
                    self._budget.add_tokens(self.generation, len(pieces[-1].token_ids))
            except (StreamLost, EngineRefused) as error:
                lost = error if isinstance(error, StreamLost) else StreamLost("refused", str(error))
                attempt.close()
                self._dispatcher.handle_loss(self._routed, attempt.engine, lost)
                self._attempt = await self._dispatcher.place(self._routed)
                self._start_answer()
            else:
                await self.wait_finish()
                return pieces

    def stream_error(self, error: StreamLost | EngineRefused) -> ApiError:
        """Return the error to send to the client after `next_piece` has raised one."""
        return self._dispatcher.stream_error(error)

    async def wait_finish(self) -> None:
        """Wait for the engine's finish; a sequence that ended by a stop string is aborted first."""
        attempt, _ = self._require_placed()
        if attempt.finish is None:
            attempt.stream.abort()
            self._gateway.metrics.aborts.labels("stop_string").inc()
            attempt.finish = await attempt.stream.wait_finish(FINISH_WAIT_SECONDS)
        self.finish = attempt.finish
        self.cached_tokens = attempt.cached_tokens

    def close(self) -> None:
        """Abort it if it still runs, and leave the admission."""
        if self._attempt is not None:
            self._attempt.close()
            self.cached_tokens = self._attempt.cached_tokens
            self._metrics.cached_tokens.inc(self.cached_tokens)
            self._attempt = None
        if self._siblings is not None:
            self._siblings.sequence_ended()
            self._siblings = None
        # The engine may have generated more tokens than a stop string left.
        self._routed.queue_entry.output_tokens = self.output_tokens
        self._dispatcher.finish(self._routed)

    def _start_answer(self) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.prompt_logprobs:
            self._prompt_logprobs = attempt.prompt_logprobs
        start = len(self.prompt_text) if self.generation.echo else 0
        self._answer = AnswerBuilder(self.generation, self.text_model, self._routed.prompt, start)

    def _require_placed(self) -> tuple[Attempt, AnswerBuilder]:
        if self._attempt is None or self._answer is None:
            raise RuntimeError("the sequence has not been placed")
        return self._attempt, self._answer
