"""One sequence of a request on its way through an engine: its tokens as pieces, its counts, its end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mizzen.gateway.admission.sibling_sequences import Siblings
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.openai.logprobs import ScoredToken, scored_prompt
from mizzen.gateway.requests.answer import Answer, Piece
from mizzen.gateway.requests.attempt import Running
from mizzen.gateway.requests.fan_out import count_placed
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.requests.routed_request import Job
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.telemetry.metrics import ModelMetrics
from mizzen.gateway.text.model import TextModel
from mizzen.wire.client.stream import EngineRefused, StreamLost, TokenLogprobs
from mizzen.wire.messages import Finish

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

FINAL_SECONDS = 2.0
"""How long usage waits for an engine's count after an abort."""


MAX_TOKENS_HELD = 1 << 21
"""Tokens of all choices of a response that is not streamed."""
MAX_LOGPROBS_HELD = 1 << 21
"""Log probabilities, each about 120 bytes, that one response may hold before any of it is sent."""


class Held:
    """Counts what one response holds until it is sent: tokens, and log probabilities."""

    def __init__(self) -> None:
        self._count = 0
        self._tokens = 0

    def answer(self, wish: Wish, tokens: int) -> None:
        """Count tokens that have come of an answer.

        Raises:
            ApiError: 400, they are too many.
        """
        self._tokens += tokens
        if self._tokens > MAX_TOKENS_HELD:
            text = f"stream: without it a response holds at most {MAX_TOKENS_HELD} tokens"
            raise invalid(
                f"{text}: ask for a stream, or for shorter or fewer choices", "stream", "out_of_range"
            )
        self.take(wish, tokens)

    def take(self, wish: Wish, tokens: int) -> None:
        """Count those of some tokens.

        Raises:
            ApiError: 400, they are too many.
        """
        if wish.sampling.logprobs is None:
            return
        self._count += tokens * (1 + wish.sampling.logprobs)
        if self._count > MAX_LOGPROBS_HELD:
            text = f"logprobs: the response would hold more than {MAX_LOGPROBS_HELD} log probabilities"
            raise invalid(
                f"{text}: ask for fewer, or for shorter or fewer choices", "logprobs", "out_of_range"
            )


class Deliveries:
    """Counts an answer's tokens, and the time between their deliveries."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._last: float | None = None

    def took(self, tokens: int) -> None:
        """Note tokens that have just come."""
        now = time.monotonic()
        self._metrics.output_tokens.inc(tokens)
        if self._last is not None and tokens:
            self._metrics.between_tokens_seconds.observe((now - self._last) / tokens)
        self._last = now


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt at the beginning of an answer."""

    text: str
    scored: list[ScoredToken]
    """Its tokens with log probabilities, where asked for."""


