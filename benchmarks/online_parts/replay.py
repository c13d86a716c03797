"""Sends requests when they are due, whatever became of those before, and notes when their tokens come."""

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
from online_parts.trace import Ask, Prompt, Session

MOST_REASON = 300
"""Characters that are kept of what a server says of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server with the OpenAI API."""

    url: str
    """Its base, with /v1 or without."""
    model: str
    chat: bool
    key: str | None
    timeout: float
    """Seconds that an answer may take."""
    temperature: float | None
    exact: bool
    """Whether answers are to have just the length asked for (`ignore_eos`)."""
    body: dict[str, Any]
    """More fields of each request."""

    @property
    def endpoint(self) -> str:
        """Where requests go."""
        base = self.url.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/{'chat/' if self.chat else ''}completions"


@dataclass(slots=True)
class Record:
    """What became of a request; times in seconds from the start of the run."""

    due: float
    """When it had to be sent: all latencies count from here."""
    turn: int = 0
    sent: float = 0.0
    end: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    """When text came; a server may put several tokens in a piece."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """Its kind; empty where all went well."""
    detail: str = ""
    """What the server said of it."""


def reason_of(body: Any) -> str:
    """Return the message in an error's body, or all of it, in one line that is not too long."""
    try:
        found = json.loads(body) if isinstance(body, bytes) else body
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or json.dumps(found)
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        text = body.decode(errors="replace")
    line = " ".join(text.split())
    return line if len(line) <= MOST_REASON else f"{line[:MOST_REASON]}..."


@dataclass(slots=True)
class Answer:
    """A stream as it came: when, and what."""

    lines: list[tuple[float, bytes]] = field(default_factory=list)
    text: str = ""

    def read(self, record: Record, *, chat: bool) -> None:
        """Look at what came, once it is over."""
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
    """Yield the data of server-sent events with the time of their last byte."""
    rest = b""
    async for piece in response.content.iter_any():
        now = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


class Replay:
    """One process's share of a run."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, start: float) -> None:
        self.target = target
        self.http = session
        self.start = start
        """When the run begins, on the monotonic clock."""
        self.records: list[Record] = []

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start

    def body(self, ask: Ask, history: list[tuple[Prompt, str]]) -> dict[str, Any]:
        """Return a request's body; a later turn repeats those before it."""
        target = self.target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": ask.output,
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
            body["messages"] = [*messages, {"role": "user", "content": ask.prompt}]
        elif isinstance(ask.prompt, str):
            said = [f"{prompt}{answer}" for prompt, answer in history]
            body["prompt"] = " ".join([*said, ask.prompt])
        else:
            said = [token for prompt, _ in history for token in prompt]
            body["prompt"] = [*said, *ask.prompt]
        return {**body, **target.body}

    async def ask(self, ask: Ask, due: float, history: list[tuple[Prompt, str]]) -> Record:
        """Send one request at its time and read its answer."""
        record, answer = Record(due, turn=len(history)), Answer()
        self.records.append(record)
        data = json.dumps(self.body(ask, history)).encode()
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
            answer.read(record, chat=self.target.chat)
        history.append((ask.prompt, answer.text))
        return record

    async def session(self, session: Session) -> None:
        """Run a session: its turns wait for one another, and for nobody else."""
        history: list[tuple[Prompt, str]] = []
        due = 0.0
        for ask in session.asks:
            record = await self.ask(ask, due + ask.after, history)
            if record.error:
                return
            due = record.end


async def replay(target: Target, sessions: list[Session], start: float) -> list[Record]:
    """Run sessions from `start` (of the monotonic clock) on."""
    headers = {"content-type": "application/json"}
    if target.key:
        headers["authorization"] = f"Bearer {target.key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=unlimited) as http:
        run = Replay(target, http, start)
        async with asyncio.TaskGroup() as group:
            for session in sorted(sessions, key=lambda session: session.asks[0].after):
                # A session's first request is made ready a little ahead, not all at once.
                await asyncio.sleep(max(session.asks[0].after - run.now() - 0.5, 0))
                group.create_task(run.session(session))
    return run.records


def work(target: Target, sessions: list[Session], ready: Any, start: Any, results: Any) -> None:
    """Run one share in a process of its own."""
    gc.collect()
    gc.freeze()
    ready.put(True)
    results.put(asyncio.run(replay(target, sessions, start.get())))


def run(target: Target, sessions: list[Session], processes: int = 1) -> list[Record]:
    """Replay sessions from so many processes at once; return all requests in order of their times.

    Raises:
        RuntimeError: a process ended without its results.
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
            records += collected(results, workers)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return sorted(records, key=lambda record: record.due)


def collected(results: Any, workers: list[Any]) -> list[Record]:
    """Wait for one process's records."""
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise RuntimeError("a client process ended before its requests") from None
