# SPDX-License-Identifier: Apache-2.0
"""Pooling modules of sentence-transformers, from their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POOLING_FILE = "1_Pooling/config.json"
"""Configuration of a model's pooling module, unless the model's `modules.json` names another folder."""
POOLINGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
"""Values of `mizzen.core.request.Pooling` by their names in a configuration: flags in its older form, values
of `pooling_mode` in its newer form."""


def selected_modes(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the poolings that a configuration selects, whose results would be concatenated."""
    mode = config.get("pooling_mode")
    flags = [name for name, on in config.items() if on is True and name.startswith("pooling_mode")]
    return [str(mode)] if mode else flags


def supported_pooling(config: Mapping[str, Any]) -> str:
    """Return the pooling that a configuration selects, a value of `Pooling`; empty if it is not supported."""
    modes = selected_modes(config)
    return POOLINGS.get(modes[0], "") if len(modes) == 1 else ""
