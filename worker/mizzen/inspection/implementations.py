"""Implementations that can serve a model, in order of preference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_fields


@dataclass(frozen=True, slots=True)
class Implementation:
    """An implementation of models.

    Attributes:
        name: value of `Inspection.implementation`.
        read: reads the configuration of a model from config.json, or raises a ConfigError that names the
            reason why this implementation does not serve the model.
    """

    name: str
    read: Callable[[Fields], ModelConfig]


IMPLEMENTATIONS: tuple[Implementation, ...] = (Implementation("native", read_fields),)


def choose_implementation(fields: Fields) -> tuple[str, ModelConfig]:
    """Return the name of the first implementation that serves a model, and the model's configuration.

    Raises:
        ConfigError: no implementation serves the model; the message is that of the first one.
    """
    errors: list[ConfigError] = []
    for implementation in IMPLEMENTATIONS:
        try:
            return implementation.name, implementation.read(fields)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]
