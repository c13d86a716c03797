"""How an embedding model makes one vector of its tokens' states, as sentence-transformers writes it down."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mizzen.core.request import Pooling

FILE = "1_Pooling/config.json"
MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
}
"""Flags of that file, and values of its later form `pooling_mode`."""


def model_pooling(files: Mapping[str, bytes]) -> Pooling | None:
    """Return the pooling that a model was made for, from its files by name.

    It is the last token's where no file says so, and None where it is another than those served.
    """
    content = files.get(FILE)
    if content is None:
        return Pooling.LAST
    try:
        noted = json.loads(content)
    except ValueError:
        return None
    if not isinstance(noted, dict):
        return None
    mode = noted.get("pooling_mode")
    flags = [name for name, on in noted.items() if on is True and name.startswith("pooling_mode")]
    chosen = [mode] if mode else flags
    return MODES.get(str(chosen[0])) if len(chosen) == 1 else None
