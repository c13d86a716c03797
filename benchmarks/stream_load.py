# SPDX-License-Identifier: Apache-2.0
"""Sends streamed requests to an OpenAI-compatible URL continuously, and counts how the streams end.

A stream is *good* if it ends with a finish reason, *cut* if it ends without a finish reason, and *failed* if
the request is rejected or the connection breaks before the first token. With `--expect`, a stream is *wrong*
if it ends with a finish reason, but its text is not the expected one. Prints a line per second on stderr, and
with `--json` one JSON object at the end.

    python benchmarks/stream_load.py http://127.0.0.1:8000/v1 --concurrency 8 --seconds 60 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import openai


@dataclass(slots=True)
class StreamCounts:
    """Counts of the streams that have ended so far."""

    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    first_token_ms: list[float] = field(default_factory=list)
    tokens: int = 0

    def summary(self, seconds: float) -> dict[str, object]:
        """Return the counts and the times to the first token (milliseconds) as an object for JSON."""
        times = sorted(self.first_token_ms)
        return {
            "streams": self.ends.total(),
            **{kind: self.ends[kind] for kind in ("good", "wrong", "cut", "failed")},
            "errors": dict(self.errors.most_common(10)),
            "seconds": round(seconds, 2),
            "chunks_per_second": round(self.tokens / max(seconds, 1e-9), 1),
            "first_token_ms": {
                "p50": round(statistics.median(times), 1) if times else None,
                "max": round(times[-1], 1) if times else None,
            },
        }


async def one_stream(client: openai.AsyncOpenAI, args: argparse.Namespace, counts: StreamCounts) -> None:
    """Run one stream to its end, and count how it ended."""
    began, text, reason, started = time.monotonic(), [], None, False
    try:
        stream = await client.chat.completions.create(
            model=args.model,
            messages=[{"role": "user", "content": args.prompt}],
            temperature=0,
            stream=True,
            max_tokens=args.max_tokens,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    if not started:
                        counts.first_token_ms.append((time.monotonic() - began) * 1000)
                        started = True
                    counts.tokens += 1
                    text.append(choice.delta.content)
                reason = choice.finish_reason or reason
    except Exception as error:  # errors of the HTTP library arrive unwrapped in mid-stream
        counts.ends["cut" if started else "failed"] += 1
        counts.errors[f"{type(error).__name__}: {error}"[:200]] += 1
        return
    if reason is None:
        counts.ends["cut"] += 1
    elif args.expect is not None and "".join(text) != args.expect:
        counts.ends["wrong"] += 1
        counts.errors[f"text: {''.join(text)[:150]!r}"] += 1
    else:
        counts.ends["good"] += 1


async def worker(
    client: openai.AsyncOpenAI, args: argparse.Namespace, counts: StreamCounts, stop: asyncio.Event
) -> None:
    """Run one stream after another until `stop` is set; pause after a failed stream."""
    while not stop.is_set():
        failures = counts.ends["failed"]
        await one_stream(client, args, counts)
        if counts.ends["failed"] > failures:
            await asyncio.sleep(0.2)


async def report(counts: StreamCounts, stop: asyncio.Event) -> None:
    """Print the counts once a second."""
    while not stop.is_set():
        await asyncio.sleep(1)
        line = " ".join(f"{kind} {counts.ends[kind]}" for kind in ("good", "wrong", "cut", "failed"))
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


async def run(args: argparse.Namespace) -> dict[str, object]:
    """Run streams for `--seconds` or until a signal, let open streams finish, and return the summary."""
    counts, stop = StreamCounts(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.call_later(args.seconds, stop.set)
    began = time.monotonic()
    async with openai.AsyncOpenAI(
        base_url=args.url, api_key=args.api_key, max_retries=0, timeout=args.timeout
    ) as client:
        reporter = asyncio.create_task(report(counts, stop))
        await asyncio.gather(*(worker(client, args, counts, stop) for _ in range(args.concurrency)))
        reporter.cancel()
    return counts.summary(time.monotonic() - began)


def main() -> int:
    """Run streams and print the summary; return 0 if there were streams and all of them were good, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="base URL, ending in /v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", default="Tell me a long story about a ship.")
    parser.add_argument("--expect", help="text that every stream must return")
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--timeout", type=float, default=120, help="seconds allowed for one stream")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    summary = asyncio.run(run(args))
    if args.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            print(f"{name:18} {value}")
    return 0 if summary["streams"] == summary["good"] and summary["streams"] else 1


if __name__ == "__main__":
    sys.exit(main())
