"""One generating request and its response: its sequences side by side, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mizzen.common.tasks import together
from mizzen.gateway.admission.admission import Ticket, reserve
from mizzen.gateway.auth.authentication import leave_place
from mizzen.gateway.http.request_bodies import ClientGone
from mizzen.gateway.openai.http_call import Call
from mizzen.gateway.openai.response_bodies import CompletionTokensDetails, PromptTokensDetails, Usage
from mizzen.gateway.openai.response_writers import Choice, Writer
from mizzen.gateway.requests.answer import Piece, whole
from mizzen.gateway.requests.backpressure import Client, Parts
from mizzen.gateway.requests.fan_out import AT_ONCE, new_job, relate
from mizzen.gateway.requests.generation_request import Wish
from mizzen.gateway.requests.sequence import Held, Sequence
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.telemetry.request_record import record_of
from mizzen.wire.client.stream import EngineRefused, StreamLost

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MANY_TOKENS = 2048
"""Log probabilities of more tokens are written off the event loop."""
NO_CACHE = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Exchange(Call):
    """Serves one request that generates."""

    def __init__(
        self, gateway: Gateway, parse: Callable[[bytes], Wish], writer: Callable[[Wish], Writer]
    ) -> None:
        super().__init__(gateway)
        self._parse = parse
        self._new_writer = writer

    async def _serve(self, body: bytes) -> None:
        wish = await self._gateway.reader.read(body, self._parse, self._scope)
        self._time.bound(wish.timeout_seconds)
        dispatcher = self._gateway.service_of(wish.model, self._scope).dispatcher
        self._wish, self._writer = wish, self._new_writer(wish)
        groups = self._groups(wish, dispatcher)
        try:
            if wish.stream:
                await self._stream(groups)
            else:
                await self._whole(groups)
        finally:
            for sequence in (one for group in groups for one in group):
                sequence.close()
            self._note(groups)

    def _groups(self, wish: Wish, dispatcher: Dispatcher) -> list[list[Sequence]]:
        """Return the sequences of each prompt.

        Raises:
            ApiError: the tenant may not have them, or lacks the tokens for all of them.
        """
        gateway, size, held = self._gateway, wish.best_of, Held()
        groups: list[list[Sequence]] = []
        tickets: list[Ticket] = []
        for index, one in enumerate(wish.sequences()):
            first = index % size == 0
            if first:
                groups.append([])
            job = new_job(gateway, self._scope, one, self._began, first=first)
            groups[-1].append(Sequence(gateway, dispatcher, job, index, self._began, held))
            tickets.append(job.ticket)
        relate(gateway, tickets)
        reserve(tickets)
        return groups

    # ── a stream ──────────────────────────────────────────────────────────────────────────────────────────

    async def _stream(self, groups: list[list[Sequence]]) -> None:
        first = groups[0][0]
        await first.place()  # an error up to here has a status code of its own
        await self._start(
            200, [(b"content-type", b"text/event-stream; charset=utf-8"), *NO_CACHE, *first.headers]
        )
        self._sending = asyncio.Lock()
        self._open = sum(map(len, groups))
        self._client = Client(first.tenant, self._output)
        if len(groups) == len(groups[0]) == 1:
            await self._pump(first)
        else:
            await self._all(groups, self._pump)
        last = self._writer.usage(self._usage(groups)) if self._wish.include_usage else b""
        await self._write(last + self._writer.end(), more=False)

    async def _pump(self, sequence: Sequence) -> None:
        """Send a sequence's events as its tokens come; it ends as soon as the engine does, whoever reads.

        Raises:
            ApiError: the answer broke off, or it could not be placed.
        """
        parts = Parts(self._gateway.untaken, self._client)
        try:
            await self._deliver(sequence, parts)
            await parts.sent()
        finally:
            await parts.close()

    async def _deliver(self, sequence: Sequence, parts: Parts) -> None:
        writer, wish, index = self._writer, self._wish, sequence.index
        detailed = wish.logprobs or wish.return_token_ids
        await sequence.place()
        size = sequence.prompt_tokens if wish.echo else 0
        events = await off_loop(size, lambda: writer.first(index, sequence.echo))
        reason = None
        try:
            while reason is None:
                piece = await sequence.next()
                reason = piece.reason
                if not piece.delta and reason is None and not (detailed and piece.ids):
                    continue
                if parts.behind:
                    parts.add(piece, self._so_far(sequence))
                    continue
                events += writer.piece(index, piece, self._so_far(sequence))
                if self._sending.locked() or not self._write_now(events):
                    parts.send(self._send_late(index, events, parts))
                events = b""
        except (StreamLost, EngineRefused) as error:
            cause = error.cause if isinstance(error, StreamLost) else "refused"
            self._gateway.metrics.stream_errors.labels(cause).inc()
            raise sequence.broke_off(error) from error
        await sequence.end()
        sequence.close()
        self._open -= 1
        if not self._open:
            leave_place(self._scope)

    async def _send_late(self, index: int, events: bytes, parts: Parts) -> None:
        """Send events as the client takes them, and then what has come meanwhile.

        Sequences send by turns, one write each.

        Raises:
            ClientGone: the client takes nothing; its connection is cut, which ends the request.
        """
        try:
            while True:
                async with self._sending:
                    await self._write(events)
                if not parts:
                    return
                events = self._writer.piece(index, *parts.take())
        except ClientGone:
            self._cut()
            raise

    # ── a whole response ──────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, groups: list[list[Sequence]]) -> None:
        found: dict[int, list[Piece]] = {}

        async def collect(sequence: Sequence) -> None:
            found[sequence.index] = await sequence.collect()
            sequence.close()

        if len(groups) == len(groups[0]) == 1:
            await collect(groups[0][0])
        else:
            await self._all(groups, collect)
        chosen = [sequence for group in groups for sequence in best(group, self._wish.n)]

        def body() -> bytes:
            choices = [
                Choice(index, whole(found[one.index]), one.echo, one.prompt)
                for index, one in enumerate(chosen)
            ]
            return self._writer.whole(choices, self._usage(groups))

        size = sum(one.tokens + one.prompt_tokens * self._wish.echo for one in chosen)
        answer = await off_loop(size * self._wish.logprobs, body)
        await self._answer(answer, chosen[0].headers)

    # ── both ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _all(self, groups: list[list[Sequence]], work: Callable[[Sequence], Awaitable[None]]) -> None:
        """Do the work of all sequences side by side; the first failure ends the others.

        The first of a prompt goes ahead until it has tokens: the prefix cache then has the prompt, in the
        engine that the router prefers for the others.

        Raises:
            ApiError: a sequence failed.
        """
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(sequence: Sequence, first: Sequence, placed: asyncio.Event) -> None:
            if sequence is not first:
                await placed.wait()
                sequence.like(first)
            async with slots:
                await sequence.place()
                placed.set()
                await work(sequence)

        events = [asyncio.Event() for _ in groups]
        await together(
            *(
                one(sequence, group[0], placed)
                for group, placed in zip(groups, events, strict=True)
                for sequence in group
            )
        )

    def _note(self, groups: list[list[Sequence]]) -> None:
        """Tell the request's record what came of it."""
        record, usage = record_of(self._scope), self._usage(groups)
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.finish_reasons = [one.reason for group in groups for one in group if one.reason is not None]

    def _usage(self, groups: list[list[Sequence]]) -> Usage:
        """Return the counts of all sequences; a prompt counts once, whatever comes of it."""
        prompts = sum(group[0].prompt_tokens for group in groups)
        cached = sum(group[0].cached_tokens for group in groups)
        output = sum(sequence.tokens for group in groups for sequence in group)
        reasoning = sum(sequence.reasoning_tokens for group in groups for sequence in group)
        return counts(prompts, output, cached, reasoning)

    def _so_far(self, sequence: Sequence) -> Usage | None:
        """Return the counts of one sequence, where events hold them."""
        if not self._wish.continuous_usage:
            return None
        return counts(
            sequence.prompt_tokens, sequence.tokens, sequence.cached_tokens, sequence.reasoning_tokens
        )


async def off_loop(tokens: int, work: Callable[[], bytes]) -> bytes:
    """Return what the work gives; that of many tokens is done beside the event loop."""
    return await asyncio.to_thread(work) if tokens > MANY_TOKENS else work()


def counts(prompt: int, output: int, cached: int, reasoning: int) -> Usage:
    """Return counts of tokens as responses have them."""
    usage = Usage(prompt, output, prompt + output, PromptTokensDetails(cached))
    if reasoning:
        usage.completion_tokens_details = CompletionTokensDetails(reasoning)
    return usage


def best(sequences: list[Sequence], count: int) -> list[Sequence]:
    """Return the `count` sequences of the highest mean log probability; all of them in their order."""
    if len(sequences) <= count:
        return sequences
    return sorted(sequences, key=lambda one: one.mean_logprob, reverse=True)[:count]
