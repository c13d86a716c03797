# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors of a checkpoint whose text part is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

NESTED = (("model.language_model.", "model."), ("language_model.", ""))
"""Pairs of a prefix of the text part in a checkpoint of the whole model, and the text model's own prefix."""


class PartTensors(Protocol):
    """Tensors of one part of a checkpoint that also holds other parts."""

    def find_own_name(self, name: str) -> str | None:
        """Return the part's own name of a tensor; None if the tensor belongs to another part."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTensors:
    """Tensors of the text part of a checkpoint, and tensors that are not loaded."""

    skipped: tuple[str, ...]
    """Prefixes of the tensors of other parts, such as those of the tower for images."""

    def find_own_name(self, name: str) -> str | None:
        """Return the text model's own name of a tensor; None if the tensor belongs to another part."""
        if name.startswith(self.skipped):
            return None
        for nested, own in NESTED:
            if name.startswith(nested):
                return own + name.removeprefix(nested)
        return name
