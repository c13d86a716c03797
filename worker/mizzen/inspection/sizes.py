# SPDX-License-Identifier: Apache-2.0
"""Sizes of a fetched model, which a fetch reports to the operator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mizzen.inspection.memory import count_loaded
from mizzen.inspection.model_files import read_folder
from mizzen.models.registry import read_model

logger = logging.getLogger(__name__)


def read_sizes(folder: Path) -> dict[str, Any]:
    """Return the number of parameters of a model and the data type in which its weights are saved.

    The result is empty if this version does not serve the model. Only the engine, whose version may differ,
    rejects the model.
    """
    try:
        files = read_folder(folder)
        if files.fields is None or files.problem:
            return {}
        config = read_model(files.fields)
        count = count_loaded(config, files.weights)
        return {"parameters": count, "dtype": config.dtype} if count else {}
    except Exception as error:  # the files are complete, whatever their config.json contains
        logger.info("the number of parameters is unknown: %s", error)
        return {}
