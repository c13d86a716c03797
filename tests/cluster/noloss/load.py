"""Keep requests and streams running, and hold every answer against what it must be. One file, for anywhere.

    python load.py PLAN.json

With `-` in place of a file, the plan is the first line of standard input.

It never tries again: a connection that is refused or cut, an error, a missing end and a wrong text each are a
failed request. It begins by asking each question of the plan that has no answer there, twice, while nothing
is disturbed; what came is what every later answer must be. Then it prints `started`, and once a second a JSON
object of its counts. When standard input ends it sends nothing new, waits for what is under way, and prints
the counts for the last time. It needs Python 3.11 and aiohttp.

A plan: {"seed": 1, "timeout": 120, "targets": [{"url": ".../v1", "lanes": [{"workers": 2, "pause": 0.0,
"asks": [{"body": {...}, "text": "...", "finish": "stop", "tokens": 9}]}]}]}. A body with `messages` is a
chat, one with `prompt` a completion. Of a lane, every other worker keeps its connection.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

SAMPLES = 20
"""Failures that are told in full."""
LEARN_SECONDS = 180.0
"""How long the answers may take that later ones are held against."""


class Failed(Exception):
    """A request that did not get what it must; `kind` is one word."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    finish: str | None
    tokens: int | None
    first_seconds: float
    route: str


@dataclass
class Ask:
    """A question and what must come."""

    body: dict[str, Any]
    text: str | None = None
    finish: str | None = None
    tokens: int | None = None

    @property
    def path(self) -> str:
        return "chat/completions" if "messages" in self.body else "completions"

    def hold(self, answer: Answer) -> None:
        """Compare an answer with what must come.

        Raises:
            Failed: it differs.
        """
        if answer.finish is None:
            raise Failed("no_end", f"no finish reason after {answer.text[-80:]!r}")
        for kind, wanted, got in (
            ("wrong_finish", self.finish, answer.finish),
            ("wrong_tokens", self.tokens, answer.tokens),
            ("wrong_text", self.text, answer.text),
        ):
            if wanted is not None and wanted != got:
                raise Failed(kind, f"{self.body}: {wanted!r} was to come, and {got!r} came; {answer.route}")


@dataclass
class Tally:
    """What was counted."""

    started: int = 0
    ok: int = 0
    streams: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    longest: float = 0.0

    def summary(self) -> dict[str, Any]:
        """The counts; times to the first token in ms."""
        first = sorted(self.first)
        at = (
            {name: first[min(len(first) - 1, int(share * len(first)))] for name, share in PARTS}
            if first
            else {}
        )
        return {
            "started": self.started,
            "ok": self.ok,
            "streams": self.streams,
            "failed": self.failed.total(),
            "failures": dict(self.failed),
            "under_way": self.started - self.ok - self.failed.total(),
            "first_token_ms": {name: round(1e3 * value, 1) for name, value in at.items()},
            "longest_s": round(self.longest, 2),
        }


