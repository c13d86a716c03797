# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of the embeddings that the device keeps.

Plans name each image to encode and to drop, so the device needs no policy of its own.
"""

from __future__ import annotations


class EmbeddingStore:
    """Embeddings on the device by digest, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        """Create an empty store for `capacity` embeddings."""
        self.capacity = capacity
        self.size = 0
        """Number of embeddings in the store."""
        self._sizes: dict[bytes, int] = {}
        self._holders: dict[bytes, set[int]] = {}
        """Requests whose last chunk ended within an image, by digest: the image stays until they go on."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def touch(self, digest: bytes) -> None:
        """Mark a stored image as the most recently used one."""
        self._sizes[digest] = self._sizes.pop(digest)

    def hold(self, digest: bytes, rid: int) -> None:
        """Keep a stored image until `release`, because a request has used only a part of it so far."""
        self._holders.setdefault(digest, set()).add(rid)

    def release(self, digest: bytes, rid: int) -> None:
        """Release the hold of a request; do nothing if it holds none."""
        holders = self._holders.get(digest)
        if holders is not None:
            holders.discard(rid)
            if not holders:
                del self._holders[digest]

    def victims(self, embeddings: int, kept: set[bytes]) -> list[bytes] | None:
        """Return the images to drop so that `embeddings` more fit; None if they cannot fit now.

        Images in `kept` and images that requests hold are not dropped.
        """
        victims: list[bytes] = []
        excess = self.size + embeddings - self.capacity
        for digest, size in self._sizes.items():
            if excess <= 0:
                break
            if digest not in kept and digest not in self._holders:
                victims.append(digest)
                excess -= size
        return victims if excess <= 0 else None

    def add(self, digest: bytes, embeddings: int) -> None:
        """Add an image, for which `victims` has made room."""
        self._sizes[digest] = embeddings
        self.size += embeddings

    def drop(self, digest: bytes) -> None:
        """Remove an image."""
        self.size -= self._sizes.pop(digest)
