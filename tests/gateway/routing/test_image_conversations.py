# SPDX-License-Identifier: Apache-2.0
"""Conversations with images under load: later turns reach the engine that has the image.

Engines are simulated: their scheduler, prefix cache, decoder and wire are real, the model is not.
MIZZEN_IMAGE_CONVERSATIONS sets the number of conversations.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig

CONVERSATIONS = int(os.environ.get("MIZZEN_IMAGE_CONVERSATIONS", "60"))
TURNS = 3
ENGINES = 4
CLIENTS = 40
"""Number of conversations at a time."""
PAUSE_SECONDS = 0.3
"""Longest time between an answer and the next question."""
INSTRUCTIONS = "You describe images for people who cannot see them. " * 4


def image_url(seed: int) -> str:
    """Return the URL of a JPEG image with 256 embeddings."""
    small = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((448, 448), Image.Resampling.BICUBIC).save(file, "jpeg")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


async def test_later_turns_reach_the_engine_that_has_the_image(
    live: Any, vision_folder: Path, until: Any
) -> None:
    """All conversations begin with the same instructions, so that only the image tells engines apart."""
    settings = SimulateConfig(
        model=str(vision_folder),
        wire_bind="tcp://127.0.0.1:*",
        step_milliseconds=5.0,
        prefill_token_microseconds=20.0,
        image_capacity=2000,
        max_running_requests=32,
    )
    source = random.Random(3)
    clients = asyncio.Semaphore(CLIENTS)
    with ExitStack() as stack:
        engines = [stack.enter_context(SimulatedEngine(settings)) for _ in range(ENGINES)]
        gateway = await live(*engines, access_log="off")
        client = gateway.client()

        async def converse(seed: int) -> None:
            part = {"type": "image_url", "image_url": {"url": image_url(seed)}}
            messages: list[Any] = [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]},
            ]
            async with clients:
                for turn in range(TURNS):
                    answer = await client.chat.completions.create(
                        model="demo", messages=messages, max_tokens=source.randint(4, 60)
                    )
                    content = answer.choices[0].message.content
                    messages.append({"role": "assistant", "content": content})
                    messages.append({"role": "user", "content": f"And number {turn}?"})
                    await asyncio.sleep(source.uniform(0, PAUSE_SECONDS))

        await asyncio.gather(*map(converse, range(CONVERSATIONS)))
        await until(lambda: sum(engine.status["images"] for engine in engines) == CONVERSATIONS * TURNS)
        counts = [int(engine.status["images"]) for engine in engines]
        sent = sum(int(engine.status["images_received"]) for engine in engines)
        hits = sum(int(engine.status["image_prefix_hits"]) for engine in engines)
    later = CONVERSATIONS * (TURNS - 1)
    assert sum(counts) == CONVERSATIONS * TURNS
    print(f"requests by engine {counts}, images sent {sent}, prefix hits {hits} of {later} later turns")
    assert hits >= 0.95 * later
    assert sent <= CONVERSATIONS + 0.05 * later
    assert min(counts) > 0.5 * max(counts), "the load is not spread over the engines"
