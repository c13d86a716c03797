# SPDX-License-Identifier: Apache-2.0
"""Sends requests when they are due, even if others are still open, and records when their tokens arrive."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import queue
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from online_parts.trace import Prompt, Session, TimedRequest

MOST_REASON = 300
"""Maximum number of characters that are kept of a server's error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server, and the parameters that all requests share."""

    url: str
    """Base URL of the server, with or without /v1."""
    model: str
    chat: bool
    key: str | None
    timeout: float
    """Seconds after which a request without a complete answer fails."""
    temperature: float | None
    exact: bool
    """Whether requests ask for answers of exactly the requested length (`ignore_eos`)."""
    body: dict[str, Any]
    """Further fields of the body of each request."""

    @property
    def endpoint(self) -> str:
        """URL to which requests are sent."""
        base = self.url.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/{'chat/' if self.chat else ''}completions"


@dataclass(slots=True)
class Record:
    """Result of a request; times are in seconds from the start of the run."""

    due: float
    """Time at which the request was due, from which all latencies count."""
    turn: int = 0
    sent: float = 0.0
    end: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    """Arrival times of pieces of text; a server may send several tokens in one piece."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """Type of error, such as "timeout" or "status 429"; empty if the request succeeded."""
    detail: str = ""
    """Error message of the server or of the client's HTTP library."""


def reason_of(body: Any) -> str:
    """Return the message in the body of an error, or else the whole body, as one line of limited length."""
    try:
        value = json.loads(body) if isinstance(body, bytes) else body
        while isinstance(value, dict):
            value = value.get("error") or value.get("message") or value.get("detail") or json.dumps(value)
        text = value if isinstance(value, str) else json.dumps(value)
    except ValueError:
        text = body.decode(errors="replace")
    line = " ".join(text.split())
    return line if len(line) <= MOST_REASON else f"{line[:MOST_REASON]}..."


@dataclass(slots=True)
class Answer:
    """Lines of a streamed answer with their arrival times."""

    lines: list[tuple[float, bytes]] = field(default_factory=list)
    text: str = ""

    def parse(self, record: Record, *, chat: bool) -> None:
        """Parse the lines of a stream that has ended, and fill in the record of its request."""
        done, texts = False, []
        for at, line in self.lines:
            if line == b"[DONE]":
                done = True
                continue
            try:
                chunk = json.loads(line)
            except ValueError:
                record.error = "malformed event"
                return
            if chunk.get("error"):
                record.error, record.detail = "error in the stream", reason_of(chunk)
                return
            if usage := chunk.get("usage"):
                record.prompt_tokens = usage.get("prompt_tokens") or 0
                record.output_tokens = usage.get("completion_tokens") or 0
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in chunk.get("choices") or ():
                part = choice.get("delta") or {} if chat else choice
                text = part.get("content") or part.get("reasoning_content") or part.get("text") or ""
                if text:
                    record.tokens_at.append(at)
                    texts.append(text)
        self.text = "".join(texts)
        if not done:
            record.error = "the stream ended early"
        elif not record.output_tokens:
            record.error = "no usage"


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """Yield the arrival time and the data of each server-sent event."""
    rest = b""
    async for piece in response.content.iter_any():
        now = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


