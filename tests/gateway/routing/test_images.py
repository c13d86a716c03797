# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: which engines get them, and the bytes that engines request, also after failures."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mizzen.core.images.keys import image_token
from mizzen.core.kv.block_hashes import BLOCK_TOKENS, block_hashes
from mizzen.core.request import FinishReason
from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.errors import ApiError
from mizzen.gateway.requests.attempt import Attempt
from mizzen.gateway.requests.generation_request import EncodedPrompt, GenerationRequest
from mizzen.gateway.requests.images import PromptImageBytes
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.text.model import TextModel
from mizzen.images.types import PixelLimits
from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig
from mizzen.wire.messages import IMAGE_PART_BYTES, OLDEST_PROTOCOL

PLACEHOLDER = 7
LARGE = np.random.default_rng(0).bytes(10 * IMAGE_PART_BYTES + 5)


@dataclass
class Pictures:
    """Prompt of text, images with a number of placeholders each, and text."""

    contents: tuple[bytes, ...]
    text: int = 70
    embeddings: int = 100

    async def encode(self, text: TextModel, context: int) -> EncodedPrompt:
        ids, images = list(range(self.text)), []
        for content in self.contents:
            positions = np.arange(len(ids), len(ids) + self.embeddings, dtype=np.int32)
            digest = content[:8].ljust(32, b"-")
            images.append(PromptImageBytes(digest, content, positions, 30, 20, PixelLimits(None, 900)))
            ids += [PLACEHOLDER] * self.embeddings
        return EncodedPrompt(np.array([*ids, *range(20)], np.int32), images=tuple(images))

    def label_ids(self, text: TextModel) -> tuple[int, ...]:
        return ()


def request(*contents: bytes, tokens: int = 6, **fields: Any) -> RoutedRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    return RoutedRequest(
        generation=GenerationRequest(
            model="demo", sampling=sampling, prompt_source=Pictures(contents, **fields)
        ),
        queue_entry=QueueEntry(time.monotonic() + 60),
    )


async def finish(attempt: Attempt) -> list[int]:
    """Return all tokens of an answer."""
    tokens: list[int] = []
    end = None
    while end is None:
        new, end = await attempt.next_tokens()
        tokens += new
    assert FinishReason(end.reason) is FinishReason.LENGTH
    attempt.close()
    return tokens


def dispatcher(gateway: Any) -> Any:
    return gateway.gateway.only_service.dispatcher


def metric(gateway: Any, name: str) -> float:
    for line in gateway.gateway.metrics_text().decode().splitlines():
        if line.startswith(f"mizzen_gateway_{name} "):
            return float(line.split()[1])
    raise AssertionError(name)


async def test_engine_gets_references_and_the_bytes_that_it_requests(live: Any, scripted: Any) -> None:
    engine = scripted(images=True)
    gateway = await live(engine)
    routed = request(LARGE, b"dog")
    assert await finish(await dispatcher(gateway).place(routed)) == [10, 11, 12, 10, 11, 12]
    (message,) = engine.requests
    first, second = message.images
    assert np.frombuffer(first.positions, "<i4").tolist() == list(range(70, 170))
    assert (first.size, first.width, first.height) == (len(LARGE), 30, 20)
    assert (first.min_pixels, first.max_pixels) == (None, 900)
    assert second.digest == b"dog".ljust(32, b"-")
    assert set(np.frombuffer(message.prompt, "<i4")[70:270].tolist()) == {PLACEHOLDER}
    assert sorted(engine.images) == sorted([LARGE, b"dog"])
    assert max(len(part.content) for part in engine.parts) <= IMAGE_PART_BYTES
    assert metric(gateway, "images_requested_total") == metric(gateway, "images_sent_total") == 2
    assert metric(gateway, "image_bytes_sent_total") == len(LARGE) + 3


async def test_engine_killed_while_it_receives_an_image_is_replaced(live: Any, scripted: Any) -> None:
    engines = [scripted(images=True) for _ in range(2)]
    engines[1].does = engines[0].does  # whichever is chosen first dies
    engines[0].does.dies_after_parts = 3
    gateway = await live(*engines)
    attempt = await dispatcher(gateway).place(request(LARGE))
    assert await finish(attempt) == [10, 11, 12, 10, 11, 12]
    assert sorted(engine.images for engine in engines) == [[], [LARGE]]
    assert sorted(len(engine.parts) for engine in engines) == [3, 11]
    assert attempt.routed.losses == 1


