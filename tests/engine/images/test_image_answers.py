# SPDX-License-Identifier: Apache-2.0
"""Greedy answers to prompts with images equal those of Transformers, for every family.

The environment variable MIZZEN_IMAGE_PROMPTS sets the number of prompts of a family.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from image_files import MODES, orientation_exif, write_image
from vision_folders import FAMILIES, IMAGE, generate, random_image, random_prompt, save_family

from mizzen import LLM, ImagePrompt, SamplingParams
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageRules, InvalidImage
from mizzen.offline.image_prompts import prepare_images

ANSWER = 6
PROMPTS = int(os.environ.get("MIZZEN_IMAGE_PROMPTS", "12"))
LONGEST_EDGE = 2000
"""Largest width and height of images in pixels."""
FORMATS = [(kind, mode) for kind, modes in MODES.items() for mode in modes]
NEAR_TIE = 1e-3
"""Difference of two logits below which either token may come first, because float32 rounds."""


def random_file(source: random.Random, rules: ImageRules) -> bytes:
    """Return an image file of random format, mode, orientation and size, with edges of 1 to LONGEST_EDGE."""
    kind, mode = source.choice(FORMATS)
    while True:
        width, height = (round(LONGEST_EDGE ** source.random()) for _ in range(2))
        try:
            rules.geometry(width, height)
        except InvalidImage:  # too narrow, or a single pixel
            continue
        options = {} if kind == "GIF" else {"exif": orientation_exif(source.randint(1, 8))}
        return write_image(kind, mode, (width, height), source.randrange(1 << 30), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts run together, in small chunks and pages, so that borders fall anywhere in an image."""
    family = FAMILIES[name]
    model = save_family(tmp_path, family)
    rules = load_image_rules(tmp_path)
    assert rules is not None
    source = random.Random(name)
    files = [random_file(source, rules) for _ in range(PROMPTS)]
    prompts = []
    for _ in range(PROMPTS):
        chosen = source.choices(files, k=source.randint(1, 3))
        prompts.append(ImagePrompt(random_prompt(source, len(chosen)), chosen))
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    with LLM(
        tmp_path,
        device="cpu",
        skip_tokenizer=True,
        threads=1,
        page_size=4,
        kv_cache_tokens=2048,
        prefill_chunk_tokens=23,
        max_running_requests=4,
        check_integrity=True,
    ) as llm:
        answers = llm.generate(prompts, params)
        assert llm.engine.integrity_faults == 0
    equal = compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        prepared = prepare_images(np.array(prompt.prompt, np.int32), prompt.images, rules)
        if sum(len(image.positions) for image in prepared.images) == 1 and name == "mistral3":
            continue  # Transformers drops the dimension of a single embedding, and fails
        compared += 1
        expected, logits = generate(model, family, prepared.ids, list(prompt.images), ANSWER)
        for i, (token, other) in enumerate(zip(answer.token_ids, expected, strict=True)):
            if token != other:
                gap = float(logits[i, other] - logits[i, token])
                assert gap < NEAR_TIE, f"token {i} is {token} instead of {other}: logits differ by {gap}"
                break
            equal += 1
    assert compared > PROMPTS / 2
    assert equal > 0.85 * ANSWER * compared
    print(f"{name}: {compared} of {PROMPTS} prompts compared, {equal} of {ANSWER * compared} tokens equal")


@pytest.mark.parametrize("name", ["qwen2.5-vl"])
def test_another_image_gives_another_answer_and_the_same_one_is_cached(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    save_family(tmp_path, family)
    source = random.Random(5)
    ids = [5, 6, 151, IMAGE, 152, 7, 8, 9]
    files = [random_image(source) for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, device="cpu", skip_tokenizer=True, threads=1, page_size=4) as llm:
        first = llm.generate([ImagePrompt(ids, [file]) for file in files], params)
        again = llm.generate([ImagePrompt(ids, [file]) for file in files], params)
        statistics = llm.engine.image_statistics
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({tuple(one.token_ids) for one in first}) > 1
    assert statistics.decoding.decoded == len(files)
    assert statistics.confined
    use = statistics.use
    assert (use.admitted, use.prefix_hits, use.encoded) == (2 * len(files), len(files), len(files))
    assert 0 < statistics.encoding_seconds < 60
    rules = load_image_rules(tmp_path)
    assert rules is not None
    for file, one in zip(files, again, strict=True):
        length = len(prepare_images(np.array(ids, np.int32), [file], rules).ids)
        assert one.cached_tokens == (length - 1) // 4 * 4