class Replay:
    """Runs the sessions of one client process, and records their requests."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, start: float) -> None:
        self.target = target
        self.http = session
        self.start = start
        """Start of the run on the monotonic clock, in seconds."""
        self.records: list[Record] = []

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start

    def body(self, request: TimedRequest, history: list[tuple[Prompt, str]]) -> dict[str, Any]:
        """Return the body of a request, which repeats all previous turns of its session (`history`)."""
        target = self.target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": request.output,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.temperature is not None:
            body["temperature"] = target.temperature
        if target.exact:
            body["ignore_eos"] = True
        if target.chat:
            messages: list[dict[str, Any]] = []
            for prompt, answer in history:
                messages.append({"role": "user", "content": prompt})
                messages.append({"role": "assistant", "content": answer})
            body["messages"] = [*messages, {"role": "user", "content": request.prompt}]
        elif isinstance(request.prompt, str):
            previous = [f"{prompt}{answer}" for prompt, answer in history]
            body["prompt"] = " ".join([*previous, request.prompt])
        else:
            previous = [token for prompt, _ in history for token in prompt]
            body["prompt"] = [*previous, *request.prompt]
        return {**body, **target.body}

    async def send(self, request: TimedRequest, due: float, history: list[tuple[Prompt, str]]) -> Record:
        """Send a request when it is due, read its answer, and append the turn to `history`."""
        record, answer = Record(due, turn=len(history)), Answer()
        self.records.append(record)
        data = json.dumps(self.body(request, history)).encode()
        await asyncio.sleep(max(due - self.now(), 0))
        record.sent = self.now()
        try:
            async with asyncio.timeout(self.target.timeout):
                async with self.http.post(self.target.endpoint, data=data) as response:
                    if response.status != 200:
                        record.error = f"status {response.status}"
                        record.detail = reason_of(await response.read())
                    else:
                        async for at, line in events(response):
                            answer.lines.append((at - self.start, line))
        except TimeoutError:
            record.error = "timeout"
        except (aiohttp.ClientError, ConnectionError) as error:
            record.error, record.detail = type(error).__name__, reason_of(str(error))
        record.end = self.now()
        if not record.error:
            answer.parse(record, chat=self.target.chat)
        history.append((request.prompt, answer.text))
        return record

    async def session(self, session: Session) -> None:
        """Run the turns of a session one after another, until one fails."""
        history: list[tuple[Prompt, str]] = []
        due = 0.0
        for request in session.requests:
            record = await self.send(request, due + request.after, history)
            if record.error:
                return
            due = record.end


async def replay(target: Target, sessions: list[Session], start: float) -> list[Record]:
    """Run sessions, starting at `start` on the monotonic clock; return the records of all requests."""
    headers = {"content-type": "application/json"}
    if target.key:
        headers["authorization"] = f"Bearer {target.key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=unlimited) as http:
        run = Replay(target, http, start)
        async with asyncio.TaskGroup() as group:
            for session in sorted(sessions, key=lambda session: session.requests[0].after):
                # Prepare the first request of a session half a second ahead, not all sessions at once.
                await asyncio.sleep(max(session.requests[0].after - run.now() - 0.5, 0))
                group.create_task(run.session(session))
    return run.records


def work(target: Target, sessions: list[Session], ready: Any, start: Any, results: Any) -> None:
    """Run some of the sessions in a client process, which gets the start time from a queue."""
    gc.collect()
    gc.freeze()
    ready.put(True)
    results.put(asyncio.run(replay(target, sessions, start.get())))


def run(target: Target, sessions: list[Session], processes: int = 1) -> list[Record]:
    """Run sessions in `processes` client processes; return the records in order of due time.

    Raises:
        RuntimeError: a client process failed before all its requests were done.
    """
    if processes == 1:
        records = asyncio.run(replay(target, sessions, time.monotonic() + 0.2))
        return sorted(records, key=lambda record: record.due)
    context = multiprocessing.get_context("spawn")
    ready, start, results = context.Queue(), context.Queue(), context.Queue()
    workers = [
        context.Process(target=work, args=(target, sessions[i::processes], ready, start, results))
        for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in workers:
            ready.get(timeout=60)
        begin = time.monotonic() + 0.5
        for _ in workers:
            start.put(begin)
        records: list[Record] = []
        for _ in workers:
            records += wait_for_records(results, workers)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return sorted(records, key=lambda record: record.due)


def wait_for_records(results: Any, workers: list[Any]) -> list[Record]:
    """Wait for the records of the next client process that is done.

    Raises:
        RuntimeError: a client process failed.
    """
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise RuntimeError("a client process failed before its requests were done") from None
