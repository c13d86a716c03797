# SPDX-License-Identifier: Apache-2.0
"""Sizes of a fetched model, which a fetch reports to the operator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mizzen.inspection.memory import ELEMENT_BYTES, count_loaded
from mizzen.inspection.model_files import read_folder
from mizzen.models.registry import read_model
from mizzen.models.weight_bytes import count_weight_bytes

logger = logging.getLogger(__name__)


def read_sizes(folder: Path) -> dict[str, Any]:
    """Return the number of parameters of a model, the data type of its weights, and their size if quantized.

    The result is empty if this version does not serve the model. Only the engine, whose version may differ,
    rejects the model.
    """
    try:
        files = read_folder(folder)
        if files.fields is None or files.problem:
            return {}
        config = read_model(files.fields)
        count = count_loaded(config, files.weights)
        sizes = {"parameters": count, "dtype": config.dtype}
        if config.quantization.schemes:
            sizes["weightBytes"] = count_weight_bytes(config, ELEMENT_BYTES[config.dtype])
        return sizes if count else {}
    except Exception as error:  # the files are complete, whatever their config.json contains
        logger.info("the number of parameters is unknown: %s", error)
        return {}
