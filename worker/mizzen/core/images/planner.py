# SPDX-License-Identifier: Apache-2.0
"""Plans when images are encoded, and requests the pixels of images that have to be.

A prompt's image needs nothing if its KV comes from the prefix cache. Otherwise its embeddings must be in the
store when a chunk contains its tokens; if they are not, the chunk's step encodes the image, for which the
scheduler needs its pixels. Pixels are dropped once the image is encoded. If its embeddings are dropped before
a request has used all of them, the scheduler requests the pixels again. Waiting requests get their pixels in
advance, up to a bound for all of them together.

If streams decode and encoding an image takes more than a step's budget, its encoding is divided: several
steps run some layers of the encoder each, so that no step takes much longer than others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from mizzen.core.images.cost import EncodingCost
from mizzen.core.images.counts import ImageUse
from mizzen.core.images.keys import ImageKeys
from mizzen.core.images.store import EmbeddingStore
from mizzen.core.images.types import ChunkImage, ImageEncoding, MissingImages, Pixels, PromptImage
from mizzen.core.sequence import SequenceState

PIXELS_AHEAD = 4
"""Bound of the pixels for waiting requests, requested or received: those of this many full stores."""
MAX_IMAGES_AHEAD = 128
"""Maximum number of these images, unless a single request has more."""
MIN_CHUNK_TOKENS = 64
"""Minimum number of prompt tokens that may follow the encoding of an image in the same step."""


class StepImages:
    """Encodings of one step, and the images that its chunks use."""

    def __init__(self) -> None:
        self.has_streams = False
        """Whether streams decode in the step, so that encodings must not exceed the budget."""
        self.encodings: list[ImageEncoding] = []
        self.dropped: list[bytes] = []
        self.used: set[bytes] = set()
        """Digests of images that the step encodes or reads; none of them is dropped in the step."""

    @property
    def divided(self) -> bool:
        """Whether the step has a part of a divided encoding; then it has no other encodings."""
        return any(encoding.layers is not None for encoding in self.encodings)


class ImagePlanner:
    """Knows the images of all requests, their pixels, and which embeddings are on the device."""

    def __init__(self, capacity: int, cost: EncodingCost | None = None) -> None:
        """Start without images.

        Args:
            capacity: number of embeddings that the device keeps.
            cost: time to encode an image; None if an embedding takes as long as a prompt token.
        """
        self._cost = cost
        self.store = EmbeddingStore(capacity)
        self.use = ImageUse()
        self._keys = ImageKeys()
        self._pixels: dict[bytes, Pixels] = {}
        self._users: dict[bytes, set[int]] = {}
        """Live requests with an image, by digest."""
        self._shapes: dict[bytes, tuple[int, ...]] = {}
        """Grid and number of embeddings of the images in `_users` and in the store, by digest."""
        self._divided: tuple[bytes, int] | None = None
        """Digest of the image whose encoding is divided, and the number of layers that have run. The device
        keeps their result until it encodes another image."""
        self._ahead = 0
        """Number of embeddings of all images in `_pixels` and `_requested`."""
        self._requested: dict[bytes, int] = {}
        """Request by which the pixels of an image were requested, by digest, until they are provided."""
        self._missing: list[MissingImages] = []

    @property
    def waits(self) -> bool:
        """Whether any pixels were requested and not provided yet."""
        return bool(self._requested)

    def fault(self, images: Iterable[PromptImage]) -> str:
        """Return an error message if the images of a request can never be computed, else an empty string."""
        largest = max((len(image.positions) for image in images), default=0)
        if largest > self.store.capacity:
            if not self.store.capacity:
                return "images: the model reads text only"
            return f"images: an image has {largest} embeddings; the engine keeps {self.store.capacity}"
        shapes: dict[bytes, tuple[int, ...]] = {}
        for image in images:
            shape = shape_of(image)
            known = self._shapes.get(image.digest, shape)
            if shape != known or shapes.setdefault(image.digest, shape) != shape:
                return "images: the digest of an image belongs to an image of another size"
        return ""

    def add_request(self, sequence: SequenceState, cached: Callable[[], Iterable[int]]) -> None:
        """Replace the placeholders among a new request's tokens by the ids of its images.

        `cached` returns the negative ids in the prefix cache and in all slots.
        """
        tokens = sequence.tokens.copy()
        for image in sequence.request.images:
            tokens[image.positions] = self._keys.assign(image.digest, cached, self._users)
            self._users.setdefault(image.digest, set()).add(sequence.rid)
            self._shapes[image.digest] = shape_of(image)
        sequence.tokens = tokens

    def count_admitted(self, sequence: SequenceState) -> None:
        """Count the images of a request that is admitted for the first time, before its first chunk."""
        last_positions = {image.digest: image.positions[-1] for image in sequence.request.images}
        for digest, last in last_positions.items():
            self.use.admitted += 1
            if last < sequence.computed:
                self.use.prefix_hits += 1
            elif digest in self.store:
                self.use.embedding_hits += 1

    def remove_request(self, sequence: SequenceState) -> None:
        """Forget the images of a request that has ended, unless others use them."""
        self.release(sequence)
        for digest in {image.digest for image in sequence.request.images}:
            users = self._users[digest]
            users.discard(sequence.rid)
            if self._requested.get(digest) == sequence.rid:
                del self._requested[digest]
                self._ahead -= self._embeddings(digest)
            if not users:
                del self._users[digest]
                if self._pixels.pop(digest, None) is not None:
                    self._ahead -= self._embeddings(digest)
                if digest not in self.store:
                    del self._shapes[digest]

    def release(self, sequence: SequenceState) -> None:
        """Release the embeddings that a request holds, because it leaves its slot."""
        for image in sequence.request.images:
            self.store.release(image.digest, sequence.rid)

    def provide(self, digest: bytes, pixels: Pixels) -> None:
        """Keep the pixels of an image for the requests that need it; ignore pixels that no request needs."""
        if self._requested.pop(digest, None) is not None:
            self._pixels[digest] = pixels

    def drain_missing(self) -> tuple[MissingImages, ...]:
        """Return the images whose pixels were found missing since the last call."""
        missing, self._missing = tuple(self._missing), []
        return missing

    def request_missing(self, sequence: SequenceState, computed: int, *, first: bool = False) -> bool:
        """Request the pixels that a request needs after its first `computed` tokens.

        If a waiting request needs more than may be requested in advance, nothing is requested yet, unless it
        is the `first` one to be admitted: that one must never wait for the pixels of others. Returns whether
        all pixels are available.
        """
        needed = dict.fromkeys(
            image.digest for image in sequence.request.images if image.positions[-1] >= computed
        )
        lacking = [one for one in needed if one not in self.store and one not in self._pixels]
        new = tuple(digest for digest in lacking if digest not in self._requested)
        if new and (first or sequence.slot >= 0 or self._has_room(new)):
            self._requested.update(dict.fromkeys(new, sequence.rid))
            self._ahead += sum(map(self._embeddings, new))
            self._missing.append(MissingImages(sequence.rid, new))
        return not lacking

    def _has_room(self, new: tuple[bytes, ...]) -> bool:
        """Return whether the pixels of a waiting request's images, given by digest, may be requested now."""
        images = len(self._pixels) + len(self._requested)
        if not images:
            return True
        embeddings = self._ahead + sum(map(self._embeddings, new))
        return images + len(new) <= MAX_IMAGES_AHEAD and embeddings <= PIXELS_AHEAD * self.store.capacity

    def _embeddings(self, digest: bytes) -> int:
        return self._shapes[digest][-1]

    def can_begin(
        self, step: StepImages, sequence: SequenceState, start: int, budget: int, *, first: bool
    ) -> bool:
        """Return whether `add_encodings` with the same arguments would make progress.

        It then allows at least one token, or adds a part of an encoding.
        """
        for image in sequence.request.images:
            if _first_position(image, start) == start:
                if image.digest in self.store:
                    return True
                return (
                    image.digest in self._pixels
                    and not step.divided
                    and (first or self._tokens(step, image) < budget)
                    and self.store.victims(len(image.positions), step.used) is not None
                )
        return True

    def add_encodings(
        self, step: StepImages, sequence: SequenceState, start: int, end: int, budget: int, *, first: bool
    ) -> tuple[int, int]:
        """Add the encodings that a chunk with the tokens `start` to `end` needs to a step.

        Args:
            step: the images of the step.
            sequence: the request of the chunk.
            start: first token of the chunk.
            end: end of the chunk (exclusive) if every image can be encoded.
            budget: number of prompt tokens that may still be added; an encoding counts as some of them.
            first: whether the step has no prompt work so far; then the budget does not prevent its first
                encoding, so that each step makes progress.

        Returns:
            End of the chunk: not above `end`, and at `start` if the chunk must wait; and the number of prompt
            tokens whose computation takes as long as the encodings.
        """
        cost = 0
        for image in sequence.request.images:
            at = _first_position(image, start)
            if at is None or at >= end:
                continue
            if image.digest in self.store:
                self._use(step, image.digest)
                continue
            tokens = self._tokens(step, image)
            if step.divided or not (first or cost + tokens + (at - start) < budget):
                return at, cost
            if step.has_streams and tokens >= budget and at > start:
                return at, cost  # the text before the image first
            tokens, encoded = self._encode(step, sequence, image, tokens, budget)
            cost += tokens
            if not encoded:
                return at, cost
            end = max(min(end, start + budget - cost), min(end, at + MIN_CHUNK_TOKENS))
            first = False
        return end, cost

    def _tokens(self, step: StepImages, image: PromptImage) -> int:
        """Return the number of prompt tokens whose computation takes as long as encoding an image.

        If its pixels are missing, the result is the number of its embeddings.
        """
        pixels = self._pixels.get(image.digest)
        if self._cost is None or pixels is None:
            return len(image.positions)
        return self._cost.tokens(pixels, first=not step.encodings)

    def chunk_images(self, sequence: SequenceState, start: int, end: int) -> tuple[ChunkImage, ...]:
        """Return the embeddings for the tokens `start` to `end` of a request; hold images that go on."""
        return tuple(self._chunk_images(sequence, start, end))

    def _chunk_images(self, sequence: SequenceState, start: int, end: int) -> Iterator[ChunkImage]:
        for image in sequence.request.images:
            first, last = np.searchsorted(image.positions, (start, end)).tolist()
            if first == last:
                continue
            if last < len(image.positions):
                self.store.hold(image.digest, sequence.rid)
            else:
                self.store.release(image.digest, sequence.rid)
            yield ChunkImage(digest=image.digest, first=first, offsets=image.positions[first:last] - start)

    def _encode(
        self, step: StepImages, sequence: SequenceState, image: PromptImage, tokens: int, budget: int
    ) -> tuple[int, bool]:
        """Add the encoding of an image, or a part of it, to a step; request its pixels if they are missing.

        Args:
            step: the images of the step.
            sequence: the request of the image.
            image: the image.
            tokens: number of prompt tokens whose computation takes as long as the whole encoding.
            budget: number of prompt tokens that may still be added.

        Returns:
            Prompt tokens whose computation takes as long, and whether the step has the image's embeddings.
        """
        victims, pixels = self.store.victims(len(image.positions), step.used), self._pixels.get(image.digest)
        if victims is None:
            return 0, False
        if pixels is None:
            self.request_missing(sequence, int(image.positions[0]))
            return 0, False
        layers, last = None, True
        begin = self._divided[1] if self._divided and self._divided[0] == image.digest else 0
        if self._cost is not None and (begin or (step.has_streams and tokens >= budget)):
            end, tokens = self._cost.divide(pixels, begin, budget if step.has_streams else sys.maxsize)
            last = end == self._cost.layers
            layers = (begin, end) if begin or not last else None
        self._divided = None if layers is None or last else (image.digest, layers[1])
        step.encodings.append(
            ImageEncoding(
                digest=image.digest,
                grid=image.grid,
                embeddings=len(image.positions),
                pixels=None if begin else pixels,
                layers=layers,
                last=last,
            )
        )
        if last:
            self._store(step, image, victims)
        return tokens, last

    def _store(self, step: StepImages, image: PromptImage, victims: list[bytes]) -> None:
        """Add the embeddings of an image, which a step completes, to the store, and drop `victims`."""
        del self._pixels[image.digest]
        self._ahead -= len(image.positions)
        for victim in victims:
            self.store.drop(victim)
            step.dropped.append(victim)
            if victim not in self._users:
                del self._shapes[victim]
        self.store.add(image.digest, len(image.positions))
        step.used.add(image.digest)
        self.use.encoded += 1

    def _use(self, step: StepImages, digest: bytes) -> None:
        self.store.touch(digest)
        step.used.add(digest)


def shape_of(image: PromptImage) -> tuple[int, ...]:
    """Return the grid and the number of embeddings of an image, which its digest determines."""
    return (*image.grid, len(image.positions))


def _first_position(image: PromptImage, start: int) -> int | None:
    """Return the first position of an image at or after `start`, or None."""
    index = int(np.searchsorted(image.positions, start))
    return int(image.positions[index]) if index < len(image.positions) else None
