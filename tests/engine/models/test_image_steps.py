# SPDX-License-Identifier: Apache-2.0
"""Logits of prompts with images equal those of the whole model in Transformers, however they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_prompts import QWEN_TWINS, ImagePrompt, random_image, random_text, read_rules, save_image_twin
from logits_check import assert_equal
from msgspec.structs import replace

from mizzen.engine.execution.image_store import ImageStore
from mizzen.engine.loading.vision_setup import load_vision_encoder
from mizzen.images.types import ImageRules
from mizzen.layers.context import BuildContext
from mizzen.models.vision.encoder import VisionEncoder

CAPACITY = 48


@dataclass
class Twin:
    """A twin with its image rules, and benches that serve it."""

    folder: Path
    model: Any
    rules: ImageRules
    encoder: VisionEncoder
    kit: SimpleNamespace

    def bench(self) -> Any:
        bench = self.kit.Bench(self.folder)
        vision = bench.model.config.vision
        table = torch.zeros(CAPACITY, vision.output_size * (1 + vision.deepstack_layers))
        bench.step.images = ImageStore(table, self.encoder, bench.upload)
        return bench

    def prompt(self, *parts: np.ndarray) -> ImagePrompt:
        return ImagePrompt.build(self.rules, *parts)

    def start(self, prompt: ImagePrompt, slot: int, length: int = 0) -> Any:
        return replace(self.kit.greedy(slot, length), rotary_offset=prompt.offset)

    def run(
        self, bench: Any, prompt: ImagePrompt, slot: int, borders: list[int], *, encode: bool = True
    ) -> torch.Tensor:
        """Compute a prompt in chunks that end at `borders`; return the logits of all tokens."""
        parts: list[torch.Tensor] = []
        begin = 0
        for end in (*borders, len(prompt.ids)):
            plan = bench.plan(
                [],
                [(slot, begin, prompt.ids[begin:end], end == len(prompt.ids))],
                (self.start(prompt, slot),) if not begin else (),
            )
            plan = replace(
                plan,
                prefill=(prompt.chunk(slot, begin, end),),
                encodings=prompt.encodings() if encode and not begin else (),
            )
            parts.append(bench.logits(plan))
            begin = end
        return torch.cat(parts)


@pytest.fixture(params=QWEN_TWINS)
def twin(request: pytest.FixtureRequest, kit: SimpleNamespace, tmp_path: Path) -> Twin:
    model = save_image_twin(tmp_path, request.param)
    config = kit.Bench(tmp_path).model.config
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32)
    encoder = load_vision_encoder(tmp_path, build, config.vision)
    return Twin(tmp_path, model, read_rules(tmp_path), encoder, kit)


def test_chunks_may_end_anywhere_in_an_image(twin: Twin) -> None:
    bench = twin.bench()
    prompt = twin.prompt(random_text(5, 1), random_image(24, 40), random_text(4, 2))
    assert len(prompt.ids) == 24
    expected = prompt.logits(twin.model)
    text_only = twin.kit.oracle(twin.model, prompt.ids)
    assert (expected - text_only)[6:].abs().max() > 0.1  # the image matters
    assert_equal(twin.run(bench, prompt, 0, []), expected)
    for slot, border in enumerate(range(1, 15), start=1):
        assert_equal(twin.run(bench, prompt, slot, [border, border + 8], encode=False), expected)


@pytest.mark.parametrize("lead", range(5))
def test_images_may_begin_at_any_offset_of_a_page(twin: Twin, lead: int) -> None:
    images = random_image(16, 24, 1), random_image(40, 8, 2), random_image(8, 8, 3)
    texts = [random_text(count, seed) for seed, count in enumerate((lead, 1, 1, 3))]
    prompt = twin.prompt(texts[0], images[0], texts[1], images[1], texts[2], images[2], texts[3])
    expected = prompt.logits(twin.model)
    bench = twin.bench()
    assert_equal(twin.run(bench, prompt, 0, []), expected)
    assert_equal(twin.run(bench, prompt, 1, [4, 8], encode=False), expected)


def test_answers_continue_after_images(twin: Twin) -> None:
    """Slots with and without images decode together, beside a chunk with an image."""
    bench = twin.bench()
    kit = twin.kit
    image = random_image(48, 16)
    prompt = twin.prompt(random_text(3, 1), image, random_text(2, 2))
    other = twin.prompt(image, random_text(9, 3))
    plain = random_text(11, 4)
    assert prompt.offset != 0
    twin.run(bench, prompt, 0, [])
    bench.logits(bench.plan([], [(1, 0, plain, True)], (kit.greedy(1),)))
    answers = {slot: random_text(4, 10 + slot) for slot in range(3)}
    expected = [
        prompt.logits(twin.model, answers[0])[len(prompt.ids) :],
        kit.oracle(twin.model, np.concatenate([plain, answers[1]]))[len(plain) :],
        other.logits(twin.model, answers[2])[len(other.ids) :],
    ]

    def feed(slots: list[int], step: int) -> None:
        for slot in slots:
            bench.state.last_tokens[slot] = int(answers[slot][step])

    feed([0, 1], 0)
    plan = bench.plan([1, 0], [(2, 0, other.ids, True)], (twin.start(other, 2),))
    logits = bench.logits(replace(plan, prefill=(other.chunk(2, 0, len(other.ids)),)))
    assert_equal(logits, torch.cat([expected[1][:1], expected[0][:1], other.logits(twin.model)]))
    feed([2], 0)
    assert_equal(bench.logits(bench.plan([2], [])), expected[2][:1])
    for step in (1, 2, 3):
        feed([0, 1, 2], step)
        logits = bench.logits(bench.plan([2, 1, 0], []))
        assert_equal(logits, torch.stack([expected[slot][step] for slot in (2, 1, 0)]))


def test_pages_with_images_are_shared(twin: Twin) -> None:
    """A prefix-cache hit may end within an image; the rest of the image comes from the store."""
    bench = twin.bench()
    prompt = twin.prompt(random_text(2, 1), random_image(24, 24), random_text(4, 2))
    expected = twin.run(bench, prompt, 0, [])
    shared = bench.share(0, 1, 8)
    plan = bench.plan([], [(1, 8, prompt.ids[8:], True)], (twin.start(prompt, 1, 8),), (shared,))
    plan = replace(plan, prefill=(prompt.chunk(1, 8, len(prompt.ids)),))
    assert_equal(bench.logits(plan), expected[8:])


def test_a_text_without_images_has_the_same_logits_as_without_a_store(twin: Twin) -> None:
    ids = random_text(30, 1)
    benches = twin.bench(), twin.kit.Bench(twin.folder)
    first, second = (
        bench.logits(bench.plan([], [(0, 0, ids, True)], (twin.kit.greedy(0),))) for bench in benches
    )
    assert torch.equal(first, second)


def test_dropped_images_make_room_for_others(twin: Twin) -> None:
    bench = twin.bench()
    digests: list[bytes] = []
    for number in range(8):
        image = random_image(40, 32, number)  # 20 embeddings; the store has room for 48
        prompt = twin.prompt(random_text(3, number), image, random_text(2, 9))
        assert_equal(twin.run(bench, prompt, number, [10]), prompt.logits(twin.model))
        digests.append(prompt.images[0].digest)
        if number:
            bench.logits(replace(bench.plan([number], []), dropped_images=(digests[-2],)))
    assert bench.step.images.free_count == CAPACITY - 20


def test_wrong_plans_are_refused(twin: Twin) -> None:
    bench = twin.bench()
    prompt = twin.prompt(random_text(3, 1), random_image(40, 32), random_text(2, 9))
    (encoding,) = prompt.encodings()
    plan = bench.plan([], [(0, 0, prompt.ids, True)], (twin.start(prompt, 0),))
    plan = replace(plan, prefill=(prompt.chunk(0, 0, len(prompt.ids)),))
    wrong = [
        (replace(plan, dropped_images=(encoding.digest,)), "drops the image .* not stored"),
        (plan, "uses the image .* not stored"),
        (replace(plan, encodings=(encoding, encoding)), "stored already"),
        (replace(plan, encodings=(replace(encoding, embeddings=19),)), "shape .20, .* not .19, "),
        (replace(plan, encodings=(replace(encoding, pixels=None),)), "without its pixels"),
        (replace(plan, encodings=(replace(encoding, embeddings=49),)), "49 embeddings, and 48 .* free"),
    ]
    for case, message in wrong:
        bench.step.images = twin.bench().step.images
        with pytest.raises(ValueError, match=message):
            bench.logits(case)
    bench.step.images = None
    with pytest.raises(ValueError, match="is served without images"):
        bench.logits(replace(plan, encodings=(encoding,)))
