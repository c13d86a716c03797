# SPDX-License-Identifier: Apache-2.0
"""Send requests and streams continuously, and compare every answer with the expected one.

    python load.py PLAN.json

With `-` instead of a file, the plan is the first line of standard input. The script also runs alone in a pod:
it needs only Python 3.11 and aiohttp.

First the script sends each question of the plan until it has two answers, while no service is disturbed. They
must be equal, and must have the text, finish reason and token count that the plan specifies, if any. Then the
script prints `started`, and from then on its counts as a JSON object once a second. Every later answer must
equal the first two, and no request is retried: a refused or cut connection, an error, a missing end or a
wrong text each count as a failed request. When standard input ends, the script sends no new requests, waits
for the ones in flight, and prints the final counts.

A plan: {"seed": 1, "timeout": 120, "targets": [{"url": ".../v1", "lanes": [{"workers": 2, "pause": 0.0,
"questions": [{"body": {...}, "text": "...", "finish": "stop", "tokens": 9}]}]}]}. A body with `messages` is a
chat, one with `prompt` a completion. `timeout` and `pause` are seconds. Every other worker of a lane keeps
its connection alive.
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

MAX_SAMPLES = 20
"""Number of failures that are reported with all details."""
LEARN_SECONDS = 180.0
"""Time limit for the first answers, while a service may still be starting."""


class FailedRequest(Exception):
    """A request did not get the expected answer; failures are counted by `kind`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Answer:
    """A complete answer; `route` is the `x-mizzen-route` header."""

    text: str
    finish: str | None
    tokens: int | None
    first_seconds: float
    route: str


@dataclass
class Question:
    """A request, and the answer that is expected; None stands for any value."""

    body: dict[str, Any]
    text: str | None = None
    finish: str | None = None
    tokens: int | None = None

    @property
    def path(self) -> str:
        return "chat/completions" if "messages" in self.body else "completions"

    def check(self, answer: Answer) -> None:
        """Compare an answer with the expected one.

        Raises:
            FailedRequest: the answer differs, or has no finish reason.
        """
        if answer.finish is None:
            raise FailedRequest("no_end", f"no finish reason after {answer.text[-80:]!r}")
        for kind, expected, actual in (
            ("wrong_finish", self.finish, answer.finish),
            ("wrong_tokens", self.tokens, answer.tokens),
            ("wrong_text", self.text, answer.text),
        ):
            if expected is not None and expected != actual:
                raise FailedRequest(
                    kind, f"{self.body}: expected {expected!r}, got {actual!r}; {answer.route}"
                )


