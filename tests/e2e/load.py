# SPDX-License-Identifier: Apache-2.0
"""Send streamed chats to a gateway from inside the cluster until standard input ends; count the outcomes.

The script runs in a pod of the gateway's image and needs nothing else. It prints `started` once the first
answer is complete, and the counts as a JSON object at the end. A stream is *good* if it ends with a finish
reason and the expected text, *wrong* if the text differs, *cut* if it has no finish reason, and *failed* if
an error ends it.

    python load.py http://demo-gateway:8000/v1 --model demo --prompt "..." --expect "..." --concurrency 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from typing import Any

import httpx


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str | None]:
    """Return text and finish reason of a streamed answer; a cut answer has the finish reason None."""
    text, reason = [], None
    async with client.stream("POST", "chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise RuntimeError(f"{response.status_code}: {response.text[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(f"error in the stream: {chunk['error']}")
            for choice in chunk["choices"]:
                text.append(choice["delta"].get("content") or "")
                reason = choice["finish_reason"] or reason
    return "".join(text), reason


async def worker(
    client: httpx.AsyncClient, options: argparse.Namespace, counts: Counter[str], stop: asyncio.Event
) -> None:
    """Send one stream after another, each on a new connection, and count outcomes until `stop` is set."""
    content: Any = options.prompt
    if options.image:
        image = {"type": "image_url", "image_url": {"url": options.image}}
        content = [image, {"type": "text", "text": options.prompt}]
    messages = [{"role": "user", "content": content}]
    body = {"model": options.model, "messages": messages, "temperature": 0, "stream": True}
    if options.max_tokens:
        body["max_tokens"] = options.max_tokens
    while not stop.is_set():
        try:
            text, reason = await stream(client, body)
        except Exception as error:
            counts["failed"] += 1
            print(f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.2)
            continue
        kind = "cut" if reason is None else "good" if options.expect in (None, text) else "wrong"
        counts[kind] += 1
        if kind != "good":
            print(f"{kind}: {text!r}", file=sys.stderr, flush=True)
        if counts.total() == 1:
            print("started", flush=True)


async def run(options: argparse.Namespace) -> Counter[str]:
    """Run the workers until standard input ends and their last streams are complete; return the counts."""
    counts: Counter[str] = Counter()
    stop = asyncio.Event()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    ended.add_done_callback(lambda _: stop.set())
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=options.url, timeout=options.timeout, limits=limits) as client:
        await asyncio.gather(*(worker(client, options, counts, stop) for _ in range(options.concurrency)))
    return counts


def main() -> None:
    """Run the load that the command line specifies, and print its counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--image", help="URL of an image before the prompt")
    parser.add_argument("--expect")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=120)
    counts = asyncio.run(run(parser.parse_args()))
    by_kind = {kind: counts[kind] for kind in ("good", "wrong", "cut", "failed")}
    print(json.dumps({"streams": counts.total(), **by_kind}))


if __name__ == "__main__":
    main()
