# SPDX-License-Identifier: Apache-2.0
"""Counters of images by the work that they needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ImageUse:
    """Counters of the images of requests since the scheduler was created.

    An image that a prompt contains several times counts once. It is counted when its request is admitted for
    the first time: at most once as a hit.
    """

    admitted: int = 0
    """Images of requests that were admitted."""
    prefix_hits: int = 0
    """Images of these whose KV was in the prefix cache, so that no embeddings were needed."""
    embedding_hits: int = 0
    """Images of these whose embeddings were needed and in the store, so that the encoder did not run."""
    encoded: int = 0
    """Runs of the image encoder."""
