# SPDX-License-Identifier: Apache-2.0
"""Token ids that stand for images in the keys of the prefix cache.

All embeddings of an image have the same negative id, which is derived from the image's digest. Gateways
derive the same id, so that both sides compute equal block hashes. Equal ids must mean equal images, or a
request would get the KV of another's image. So the engine remembers which digest each id belongs to, as long
as a request or the prefix cache uses it, and gives another id to a digest whose own one is occupied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

_BITS = 31
_FIRST_SWEEP = 4096
"""Number of known images at which unused ones are forgotten for the first time."""


def image_token(digest: bytes) -> int:
    """Return the token id of an image for a digest: negative, and within int32."""
    return -1 - (int.from_bytes(digest[:4], "big") >> (32 - _BITS))


class ImageKeys:
    """Assigns token ids to images, each to one image at a time."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._occupied: set[int] = set()
        """The ids of all known images."""
        self._sweep_at = _FIRST_SWEEP

    def __len__(self) -> int:
        return len(self._ids)

    def assign(self, digest: bytes, cached: Callable[[], Iterable[int]], live: Collection[bytes]) -> int:
        """Return the token id of an image.

        Ids that `cached` does not return and that do not belong to `live` are forgotten from time to time.

        Args:
            digest: digest of the image.
            cached: returns the negative ids in the prefix cache and in all slots.
            live: digests of the images of live requests.
        """
        known = self._ids.get(digest)
        if known is not None:
            return known
        if len(self._ids) >= self._sweep_at:
            self._forget_unused({*cached(), *(self._ids[one] for one in live if one in self._ids)})
        token = image_token(digest)
        while token in self._occupied:
            token = token - 1 if token > -(1 << _BITS) else -1
        self._ids[digest] = token
        self._occupied.add(token)
        return token

    def _forget_unused(self, used: set[int]) -> None:
        self._ids = {digest: token for digest, token in self._ids.items() if token in used}
        self._occupied = set(self._ids.values())
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._ids))
