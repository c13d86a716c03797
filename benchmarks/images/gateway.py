# SPDX-License-Identifier: Apache-2.0
"""Latency of text requests at a gateway while requests with images arrive, compared with no such requests.

    python benchmarks/images/gateway.py [--rate 100] [--size 300000] [--seconds 10] [--rounds 3] [--json]

The gateway is the real command, on one core; a simulated engine, which accepts images and requests none of
their bytes, and the clients run on the other cores. Text requests of one token arrive one after the other;
the time from sending a request to the end of its answer is measured. Requests with one image each arrive at
a fixed rate from another process, whether or not earlier ones are answered. Rounds with and without images
alternate. `added_ms` is the difference between the percentiles with and without images.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import random
import statistics
import struct
import sys
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway_parts.engines import Engines, Script
from gateway_parts.process import GatewayProcess
from gateway_parts.vocabulary import Vocabulary

from mizzen.gateway.text.model import image_rules

GOAL_MS = 8.0
"""Largest 99th percentile of the added latency in milliseconds."""
EDGE = 1024
PAUSE_SECONDS = 0.005
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template of the form of Qwen2.5-VL's."""


def model_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """Return the files of a model like Qwen2.5-VL with the tokenizer of the gateway's benchmarks."""
    tokenizer = tokenizers.Tokenizer.from_file(str(vocabulary.path))
    tokenizer.add_special_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    config = {"model_type": "qwen2_5_vl", "image_token_id": tokenizer.token_to_id("<|image_pad|>")}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
        "config.json": json.dumps(config).encode(),
    }


def image_file(size: int, seed: int) -> bytes:
    """Return a PNG file of about `size` bytes with random image data, because nothing decodes it."""
    header = struct.pack(">IIBBBBB", EDGE, EDGE, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    begin = (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(header)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )
    data = random.Random(seed).randbytes(max(1, size - len(begin)))
    return begin + struct.pack(">I", len(data)) + b"IDAT" + data + bytes(4)


def http_request(port: int, content: list[dict[str, Any]] | str) -> bytes:
    """Return the bytes of a chat request of one token."""
    fields = {"model": "bench", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    body = json.dumps(fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json"
    return f"{head}\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Channel:
    """A connection to the gateway that sends one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> None:
        """Send a request and read its answer.

        Raises:
            RuntimeError: the answer has another status than 200.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = await reader.readexactly(int(length.split(b":")[1]))
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"the gateway answered {answer[:300]!r}")


async def send_images(port: int, rate: float, size: int, seconds: float) -> int:
    """Send requests with images at a rate for a time; return their number."""
    requests: list[bytes] = []
    for seed in range(16):
        url = f"data:image/png;base64,{base64.b64encode(image_file(size, seed)).decode()}"
        requests.append(http_request(port, [{"type": "image_url", "image_url": {"url": url}}]))
    free: list[Channel] = []

    async def send(request: bytes) -> None:
        channel = free.pop() if free else Channel(port)
        await channel.send(request)
        free.append(channel)

    begin, count = time.monotonic(), round(rate * seconds)
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
            group.create_task(send(requests[number % len(requests)]))
    return count


def image_client(port: int, rate: float, size: int, pipe: Connection, cores: set[int]) -> None:
    """Send images for each number of seconds that arrives at the pipe, until it is 0."""
    os.sched_setaffinity(0, cores)
    while seconds := pipe.recv():
        pipe.send(asyncio.run(send_images(port, rate, size, seconds)))


async def measure_texts(port: int, seconds: float) -> list[float]:
    """Return the milliseconds of each text request during a time."""
    channel, laps, end = Channel(port), list[float](), time.monotonic() + seconds
    request = http_request(port, "What is the capital of France?")
    await channel.send(request)
    while time.monotonic() < end:
        began = time.perf_counter()
        await channel.send(request)
        laps.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(PAUSE_SECONDS)
    return laps


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the results."""
    cores = sorted(os.sched_getaffinity(0))
    gateway_cores, others = ({cores[0]}, set(cores[1:])) if len(cores) > 1 else (set(cores), set(cores))
    os.sched_setaffinity(0, others)
    vocabulary = Vocabulary()
    files = model_files(vocabulary)
    script = Script(
        files=files, replies=np.array(vocabulary.replies(), np.int32), vocab_size=130_000, step_seconds=0.002,
        image_rules=image_rules(files),
    )  # fmt: skip
    laps: dict[bool, list[list[float]]] = {False: [], True: []}
    context = multiprocessing.get_context("spawn")
    with Engines(1, 1, script, others) as engines:
        options = ["--access-log", "off", "--max-bodies-bytes", str(2**30)]
        with GatewayProcess(engines.endpoints, gateway_cores, options) as gateway:
            ours, theirs = context.Pipe()
            client = context.Process(
                target=image_client,
                args=(gateway.port, arguments.rate, arguments.size, theirs, others),
                daemon=True,
            )
            client.start()
            theirs.close()
            for _ in range(arguments.rounds):
                for images in (False, True):
                    if images:
                        ours.send(arguments.seconds + 1)
                        time.sleep(0.5)
                    laps[images].append(asyncio.run(measure_texts(gateway.port, arguments.seconds)))
                    if images:
                        ours.recv()
            ours.send(0)
            client.join(10)

    def percentile(images: bool, percent: float) -> float:
        return statistics.median(float(np.percentile(values, percent)) for values in laps[images])

    shown = {
        f"p{percent}": {"alone": percentile(False, percent), "with_images": percentile(True, percent)}
        for percent in (50, 90, 99)
    }
    added = {name: values["with_images"] - values["alone"] for name, values in shown.items()}
    return {"text_ms": shown, "added_ms": added, "goal_ms": GOAL_MS, "met": added["p99"] <= GOAL_MS}


def main() -> None:
    """Parse the command line, run the benchmark, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=100.0, help="images per second (default: 100)")
    parser.add_argument("--size", type=int, default=300_000, help="bytes of each image (default: 300000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round (default: 10)")
    parser.add_argument("--rounds", type=int, default=3, help="number of pairs of rounds (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args()
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    print("percentile  alone ms  with images ms  added ms")
    for name, values in result["text_ms"].items():
        columns = values["alone"], values["with_images"], result["added_ms"][name]
        print(f"{name:10}  {columns[0]:8.2f}  {columns[1]:14.2f}  {columns[2]:8.2f}")


if __name__ == "__main__":
    main()
