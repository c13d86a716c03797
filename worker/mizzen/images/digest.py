# SPDX-License-Identifier: Apache-2.0
"""Digests that identify the embeddings of images."""

from __future__ import annotations

import hashlib

from mizzen.core.images.types import DIGEST_BYTES
from mizzen.images.types import ImageGeometry, ImageRules


def image_digest(content: bytes, rules: ImageRules, geometry: ImageGeometry) -> bytes:
    """Return the BLAKE2b digest of an image file and of everything that determines its embeddings, 32 bytes.

    Equal digests therefore mean equal embeddings. A request's pixel limits count through the geometry.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"mizzen-image")
    for part in (rules.fingerprint(), repr(geometry).encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(content)
    return digest.digest()
