# SPDX-License-Identifier: Apache-2.0
"""One generated sequence of a request, from its placement on an engine to its last piece.

`GenerationExchange` runs the sequences of a request.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.requests.answer import AnswerBuilder, AnswerPiece
from mizzen.gateway.requests.attempt import Attempt
from mizzen.gateway.requests.fan_out import count_placement
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.prompt_scores.scored_prompts import ScoredPrefix, ScoredPrompts, ScoreKey
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.requests.token_logprobs import ScoredToken, decode_prompt_logprobs
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.gateway.telemetry.metrics import ModelMetrics
from mizzen.gateway.text.model import TextModel
from mizzen.wire.client.stream import EngineRefused, StreamLost, TokenLogprobs
from mizzen.wire.messages import Finish

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

FINISH_WAIT_SECONDS = 2.0
"""Maximum time to wait for an engine's final token counts after an abort."""


MAX_RESPONSE_TOKENS = 1 << 21
"""Maximum number of output tokens in all choices of a response that is not streamed."""
MAX_RESPONSE_LOGPROBS = 1 << 21
"""Maximum number of log probabilities, about 120 bytes each, that a response holds before it is sent."""


class ResponseBudget:
    """Bound on the tokens and log probabilities that one response holds before it is sent."""

    def __init__(self) -> None:
        self._logprobs = 0
        self._tokens = 0

    def add_tokens(self, generation: GenerationRequest, tokens: int) -> None:
        """Count output tokens, and their log probabilities if requested.

        Raises:
            ApiError: 400 if the response would hold too many tokens or log probabilities.
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
            ApiError: 400 if the response would hold too many log probabilities.
        """
        if generation.sampling.logprobs is None:
            return
        self._logprobs += tokens * (1 + generation.sampling.logprobs)
        if self._logprobs > MAX_RESPONSE_LOGPROBS:
            text = f"logprobs: the response would hold more than {MAX_RESPONSE_LOGPROBS} log probabilities"
            raise invalid(
                f"{text}: ask for fewer, or for shorter or fewer choices", "logprobs", "out_of_range"
            )


class InterTokenTimer:
    """Records in a model's metrics how many output tokens arrive, and the time between them."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._last: float | None = None

    def observe(self, tokens: int) -> None:
        """Record that `tokens` tokens have arrived together."""
        now = time.monotonic()
        self._metrics.output_tokens.inc(tokens)
        if self._last is not None and tokens:
            self._metrics.between_tokens_seconds.observe((now - self._last) / tokens)
        self._last = now


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Prompt that an answer repeats at its beginning (`echo`)."""

    text: str
    logprobs: list[ScoredToken]
    """Prompt tokens with their log probabilities; empty if log probabilities were not requested."""


