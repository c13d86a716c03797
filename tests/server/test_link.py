# SPDX-License-Identifier: Apache-2.0
"""A gateway's link to a simulated engine: log probabilities, embeddings and resumed requests end to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq.asyncio

from mizzen.core.request import FinishReason
from mizzen.engine.simulated.side_outputs import hidden_states
from mizzen.engine.simulated.side_outputs import logprob_entries as simulated_logprobs
from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig
from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.client.stream import EngineRefused, EngineStream, StreamLost, TokenLogprobs, logprob_entries
from mizzen.wire.messages import RefusalCode, Sampling

WAIT = 60.0
VOCAB = 1000
DEMO = Path(__file__).parents[2] / "models/demo"
MARK = TokenLogprobs(-1, 0.0, (), ())


def packed(prompt: list[int]) -> bytes:
    return np.array(prompt, "<i4").tobytes()


def expected(tokens: list[int], top: int, by_id: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    return logprob_entries(*simulated_logprobs(np.array(tokens, np.int32), top, by_id, VOCAB), len(by_id))


@asynccontextmanager
async def linked(model: Path, **options: Any) -> AsyncIterator[tuple[EngineLink, SimulatedEngine]]:
    config = SimulateConfig(
        model=str(model),
        wire_bind="tcp://127.0.0.1:*",
        **{"step_milliseconds": 0.5, "drain_timeout_seconds": 0.2, "check_integrity": True, **options},
    )
    with SimulatedEngine(config) as engine:
        context = zmq.asyncio.Context()
        link = EngineLink(engine.endpoint, gateway="test", context=context)
        task = asyncio.create_task(link.run())
        try:
            await until(lambda: link.welcome is not None)
            yield link, engine
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            context.destroy(linger=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110 a link has no event common to all conditions
            await asyncio.sleep(0.005)


async def read(stream: EngineStream) -> tuple[list[int], list[TokenLogprobs], Any]:
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    async with asyncio.timeout(WAIT):
        while True:
            more, finish = await stream.next()
            if more and not tokens and stream.prompt_logprobs is not None:
                stream.prompt_logprobs.append(MARK)  # no prompt logprobs may follow the first token
            tokens += more
            logprobs += stream.drain_logprobs()
            assert not stream.drain_logprobs()
            if finish is not None:
                return tokens, logprobs, finish


async def test_logprobs_arrive_with_their_tokens(model: Path) -> None:
    async with linked(model, prefill_chunk_tokens=8, kv_cache_tokens=512, page_size=4) as (link, _):
        prompts = [[(7 * i + j) % 900 + 3 for j in range(5 + 9 * i)] for i in range(8)]
        samplings = [
            Sampling(max_tokens=20),
            Sampling(max_tokens=20, logprobs=2, logprob_token_ids=(4, 9)),
            Sampling(max_tokens=20, logprobs=0, prompt_logprobs=3),
            Sampling(max_tokens=20, prompt_logprobs=0),
        ]
        streams = [link.generate(packed(p), samplings[i % 4]) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*map(read, streams))
        for i, (tokens, logprobs, finish) in enumerate(answers):
            sampling, prompt_logprobs = samplings[i % 4], streams[i].prompt_logprobs
            assert (len(tokens), finish.output_tokens) == (20, 20)
            if sampling.logprobs is None:
                assert logprobs == []
            else:
                assert logprobs == expected(tokens, sampling.logprobs, sampling.logprob_token_ids)
            if sampling.prompt_logprobs is None:
                assert prompt_logprobs is None
            else:
                assert prompt_logprobs == [*expected(prompts[i][1:], sampling.prompt_logprobs), MARK]
                assert finish.cached_tokens == 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_embeddings_equal_the_pooled_hidden_states(model: Path, pooling: str) -> None:
    async with linked(model, prefill_chunk_tokens=8, kv_cache_tokens=512, page_size=4) as (link, engine):
        prompts = [[(7 * i + j) % 900 + 3 for j in range(1 + 6 * i)] for i in range(12)]
        async with asyncio.timeout(WAIT):
            answers = await asyncio.gather(
                *(link.embed(packed(p), pooling, normalize=False) for p in prompts),
                read(link.generate(packed(prompts[3]), Sampling(max_tokens=30))),
            )
            repeated, prompt_tokens, cached = await link.embed(packed(prompts[-1]), pooling)
        for prompt, (vector, count, _) in zip(prompts, answers[:-1], strict=True):
            states = hidden_states(np.array(prompt, np.int32), 0)
            expected = states[-1] if pooling == "last" else states.mean(0)
            assert vector.dtype == np.float32
            np.testing.assert_allclose(vector, expected, atol=1e-5)
            assert count == len(prompt)
        assert (prompt_tokens, cached > 0) == (67, pooling == "last")
        assert np.linalg.norm(repeated) == pytest.approx(1, abs=1e-5)
        assert len(answers[-1][0]) == 30
        assert link.open_streams == 0
        await until(lambda: link.stats is not None and link.stats.running == link.stats.waiting == 0)
        assert engine.status["integrity"] == 0


async def test_invalid_requests_are_refused_with_a_message(model: Path) -> None:
    async with linked(model) as (link, _):
        for wrong, message in (
            (Sampling(logprobs=21), "logprobs must be between 0 and 20"),
            (Sampling(logit_bias=((1000, 1.0),)), "logit_bias holds 1000; token ids go from 0 to 999"),
            (Sampling(logprobs=1, logprob_token_ids=(-1,)), "logprob_token_ids holds -1"),
            (Sampling(frequency_penalty=3.0), "frequency_penalty must be between -2 and 2"),
            (Sampling(repetition_penalty=float("nan")), "repetition_penalty must be between 0.01 and 10"),
            (Sampling(min_tokens=-1), "min_tokens must be between 0 and 2147483647"),
            (Sampling(grammar=("yaml", "")), "grammar must be one of json_object, json_schema"),
        ):
            with pytest.raises(EngineRefused, match=message) as refused:
                await read(link.generate(packed([5, 6]), wrong))
            assert refused.value.code == RefusalCode.INVALID
        for generated, message in ((2, "at least one must be the prompt's"), (-1, "generated is -1")):
            with pytest.raises(EngineRefused, match=message):
                await read(link.generate(packed([5, 6]), Sampling(), generated=generated))
        with pytest.raises(EngineRefused, match="the output is complete already"):
            await read(link.generate(packed([5, 6]), Sampling(max_tokens=1), generated=1))
        for prompt, pooling, message in (
            ([5], "first", "pooling must be one of last, mean, cls, not 'first'"),
            ([], "last", "prompt is empty"),
            ([1000], "mean", "prompt contains the token id 1000"),
            ([5] * 2048, "mean", "prompt must be shorter than the context"),
        ):
            with pytest.raises(EngineRefused, match=message):
                await link.embed(packed(prompt), pooling)
        with pytest.raises(EngineRefused, match="second_start must be between 0 and 1, not 2"):
            await link.embed(packed([5, 6]), second_start=2)
        assert link.open_streams == 0


async def test_a_cancelled_embedding_is_aborted(model: Path) -> None:
    async with linked(model, max_running_requests=1, step_milliseconds=20.0) as (link, _):
        busy = link.generate(packed([5, 6, 7]), Sampling(max_tokens=2000))
        await busy.next()
        waiting = [asyncio.create_task(link.embed(packed([8, 9]))) for _ in range(3)]
        await until(lambda: link.stats is not None and link.stats.waiting == 3)
        waiting[1].cancel()
        await until(lambda: link.open_streams == 3)
        busy.abort()
        async with asyncio.timeout(WAIT):
            vectors = await asyncio.gather(waiting[0], waiting[2])
        np.testing.assert_array_equal(vectors[0][0], vectors[1][0])
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]


async def test_an_embedding_fails_when_its_engine_stops(model: Path) -> None:
    async with linked(model, max_running_requests=1, step_milliseconds=20.0) as (link, engine):
        busy = link.generate(packed([5, 6, 7]), Sampling(max_tokens=2000))
        await busy.next()
        task = asyncio.create_task(link.embed(packed([8, 9])))
        await until(lambda: link.stats is not None and link.stats.waiting == 1)
        await asyncio.to_thread(engine.stop)
        with pytest.raises(StreamLost):
            async with asyncio.timeout(WAIT):
                await task


@pytest.mark.parametrize("cut", [1, 7, 19])
async def test_another_engine_continues_a_cut_stream(model: Path, cut: int) -> None:
    prompt = list(range(20, 50))
    sampling = Sampling(temperature=0.7, seed=9, max_tokens=20, logprobs=1, min_tokens=4)
    async with linked(model) as (link, _):
        tokens, logprobs, end = await read(link.generate(packed(prompt), sampling))
    async with linked(model) as (link, _):
        stream = link.generate(packed(prompt + tokens[:cut]), sampling, generated=cut)
        continued, continued_logprobs, continued_end = await read(stream)
    assert continued == tokens[cut:]
    assert continued_logprobs == logprobs[cut:]
    assert (continued_end.reason, continued_end.prompt_tokens, continued_end.output_tokens) == (
        FinishReason.LENGTH,
        len(prompt),
        20,
    )
    assert end.output_tokens == continued_end.output_tokens


async def test_a_scripted_reply_resumes_where_it_was_cut() -> None:
    async with linked(DEMO, reply="one two three four five six") as (link, _):
        tokens, _, _ = await read(link.generate(packed([5, 6, 7]), Sampling()))
        cut = len(tokens) // 2
        resumed = link.generate(packed([5, 6, 7, *tokens[:cut]]), Sampling(), generated=cut)
        assert (await read(resumed))[0] == tokens[cut:]
