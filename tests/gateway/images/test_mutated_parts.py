# SPDX-License-Identifier: Apache-2.0
"""Mutated parts with images: every request gets a prompt or an error with a status below 500.

`MIZZEN_MUTATIONS=100000` in the environment runs more mutations than the default.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from image_part_kit import data_url, png
from mizzen.gateway.anthropic.parse import MessagesParser
from mizzen.gateway.errors import ApiError
from mizzen.gateway.images.limits import ImageLimits
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.requests.engine_request import tokenize_prompt
from mizzen.gateway.responses.parse import ResponsesParser
from mizzen.gateway.text.model import TextModel, build_text_model

MUTATIONS = int(os.environ.get("MIZZEN_MUTATIONS", "10000"))
SEED = 20261127
VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, "", "a", "low", "https://a.b/c", "data:", "data:;base64,", "data:,", [],
    "\u0000", "\ud7ff", "<|image_pad|>", "image_url", "text", {"url": 1}, "data:image/png;base64,=",
    "A" * 5000,
    [[]], {},
]  # fmt: skip
NAMES = (
    "type",
    "text",
    "image_url",
    "url",
    "detail",
    "source",
    "data",
    "file_id",
    "role",
    "content",
    "input_audio",
)


def files() -> list[bytes]:
    """Return a file of each format."""
    found = [png(30, 40)]
    for name in ("JPEG", "WEBP", "GIF"):
        out = io.BytesIO()
        Image.new("RGB", (50, 20), "green").save(out, name)
        found.append(out.getvalue())
    return found


def mutate_file(choose: random.Random, content: bytes) -> bytes:
    """Return a file with some bytes changed, removed or repeated."""
    changed = bytearray(content)
    for _ in range(choose.randrange(4)):
        at = choose.randrange(len(changed) + 1)
        kind = choose.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] = choose.randrange(256)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = choose.randbytes(choose.randrange(20))
        else:
            changed[at : at + 4] = choose.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
    return bytes(changed)


def mutate(choose: random.Random, value: Any, depth: int = 0) -> Any:
    """Return a JSON value with some parts replaced, removed or repeated."""
    if choose.random() < 0.04:
        return choose.choice(VALUES)
    if isinstance(value, dict):
        mutated = {name: mutate(choose, item, depth + 1) for name, item in value.items()}
        if mutated and choose.random() < 0.05:
            del mutated[choose.choice(list(mutated))]
        if choose.random() < 0.05:
            mutated[choose.choice(NAMES)] = choose.choice(VALUES)
        return mutated
    if isinstance(value, list):
        mutated_items = [mutate(choose, item, depth + 1) for item in value]
        return mutated_items * choose.choice([1] * 20 + [0, 2, 9])
    if isinstance(value, str) and len(value) > 20 and choose.random() < 0.1:
        at = choose.randrange(len(value))
        return value[:at] + choose.choice(["", "=", "\n", "%", "é", " ", value[:9]]) + value[at + 1 :]
    return value


def chat_body(url: str, _: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a <|image_pad|>"}, image]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [image, {"type": "text", "text": "b"}]},
        ],
        "mm_processor_kwargs": {"min_pixels": 4000, "max_pixels": 90000},
    }


def responses_body(url: str, _: str) -> dict[str, Any]:
    image = {"type": "input_image", "image_url": url, "detail": "low"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {
        "model": "demo",
        "input": [
            {"role": "user", "content": [image, {"type": "input_text", "text": "a"}]},
            call,
            {"type": "function_call_output", "call_id": "c", "output": [image]},
        ],
    }


def messages_body(url: str, data: str) -> dict[str, Any]:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    linked = {"type": "image", "source": {"type": "url", "url": url}}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image], "is_error": True}
    return {
        "model": "demo",
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, linked]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, image]},
        ],
    }


@pytest.fixture(scope="session")
def models(qwen: TextModel, llava_files: Any, tokenizer_files: dict[str, bytes]) -> list[TextModel]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    llava = build_text_model("llava", llava_files(template))
    return [qwen, llava, build_text_model("text", tokenizer_files)]


async def test_mutated_parts_never_fail_the_gateway(models: list[TextModel]) -> None:
    choose, samples = random.Random(SEED), files()
    parser = RequestParser(image_limits=ImageLimits(count=6, size=20_000, pixels=10**6))
    parsers: list[tuple[Callable[[bytes], Any], Callable[[str, str], dict[str, Any]]]] = [
        (parser.parse_chat, chat_body),
        (lambda body: ResponsesParser(parser.chat_generation).parse(body).generation, responses_body),
        (lambda body: MessagesParser(parser.chat_generation).parse(body).generation, messages_body),
    ]
    accepted, refused = 0, 0
    for number in range(MUTATIONS):
        parse, make_body = parsers[number % 3]
        content = mutate_file(choose, choose.choice(samples))
        body = mutate(choose, make_body(data_url(content), base64.b64encode(content).decode()))
        text = models[0] if choose.random() < 0.8 else choose.choice(models)
        try:
            prompt = await tokenize_prompt(parse(json.dumps(body).encode()), text)
        except ApiError as error:
            refused += 1
            assert 400 <= error.status < 500, (number, error.message)
            assert error.message, number
            assert len(error.message) < 2000, (number, error.message)
            continue
        accepted += 1
        rules = text.image_rules
        placeholders = 0 if rules is None else int((prompt.ids == rules.placeholder_id).sum())
        assert placeholders == sum(len(image.positions) for image in prompt.images), number
    assert accepted > MUTATIONS // 50
    assert refused > MUTATIONS // 50