class GeneratedSequence:
    """One sequence of a request. Call `place` before reading pieces, and always call `close` at the end."""

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
        """Index of the sequence's choice in the response."""
        self.finish: Finish | None = None
        """The engine's `Finish` message; None until it has arrived."""
        self.cached_tokens = 0
        self._gateway = gateway
        self._dispatcher = dispatcher
        self._began = began
        self._routed = routed
        self._attempt: Attempt | None = None
        self._siblings: SiblingSequences | None = None
        """State shared with the request's other sequences; only set while this sequence counts as running."""
        self._answer: AnswerBuilder | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._recalled: ScoredPrefix | None = None
        """Beginning of the prompt that the engine need not score."""
        self._model: ModelIdentity | None = None
        """Model that has answered; None until the answer is complete."""
        self.finish_reason: str | None = None
        """OpenAI's finish_reason; None until the sequence has ended."""
        self._metrics = gateway.metrics.for_model(routed.generation.model)
        self._token_timer = InterTokenTimer(self._metrics)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response header with the chosen engine and the reason for the choice; empty if it is not sent."""
        shown = self._routed.route_header and self._gateway.config.route_header
        return [(b"x-mizzen-route", self._routed.route_header.encode())] if shown else []

    @property
    def tenant(self) -> str:
        """Name of the request's API key."""
        return self._routed.queue_entry.tenant.name

    # ── the prompt ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def text_model(self) -> TextModel:
        """Tokenizer and chat template of the model that answers.

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
        """Prompt as text: as the client sent it, or decoded from its tokens."""
        if isinstance(self.generation.prompt, str):
            return self.generation.prompt
        return self.text_model.tokenizer.decode(self.prompt, self.generation.skip_special_tokens)

    @property
    def echo(self) -> EchoedPrompt | None:
        """The prompt, which the answer repeats at its beginning; None if the request does not set `echo`."""
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
        """Copy the prompt from `other`, which belongs to the same request and has been placed."""
        self._routed.copy_prompt(other._routed)
        self._prompt_logprobs = other._prompt_logprobs

    def take_prompt_logprobs(self, source: GeneratedSequence) -> None:
        """Add the log probabilities of the first tokens, which the prompt of `source` has too."""
        missing = self.prompt_tokens - 1 - len(self._prompt_logprobs)
        first = source.prompt_tokens - 1 - len(source._prompt_logprobs)  # tokens before prompt_logprobs_from
        self._prompt_logprobs = [*source._prompt_logprobs[: max(0, missing - first)], *self._prompt_logprobs]

    def recall_scores(self, scored: ScoredPrompts, model: ModelIdentity) -> None:
        """Let the engine, which serves `model`, score only the tokens that no recent prompt has in common.

        Prompts that are texts are scored as a whole, because their tokens are not known.
        """
        if not isinstance(self.generation.prompt, array):
            return
        prefix = scored.find_prefix(self._score_key(model), self.generation.prompt.tobytes())
        if prefix is not None and prefix.tokens > self.generation.sampling.prompt_logprobs_from:
            self._recalled = prefix
            self._start_scores_at(prefix.tokens)

    def remember_scores(self, scored: ScoredPrompts) -> None:
        """Keep the log probabilities of the prompt for later prompts; call it after `collect`."""
        complete = len(self._prompt_logprobs) == self.prompt_tokens - 1
        if isinstance(self.generation.prompt, array) and self._model is not None and complete:
            prompt = self.generation.prompt.tobytes()
            scored.add(self._score_key(self._model), prompt, self._prompt_logprobs)

    def _complete_scores(self, model: ModelIdentity) -> bool:
        """Put the recalled log probabilities before those of an engine that serves `model`.

        Return False if a rollout has replaced the model that scored them; then the whole prompt is scored.
        """
        self._model = model
        if self._recalled is None:
            return True
        if self._recalled.model == model:
            self._prompt_logprobs = [*self._recalled.entries, *self._prompt_logprobs]
            return True
        self._recalled, self._prompt_logprobs = None, []
        self._start_scores_at(0)
        return False

    def _score_key(self, model: ModelIdentity) -> ScoreKey:
        return ScoreKey(model, self._routed.salt, self.generation.sampling.prompt_logprobs or 0)

    def _start_scores_at(self, token: int) -> None:
        self.generation = self._routed.generation = self.generation.start_scores_at(token)
        self._routed.sampling = None

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
        """Mean log probability of the output tokens; 0 if log probabilities were not requested."""
        return (
            0.0 if self._answer is None else self._answer.total_logprob / max(1, self._answer.output_tokens)
        )

    async def place(self) -> None:
        """Place the sequence on an engine and wait for its first tokens; do nothing if it has been placed.

        Raises:
            ApiError: no engine could serve the sequence, or none could serve it in time.
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
        """Return the next piece of the answer; the last piece has a finish reason.

        Raises:
            StreamLost, EngineRefused: the engine was lost, and the answer cannot continue on another engine.
        """
        attempt, answer = self._require_placed()
        tokens, finish = await attempt.next_tokens()
        piece = answer.add(tokens, finish, attempt.take_logprobs() if self.generation.logprobs else [])
        self._token_timer.observe(len(piece.token_ids))
        self.finish_reason = piece.finish_reason
        return piece

    async def collect(self) -> list[AnswerPiece]:
        """Place the sequence and return all pieces of its answer.

        If the engine is lost, the sequence starts over, because nothing has been sent to the client yet.

        Raises:
            ApiError: no engine could serve the sequence, or the response would be too large.
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
            else:
                await self.wait_finish()
                if self._complete_scores(attempt.model):
                    return pieces
                attempt.close()
                self._routed.discard_output()
            self._attempt = await self._dispatcher.place(self._routed)
            self._start_answer()

    def stream_error(self, error: StreamLost | EngineRefused) -> ApiError:
        """Return the error to send to the client for an error that `next_piece` has raised."""
        return self._dispatcher.stream_error(error)

    async def wait_finish(self) -> None:
        """Wait for the engine's `Finish`; if a stop string has ended the text, first abort the sequence."""
        attempt, _ = self._require_placed()
        if attempt.finish is None:
            attempt.stream.abort()
            self._gateway.metrics.aborts.labels("stop_string").inc()
            attempt.finish = await attempt.stream.wait_finish(FINISH_WAIT_SECONDS)
        self.finish = attempt.finish
        self.cached_tokens = attempt.cached_tokens

    def close(self) -> None:
        """Abort the sequence if it still runs; charge its tokens, and stop counting it as in flight."""
        if self._attempt is not None:
            self._attempt.close()
            self.cached_tokens = self._attempt.cached_tokens
            self._metrics.cached_tokens.inc(self.cached_tokens)
            self._attempt = None
        if self._siblings is not None:
            self._siblings.sequence_ended()
            self._siblings = None
        # The engine may have generated tokens after a stop string; the tenant does not pay for them.
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