class Sequence:
    """A sequence that engines run: placed, read piece by piece, closed. `close` must be called."""

    def __init__(
        self, gateway: Gateway, dispatcher: Dispatcher, job: Job, index: int, began: float, held: Held
    ) -> None:
        self.wish = job.wish
        self._held = held
        self.index = index
        """Of the choice, in the response."""
        self.finish: Finish | None = None
        """The engine's end of it, once it is known."""
        self.cached_tokens = 0
        self._gateway = gateway
        self._dispatcher = dispatcher
        self._began = began
        self._job = job
        self._running: Running | None = None
        self._siblings: Siblings | None = None
        """Those that count it as running."""
        self._answer: Answer | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.reason: str | None = None
        """OpenAI's finish_reason, once it has ended."""
        self._metrics = gateway.metrics.of(job.wish.model)
        self._times = Deliveries(self._metrics)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of a response: where the sequence went, and why."""
        shown = self._job.route and self._gateway.config.route_header
        return [(b"x-mizzen-route", self._job.route.encode())] if shown else []

    @property
    def tenant(self) -> str:
        """The name of the key whose request this is."""
        return self._job.ticket.tenant.name

    # ── the prompt ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def text(self) -> TextModel:
        """The text side of the model that answers.

        Raises:
            ApiError: 503, the sequence has not been placed.
        """
        if self._job.text is None:
            raise unavailable("no engine is ready")
        return self._job.text

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self._job.prompt.tolist()

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self._job.prompt)

    @property
    def prompt_text(self) -> str:
        """The prompt as text: what the client sent, or what its tokens say."""
        if isinstance(self.wish.prompt, str):
            return self.wish.prompt
        return self.text.tokenizer.decode(self.prompt, self.wish.skip_special_tokens)

    @property
    def echo(self) -> Echo | None:
        """The prompt as the answer's beginning, where that is asked for."""
        if not self.wish.echo:
            return None
        tokenizer, skip = self.text.tokenizer, self.wish.skip_special_tokens
        scored = (
            scored_prompt(tokenizer, self.prompt, self._prompt_logprobs, skip) if self.wish.logprobs else []
        )
        return Echo(self.prompt_text, scored)

    def like(self, other: Sequence) -> None:
        """Take over the prompt of another sequence of the same request, which has been placed."""
        given = other._job
        self._job.text, self._job.prompt, self._job.blocks = given.text, given.prompt, given.blocks
        self._prompt_logprobs = other._prompt_logprobs

    # ── the answer ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return 0 if self._answer is None else self._answer.tokens

    @property
    def reasoning_tokens(self) -> int:
        """How many of them were reasoning."""
        return 0 if self._answer is None else self._answer.reasoning_tokens

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of its tokens, where they are asked for."""
        return 0.0 if self._answer is None else self._answer.logprob / max(1, self._answer.tokens)

    async def place(self) -> None:
        """Wait until an engine has given the first tokens, unless it has.

        Raises:
            ApiError: it cannot be served, or not in time.
        """
        if self._answer is not None:
            return
        self._gateway.wait_from_now(self._job.ticket)
        self._running = await self._dispatcher.place(self._job)
        self._siblings, self._job.ticket.siblings = self._job.ticket.siblings, None
        if self._siblings is not None:
            self._siblings.began()
        count_placed(self._gateway, self._job)
        self._begin()
        if self.wish.echo:
            self._held.take(self.wish, self.prompt_tokens)

    async def next(self) -> Piece:
        """Return the next piece; one with a reason is the last.

        Raises:
            StreamLost, EngineRefused: the engine has lost it.
        """
        running, answer = self._placed()
        tokens, finish = await running.next()
        piece = answer.add(tokens, finish, running.take_logprobs() if self.wish.logprobs else [])
        self._times.took(len(piece.ids))
        self.reason = piece.reason
        return piece

    async def collect(self) -> list[Piece]:
        """Place it and return its whole answer. Nothing was sent yet: a lost engine costs only time.

        Raises:
            ApiError: it cannot be served.
        """
        await self.place()
        while True:
            running, _ = self._placed()
            pieces: list[Piece] = []
            try:
                while not pieces or pieces[-1].reason is None:
                    pieces.append(await self.next())
                    self._held.answer(self.wish, len(pieces[-1].ids))
            except (StreamLost, EngineRefused) as error:
                lost = error if isinstance(error, StreamLost) else StreamLost("refused", str(error))
                running.close()
                self._dispatcher.lost(self._job, running.engine, lost)
                self._running = await self._dispatcher.place(self._job)
                self._begin()
            else:
                await self.end()
                return pieces

    def broke_off(self, error: StreamLost | EngineRefused) -> ApiError:
        """Return what a client is told when `next` has raised an error."""
        return self._dispatcher.broke_off(error)

    async def end(self) -> None:
        """Wait for the engine's end of it; one that a stop string has ended is aborted first."""
        running, _ = self._placed()
        if running.finish is None:
            running.stream.abort()
            self._gateway.metrics.aborts.labels("stop_string").inc()
            running.finish = await running.stream.final(FINAL_SECONDS)
        self.finish = running.finish
        self.cached_tokens = running.cached_tokens

    def close(self) -> None:
        """Abort what still runs, and give its turn back."""
        if self._running is not None:
            self._running.close()
            self.cached_tokens = self._running.cached_tokens
            self._metrics.cached_tokens.inc(self.cached_tokens)
            self._running = None
        if self._siblings is not None:
            self._siblings.ended()
            self._siblings = None
        self._job.ticket.output_tokens = (
            self.tokens
        )  # an engine may have given more than a stop string let by
        self._dispatcher.leave(self._job)

    def _begin(self) -> None:
        running = self._running
        if running is not None and running.prompt_logprobs:
            self._prompt_logprobs = running.prompt_logprobs
        start = len(self.prompt_text) if self.wish.echo else 0
        self._answer = Answer(self.wish, self.text, self._job.prompt, start)

    def _placed(self) -> tuple[Running, Answer]:
        if self._running is None or self._answer is None:
            raise RuntimeError("the sequence has not been placed")
        return self._running, self._answer
