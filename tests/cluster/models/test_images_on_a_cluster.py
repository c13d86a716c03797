# SPDX-License-Identifier: Apache-2.0
"""A model that reads images on a real API server: official clients get the answers of `LLM`."""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from local_node_kit import Space, eventually
from PIL import Image

from mizzen import LLM, ImagePrompt, SamplingParams
from vision_chat_model import save_vision_chat_model

QUESTION = "What is this?"
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 16

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


@pytest.fixture
def vision_model() -> Iterator[Path]:
    # Pods do not see the host's /tmp: each of them gets an empty one.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="mizzen-") as folder:
        save_vision_chat_model(Path(folder))
        Path(folder).chmod(0o755)
        yield Path(folder)


def picture(seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (50 + seed, 70, 3), np.uint8)
    output = io.BytesIO()
    Image.fromarray(noise).save(output, "JPEG")
    return output.getvalue()


def content(image: bytes) -> list[dict[str, Any]]:
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]


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
    images = [picture(seed) for seed in range(3)]
    with LLM(vision_model, device="cpu", threads=1) as llm:
        prompts = [ImagePrompt(PROMPT.format(QUESTION), [image]) for image in images]
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