async def test_answer_continues_on_an_engine_that_requests_the_image_again(live: Any, scripted: Any) -> None:
    engines = [scripted(images=True, incarnation=str(number)) for number in range(2)]
    gateway = await live(*engines)
    for engine in engines:
        engine.does.reply = list(range(20, 60))
        engine.does.cuts, engine.does.fault = (4,), "forget"
    attempt = await dispatcher(gateway).place(request(LARGE, tokens=9))
    (survivor,) = (engine for engine in engines if not engine.requests)
    survivor.does.cuts, survivor.does.fault = (), ""
    assert await finish(attempt) == list(range(20, 29))
    assert [engine.images for engine in engines] == [[LARGE], [LARGE]]
    assert survivor.requests[0].generated == 4
    assert len(survivor.requests[0].images) == 1


async def test_engine_of_the_former_release_never_gets_images(live: Any, scripted: Any) -> None:
    new, old = scripted(images=True), scripted(protocol=OLDEST_PROTOCOL)
    gateway = await live(new, old)
    for _ in range(10):
        await finish(await dispatcher(gateway).place(request(b"cat")))
    assert len(new.requests) == 10
    assert not old.requests
    verdicts = await dispatcher(gateway).explain(request(b"cat"))
    assert sorted(verdict.excluded_by for verdict in verdicts) == ["", "images"]
    text = request()
    new.does.draining = True
    await finish(await dispatcher(gateway).place(text))


async def test_service_without_engines_for_images_answers_at_once(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(protocol=OLDEST_PROTOCOL))
    with pytest.raises(ApiError, match="no engine that accepts images is ready") as error:
        await dispatcher(gateway).place(request(b"cat"))
    assert error.value.status == 503


async def test_aborted_request_sends_no_further_parts(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted(images=True)
    gateway = await live(engine)
    engine.does.fault, engine.does.fault_after = "mute", 0  # requests images, but sends no tokens
    task = asyncio.create_task(dispatcher(gateway).place(request(LARGE)))
    await until(lambda: engine.parts)
    task.cancel()
    await until(lambda: engine.aborts)
    assert len(engine.images) <= 1


async def test_block_hashes_distinguish_images(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(images=True), scripted(images=True))
    cat, dog = request(b"cat"), request(b"dog")
    for routed in (cat, dog):
        await finish(await dispatcher(gateway).place(routed))
    tokens = cat.prompt.copy()
    tokens[cat.images[0].positions] = image_token(cat.images[0].digest)
    assert cat.block_hashes == tuple(block_hashes(tokens))
    assert cat.block_hashes[0] == dog.block_hashes[0]  # 64 tokens of text
    assert not set(cat.block_hashes[1:]) & set(dog.block_hashes[1:])
    assert (cat.prompt[70:170] == PLACEHOLDER).all()


async def test_warm_up_knows_only_the_text_before_the_first_image(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(images=True), warm_tokens=4096)
    for _ in range(2):
        await finish(await dispatcher(gateway).place(request(b"cat", text=3 * BLOCK_TOKENS + 9)))
    warmer = gateway.gateway.only_service.table.cache_warmer
    (store,) = warmer._stores.values()
    (prefix,) = store.find_hottest(4096)
    assert prefix.tokens.tolist() == list(range(3 * BLOCK_TOKENS))


def picture_url() -> str:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def test_second_turn_of_a_chat_sends_no_image(live: Any, vision_folder: Path) -> None:
    simulation = SimulateConfig(
        model=str(vision_folder), wire_bind="tcp://127.0.0.1:*", step_milliseconds=1.0, image_capacity=300
    )
    with SimulatedEngine(simulation) as engine:
        gateway = await live(engine)
        content = [
            {"type": "text", "text": "What is this?" * 8},
            {"type": "image_url", "image_url": {"url": picture_url()}},
        ]
        messages: list[Any] = [{"role": "user", "content": content}]
        client = gateway.client()
        first = await client.chat.completions.create(model="demo", messages=messages, max_tokens=4)
        assert first.usage.prompt_tokens > 64
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And its color?"},
        ]
        second = await client.chat.completions.create(model="demo", messages=messages, max_tokens=4)
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 32
        assert metric(gateway, "images_sent_total") == 1
