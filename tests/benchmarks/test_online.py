# SPDX-License-Identifier: Apache-2.0
"""The client of benchmarks/online.py: how it generates and sends requests, and counts results."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from common_parts.lengths import Lengths
from hypothesis import given
from hypothesis import strategies as st
from online_parts.gateway_share import Histogram, describe_share, read_histograms, summarize_share
from online_parts.replay import MOST_REASON, Record, Target, reason_of, replay
from online_parts.summary import summarize
from online_parts.trace import (
    Session,
    Texts,
    TimedRequest,
    Workload,
    arrivals,
    generate,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def texts(vocabulary: int | None = 1000, seed: int = 0) -> Texts:
    return Texts(np.random.default_rng(seed), vocabulary)


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("100", 100, 100, 100),
        ("D(7)", 7, 7, 7),
        ("U(100,1024)", 100, 1024, 562),
        ("N(480, 240)", 1, 2000, 480),
        ("L(500,0.5)", 1, 5000, 566),
    ],
)
def test_lengths_follow_their_distribution(text: str, low: int, high: int, mean: float) -> None:
    lengths = Lengths(text).draw(np.random.default_rng(1), 4000)
    assert low <= min(lengths) <= max(lengths) <= high
    assert abs(np.mean(lengths) - mean) < 0.06 * mean


@pytest.mark.parametrize("text", ["", "U(3)", "D(1,2)", "X(1)", "U(9,2)", "-5"])
def test_invalid_lengths_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"must have the form|upper bound is below"):
        Lengths(text)


@given(rate=st.floats(0.1, 1000), burstiness=st.sampled_from([0.0, 0.5, 1.0, 3.0]), seed=st.integers(0, 99))
def test_arrivals_have_the_rate_and_the_variation(rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(np.random.default_rng(seed), 4000, rate, burstiness)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert abs(gaps.mean() * rate - 1) < 0.06 * max(burstiness, 0.1) * 5
    assert abs(gaps.std() / gaps.mean() - burstiness) < 0.1 + 0.35 * burstiness


def workload(**changes: Any) -> Workload:
    values = {"requests": 20, "rate": 5.0, "burstiness": 1.0, "shared": 0, "groups": 1, "turns": 1}
    values |= {"inputs": Lengths("U(3,9)"), "outputs": Lengths("U(2,4)"), "think": 0.5}
    return Workload(**values | changes)


def test_generated_sessions_share_prefixes_and_have_turns() -> None:
    sessions = generate(workload(shared=8, groups=2, turns=3), texts())
    assert sessions == generate(workload(shared=8, groups=2, turns=3), texts())
    assert [len(session.requests) for session in sessions] == [3, 3, 3, 3, 3, 3, 2]
    assert len({tuple(session.requests[0].prompt[:8]) for session in sessions}) == 2
    assert all(len(request.prompt) < 10 for session in sessions for request in session.requests[1:])
    words = generate(workload(), texts(None))[0].requests[0].prompt
    assert isinstance(words, str)
    assert 3 <= len(words.split()) <= 9


class Server:
    """An OpenAI server whose answers come from a handler; `bodies` lists the request bodies it received."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await self.handler(request)