PARTS = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], path: str) -> Answer:
    """Send one request and read all of its answer.

    Raises:
        Failed: it did not come whole.
    """
    began = time.monotonic()
    try:
        async with session.post(f"{url}/{path}", json=body) as response:
            route = response.headers.get("x-mizzen-route", "")
            if response.status != 200:
                raise Failed(f"status_{response.status}", (await response.text())[:300])
            if body.get("stream"):
                return await _streamed(response, began, route)
            whole = await response.json()
            choice = whole["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            seconds = time.monotonic() - began
            return Answer(text, choice["finish_reason"], whole["usage"]["completion_tokens"], seconds, route)
    except aiohttp.ClientConnectorError as error:
        raise Failed("refused", repr(error)) from error
    except TimeoutError as error:
        raise Failed("timeout", repr(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise Failed("cut", repr(error)) from error


async def _streamed(response: aiohttp.ClientResponse, began: float, route: str) -> Answer:
    text: list[str] = []
    finish, tokens, first, done = None, None, 0.0, False
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if not line.startswith(b"data: "):
            continue
        if done:
            raise Failed("after_end", f"{data[:200]!r} came after [DONE]")
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise Failed("error_event", f"{event['error']} after {len(text)} pieces; {route}")
        first = first or time.monotonic() - began
        for choice in event["choices"]:
            text.append(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
            finish = choice["finish_reason"] or finish
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not done:
        raise Failed("no_end", f"the stream ended without [DONE] after {len(text)} pieces; {route}")
    return Answer("".join(text), finish, tokens, first, route)


class Load:
    """All workers of a plan."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._random = random.Random(plan.get("seed", 0))
        self._stop = asyncio.Event()
        self.tally = Tally()

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._plan.get("timeout", 120))
        connector = aiohttp.TCPConnector(limit=0, force_close=not keep)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)

    async def run(self) -> None:
        """Learn, then load until standard input ends."""
        lanes = [
            (target["url"], lane, [Ask(**one) for one in lane["asks"]])
            for target in self._plan["targets"]
            for lane in target["lanes"]
        ]
        async with self._session(keep=False) as session:
            await asyncio.gather(*(self._learn(session, url, one) for url, _, asks in lanes for one in asks))
        print("started", flush=True)
        reading = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        reading.add_done_callback(lambda _: self._stop.set())
        telling = asyncio.create_task(self._tell())
        workers = [
            self._worker(url, asks, lane.get("pause", 0.0), keep=bool(number % 2))
            for url, lane, asks in lanes
            for number in range(lane["workers"])
        ]
        await asyncio.gather(*workers)
        telling.cancel()
        print(json.dumps({**self.tally.summary(), "samples": self.tally.samples}), flush=True)

    async def _learn(self, session: aiohttp.ClientSession, url: str, one: Ask) -> None:
        """Take what comes twice as what must come; until something comes the service may be starting."""
        deadline = time.monotonic() + LEARN_SECONDS
        answers: list[Answer] = []
        while len(answers) < 2:
            try:
                answers.append(await ask(session, url, one.body, one.path))
                one.hold(answers[-1])
            except Failed as error:
                if time.monotonic() > deadline or error.kind.startswith("wrong"):
                    raise SystemExit(f"{url} does not answer {one.body}: {error.kind}: {error}") from error
                await asyncio.sleep(0.2)
        first, second = answers
        if (first.text, first.finish, first.tokens) != (second.text, second.finish, second.tokens):
            raise SystemExit(f"two answers to {one.body} differ: {first} and {second}")
        one.text, one.finish, one.tokens = first.text, first.finish, first.tokens

    async def _worker(self, url: str, asks: list[Ask], pause: float, *, keep: bool) -> None:
        async with self._session(keep=keep) as session:
            while not self._stop.is_set():
                await self._one(session, url, self._random.choice(asks))
                if pause:
                    await asyncio.sleep(self._random.uniform(0, 2 * pause))

    async def _one(self, session: aiohttp.ClientSession, url: str, one: Ask) -> None:
        tally, began, at = self.tally, time.monotonic(), time.time()
        tally.started += 1
        try:
            answer = await ask(session, url, one.body, one.path)
            one.hold(answer)
        except Failed as error:
            tally.failed[error.kind] += 1
            if len(tally.samples) < SAMPLES:
                seconds = round(time.monotonic() - began, 3)
                sample = {
                    "at": at,
                    "seconds": seconds,
                    "url": url,
                    "kind": error.kind,
                    "why": str(error)[:600],
                }
                tally.samples.append(sample)
            await asyncio.sleep(0.2)
            return
        tally.ok += 1
        tally.streams += bool(one.body.get("stream"))
        tally.first.append(answer.first_seconds)
        tally.longest = max(tally.longest, time.monotonic() - began)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(1)
            print(json.dumps(self.tally.summary()), flush=True)


if __name__ == "__main__":
    text = sys.stdin.readline() if sys.argv[1] == "-" else Path(sys.argv[1]).read_text()
    asyncio.run(Load(json.loads(text)).run())
