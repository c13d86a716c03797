# SPDX-License-Identifier: Apache-2.0
"""A model that reads images on a real API server: official clients get the answers of `LLM`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from local_node_kit import Space, eventually

from image_noise import encode_noise, image_part
from mizzen import LLM, ImagePrompt, SamplingParams
from vision_chat_model import IMAGE_PLACEHOLDER, render_question, save_vision_chat_model

QUESTION = "What is this?"
TOKENS = 16

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


@pytest.fixture
def vision_model() -> Iterator[Path]:
    # Pods do not see the host's /tmp: each of them gets an empty one.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="mizzen-") as folder:
        save_vision_chat_model(Path(folder))
        Path(folder).chmod(0o755)
        yield Path(folder)


def content(image: bytes) -> list[dict[str, Any]]:
    return [image_part(image), {"type": "text", "text": QUESTION}]


def test_official_clients_send_images_and_get_the_answers_of_llm(space: Space, vision_model: Path) -> None:
    spec = {
        "model": {"source": f"file://{vision_model}"},
        "engine": {"device": "CPU"},
        "gateway": {"replicas": 1},
        "accelerator": {"nodeSelector": {}},
    }
    space.create("InferenceService", "vision", "mizzen.dev/v1alpha1", spec=spec)
    space.wait("infsvc/vision", "condition=Ready", 100)
    eventually(
        lambda: space.kubectl("get", "infsvc", "vision", "-o", "jsonpath={.status.model.images}") == "true"
    )
    images = [encode_noise(seed, 70, 50 + seed, "JPEG") for seed in range(3)]
    with LLM(vision_model, device="cpu", threads=1) as llm:
        prompts = [ImagePrompt(render_question(IMAGE_PLACEHOLDER + QUESTION), [image]) for image in images]
        expected = [
            answer.text for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS))
        ]
    assert len(set(expected)) > 1
    url = space.cluster.url("vision", space.name)
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    answers = [
        client.chat.completions.create(
            model="vision",
            messages=[{"role": "user", "content": content(image)}],  # type: ignore[misc,list-item]
            temperature=0,
            max_tokens=TOKENS,
        )
        .choices[0]
        .message.content
        for image in images
    ]
    assert answers == expected
    chain = ChatOpenAI(
        model="vision",
        base_url=url,
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=TOKENS,
    )
    assert [chain.invoke([HumanMessage(content(image))]).text for image in images] == expected  # type: ignore[arg-type]
