# SPDX-License-Identifier: Apache-2.0
"""Access log: one line of JSON per request, without prompts by default."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from mizzen.gateway.requests.exchange import GenerationExchange
from mizzen.gateway.requests.sequence import GeneratedSequence
from mizzen.gateway.telemetry.access_log import MAX_QUEUED_LINES, AccessLog
from mizzen.gateway.telemetry.request_record import MAX_ATTEMPTS, MAX_PROMPT_CHARACTERS, RequestRecord

SECRET = "the word is swordfish"
BODY = {"model": "demo", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}


class Lines:
    """The JSON lines that have been written to standard output so far."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self.text = b""

    @property
    def all(self) -> list[dict[str, Any]]:
        self.text += self._read()
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def lines(capsysbinary: pytest.CaptureFixture[bytes]) -> Lines:
    return Lines(lambda: capsysbinary.readouterr().out)


async def ask(gateway: Any, until: Any, lines: Lines, count: int = 1, **body: Any) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(timeout=60) as http:
        headers = {"x-request-id": "one"}
        await http.post(f"{gateway.url}/v1/chat/completions", json={**BODY, **body}, headers=headers)
    await until(lambda: len(lines.all) == count)
    return lines.all


async def test_access_log_line_describes_the_request(
    scripted: Any, live: Any, until: Any, lines: Lines
) -> None:
    engine = scripted(engine="engine-7")
    engine.does.cached_tokens = 16
    gateway = await live(engine)
    (line,) = await ask(gateway, until, lines)
    assert line["event"] == "request"
    assert line["id"] == "one"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["model"] == "demo"
    assert line["completion_tokens"] == 3
    assert line["prompt_tokens"] == len(engine.requests[0].prompt) // 4
    assert line["cached_tokens"] == 16
    assert line["finish_reasons"] == ["length"]
    assert line["engine"] == next(iter(gateway.gateway.table)).name
    assert line["route"] == "only"
    assert line["attempts"] == 1
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert "stream" not in line
    assert SECRET.encode() not in lines.text


async def test_access_log_includes_streams_choices_and_retries(
    scripted: Any, live: Any, until: Any, lines: Lines
) -> None:
    first, second = scripted(), scripted()
    first.does.fault, first.does.fault_after = "error", 0
    gateway = await live(first, second)
    logged = await ask(gateway, until, lines, stream=True, n=2)
    assert logged[0]["stream"] is True
    assert logged[0]["finish_reasons"] == ["length", "length"]
    assert logged[0]["completion_tokens"] == 6
    assert logged[0]["attempts"] == 2 + len(first.requests)


async def test_access_log_includes_the_error_code_of_refusals(
    scripted: Any, live: Any, until: Any, lines: Lines
) -> None:
    gateway = await live(scripted())
    await ask(gateway, until, lines, model="absent")
    await ask(gateway, until, lines, count=2, temperature="hot")
    assert [(line["status"], line["error"]) for line in lines.all] == [
        (404, "model_not_found"),
        (400, "invalid_type"),
    ]


async def test_access_log_includes_interrupted_answers(
    scripted: Any, live: Any, until: Any, lines: Lines
) -> None:
    engine = scripted()
    engine.does.fault = "error"
    gateway = await live(engine, max_resumes=0)
    (line,) = await ask(gateway, until, lines, stream=True, max_tokens=50)
    assert line["status"] == 200
    assert line["error"] == "engine_lost"


