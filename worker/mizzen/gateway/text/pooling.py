# SPDX-License-Identifier: Apache-2.0
"""Pooling of an embedding model, from its sentence-transformers configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mizzen.core.request import Pooling

FILE = "1_Pooling/config.json"
MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
}
"""Poolings by their names in `FILE`: flags in its older form, values of `pooling_mode` in its newer form."""


def model_pooling(files: Mapping[str, bytes]) -> Pooling | None:
    """Return the pooling that a model was trained with; None if it is not supported.

    `files` holds the contents of the model's files by name. Without a pooling file, the pooling is `LAST`.
    """
    content = files.get(FILE)
    if content is None:
        return Pooling.LAST
    try:
        config = json.loads(content)
    except ValueError:
        return None
    if not isinstance(config, dict):
        return None
    mode = config.get("pooling_mode")
    flags = [name for name, on in config.items() if on is True and name.startswith("pooling_mode")]
    chosen = [mode] if mode else flags
    return MODES.get(str(chosen[0])) if len(chosen) == 1 else None