@dataclass
class Counts:
    """Counts of requests by outcome, with the times to the first token in seconds."""

    started: int = 0
    ok: int = 0
    streams: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    longest: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the counts, and percentiles of the time to the first token in ms."""
        first = sorted(self.first)
        percentiles = (
            {name: first[min(len(first) - 1, int(share * len(first)))] for name, share in PERCENTILES}
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
            "first_token_ms": {name: round(1e3 * value, 1) for name, value in percentiles.items()},
            "longest_s": round(self.longest, 2),
        }


PERCENTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


async def send_request(session: aiohttp.ClientSession, url: str, body: dict[str, Any], path: str) -> Answer:
    """Send a request and return its complete answer.

    Raises:
        FailedRequest: the request was refused, or the answer is incomplete.
    """
    began = time.monotonic()
    try:
        async with session.post(f"{url}/{path}", json=body) as response:
            route = response.headers.get("x-mizzen-route", "")
            if response.status != 200:
                raise FailedRequest(f"status_{response.status}", (await response.text())[:300])
            if body.get("stream"):
                return await _streamed(response, began, route)
            content = await response.json()
            choice = content["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            seconds = time.monotonic() - began
            return Answer(
                text, choice["finish_reason"], content["usage"]["completion_tokens"], seconds, route
            )
    except aiohttp.ClientConnectorError as error:
        raise FailedRequest("refused", repr(error)) from error
    except TimeoutError as error:
        raise FailedRequest("timeout", repr(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise FailedRequest("cut", repr(error)) from error


async def _streamed(response: aiohttp.ClientResponse, began: float, route: str) -> Answer:
    text: list[str] = []
    finish, tokens, first, done = None, None, 0.0, False
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if not line.startswith(b"data: "):
            continue
        if done:
            raise FailedRequest("after_end", f"{data[:200]!r} came after [DONE]")
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise FailedRequest("error_event", f"{event['error']} after {len(text)} pieces; {route}")
        first = first or time.monotonic() - began
        for choice in event["choices"]:
            text.append(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
            finish = choice["finish_reason"] or finish
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not done:
        raise FailedRequest("no_end", f"the stream ended without [DONE] after {len(text)} pieces; {route}")
    return Answer("".join(text), finish, tokens, first, route)


class Load:
    """The workers of a plan, and their counts."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._random = random.Random(plan.get("seed", 0))
        self._stop = asyncio.Event()
        self.counts = Counts()

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._plan.get("timeout", 120))
        connector = aiohttp.TCPConnector(limit=0, force_close=not keep)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)

    async def run(self) -> None:
        """Learn the expected answers, then run all workers until standard input ends."""
        lanes = [
            (target["url"], lane, [Question(**question) for question in lane["questions"]])
            for target in self._plan["targets"]
            for lane in target["lanes"]
        ]
        async with self._session(keep=False) as session:
            await asyncio.gather(
                *(
                    self._learn_answer(session, url, question)
                    for url, _, questions in lanes
                    for question in questions
                )
            )
        print("started", flush=True)
        reading = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        reading.add_done_callback(lambda _: self._stop.set())
        printing = asyncio.create_task(self._print_counts())
        workers = [
            self._worker(url, questions, lane.get("pause", 0.0), keep=bool(number % 2))
            for url, lane, questions in lanes
            for number in range(lane["workers"])
        ]
        await asyncio.gather(*workers)
        printing.cancel()
        print(json.dumps({**self.counts.summary(), "samples": self.counts.samples}), flush=True)

    async def _learn_answer(self, session: aiohttp.ClientSession, url: str, question: Question) -> None:
        """Get two equal answers to a question, and expect that answer from then on.

        Failed requests are retried for up to `LEARN_SECONDS`, because the service may still be starting.

        Raises:
            SystemExit: the service does not answer, or two answers differ.
        """
        deadline = time.monotonic() + LEARN_SECONDS
        answers: list[Answer] = []
        while len(answers) < 2:
            try:
                answers.append(await send_request(session, url, question.body, question.path))
                question.check(answers[-1])
            except FailedRequest as error:
                if time.monotonic() > deadline or error.kind.startswith("wrong"):
                    raise SystemExit(
                        f"{url} does not answer {question.body}: {error.kind}: {error}"
                    ) from error
                await asyncio.sleep(0.2)
        first, second = answers
        if (first.text, first.finish, first.tokens) != (second.text, second.finish, second.tokens):
            raise SystemExit(f"two answers to {question.body} differ: {first} and {second}")
        question.text, question.finish, question.tokens = first.text, first.finish, first.tokens

    async def _worker(self, url: str, questions: list[Question], pause: float, *, keep: bool) -> None:
        async with self._session(keep=keep) as session:
            while not self._stop.is_set():
                await self._send(session, url, self._random.choice(questions))
                if pause:
                    await asyncio.sleep(self._random.uniform(0, 2 * pause))

    async def _send(self, session: aiohttp.ClientSession, url: str, question: Question) -> None:
        counts, began, at = self.counts, time.monotonic(), time.time()
        counts.started += 1
        try:
            answer = await send_request(session, url, question.body, question.path)
            question.check(answer)
        except FailedRequest as error:
            counts.failed[error.kind] += 1
            if len(counts.samples) < MAX_SAMPLES:
                seconds = round(time.monotonic() - began, 3)
                sample = {
                    "at": at,
                    "seconds": seconds,
                    "url": url,
                    "kind": error.kind,
                    "why": str(error)[:600],
                }
                counts.samples.append(sample)
            await asyncio.sleep(0.2)
            return
        counts.ok += 1
        counts.streams += bool(question.body.get("stream"))
        counts.first.append(answer.first_seconds)
        counts.longest = max(counts.longest, time.monotonic() - began)

    async def _print_counts(self) -> None:
        while True:
            await asyncio.sleep(1)
            print(json.dumps(self.counts.summary()), flush=True)


if __name__ == "__main__":
    text = sys.stdin.readline() if sys.argv[1] == "-" else Path(sys.argv[1]).read_text()
    asyncio.run(Load(json.loads(text)).run())
