# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: placeholders, their expansion, and texts that spell placeholders."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from image_part_kit import LISTS_ONLY, TEXT_ONLY, data_url, image_part, png
from mizzen.gateway.errors import ApiError
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.requests.engine_request import tokenize_prompt
from mizzen.gateway.requests.generation_request import EncodedPrompt
from mizzen.gateway.text.model import TextModel, build_text_model
from mizzen.images.digest import image_digest

USER_IMAGES = (
    "{% for message in messages %}{% if message.role == 'user' and message.content is not string %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% endif %}{{ part.text }}"
    "{% endfor %}{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
)
"""Chat template that shows images only in messages of the user."""
PLACEHOLDERS = ("<|image_pad|>", "<image>", "<|vision_start|><|image_pad|><|vision_end|>")


async def encode(text: TextModel, *messages: dict[str, Any], **fields: Any) -> EncodedPrompt:
    """Return the prompt of a chat request."""
    body = {"model": "demo", "messages": messages, **fields}
    return await tokenize_prompt(RequestParser().parse_chat(json.dumps(body).encode()), text)


def user(*parts: Any) -> dict[str, Any]:
    """Return a message of the user, of texts and image files."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else part
            if isinstance(part, dict)
            else image_part(part)
            for part in parts
        ],
    }


async def test_an_image_becomes_one_token_for_each_embedding(qwen: TextModel) -> None:
    rules = qwen.image_rules
    assert rules is not None
    wide, tall = png(280, 56), png(56, 84, "blue")
    prompt = await encode(qwen, user("a", wide, "b", tall, "c"))
    assert [len(image.positions) for image in prompt.images] == [10 * 2, 2 * 3]
    assert [image.content for image in prompt.images] == [wide, tall]
    assert [(image.width, image.height) for image in prompt.images] == [(280, 56), (56, 84)]
    places = np.concatenate([image.positions for image in prompt.images])
    assert places.tolist() == np.nonzero(prompt.ids == rules.placeholder_id)[0].tolist()
    for image in prompt.images:
        geometry = rules.geometry(image.width, image.height)
        assert image.digest == image_digest(image.content, rules, geometry)
    text = qwen.tokenizer.decode(prompt.ids.tolist(), skip_special_tokens=False)
    begin, end = "<|vision_start|>", "<|vision_end|>"
    expected = f"a{begin}{'<|image_pad|>' * 20}{end}b{begin}{'<|image_pad|>' * 6}{end}c<|im_end|>"
    assert expected in text


async def test_the_prompt_equals_that_of_the_original_template(
    qwen: TextModel, qwen_files: dict[str, bytes]
) -> None:
    """Oracle: the template rendered by plain Jinja, tokenized by the unchanged tokenizer."""
    from transformers.utils.chat_template_utils import render_jinja_template

    inner = tokenizers.Tokenizer.from_buffer(qwen_files["tokenizer.json"])
    source = json.loads(qwen_files["chat_template.json"])["chat_template"]
    chat = [
        user("Größe", png(56, 56), "x"),
        {"role": "assistant", "content": "fine"},
        user(png(56, 56), "y z"),
    ]
    plain = [
        {
            **message,
            "content": [
                {"type": "image"} if part["type"] == "image_url" else part for part in message["content"]
            ]
            if isinstance(message["content"], list)
            else message["content"],
        }
        for message in chat
    ]
    (rendered,), _ = render_jinja_template([plain], chat_template=source, add_generation_prompt=True)
    expected = inner.encode(rendered.replace("<|image_pad|>", "<|image_pad|>" * 4), add_special_tokens=False)
    assert (await encode(qwen, *chat)).ids.tolist() == expected.ids


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
async def test_text_that_spells_a_placeholder_stays_text(qwen: TextModel, placeholder: str) -> None:
    prompt = await encode(qwen, user(f"a {placeholder} b", png(56, 56), placeholder))
    assert len(prompt.images) == 1
    rules = qwen.image_rules
    assert rules is not None
    assert prompt.images[0].positions.tolist() == np.nonzero(prompt.ids == rules.placeholder_id)[0].tolist()
    text = qwen.tokenizer.decode(prompt.ids.tolist(), skip_special_tokens=False)
    real = placeholder == "<image>"
    assert text.count("<|image_pad|>") == 4 + (0 if real else 2)
    assert f"a {placeholder} b" in text
    without = await encode(qwen, user(f"a {placeholder} b"))
    assert rules.placeholder_id not in without.ids


async def test_pieces_of_a_placeholder_in_adjacent_parts_stay_text(qwen: TextModel) -> None:
    prompt = await encode(qwen, user("<|image_", "pad|>", png(56, 56), "<|image", "_pad", "|>"))
    assert [len(image.positions) for image in prompt.images] == [4]
    ids = (await qwen.text_prompt("x <|image_pad|> y")).tolist()
    assert qwen.image_rules is not None
    assert qwen.image_rules.placeholder_id not in ids
    assert qwen.tokenizer.decode(ids) == "x <|image_pad|> y"


PIECES = st.lists(
    st.sampled_from(
        [
            "<|image_pad|>",
            "<|image",
            "_pad|>",
            "<|",
            "|>",
            "a",
            " ",
            "<|vision_start|>",
            "Größe",
            "\n",
            IMAGE := b"",
        ]
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES)
def test_random_texts_never_become_placeholders(qwen: TextModel, pieces: list[str | bytes]) -> None:
    import asyncio

    file = png(56, 56)
    parts = [file if isinstance(piece, bytes) else piece for piece in pieces]
    if not any(parts):
        return
    prompt = asyncio.run(encode(qwen, user(*parts)))
    assert qwen.image_rules is not None
    count = sum(isinstance(part, bytes) for part in parts)
    assert len(prompt.images) == count
    assert int((prompt.ids == qwen.image_rules.placeholder_id).sum()) == 4 * count


@pytest.mark.parametrize("template", [LISTS_ONLY, TEXT_ONLY])
async def test_templates_that_take_only_lists_or_only_text(
    llava_files: Callable[[str], dict[str, bytes]], template: str
) -> None:
    text = build_text_model("llava", llava_files(template))
    assert text.image_rules is not None
    prompt = await encode(
        text, user(png(30, 40), "is <image> here?"), {"role": "assistant", "content": "no"}, user("ok")
    )
    assert [len(image.positions) for image in prompt.images] == [4]
    shown = text.tokenizer.decode(prompt.ids.tolist(), skip_special_tokens=False)
    lines = ("USER: " + "<image>" * 4, "is <image> here?", "ASSISTANT: no", "USER: ok", "ASSISTANT:")
    assert shown.replace("\n", "") == "".join(lines)


async def test_images_in_results_of_tools_need_a_template_that_shows_them(
    qwen: TextModel, llava_files: Callable[[str], dict[str, bytes]]
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        user("q"),
        {"role": "assistant", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "r"}, image_part(png(56, 56))],
        },
    ]
    assert len((await encode(qwen, *chat)).images) == 1
    assert len((await encode(build_text_model("t", llava_files(TEXT_ONLY)), *chat)).images) == 1
    with pytest.raises(ApiError, match="shows no images in the results of tool calls"):
        await encode(build_text_model("s", llava_files(USER_IMAGES)), *chat)


async def test_a_text_model_refuses_images_by_path_and_name(tokenizer_files: dict[str, bytes]) -> None:
    text = build_text_model("text", tokenizer_files)
    with pytest.raises(ApiError) as caught:
        await encode(text, user("a"), user("b", png(8, 8)))
    error = caught.value
    assert (error.status, error.param) == (400, "messages[1].content[1]")
    assert error.message == "messages[1].content[1]: the model demo reads text only, no images"


async def test_detail_low_and_pixel_bounds_change_the_number_of_tokens(qwen: TextModel) -> None:
    large = png(1400, 1400)

    async def count(detail: str | None = None, **bounds: int) -> int:
        part = image_part(large) if detail is None else image_part(large, detail=detail)
        options = {"mm_processor_kwargs": bounds} if bounds else {}
        return len((await encode(qwen, user(part), **options)).images[0].positions)

    assert await count() == await count("auto") == await count("high") == 35 * 35
    assert await count("low") == 18 * 18
    assert await count(max_pixels=28 * 28 * 100) == await count("low", max_pixels=28 * 28 * 100) == 100
    assert await count(min_pixels=3136, max_pixels=3136) == 4
    for bounds, param in (
        ({"max_pixels": 10**9}, "mm_processor_kwargs"),
        ({"min_pixels": 10}, "mm_processor_kwargs"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "mm_processor_kwargs.min_pixels"),
    ):
        with pytest.raises(ApiError) as caught:
            await count(**bounds)
        assert (caught.value.status, caught.value.param) == (400, param)


async def test_an_image_of_a_shape_that_the_model_refuses_is_named(qwen: TextModel) -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\].content\[1\]: the image has 1000 x 2 pixels"):
        await encode(qwen, user("a", png(1000, 2)))


async def test_the_media_type_of_a_data_url_is_not_used(qwen: TextModel) -> None:
    for media_type in ("image/jpeg", "IMAGE/PNG", "", "text/plain"):
        part = {"type": "image_url", "image_url": data_url(png(56, 56), media_type)}
        assert len((await encode(qwen, user(part))).images) == 1
