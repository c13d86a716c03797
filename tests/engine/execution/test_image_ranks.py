# SPDX-License-Identifier: Apache-2.0
"""Engines with one and two ranks answer prompts with images as Transformers does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_prompts import ImagePrompt, random_image, random_text, read_rules, save_image_twin
from PIL import Image
from rank_kit import thread_ranks

from mizzen.core.request import Int32, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.engine import Engine
from mizzen.engine.images.pending import ImageFile

ANSWER = 5


def greedy_answer(prompt: ImagePrompt, model: Any) -> list[int]:
    """Return the tokens that Transformers generates."""
    answer: Int32 = np.empty(0, np.int32)
    for _ in range(ANSWER):
        token = prompt.logits(model, answer)[-1].argmax()
        answer = np.append(answer, np.int32(token))
    return answer.tolist()


def to_file(pixels: np.ndarray) -> bytes:
    """Return an image as the content of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def generate(engine: Engine, prompts: list[ImagePrompt]) -> list[list[int]]:
    """Return the engine's answers; files of images are sent when the engine asks for them."""
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    files = {
        image.digest: pixels[0]
        for prompt in prompts
        for image, pixels in zip(prompt.images, prompt.pixels, strict=True)
    }
    for rid, prompt in enumerate(prompts):
        engine.submit(
            Request(
                rid=rid,
                prompt=prompt.ids,
                sampling=sampling,
                seed=0,
                images=prompt.images,
                rotary=prompt.rotary,
                rotary_offset=prompt.offset,
            )
        )
    answers: list[list[int]] = [[] for _ in prompts]
    step = 0
    while engine.busy:
        output = engine.step(float(step))
        step += 1
        for missing in engine.drain_missing_images():
            for digest in missing.digests:
                pixels = files[digest]
                size = (pixels.shape[1], pixels.shape[0])
                engine.provide_image(
                    ImageFile(rid=missing.rid, digest=digest, content=to_file(pixels), size=size)
                )
        if output is not None:
            assert not [end.message for end in output.finished if end.message]
            for rid, token in zip(output.rids, output.tokens, strict=True):
                answers[rid].append(int(token))
    return answers


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("twin", ["qwen2.5-vl", "qwen3-vl"])
def test_answers_equal_those_of_transformers(twin: str, size: int, tmp_path: Path) -> None:
    model = save_image_twin(tmp_path, twin)
    rules = read_rules(tmp_path)

    first, second = random_image(24, 40, 1), random_image(64, 16, 2)
    prompts = [
        ImagePrompt.build(rules, random_text(5, 1), first, random_text(4, 2)),
        ImagePrompt.build(rules, random_text(3, 3), second, random_text(1, 4), first, random_text(2, 5)),
        ImagePrompt.build(rules, first, random_text(7, 6)),
    ]
    expected = [greedy_answer(prompt, model) for prompt in prompts]
    with thread_ranks(tmp_path, size, prefill_chunk_tokens=16, check_integrity=True) as engine:
        assert engine.info.images
        assert generate(engine, prompts) == expected
        assert generate(engine, prompts[::-1]) == expected[::-1]
