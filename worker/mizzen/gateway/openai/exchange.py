"""One generating request and its response: its sequences side by side, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mizzen.common.tasks import together
from mizzen.gateway.admission.queue_entry import QueueEntry, reserve_tokens
from mizzen.gateway.auth.authentication import release_parallel_slot
from mizzen.gateway.http.request_bodies import ClientGone
from mizzen.gateway.openai.http_call import Call
from mizzen.gateway.openai.response_writers import Choice, Writer
from mizzen.gateway.requests.answer import AnswerPiece, join_pieces
from mizzen.gateway.requests.backpressure import OutputQueue, StreamClient
from mizzen.gateway.requests.fan_out import MAX_CONCURRENT_SEQUENCES, link_siblings, new_routed_request
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.sequence import GeneratedSequence, ResponseBudget
from mizzen.gateway.requests.usage import TokenUsage
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.telemetry.request_record import get_record
from mizzen.wire.client.stream import EngineRefused, StreamLost

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MANY_TOKENS = 2048
"""Log probabilities of more tokens are written off the event loop."""
NO_CACHE = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Exchange(Call):
    """Serves one request that generates."""

    def __init__(
        self,
        gateway: Gateway,
        parse: Callable[[bytes], GenerationRequest],
        writer: Callable[[GenerationRequest], Writer],
    ) -> None:
        super().__init__(gateway)
        self._parse = parse
        self._new_writer = writer

    async def _serve(self, body: bytes) -> None:
        generation = await self._gateway.body_reader.parse_body(body, self._parse, self._scope)
        self._time.shorten(generation.timeout_seconds)
        dispatcher = self._gateway.open_service(generation.model, self._scope).dispatcher
        self._generation, self._writer = generation, self._new_writer(generation)
        groups = self._groups(generation, dispatcher)
        try:
            if generation.stream:
                await self._stream(groups)
            else:
                await self._whole(groups)
        finally:
            for sequence in (one for group in groups for one in group):
                sequence.close()
            self._note(groups)

    def _groups(self, generation: GenerationRequest, dispatcher: Dispatcher) -> list[list[GeneratedSequence]]:
        """Return the sequences of each prompt.

        Raises:
            ApiError: the tenant may not have them, or lacks the tokens for all of them.
        """
        gateway, size, held = self._gateway, generation.best_of, ResponseBudget()
        groups: list[list[GeneratedSequence]] = []
        entries: list[QueueEntry] = []
        for index, one in enumerate(generation.split_sequences()):
            first = index % size == 0
            if first:
                groups.append([])
            routed = new_routed_request(gateway, self._scope, one, self._began, first=first)
            groups[-1].append(GeneratedSequence(gateway, dispatcher, routed, index, self._began, held))
            entries.append(routed.queue_entry)
        link_siblings(gateway, entries)
        reserve_tokens(entries)
        return groups

    # ── a stream ──────────────────────────────────────────────────────────────────────────────────────────

    async def _stream(self, groups: list[list[GeneratedSequence]]) -> None:
        first = groups[0][0]
        await first.place()  # an error up to here has a status code of its own
        await self._start(
            200, [(b"content-type", b"text/event-stream; charset=utf-8"), *NO_CACHE, *first.headers]
        )
        self._sending = asyncio.Lock()
        self._open = sum(map(len, groups))
        self._client = StreamClient(first.tenant, self._output)
        if len(groups) == len(groups[0]) == 1:
            await self._pump(first)
        else:
            await self._all(groups, self._pump)
        last = self._writer.usage(self._usage(groups)) if self._generation.include_usage else b""
        await self._write(last + self._writer.end(), more=False)

    async def _pump(self, sequence: GeneratedSequence) -> None:
        """Send a sequence's events as its tokens come; it ends as soon as the engine does, whoever reads.

        Raises:
            ApiError: the answer broke off, or it could not be placed.
        """
        parts = OutputQueue(self._gateway.unread_output, self._client)
        try:
            await self._deliver(sequence, parts)
            await parts.wait_sent()
        finally:
            await parts.close()

    async def _deliver(self, sequence: GeneratedSequence, parts: OutputQueue) -> None:
        writer, generation, index = self._writer, self._generation, sequence.index
        detailed = generation.logprobs or generation.return_token_ids
        await sequence.place()
        size = sequence.prompt_tokens if generation.echo else 0
        events = await off_loop(size, lambda: writer.first(index, sequence.echo))
        reason = None
        try:
            while reason is None:
                piece = await sequence.next_piece()
                reason = piece.finish_reason
                if not piece.delta and reason is None and not (detailed and piece.token_ids):
                    continue
                if parts.is_sending:
                    parts.push(piece, self._so_far(sequence))
                    continue
                events += writer.piece(index, piece, self._so_far(sequence))
                if self._sending.locked() or not self._write_now(events):
                    parts.start_sending(self._send_late(index, events, parts))
                events = b""
        except (StreamLost, EngineRefused) as error:
            cause = error.cause if isinstance(error, StreamLost) else "refused"
            self._gateway.metrics.stream_errors.labels(cause).inc()
            raise sequence.stream_error(error) from error
        await sequence.wait_finish()
        sequence.close()
        self._open -= 1
        if not self._open:
            release_parallel_slot(self._scope)

    async def _send_late(self, index: int, events: bytes, parts: OutputQueue) -> None:
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
                events = self._writer.piece(index, *parts.pop())
        except ClientGone:
            self._cut()
            raise

    # ── a whole response ──────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, groups: list[list[GeneratedSequence]]) -> None:
        found: dict[int, list[AnswerPiece]] = {}

        async def collect(sequence: GeneratedSequence) -> None:
            found[sequence.index] = await sequence.collect()
            sequence.close()

        if len(groups) == len(groups[0]) == 1:
            await collect(groups[0][0])
        else:
            await self._all(groups, collect)
        chosen = [sequence for group in groups for sequence in best(group, self._generation.n)]

        def body() -> bytes:
            choices = [
                Choice(index, join_pieces(found[one.index]), one.echo, one.prompt)
                for index, one in enumerate(chosen)
            ]
            return self._writer.whole(choices, self._usage(groups))

        size = sum(one.output_tokens + one.prompt_tokens * self._generation.echo for one in chosen)
        answer = await off_loop(size * self._generation.logprobs, body)
        await self._answer(answer, chosen[0].headers)

    # ── both ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _all(
        self, groups: list[list[GeneratedSequence]], work: Callable[[GeneratedSequence], Awaitable[None]]
    ) -> None:
        """Do the work of all sequences side by side; the first failure ends the others.

        The first of a prompt goes ahead until it has tokens: the prefix cache then has the prompt, in the
        engine that the router prefers for the others.

        Raises:
            ApiError: a sequence failed.
        """
        slots = asyncio.Semaphore(MAX_CONCURRENT_SEQUENCES)

        async def one(sequence: GeneratedSequence, first: GeneratedSequence, placed: asyncio.Event) -> None:
            if sequence is not first:
                await placed.wait()
                sequence.copy_prompt(first)
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

    def _note(self, groups: list[list[GeneratedSequence]]) -> None:
        """Tell the request's record what came of it."""
        record, usage = get_record(self._scope), self._usage(groups)
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.output_tokens
        record.cached_tokens = usage.cached_tokens
        record.finish_reasons = [one.finish_reason for group in groups for one in group if one.finish_reason is not None]

    def _usage(self, groups: list[list[GeneratedSequence]]) -> TokenUsage:
        """Return the counts of all sequences; a prompt counts once, whatever comes of it."""
        prompts = sum(group[0].prompt_tokens for group in groups)
        cached = sum(group[0].cached_tokens for group in groups)
        output = sum(sequence.output_tokens for group in groups for sequence in group)
        reasoning = sum(sequence.reasoning_tokens for group in groups for sequence in group)
        return TokenUsage(prompts, output, cached, reasoning)

    def _so_far(self, sequence: GeneratedSequence) -> TokenUsage | None:
        """Return the counts of one sequence, where events hold them."""
        if not self._generation.continuous_usage:
            return None
        return TokenUsage(
            sequence.prompt_tokens, sequence.output_tokens, sequence.cached_tokens, sequence.reasoning_tokens
        )


async def off_loop(tokens: int, work: Callable[[], bytes]) -> bytes:
    """Return what the work gives; that of many tokens is done beside the event loop."""
    return await asyncio.to_thread(work) if tokens > MANY_TOKENS else work()


def best(sequences: list[GeneratedSequence], count: int) -> list[GeneratedSequence]:
    """Return the `count` sequences of the highest mean log probability; all of them in their order."""
    if len(sequences) <= count:
        return sequences
    return sorted(sequences, key=lambda one: one.mean_logprob, reverse=True)[:count]
