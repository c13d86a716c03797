# SPDX-License-Identifier: Apache-2.0
"""A simulated engine with images: it requests files over the wire, decodes them and caches their prefixes."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prometheus_client import generate_latest

from mizzen.core.images.counts import ImageUse
from mizzen.core.images.keys import image_token
from mizzen.core.kv.block_hashes import block_hashes
from mizzen.core.request import FinishReason, Int32
from mizzen.engine.images.statistics import ImageStatistics
from mizzen.images.digest import image_digest
from mizzen.images.prompt import expand_placeholders
from mizzen.images.rules import load_image_rules
from mizzen.server.metric_catalogue import Phase
from mizzen.server.metrics import EngineView, build_registry
from mizzen.server.ranks.rank_status import RankStatus
from mizzen.server.simulate import SimulatedEngine
from mizzen.server.simulate_config import SimulateConfig
from mizzen.server.status_block import StatusReader, StatusWriter, create_status_blocks
from mizzen.wire.messages import (
    Abort,
    Blocks,
    ImageContent,
    ImageReference,
    NeedImages,
    RefusalCode,
    Refused,
    Welcome,
)
from mizzen.wire.server.peers import WireCounters

PLACEHOLDER = 999


def encode_picture(seed: int, size: int = 224) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


class Prompt:
    """A prompt of text, images and text: token ids and references."""

    def __init__(self, folder: Path, *contents: bytes, size: int = 224, text: int = 70) -> None:
        rules = load_image_rules(folder)
        assert rules is not None
        geometry = rules.geometry(size, size)
        ids: list[int] = list(range(3, 3 + text))
        for _ in contents:
            ids += [PLACEHOLDER, 1]
        ids += [5] * 10
        expanded, positions = expand_placeholders(np.array(ids, np.int32), [geometry] * len(contents), rules)
        self.ids: Int32 = expanded
        self.files = {image_digest(content, rules, geometry): content for content in contents}
        self.references = tuple(
            ImageReference(digest, at.astype("<i4").tobytes(), len(content), size, size)
            for (digest, content), at in zip(self.files.items(), positions, strict=True)
        )
        cached = self.ids.copy()
        for digest, at in zip(self.files, positions, strict=True):
            cached[at] = image_token(digest)
        self.block_hashes = list(block_hashes(cached))


@pytest.fixture
def folder(model: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "qwen2_vl",
        "image_token_id": PLACEHOLDER,
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
    }
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture
def engine(folder: Path) -> Iterator[SimulatedEngine]:
    config = SimulateConfig(
        model=str(folder),
        wire_bind="tcp://127.0.0.1:*",
        step_milliseconds=1.0,
        drain_timeout_seconds=0.2,
        check_integrity=True,
        image_capacity=300,
        prefill_chunk_tokens=128,
    )
    with SimulatedEngine(config) as running:
        yield running


def generate(gateway: Any, rid: int, prompt: Prompt, ids: list[int] | None = None, **options: Any) -> None:
    options = {"max_tokens": 3, "temperature": 0.0, **options}
    gateway.generate(rid, prompt.ids.tolist() if ids is None else ids, images=prompt.references, **options)


def answer(gateway: Any, prompt: Prompt, seconds: float = 60.0) -> NeedImages:
    """Send the images of the next `NeedImages`."""
    message = gateway.expect(NeedImages, seconds)
    for digest in message.digests:
        content = prompt.files[digest]
        half = len(content) // 2
        gateway.send(ImageContent(message.rid, digest, 0, content[:half]))
        gateway.send(ImageContent(message.rid, digest, half, content[half:]))
    return message


def end(gateway: Any, rid: int) -> Any:
    gateway.until(lambda: rid in gateway.ends)
    return gateway.ends[rid]


def test_second_turn_sends_no_bytes(engine: SimulatedEngine, folder: Path, connect: Any) -> None:
    gateway = connect(engine.endpoint)
    assert gateway.expect(Welcome).images
    prompt = Prompt(folder, encode_picture(1), encode_picture(2))
    generate(gateway, 1, prompt)
    requested = list(answer(gateway, prompt).digests)
    while len(requested) < 2:
        requested += answer(gateway, prompt).digests
    first = end(gateway, 1)
    assert (first.reason, first.prompt_tokens) == (FinishReason.LENGTH, len(prompt.ids))
    generate(gateway, 2, prompt, [*prompt.ids.tolist(), *gateway.tokens[1], 6, 7, 8])
    second = end(gateway, 2)
    assert second.cached_tokens >= len(prompt.ids) - 16
    assert not any(isinstance(message, NeedImages) for message in gateway.others)
    assert engine.status["images_requested"] == 2
    assert engine.status["images_decoded"] == 2
    names = ("images", "image_prefix_hits", "images_encoded", "image_processes_confined")
    gateway.until(lambda: [engine.status[name] for name in names] == [4, 2, 2, 1])


@pytest.mark.parametrize(("confined", "lines"), [(None, 0), (True, 1), (False, 1)])
def test_metrics_say_whether_decoding_is_confined(confined: bool | None, lines: int) -> None:
    block = create_status_blocks(1)
    try:
        status, reader = RankStatus(StatusWriter(block, 0)), StatusReader(block, 0)
        status.set_images(
            WireCounters(),
            ImageStatistics(confined=confined, use=ImageUse(admitted=3, encoded=2), encoding_seconds=0.5),
        )
        status.enter_phase(Phase.SERVING)
        snapshot = reader.read()
    finally:
        os.close(block)
    text = generate_latest(build_registry("m", lambda: EngineView(snapshot, "serving", "", 0.0), 4)).decode()
    found = re.findall(r'^mizzen_engine_image_decoding_confined\{model_name="m"\} (.+)$', text, re.MULTILINE)
    assert found == [str(float(bool(confined)))] * lines
    assert 'mizzen_engine_images_total{model_name="m"} 3.0\n' in text
    assert 'mizzen_engine_image_encode_seconds_total{model_name="m"} 0.5\n' in text


def test_block_hashes_have_the_ids_of_images(engine: SimulatedEngine, folder: Path, connect: Any) -> None:
    gateway = connect(engine.endpoint)
    prompt = Prompt(folder, encode_picture(1))
    generate(gateway, 1, prompt)
    answer(gateway, prompt)
    end(gateway, 1)
    stored: set[int] = set()

    def all_stored() -> bool:
        for message in [one for one in gateway.others if isinstance(one, Blocks)]:
            stored.update(np.frombuffer(message.stored, "<u8").tolist())
        return set(prompt.block_hashes) <= stored

    assert len(prompt.block_hashes) == 2
    gateway.until(all_stored)


def test_other_image_does_not_reuse_the_prefix(engine: SimulatedEngine, folder: Path, connect: Any) -> None:
    gateway = connect(engine.endpoint)
    for rid in (1, 2):
        prompt = Prompt(folder, encode_picture(rid))
        generate(gateway, rid, prompt)
        answer(gateway, prompt)
    assert end(gateway, 2).cached_tokens <= 70


def test_image_of_two_gateways_is_fetched_once(engine: SimulatedEngine, folder: Path, connect: Any) -> None:
    gateways = [connect(engine.endpoint) for _ in range(2)]
    prompt = Prompt(folder, encode_picture(1))
    generate(gateways[0], 1, prompt)
    message = gateways[0].expect(NeedImages)
    generate(gateways[1], 1, prompt)
    gateways[1].until(lambda: engine.status["accepted"] == 2)
    (digest,) = message.digests
    gateways[0].send(ImageContent(1, digest, 0, prompt.files[digest]))
    for gateway in gateways:
        assert end(gateway, 1).reason == FinishReason.LENGTH
    assert not any(isinstance(message, NeedImages) for message in gateways[1].others)


def test_other_gateway_provides_the_image_if_the_first_one_aborts(
    engine: SimulatedEngine, folder: Path, connect: Any
) -> None:
    first, second = connect(engine.endpoint), connect(engine.endpoint)
    prompt = Prompt(folder, encode_picture(1))
    generate(first, 1, prompt)
    message = first.expect(NeedImages)
    first.send(ImageContent(1, message.digests[0], 0, b"\x89PNG"))
    generate(second, 1, prompt)
    second.until(lambda: engine.status["accepted"] == 2)
    first.send(Abort(1))
    assert end(first, 1).reason == FinishReason.ABORT
    answer(second, prompt)
    assert end(second, 1).reason == FinishReason.LENGTH


def test_texts_go_on_while_an_image_is_missing(engine: SimulatedEngine, folder: Path, connect: Any) -> None:
    gateway = connect(engine.endpoint)
    prompt = Prompt(folder, encode_picture(1))
    generate(gateway, 1, prompt)
    gateway.expect(NeedImages)
    gateway.generate(2, [5, 6, 7], max_tokens=40, temperature=0.0)
    assert end(gateway, 2).output_tokens == 40
    assert 1 not in gateway.ends


@pytest.mark.parametrize("damage", ["truncated", "other size"])
def test_image_that_cannot_be_decoded_ends_its_request(
    engine: SimulatedEngine, folder: Path, connect: Any, damage: str
) -> None:
    gateway = connect(engine.endpoint)
    content = encode_picture(1)[:-2000] if damage == "truncated" else encode_picture(1, 230)
    bad, good = Prompt(folder, content), Prompt(folder, encode_picture(2))
    generate(gateway, 1, bad)
    answer(gateway, bad)
    result = end(gateway, 1)
    assert (result.reason, result.at_fault) == (FinishReason.ERROR, True)
    assert result.message.startswith("images: ")
    generate(gateway, 2, good)
    answer(gateway, good)
    assert end(gateway, 2).reason == FinishReason.LENGTH
    gateway.until(lambda: engine.status["images_rejected_invalid"] == 1)


def test_geometry_of_the_engine_counts(engine: SimulatedEngine, folder: Path, connect: Any) -> None:
    gateway = connect(engine.endpoint)
    prompt = Prompt(folder, encode_picture(1))
    (reference,) = prompt.references
    lies = ImageReference(reference.digest, reference.positions, reference.size, 500, 500)
    gateway.generate(1, prompt.ids.tolist(), images=(lies,))
    refused = gateway.expect(Refused)
    assert refused.code == RefusalCode.INVALID
    assert refused.message == "images: image 1 has 64 positions, but 324 embeddings"


def test_image_larger_than_the_store_is_refused(engine: SimulatedEngine, folder: Path, connect: Any) -> None:
    gateway = connect(engine.endpoint)
    generate(gateway, 1, Prompt(folder, encode_picture(1, 700), size=700))
    assert "the engine keeps 300" in gateway.expect(Refused).message
