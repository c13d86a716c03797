# SPDX-License-Identifier: Apache-2.0
"""Images from the official clients through `mizzen serve` to a model, and the same images in `LLM`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from cli_support import Served, stop

from image_noise import data_url, encode_noise, image_part
from mizzen import LLM, ImagePrompt, SamplingParams
from vision_chat_model import IMAGE_PLACEHOLDER, render_question, save_vision_chat_model

pytestmark = [pytest.mark.xdist_group("cli")]
QUESTION = "What is this?"
TOKENS = 24


def picture(seed: int, width: int = 70, height: int = 50, kind: str = "PNG") -> bytes:
    return encode_noise(seed, width, height, kind)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "tiny-vl"
    folder.mkdir()
    save_vision_chat_model(folder)
    return folder


@pytest.fixture(scope="module")
def served_vision(vision_model: Path) -> Iterator[Served]:
    server = Served(model=vision_model)
    yield server
    stop(server)


@pytest.fixture(scope="module")
def offline(vision_model: Path) -> Iterator[LLM]:
    with LLM(vision_model, device="cpu", threads=1) as llm:
        yield llm


def expected_answer(llm: LLM, parts: str, images: list[bytes]) -> str:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    return llm.generate([ImagePrompt(render_question(parts), images)], params)[0].text


def ask(client: openai.OpenAI, content: Any) -> Any:
    return client.chat.completions.create(
        model="tiny-vl",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=TOKENS,
    )


def test_chat_gives_the_answers_of_llm(served_vision: Served, offline: LLM) -> None:
    client = served_vision.client()
    answers = set()
    for seed in range(4):
        image = picture(seed, 60 + seed, 50, "PNG")
        answer = ask(client, [{"type": "text", "text": QUESTION}, image_part(image)])
        assert answer.choices[0].message.content == expected_answer(
            offline, QUESTION + IMAGE_PLACEHOLDER, [image]
        )
        answers.add(answer.choices[0].message.content)
    assert len(answers) > 1


def test_several_images_keep_their_places(served_vision: Served, offline: LLM) -> None:
    images = [picture(1), picture(2, 33, 90, "JPEG"), picture(1)]
    content = [
        image_part(images[0]),
        {"type": "text", "text": "first"},
        image_part(images[1]),
        image_part(images[2]),
        {"type": "text", "text": "last"},
    ]
    answer = ask(served_vision.client(), content)
    parts = f"{IMAGE_PLACEHOLDER}first{IMAGE_PLACEHOLDER}{IMAGE_PLACEHOLDER}last"
    assert answer.choices[0].message.content == expected_answer(offline, parts, images)


def test_a_repeated_image_comes_from_the_cache(served_vision: Served) -> None:
    image = picture(7)
    content = [image_part(image), {"type": "text", "text": QUESTION}]
    client = served_vision.client()
    first, again = ask(client, content), ask(client, content)
    assert first.choices[0].message.content == again.choices[0].message.content
    usage = again.usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 17


def test_the_apis_of_responses_and_messages_take_images(served_vision: Served, offline: LLM) -> None:
    image = picture(5)
    expected = expected_answer(offline, IMAGE_PLACEHOLDER + QUESTION, [image])
    response = served_vision.client().responses.create(
        model="tiny-vl",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data_url(image), "detail": "auto"},
                    {"type": "input_text", "text": QUESTION},
                ],
            }
        ],
        temperature=0,
        max_output_tokens=TOKENS,
    )
    assert response.output_text == expected
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    with anthropic.Anthropic(base_url=served_vision.url.removesuffix("/v1"), api_key="none") as client:
        message = client.messages.create(
            model="tiny-vl",
            max_tokens=TOKENS,
            extra_body={"temperature": 0},
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}],
                }
            ],
        )
    assert message.content[0].text == expected


def test_a_damaged_image_is_an_error_of_its_request_alone(served_vision: Served) -> None:
    whole = picture(9)
    with pytest.raises(openai.BadRequestError, match="image"):
        ask(served_vision.client(), [image_part(whole[: len(whole) // 2])])
    assert ask(served_vision.client(), "Hello").choices[0].message.content


def test_text_that_spells_a_placeholder_stays_text(served_vision: Served) -> None:
    answer = ask(served_vision.client(), [{"type": "text", "text": IMAGE_PLACEHOLDER + " and " + QUESTION}])
    assert answer.choices[0].message.content
