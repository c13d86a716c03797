# SPDX-License-Identifier: Apache-2.0
"""Images from the official clients through `mizzen serve` to a model, and the same images in `LLM`."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from cli_support import Served, stop

from image_noise import data_url, encode_noise, image_part
from mizzen import LLM, ImagePrompt, SamplingParams
from vision_chat_model import IMAGE_PLACEHOLDER, render_question, save_vision_chat_model

pytestmark = [pytest.mark.xdist_group("cli")]
QUESTION = "What is this?"
TOKENS = 24
PAGE_SIZE = 16


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


def test_llm_chat_gives_the_answers_of_generate(offline: LLM) -> None:
    images = [picture(1), picture(2, 33, 90, "JPEG")]
    imitation = {"type": "text", "text": IMAGE_PLACEHOLDER + " and " + QUESTION}
    text = {"type": "text", "text": QUESTION}
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    chats = [
        [image_part(images[0]), text, {"type": "image", "image": images[1]}],
        [text],
        [{"type": "image_url", "image_url": data_url(images[1], "jpeg")}, imitation],
    ]
    answers = offline.chat([[{"role": "user", "content": chat}] for chat in chats], params)
    parts = f"{IMAGE_PLACEHOLDER}{QUESTION}{IMAGE_PLACEHOLDER}"
    assert answers[0].text == expected_answer(offline, parts, images)
    assert answers[1].text == offline.generate([render_question(QUESTION)], params)[0].text
    assert answers[2].text


def test_llm_chat_reads_paths_and_refuses_other_urls(offline: LLM, tmp_path: Path) -> None:
    path = tmp_path / "ship.png"
    path.write_bytes(picture(3))
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    for source in (path, str(path), picture(3)):
        message = {"role": "user", "content": [{"type": "image", "image": source}]}
        assert offline.chat([message], params)[0].text == expected_answer(
            offline, IMAGE_PLACEHOLDER, [picture(3)]
        )
    for part, error in (
        ({"type": "image_url", "image_url": {"url": "https://a.example/ship.png"}}, "data: URL"),
        ({"type": "image_url", "image_url": {"url": data_url(picture(3)), "detail": "low"}}, "detail 'low'"),
        ({"type": "image"}, "needs a file"),
        ({"type": "image", "image": b"GIF"}, "image 0"),
    ):
        with pytest.raises(ValueError, match=error):
            offline.chat([{"role": "user", "content": [part]}], params)


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


def read_metrics(served: Served) -> dict[str, float]:
    """Return the metrics about images without labels of the gateway and of the engine's only model."""
    values = {}
    for process, option in (("engine", "http-port"), ("gateway", "admin-port")):
        words = " ".join(served.children()[process].cmdline())
        (port,) = re.findall(rf"--{option}[= ](\d+)", words)
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        lines = re.findall(r'^mizzen_(\w*image\w*)(?:\{model_name="[^"]*"\})? (.+)$', text, re.MULTILINE)
        values |= {name: float(value) for name, value in lines}
    return values


def wait_for_metric(served: Served, name: str, value: float) -> dict[str, float]:
    """Wait until a metric has a value, because metrics are published a moment after answers; return all."""
    end = time.monotonic() + 30
    while (values := read_metrics(served))[name] != value:
        assert time.monotonic() < end, (name, value, values)
        time.sleep(0.05)
    return values


def test_a_repeated_image_needs_no_bytes_no_decoding_and_no_encoder(served_vision: Served) -> None:
    content = [image_part(picture(7, 120, 130)), {"type": "text", "text": QUESTION * 20}]
    client = served_vision.client()
    images = read_metrics(served_vision)["engine_images_total"]
    first = ask(client, content)
    before = wait_for_metric(served_vision, "engine_images_total", images + 1)
    again = ask(client, content)
    after = wait_for_metric(served_vision, "engine_images_total", images + 2)
    assert first.choices[0].message.content == again.choices[0].message.content
    usage = again.usage
    possible = (usage.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    assert possible > 200
    assert usage.prompt_tokens_details.cached_tokens >= 0.99 * possible
    assert after["engine_image_prefix_hits_total"] == before["engine_image_prefix_hits_total"] + 1
    unchanged = (
        "gateway_images_requested_total",
        "gateway_images_sent_total",
        "gateway_image_bytes_sent_total",
        "engine_images_requested_total",
        "engine_images_decoded_total",
        "engine_images_encoded_total",
        "engine_image_encode_seconds_total",
    )
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert all(before[name] > 0 for name in unchanged)
    assert after["engine_image_decoding_confined"] == 1


def test_an_image_after_another_text_needs_no_bytes_and_no_encoder(served_vision: Served) -> None:
    content = [{"type": "text", "text": QUESTION}, image_part(picture(8))]
    client = served_vision.client()
    images = read_metrics(served_vision)["engine_images_total"]
    ask(client, content)
    before = wait_for_metric(served_vision, "engine_images_total", images + 1)
    ask(client, [{"type": "text", "text": "Answer in one word."}, *content])
    after = wait_for_metric(served_vision, "engine_images_total", images + 2)
    assert after["engine_image_embedding_hits_total"] == before["engine_image_embedding_hits_total"] + 1
    for name in ("engine_images_requested_total", "engine_images_encoded_total"):
        assert after[name] == before[name]


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
