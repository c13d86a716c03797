"""Sizes of a fetched model, which a fetch reports to the operator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mizzen.inspection.implementations import choose_implementation
from mizzen.inspection.model_files import read_folder
from mizzen.models.parameters import count_parameters

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
        _, config = choose_implementation(files.fields)
        return {"parameters": count_parameters(config), "dtype": config.dtype}
    except Exception as error:  # the files are complete, whatever their config.json contains
        logger.info("the number of parameters is unknown: %s", error)
        return {}
