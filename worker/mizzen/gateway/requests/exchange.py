# SPDX-License-Identifier: Apache-2.0
"""Serve one generating request: run its sequences concurrently and stream or return their output.

Endpoints create one `GenerationExchange` per request. This class is independent of the API: a parser creates
the `GenerationRequest`, and a `ResponseWriter` encodes the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mizzen.common.tasks import run_together
from mizzen.gateway.admission.queue_entry import QueueEntry, reserve_tokens
from mizzen.gateway.auth.authentication import release_parallel_slot
from mizzen.gateway.http.api_call import ApiCall
from mizzen.gateway.http.request_bodies import ClientGone
from mizzen.gateway.images.hold import hold_images
from mizzen.gateway.requests.answer import AnswerPiece, join_pieces
from mizzen.gateway.requests.backpressure import OutputQueue, StreamClient
from mizzen.gateway.requests.fan_out import MAX_CONCURRENT_SEQUENCES, link_siblings, new_routed_request
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.prompt_scores.shared_prefixes import order_sources_first
from mizzen.gateway.requests.response_writer import FinishedChoice, ResponseWriter
from mizzen.gateway.requests.sequence import GeneratedSequence, ResponseBudget
from mizzen.gateway.requests.usage import TokenUsage
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.gateway.telemetry.request_record import get_record
from mizzen.wire.client.stream import EngineRefused, StreamLost

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway
    from mizzen.gateway.services import Service

OFF_LOOP_TOKENS = 2048
"""Number of tokens above which echoes and log probabilities are encoded off the event loop, in a thread."""
NO_CACHE = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class GenerationExchange(ApiCall):
    """One HTTP request that generates tokens, together with its response."""

    def __init__(
        self,
        gateway: Gateway,
        parse: Callable[[bytes], GenerationRequest],
        writer: Callable[[GenerationRequest], ResponseWriter],
    ) -> None:
        super().__init__(gateway)
        self._parse = parse
        self._new_writer = writer

    async def _serve(self, body: bytes) -> None:
        generation = await self._gateway.body_reader.parse_body(body, self._parse, self._scope)
        get_record(self._scope).ignored_fields = generation.ignored_fields
        self._deadline.shorten(generation.timeout_seconds)
        service = self._gateway.find_active_service(generation.model, self._scope)
        self._generation, self._writer = generation, self._new_writer(generation)
        groups = await self._new_groups(generation, service.dispatcher)
        try:
            with hold_images(self._gateway, generation, self._scope):
                if generation.stream:
                    await self._serve_stream(groups)
                else:
                    await self._serve_full(groups, service)
        finally:
            for sequence in (sequence for group in groups for sequence in group):
                sequence.close()
            self._fill_record(groups)

    async def _new_groups(
        self, generation: GenerationRequest, dispatcher: Dispatcher
    ) -> list[list[GeneratedSequence]]:
        """Return the sequences of each prompt, one list per prompt.

        Raises:
            ApiError: the tenant may not use the requested priority, or its token budget does not cover all
                sequences.
        """
        gateway, sequences_per_prompt, budget = self._gateway, generation.best_of, ResponseBudget()
        groups: list[list[GeneratedSequence]] = []
        entries: list[QueueEntry] = []
        for index, sequence_request in enumerate(generation.split_sequences()):
            first = index % sequences_per_prompt == 0
            if first:
                groups.append([])
            routed = new_routed_request(gateway, self._scope, sequence_request, self._began, first=first)
            groups[-1].append(GeneratedSequence(gateway, dispatcher, routed, index, self._began, budget))
            entries.append(routed.queue_entry)
        link_siblings(gateway, entries)
        await reserve_tokens(entries)
        return groups

    # ── streaming ──────────────────────────────────────────────────────────────────────────────────────────

    async def _serve_stream(self, groups: list[list[GeneratedSequence]]) -> None:
        first = groups[0][0]
        await first.place()  # errors up to this point are sent with their own status code
        await self._start_response(
            200, [(b"content-type", b"text/event-stream; charset=utf-8"), *NO_CACHE, *first.headers]
        )
        self._sending = asyncio.Lock()
        self._unfinished = sum(map(len, groups))
        self._client = StreamClient(first.tenant, self._output)
        if len(groups) == len(groups[0]) == 1:
            await self._stream_sequence(first)
        else:
            await self._run_all(groups, self._stream_sequence)
        last = self._writer.write_usage(self._usage(groups)) if self._generation.include_usage else b""
        await self._write(last + self._writer.end_stream(), more=False)

    async def _stream_sequence(self, sequence: GeneratedSequence) -> None:
        """Send a sequence's events as its tokens arrive; a slow client does not slow down the engine.

        Raises:
            ApiError: no engine could start the sequence, or its output was interrupted.
        """
        queue = OutputQueue(self._gateway.unread_output, self._client)
        try:
            await self._produce_events(sequence, queue)
            await queue.wait_sent()
        finally:
            await queue.close()

    async def _produce_events(self, sequence: GeneratedSequence, queue: OutputQueue) -> None:
        writer, generation, index = self._writer, self._generation, sequence.index
        detailed = generation.logprobs or generation.return_token_ids
        await sequence.place()
        echo_tokens = sequence.prompt_tokens if generation.echo else 0
        prompt_tokens = sequence.prompt_tokens
        events = await run_off_loop(
            echo_tokens, lambda: writer.start_choice(index, sequence.echo, prompt_tokens)
        )
        reason = None
        try:
            while reason is None:
                piece = await sequence.next_piece()
                reason = piece.finish_reason
                if not piece.delta and reason is None and not (detailed and piece.token_ids):
                    continue
                if queue.is_sending:
                    queue.push(piece, self._usage_so_far(sequence))
                    continue
                events += writer.write_piece(index, piece, self._usage_so_far(sequence))
                if self._sending.locked() or not self._try_write(events):
                    queue.start_sending(self._send_queued(index, events, queue))
                events = b""
        except (StreamLost, EngineRefused) as error:
            cause = error.cause if isinstance(error, StreamLost) else "refused"
            self._gateway.metrics.stream_errors.labels(cause).inc()
            raise sequence.stream_error(error) from error
        await sequence.wait_finish()
        sequence.close()
        self._unfinished -= 1
        if not self._unfinished:
            release_parallel_slot(self._scope)

    async def _send_queued(self, index: int, events: bytes, queue: OutputQueue) -> None:
        """Send `events`, then the queued output, at the client's pace.

        The sequences of a response take turns, one write each.

        Raises:
            ClientGone: the client does not read. Its connection is aborted, which ends the request.
        """
        try:
            while True:
                async with self._sending:
                    await self._write(events)
                if not queue:
                    return
                events = self._writer.write_piece(index, *queue.pop())
        except ClientGone:
            self._abort_connection()
            raise

    # ── without streaming ──────────────────────────────────────────────────────────────────────────────────

    async def _serve_full(self, groups: list[list[GeneratedSequence]], service: Service) -> None:
        pieces: dict[int, list[AnswerPiece]] = {}
        firsts = [group[0] for group in groups]
        model = service.table.find_sole_model() if self._generation.returns_all_scores else None
        if model is not None:
            for first in firsts:
                first.recall_scores(service.scored_prompts, model)

        async def collect(sequence: GeneratedSequence) -> None:
            pieces[sequence.index] = await sequence.collect()
            sequence.close()

        if len(groups) == len(groups[0]) == 1:
            await collect(groups[0][0])
        else:
            await self._run_all(groups, collect)
        for index, source in order_sources_first([first.generation.logprobs_source for first in firsts]):
            firsts[index].take_prompt_logprobs(firsts[source])
        if self._generation.returns_all_scores:
            for first in firsts:
                first.remember_scores(service.scored_prompts)
        chosen = [sequence for group in groups for sequence in select_best(group, self._generation.n)]

        def encode_response() -> bytes:
            choices = [
                FinishedChoice(index, join_pieces(pieces[sequence.index]), sequence.echo, sequence.prompt)
                for index, sequence in enumerate(chosen)
            ]
            return self._writer.full_response(choices, self._usage(groups))

        tokens = sum(
            sequence.output_tokens + sequence.prompt_tokens * self._generation.echo for sequence in chosen
        )
        body = await run_off_loop(tokens * self._generation.logprobs, encode_response)
        await self._send_json(body, chosen[0].headers)

    # ── common ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _run_all(
        self, groups: list[list[GeneratedSequence]], work: Callable[[GeneratedSequence], Awaitable[None]]
    ) -> None:
        """Run `work` for all sequences concurrently; the first failure cancels the others.

        The first sequence of a prompt starts before the prompt's other sequences. Once it has tokens, its
        engine has the prompt in its prefix cache, and the router prefers that engine for the others.

        Raises:
            ApiError: the error of the first sequence that failed.
        """
        slots = asyncio.Semaphore(MAX_CONCURRENT_SEQUENCES)

        async def run_sequence(
            sequence: GeneratedSequence, first: GeneratedSequence, placed: asyncio.Event
        ) -> None:
            if sequence is not first:
                await placed.wait()
                sequence.copy_prompt(first)
            async with slots:
                await sequence.place()
                placed.set()
                await work(sequence)

        placed_events = [asyncio.Event() for _ in groups]
        await run_together(
            *(
                run_sequence(sequence, group[0], placed)
                for group, placed in zip(groups, placed_events, strict=True)
                for sequence in group
            )
        )

    def _fill_record(self, groups: list[list[GeneratedSequence]]) -> None:
        """Write token counts and finish reasons into the request's record."""
        record, usage = get_record(self._scope), self._usage(groups)
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.output_tokens
        record.cached_tokens = usage.cached_tokens
        record.finish_reasons = [
            sequence.finish_reason
            for group in groups
            for sequence in group
            if sequence.finish_reason is not None
        ]

    def _usage(self, groups: list[list[GeneratedSequence]]) -> TokenUsage:
        """Return the token counts of all sequences. Each prompt counts once, not once per sequence."""
        prompts = sum(group[0].prompt_tokens for group in groups)
        cached = sum(group[0].cached_tokens for group in groups)
        output = sum(sequence.output_tokens for group in groups for sequence in group)
        reasoning = sum(sequence.reasoning_tokens for group in groups for sequence in group)
        return TokenUsage(prompts, output, cached, reasoning)

    def _usage_so_far(self, sequence: GeneratedSequence) -> TokenUsage | None:
        """Return a sequence's token counts so far; None unless each stream event reports them."""
        if not self._generation.continuous_usage:
            return None
        return TokenUsage(
            sequence.prompt_tokens, sequence.output_tokens, sequence.cached_tokens, sequence.reasoning_tokens
        )


async def run_off_loop(tokens: int, work: Callable[[], bytes]) -> bytes:
    """Return the result of `work`; run it in a thread if it processes more than `OFF_LOOP_TOKENS` tokens."""
    return await asyncio.to_thread(work) if tokens > OFF_LOOP_TOKENS else work()


def select_best(sequences: list[GeneratedSequence], count: int) -> list[GeneratedSequence]:
    """Return the `count` sequences with the highest mean log probability.

    If there are at most `count`, return all in their original order.
    """
    if len(sequences) <= count:
        return sequences
    return sorted(sequences, key=lambda sequence: sequence.mean_logprob, reverse=True)[:count]
