# SPDX-License-Identifier: Apache-2.0
"""Checks that Transformers is installed and has a model's class, without importing it or torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from mizzen.models.hf_fields import ConfigError

MODEL_NAMES = Path("models") / "auto" / "modeling_auto.py"
"""File of Transformers that lists the classes of all models."""


def find_package() -> Path | None:
    """Return the folder of the installed Transformers; None if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def check_installed(architecture: str, native: Iterable[str]) -> None:
    """Check that the installed Transformers has a class.

    Args:
        architecture: Name of the class, as in `architectures`.
        native: Names of the architectures that need no Transformers.

    Raises:
        ConfigError: Transformers is not installed or lacks the class.
    """
    package = find_package()
    listed = f"one of {', '.join(sorted(native))}"
    if package is None:
        raise ConfigError(
            f"architectures ['{architecture}'] has no native implementation, and Transformers is not "
            f"installed: install mizzen[transformers], or use a model whose architectures list {listed}"
        )
    try:
        names = (package / MODEL_NAMES).read_text(encoding="utf-8")
    except OSError:
        return  # the engine itself will find out
    if f'"{architecture}"' not in names:
        raise ConfigError(
            f"architectures ['{architecture}'] is not supported, because the installed Transformers does not "
            "contain it and code in the model's folder is not executed: use an image with a newer "
            f"Transformers, or a model whose architectures list {listed}"
        )
