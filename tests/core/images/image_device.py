# SPDX-License-Identifier: Apache-2.0
"""A device without a model, for tests of the scheduler with images."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import AddRequest, Event, ProvideImage
from mizzen.core.images.cost import EncodingCost
from mizzen.core.images.types import PromptImage
from mizzen.core.kv.integrity import find_integrity_faults
from mizzen.core.request import Finished, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan, StepTokens

PLACEHOLDER = 9
Prompt = list[int | tuple[str, int]]
"""Token ids, and images as pairs of a name and the number of embeddings."""


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def image_request(rid: int, prompt: Prompt, **sampling: Any) -> Request:
    ids: list[int] = []
    images: list[PromptImage] = []
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
            continue
        name, count = part
        positions = np.arange(len(ids), len(ids) + count, dtype=np.int32)
        images.append(PromptImage(digest=digest(name), positions=positions, grid=(1, 1, count)))
        ids += [PLACEHOLDER] * count
    length = len(ids)
    return Request(
        rid=rid,
        prompt=np.array(ids, np.int32),
        sampling=SamplingParams(**{"max_tokens": 3, **sampling}),
        images=tuple(images),
        rotary=np.tile(np.arange(length, dtype=np.int32) // 2, (3, 1)) if images else None,
        rotary_offset=-3 if images else 0,
    )


def config(**fields: Any) -> SchedulerConfig:
    values = {"pages_total": 64, "context_length": 200, "page_size": 4, "image_capacity": 24, **fields}
    return SchedulerConfig(**values)


def encoding_cost(tokens: int, layers: int, least: int = 0) -> EncodingCost:
    """Return the cost of images of 2 x 2 pixels that take as long as prompts of `tokens` tokens.

    The launches of an encoder with this number of layers take as long as prompts of `least` tokens.
    """
    return EncodingCost(
        patch_size=1, patch_tokens=tokens / 4, pair_tokens=0, least=least, full_layers=(True,) * layers
    )


class Device:
    """Runs plans without a model, and checks that chunks use only encoded images."""

    def __init__(self, settings: SchedulerConfig) -> None:
        self.scheduler = Scheduler(settings)
        self.settings = settings
        self.events: list[Event] = []
        self.inflight: deque[StepPlan] = deque()
        self.requests: dict[int, Request] = {}
        self.finished: dict[int, Finished] = {}
        self.embeddings: dict[bytes, int] = {}
        self.encoded: list[bytes] = []
        self.divided: tuple[bytes, int] | None = None
        self.requested: list[tuple[int, bytes]] = []
        self.plans: list[StepPlan] = []
        self.provides = True
        self.small: set[bytes] = set()
        """Images of one pixel; others have 2 x 2."""

    def add(self, request: Request) -> None:
        self.requests[request.rid] = request
        self.events.append(AddRequest(request))

    def launch(self) -> bool:
        events, self.events = self.events, []
        plan = self.scheduler.schedule(events, 0.0)
        for missing in self.scheduler.drain_missing_images():
            self.requested += [(missing.rid, one) for one in missing.digests]
            if self.provides:
                self.events += [ProvideImage(one, self.pixels(one)) for one in missing.digests]
        for end in self.scheduler.drain_finished():
            self.finished[end.rid] = end
        if plan is None:
            return bool(self.events)
        self.check(plan)
        self.plans.append(plan)
        self.inflight.append(plan)
        return True

    def pixels(self, one: bytes) -> np.ndarray:
        edge = 1 if one in self.small else 2
        return np.frombuffer(one[:12], np.uint8).reshape(1, 2, 2, 3)[:, :edge, :edge]

    def check(self, plan: StepPlan) -> None:
        for one in plan.dropped_images:
            del self.embeddings[one]
        for encoding in plan.encodings:
            assert encoding.digest not in self.embeddings
            begin, end = encoding.layers or (0, 0)
            if begin:
                assert self.divided == (encoding.digest, begin)
                assert encoding.pixels is None
            else:
                assert encoding.pixels is not None
                assert np.array_equal(encoding.pixels, self.pixels(encoding.digest))
            assert encoding.layers is None or len(plan.encodings) == 1
            self.divided = None if encoding.last else (encoding.digest, end)
            if not encoding.last:
                assert end > begin
                assert len(plan.decode), "only streams make it worthwhile to divide"
                continue
            assert self.settings.encoding_cost is None or end in (0, self.settings.encoding_cost.layers)
            self.embeddings[encoding.digest] = encoding.embeddings
            self.encoded.append(encoding.digest)
        assert sum(self.embeddings.values()) <= self.settings.image_capacity
        for chunk in plan.prefill:
            assert len(chunk.tokens)
            replaced = [offset for image in chunk.images for offset in image.offsets.tolist()]
            assert np.flatnonzero(chunk.tokens < 0).tolist() == replaced
            for image in chunk.images:
                assert image.first + len(image.offsets) <= self.embeddings[image.digest]

    def collect(self) -> bool:
        if not self.inflight:
            return False
        plan = self.inflight.popleft()
        tokens = np.full((plan.samples, 1), 5, np.int32)
        output = self.scheduler.complete(StepTokens(plan.step, tokens), 0.0)
        for end in output.finished:
            self.finished[end.rid] = end
        return True

    def run(self, steps: int = 3000) -> None:
        for _ in range(steps):
            progressed = self.launch()
            progressed = self.collect() or progressed
            if not progressed and not self.scheduler.has_work:
                break
        assert not find_integrity_faults(self.scheduler)
