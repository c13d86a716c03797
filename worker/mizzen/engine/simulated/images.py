# SPDX-License-Identifier: Apache-2.0
"""Images of a simulated device: which embeddings it keeps, and checks of the plans that use them."""

from __future__ import annotations

import numpy as np

from mizzen.core.request import Int32
from mizzen.core.step_plan import PrefillChunk, StepPlan


class PlanViolation(RuntimeError):
    """A plan violates a rule of `mizzen.core.step_plan`; the message names the rule."""


class SimulatedImages:
    """Numbers of embeddings of the images that a device keeps, by digest."""

    def __init__(self, capacity: int) -> None:
        """Keep at most `capacity` embeddings."""
        self.capacity = capacity
        self.embeddings: dict[bytes, int] = {}
        self._divided: tuple[bytes, int] | None = None
        """Digest of the image whose encoding is divided, and the number of layers that have run."""

    def update(self, plan: StepPlan) -> None:
        """Drop and encode images as a plan says.

        Raises:
            PlanViolation: The plan drops an image that is not kept, encodes one that is kept, without its
                pixels or without the layers before, or exceeds the capacity.
        """
        for digest in plan.dropped_images:
            if self.embeddings.pop(digest, None) is None:
                raise PlanViolation(f"step {plan.step} drops the image {digest.hex()}, which is not kept")
        for encoding in plan.encodings:
            name = f"the image {encoding.digest.hex()}"
            if encoding.digest in self.embeddings:
                raise PlanViolation(f"step {plan.step} encodes {name}, which is kept already")
            begin, end = encoding.layers or (0, 0)
            if begin and self._divided != (encoding.digest, begin):
                raise PlanViolation(f"step {plan.step} encodes {name} without the layers before {begin}")
            if not begin and encoding.pixels is None:
                raise PlanViolation(f"step {plan.step} encodes {name} without its pixels")
            self._divided = None if encoding.last else (encoding.digest, end)
            if encoding.last:
                self.embeddings[encoding.digest] = encoding.embeddings
        if (total := sum(self.embeddings.values())) > self.capacity:
            raise PlanViolation(f"step {plan.step} keeps {total} embeddings, more than {self.capacity}")

    def check_chunk(self, plan: StepPlan, chunk: PrefillChunk) -> None:
        """Check the images and rotary positions of a chunk.

        Raises:
            PlanViolation: The chunk uses an image that is not kept, or embeddings beyond its number, or
                images do not replace exactly the tokens with negative ids, or rotary positions are missing.
        """
        where = f"step {plan.step}: a chunk of slot {chunk.slot}"
        for image in chunk.images:
            count, end = self.embeddings.get(image.digest), image.first + len(image.offsets)
            if count is None:
                raise PlanViolation(f"{where} uses the image {image.digest.hex()}, which is not kept")
            if image.first < 0 or not len(image.offsets) or end > count:
                raise PlanViolation(f"{where} uses embeddings {image.first} to {end - 1} of {count}")
            if np.any(np.diff(image.offsets) <= 0):
                raise PlanViolation(f"{where} does not use the embeddings of an image in order")
        replaced: Int32 = np.sort(np.concatenate([np.empty(0, np.int32), *(i.offsets for i in chunk.images)]))
        if not np.array_equal(replaced, np.flatnonzero(chunk.tokens < 0)):
            raise PlanViolation(f"{where} replaces tokens other than those of images")
        if chunk.rotary is not None and chunk.rotary.shape != (3, len(chunk.tokens)):
            raise PlanViolation(f"{where} has rotary positions of shape {chunk.rotary.shape}")
