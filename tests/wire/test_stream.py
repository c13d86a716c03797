# SPDX-License-Identifier: Apache-2.0
"""Log probabilities and embeddings: delivery to the requesting gateway, and decoding in its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mizzen.core.outputs import RequestLogprobs, RequestSideOutputs, RequestVector, StepOutput
from mizzen.core.request import FinishReason, Pooling
from mizzen.wire.client.stream import EngineStream, StreamLost, TokenLogprobs, unpack_logprobs
from mizzen.wire.messages import Abort, Embed, Embedding, Logprobs, Outputs, Refused, Sampling


def output(bench: Any, rows: list[int], reports: RequestSideOutputs, finished: tuple[Any, ...] = ()) -> Any:
    count = len(rows)
    return bench.server.out.send(
        StepOutput(
            step=1,
            rids=np.array(rows, np.int64),
            offsets=np.zeros(count, np.int32),
            tokens=np.arange(count, dtype=np.int32),
            counts=None,
            finished=finished,
            side_outputs=reports,
        ),
        bench.now,
    )


def table(rows: int, width: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.arange(first, first + rows * width, dtype=np.int32).reshape(rows, width)
    return ids, -ids.astype(np.float32) / 8


def test_each_request_receives_its_own_logprobs(bench: Any) -> None:
    first, second = bench.gateway(), bench.gateway()
    first_rids = [bench.submit(first, handle, sampling=Sampling(logprobs=1)) for handle in (4, 5)]
    second_rid = bench.submit(second, 4, sampling=Sampling(prompt_logprobs=2))
    reports = RequestSideOutputs(
        (
            RequestLogprobs(first_rids[1], *table(1, 2, 10), False),
            RequestLogprobs(second_rid, *table(3, 3, 40), True),
            RequestLogprobs(first_rids[0], *table(1, 2, 70), False),
        )
    )
    waits = output(bench, first_rids, reports)
    assert len(waits) == 2  # prompt logprobs do not count as a first token
    outputs = bench.expect(first, Outputs)
    assert np.frombuffer(outputs.rids, "<u4").tolist() == [4, 5]
    assert [(logprobs.rid, logprobs.width, logprobs.prompt) for logprobs in outputs.logprobs] == [
        (5, 2, False),
        (4, 2, False),
    ]
    assert unpack_logprobs(outputs.logprobs[0], 0) == [TokenLogprobs(10, -1.25, ((11, -1.375),), ())]
    assert unpack_logprobs(outputs.logprobs[0], 1) == [TokenLogprobs(10, -1.25, (), (-1.375,))]
    outputs = bench.expect(second, Outputs)
    assert (outputs.rids, outputs.tokens, outputs.finished) == (b"", b"", ())
    (logprobs,) = outputs.logprobs
    assert (logprobs.rid, logprobs.prompt) == (4, True)
    assert [entry.token for entry in unpack_logprobs(logprobs, 0)] == [40, 43, 46]


def test_embedding_frees_its_handle_and_counts_as_first_token(bench: Any) -> None:
    gateway = bench.gateway()
    prompt = np.array([1, 2, 3], "<i4").tobytes()
    gateway.send(Embed(7, prompt, "mean", False, b"tenant", 3))
    bench.until(lambda: len(bench.requests) == 1)
    (request,) = bench.requests.values()
    assert (request.pooling, request.normalize, request.salt, request.priority) == (
        Pooling.MEAN,
        False,
        b"tenant",
        3,
    )
    bench.now += 2
    vector = np.arange(5, dtype=np.float32)
    end = bench.end(request.rid, FinishReason.LENGTH)
    waits = output(bench, [], RequestSideOutputs((), (RequestVector(request.rid, vector, 3, 1),)), (end,))
    assert waits.tolist() == [2.0]
    received = bench.expect(gateway, Embedding)
    assert np.frombuffer(received.vector, "<f4").tolist() == vector.tolist()
    assert (received.rid, received.prompt_tokens, received.cached_tokens) == (7, 3, 1)
    assert not len(bench.server.out.table)
    del bench.requests[request.rid]
    bench.submit(gateway, 7)
    gateway.drain()
    assert not [message for message in gateway.inbox if isinstance(message, Outputs)], (
        "a finish was sent in addition to the embedding"
    )


def test_aborted_embedding_is_answered_by_a_finish(bench: Any) -> None:
    gateway = bench.gateway()
    gateway.send(Embed(7, np.array([1], "<i4").tobytes()))
    gateway.send(Abort(7))
    bench.until(lambda: len(bench.aborts) == 1)
    bench.server.out.finish([bench.end(bench.aborts[0], FinishReason.ABORT)], 0)
    (end,) = bench.expect(gateway, Outputs).finished
    assert (end.rid, end.reason) == (7, FinishReason.ABORT)


def test_reused_handle_is_rejected_for_generate_and_embed(bench: Any) -> None:
    gateway = bench.gateway()
    bench.submit(gateway, 7)
    gateway.send(Embed(7, np.array([1], "<i4").tobytes()))
    refused = bench.expect(gateway, Refused)
    assert refused.rid is None
    assert "in use" in refused.message


def test_embed_before_hello_is_rejected(bench: Any) -> None:
    gateway = bench.gateway(hello=False)
    gateway.send(Embed(7, np.array([1], "<i4").tobytes()))
    assert bench.expect(gateway, Refused).rid == 7


def message(tokens: list[int], width: int = 2, prompt: bool = False) -> Logprobs:
    ids = np.repeat(np.array(tokens, "<i4")[:, None], width, axis=1)
    return Logprobs(1, width, ids.tobytes(), np.zeros_like(ids, "<f4").tobytes(), prompt)


@pytest.fixture
def make_stream() -> Callable[..., EngineStream]:
    def make(**options: Any) -> EngineStream:
        return EngineStream(1, lambda stream: None, **options)

    return make


async def test_stream_returns_logprobs_of_the_tokens_read(make_stream: Callable[..., EngineStream]) -> None:
    stream = make_stream(logprobs=0, prompt_logprobs=True)
    for tokens in ([1, 2], [3]):
        stream.add_logprobs(message(tokens, prompt=True))
    stream.add_logprobs(message([5, 6]))
    stream.add_tokens(0, [5, 6])
    assert (await stream.next())[0] == [5, 6]
    stream.add_logprobs(message([7]))
    stream.add_tokens(2, [7])
    assert [entry.token for entry in stream.drain_logprobs()] == [5, 6]
    assert stream.drain_logprobs() == []
    assert (await stream.next())[0] == [7]
    stream.add_logprobs(message([8]))
    stream.add_tokens(3, [8])
    assert (await stream.next())[0] == [8]
    assert [entry.token for entry in stream.drain_logprobs()] == [7, 8]
    assert [entry.token for entry in stream.prompt_logprobs or []] == [1, 2, 3]


async def test_missing_logprobs_fail_a_stream(make_stream: Callable[..., EngineStream]) -> None:
    stream = make_stream(logprobs=0)
    stream.add_logprobs(message([5]))
    stream.add_tokens(0, [5, 6])
    with pytest.raises(StreamLost, match="received 2 tokens and 1 log probabilities") as lost:
        await asyncio.wait_for(stream.next(), 60)
    assert lost.value.cause == "gap"


async def test_stream_ignores_logprobs_that_were_not_requested(
    make_stream: Callable[..., EngineStream],
) -> None:
    stream = make_stream(generated=4)
    stream.add_logprobs(message([5]))
    stream.add_logprobs(message([5], prompt=True))
    stream.add_tokens(4, [5])
    assert (await stream.next())[0] == [5]
    assert stream.drain_logprobs() == []
    assert stream.prompt_logprobs is None


@pytest.mark.parametrize(("width", "requested"), [(0, 0), (1, 1), (3, 0), (-1, 0)])
def test_inconsistent_logprob_widths_are_malformed(width: int, requested: int) -> None:
    good = message([1, 2], 2)
    with pytest.raises(ValueError, match="do not form rows of"):
        unpack_logprobs(Logprobs(1, width, good.ids, good.values), requested)