async def test_access_log_marks_internal_errors(
    scripted: Any, live: Any, until: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error is logged with status 500, not as a disconnect; its response has the request id."""
    gateway = await live(scripted())

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(GenerationExchange, "_new_groups", broken)
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"{gateway.url}/v1/chat/completions", json=BODY, headers={"x-request-id": "one"}
        )
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "one"
    await until(lambda: lines.all)
    assert (lines.all[0]["status"], lines.all[0]["error"]) == (500, "internal_error")
    assert 'code="500"' in gateway.gateway.metrics_text().decode()


async def test_access_log_marks_internal_errors_in_a_stream(
    scripted: Any, live: Any, until: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await live(scripted())
    monkeypatch.setattr(GeneratedSequence, "next_piece", lambda _: None)
    with pytest.raises(httpx.RemoteProtocolError):  # the truncated response must not look complete
        await ask(gateway, until, lines, stream=True)
    await until(lambda: lines.all)
    assert (lines.all[0]["status"], lines.all[0]["error"]) == (200, "internal_error")


async def test_access_log_includes_prompts_on_request(
    scripted: Any, live: Any, until: Any, lines: Lines
) -> None:
    gateway = await live(scripted(), access_log="prompts")
    (line,) = await ask(gateway, until, lines)
    assert SECRET in line["prompt"]


async def test_access_log_includes_prompts_of_token_ids(
    scripted: Any, live: Any, until: Any, lines: Lines
) -> None:
    gateway = await live(scripted(), access_log="prompts")
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 1}
        await http.post(f"{gateway.url}/v1/completions", json=body)
    await until(lambda: lines.all)
    assert lines.all[0]["prompt"] == "[5,6,7]"


async def test_access_log_can_be_off(scripted: Any, live: Any) -> None:
    gateway = await live(scripted(), access_log="off")
    assert gateway.gateway.access_log is None
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=BODY)
    assert answer.status_code == 200


def line_of(record: RequestRecord, prompts: bool = False) -> dict[str, Any]:
    stream = io.BytesIO()
    log = AccessLog(prompts, stream)
    log.write(record)
    log.close(60)
    return json.loads(stream.getvalue())


def new_record(**given: Any) -> RequestRecord:
    return RequestRecord(request_id="r", method="POST", path="/", began=1.0, clock=0.25, ended=1.5, **given)


def test_access_log_lines_are_bounded_for_any_request() -> None:
    record = new_record(model="m" * 10_000, prompt="p" * 100_000)
    for number in range(1000):
        record.add_attempt(record.new_attempt(f"engine-{number}", "load"))
        record.end_phase("route", 0.0)
    line = line_of(record, prompts=True)
    assert len(line["model"]) == 256
    assert len(line["prompt"]) == MAX_PROMPT_CHARACTERS
    assert line["attempts"] == 1000
    assert len(record.attempts) == len(record.phases) == MAX_ATTEMPTS


def test_access_log_time_is_the_arrival() -> None:
    line = line_of(new_record())
    assert line["time"] == "1970-01-01T00:00:00.250Z"
    assert line["seconds"] == 0.5
    assert line["status"] == 499


def test_requests_continue_when_the_log_reader_has_exited() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as stream:
        log = AccessLog(False, stream)  # type: ignore[arg-type]
        log.write(new_record())
        log.close(60)
        assert log._thread is None


class BlockedOutput(io.BytesIO):
    """An output whose writes block until the test sets `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, data: Any) -> int:
        self.go.wait(60)
        return super().write(data)


def test_slow_log_reader_delays_no_request_and_dropped_lines_are_counted() -> None:
    slow = BlockedOutput()
    log = AccessLog(False, slow)
    record = RequestRecord(request_id="r", method="POST", path="/v1/completions")
    record.ended = record.began
    for _ in range(MAX_QUEUED_LINES + 50):
        log.write(record)  # returns at once even if the queue is full
    slow.go.set()
    log.close(60)
    log.write(record)
    log.close(60)
    lines = [json.loads(line) for line in slow.getvalue().splitlines()]
    dropped_counts = [line["lines"] for line in lines if line["event"] == "dropped"]
    assert len(dropped_counts) == 1
    assert sum(line["event"] == "request" for line in lines) + dropped_counts[0] == MAX_QUEUED_LINES + 51


def test_log_lines_of_several_processes_do_not_interleave() -> None:
    """Each write consists of whole lines, at most 4096 bytes, because a pipe writes that much atomically."""
    allow_writes, pieces = threading.Event(), list[bytes]()

    class Slow(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            allow_writes.wait(60)
            pieces.append(bytes(data))
            return len(data)

    log = AccessLog(prompts=False, stream=io.BufferedWriter(Slow()))
    for number in range(300):
        log.write(RequestRecord(request_id=f"{number}", method="GET", path="/" + "x" * (number % 200)))
    allow_writes.set()
    log.close(60)
    assert [json.loads(line)["id"] for line in b"".join(pieces).splitlines()] == [str(n) for n in range(300)]
    assert all(len(piece) <= 4096 and piece.endswith(b"\n") for piece in pieces)
    assert len(pieces) < 100, "lines are not batched into larger writes"
