# SPDX-License-Identifier: Apache-2.0
"""Pooling of an embedding model, from its sentence-transformers configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mizzen.common.sentence_transformers import POOLING_FILE, supported_pooling
from mizzen.core.request import Pooling


def model_pooling(files: Mapping[str, bytes]) -> Pooling | None:
    """Return the pooling that a model was trained with; None if it is not supported.

    `files` holds the contents of the model's files by name. Without a pooling file, the pooling is `LAST`.
    """
    content = files.get(POOLING_FILE)
    if content is None:
        return Pooling.LAST
    try:
        config = json.loads(content)
    except ValueError:
        return None
    name = supported_pooling(config) if isinstance(config, dict) else ""
    return Pooling(name) if name else None