async def stream(
    request: web.Request, words: list[str], *events: Any, chat: bool = False
) -> web.StreamResponse:
    """Stream one event per word, and then `events`, or the usage and `[DONE]` if `events` is empty."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": len(words),
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    parts: list[Any] = [
        {"choices": [{"delta": {"content": word}} if chat else {"text": word}]} for word in ["", *words]
    ]
    for event in [*parts, *(events or ({"choices": [], "usage": usage}, "[DONE]"))]:
        data = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {data}\n\n".encode())
    await response.write_eof()
    return response


def replayed(handler: Handler, sessions: list[Session], **changes: Any) -> tuple[list[Record], Server]:
    """Replay sessions against a server; return the records of all requests, ordered by due time."""
    server = Server(handler)

    async def run() -> list[Record]:
        app = web.Application()
        app.router.add_post("/v1/completions", server.answer)
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        values = {
            "model": "m",
            "chat": False,
            "key": None,
            "timeout": 60.0,
            "temperature": 0.5,
            "exact": True,
        }
        values |= {"url": f"http://127.0.0.1:{port}/v1", "body": {"top_p": 0.9}, **changes}
        try:
            return await replay(Target(**values), sessions, time.monotonic())
        finally:
            await runner.cleanup()

    records = asyncio.run(run())
    return sorted(records, key=lambda record: record.due), server


def single_session(at: float = 0.0) -> Session:
    return Session((TimedRequest(at, [1, 2, 3], 4),))


def test_no_answer_holds_a_request_back() -> None:
    count = 30
    everyone = asyncio.Event()
    begun = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal begun
        begun += 1
        if begun == count:
            everyone.set()
        await everyone.wait()
        return await stream(request, ["a", "b"])

    records, server = replayed(handler, [single_session(i * 0.002) for i in range(count)])
    assert [record.error for record in records] == [""] * count
    assert summarize(records, warm=0, most_first=None, most_token=None)["most_in_flight"] == count
    assert all(record.sent >= record.due for record in records)
    body = server.bodies[0]
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["ignore_eos"], body["top_p"]) == (4, True, 0.9)
    assert body["stream_options"] == {"include_usage": True}


def test_turns_wait_for_answers_and_repeat_the_conversation() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, ["hello", " you"], chat=True)

    session = Session(
        (TimedRequest(0.0, "one", 2), TimedRequest(0.01, "two", 2), TimedRequest(0.0, "three", 2))
    )
    records, server = replayed(handler, [session], chat=True, exact=False)
    assert [record.turn for record in records] == [0, 1, 2]
    assert all(b.due >= a.end for a, b in pairwise(records))
    assert [message["content"] for message in server.bodies[2]["messages"]] == [
        "one", "hello you", "two", "hello you", "three",
    ]  # fmt: skip
    assert "ignore_eos" not in server.bodies[0]
    assert (records[0].prompt_tokens, records[0].cached_tokens, records[0].output_tokens) == (7, 2, 2)


def test_each_failure_is_counted_by_its_kind() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        number = (await request.json())["prompt"][0]
        match number:
            case 0:
                return web.json_response({"error": {"message": "busy"}}, status=503)
            case 1:
                return await stream(request, ["a"], {"error": {"message": "no"}})
            case 2:
                return await stream(request, ["a"], "{}")
            case 3:
                return await stream(request, ["a"], "[DONE]")
            case 4:
                if request.transport is not None:
                    request.transport.close()
                return web.Response()
        return await stream(request, ["a"])

    sessions = [Session((TimedRequest(0.0, [number], 1), TimedRequest(0.0, [9], 1))) for number in range(6)]
    records, _ = replayed(handler, sessions)
    result = summarize(records, warm=0, most_first=None, most_token=None)
    assert result["errors"] == {
        "status 503": 1,
        "error in the stream": 1,
        "the stream ended early": 1,
        "no usage": 1,
        "ServerDisconnectedError": 1,
    }
    assert result["error_details"] == {
        "status 503": "busy", "error in the stream": "no", "ServerDisconnectedError": "Server disconnected",
    }  # fmt: skip
    assert result["requests"] == 7  # a session ends with its first error
    assert result["output_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "too\\nlong", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "no model"}', "no model"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
        (b"x" * 1000, "x" * MOST_REASON + "..."),
    ],
)
def test_the_reason_is_extracted_from_an_error_response(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


def test_an_answer_that_takes_too_long_is_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    records, _ = replayed(handler, [single_session()], timeout=0.3)
    assert [record.error for record in records] == ["timeout"]


def record(due: float, sent: float, *tokens_at: float, error: str = "") -> Record:
    end = tokens_at[-1] if tokens_at else sent + 1
    new_record = Record(due, sent=sent, end=end, tokens_at=list(tokens_at), error=error)
    new_record.output_tokens, new_record.prompt_tokens = len(tokens_at), 10
    return new_record


def test_latencies_count_from_when_a_request_was_due() -> None:
    records = [
        record(0.0, 0.0, 9.0),  # warm-up
        record(1.0, 3.0, 3.5, 3.6, 3.9),
        record(2.0, 2.0, 2.1, 2.2),
        record(2.5, 2.5, error="status 500"),
    ]
    result = summarize(records, warm=1.0, most_first=1.0, most_token=0.1501)
    assert result["first_token_ms"]["max"] == pytest.approx(2500)
    assert result["first_token_ms"]["p50"] == pytest.approx(1300)
    assert result["per_token_ms"]["max"] == pytest.approx(200)
    assert result["between_tokens_ms"]["max"] == pytest.approx(300)
    assert result["client_lag_ms"]["max"] == pytest.approx(2000)
    assert result["whole_ms"]["max"] == pytest.approx(2900)
    assert result["good_share"] == pytest.approx(1 / 3)
    assert result["output_tokens_per_second"] == pytest.approx(6 / 9)
    assert result["errors"] == {"status 500": 1}
    assert summarize(records[3:], warm=0, most_first=None, most_token=None)["first_token_ms"] is None


def page(first: list[int], gateway_sum: float, engine_sum: float) -> str:
    """Return a metrics page of a gateway and an engine; `first` has the added times up to 1 ms, 2 ms, any."""
    lines = ["# TYPE mizzen_gateway_added_seconds histogram"]
    for bound, count in zip(("0.001", "0.002", "+Inf"), first, strict=True):
        lines.append(f'mizzen_gateway_added_seconds_bucket{{model="m",le="{bound}"}} {count}')
    lines += [f"mizzen_gateway_added_seconds_count {first[-1]}", "mizzen_gateway_added_seconds_sum 1"]
    for name, total in (("gateway", gateway_sum), ("engine", engine_sum)):
        family = f"mizzen_{name}_inter_token_seconds"
        lines += [f"# TYPE {family} histogram", f'{family}_bucket{{le="+Inf"}} 100', f"{family}_sum {total}"]
    return "\n".join([*lines, ""])


def test_the_gateways_share_is_the_difference_of_two_readings() -> None:
    nothing = read_histograms([])
    before = read_histograms([page([10, 10, 10], 0.0, 0.0)])
    after = read_histograms([page([10, 110, 110], 0.65, 0.5)])
    share = summarize_share(nothing, after)
    assert share["per_token_mean"] == pytest.approx(1.5)
    assert share["engine_per_token_mean"] == pytest.approx(5.0)
    # The first reading is subtracted: all 100 new observations lie between 1 and 2 ms.
    share = summarize_share(before, after)
    assert share["first_token_p50"] == pytest.approx(1.5)
    assert share["first_token_p99"] == pytest.approx(1.99)
    assert "added 1.50/1.99 ms (p50/p99) to the first token, - ms" in describe_share(share)
    assert set(summarize_share(nothing, nothing).values()) == {None}


def test_several_gateways_are_added_up() -> None:
    pages = [page([1, 2, 2], 0.1, 0.1), page([3, 4, 4], 0.1, 0.1)]
    added = read_histograms(pages)["mizzen_gateway_added_seconds"]
    assert added.counts == {0.001: 4, 0.002: 6, float("inf"): 6}


def test_a_quantile_beyond_the_finite_bounds_is_the_highest_of_them() -> None:
    assert Histogram({0.5: 1, float("inf"): 10}, 90.0).quantile(0.99) == 0.5
