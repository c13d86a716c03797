# SPDX-License-Identifier: Apache-2.0
"""Patterns that name layers in quantization configurations, and their matching with a model's layers.

Exporters name layers as the model's code in Transformers does. In a checkpoint of a model for images, the
names of the text part have a prefix, and some exporters name the projections q_proj, k_proj and v_proj
together as qkv_proj. A pattern matches a layer if it matches one of these names.
"""

from __future__ import annotations

import enum
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mizzen.models.text_tensors import NESTED

MAX_PATTERNS = 100_000
MAX_PATTERN_LENGTH = 1000
MERGED_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parts of a merged layer, by the last component of its name."""
MERGED_NAMES = {part: merged for merged, parts in MERGED_PARTS.items() for part in parts}
TEXT_PREFIXES = (*((own, nested) for nested, own in NESTED), ("model.", ""))
"""Pairs of a prefix of the text model's own names, and its replacement in names of the whole model."""


class PatternKind(enum.StrEnum):
    """Way in which a pattern names layers."""

    NAME = "name"
    """Full name of a layer (compressed-tensors)."""
    REGEX = "regex"
    """Regular expression that matches the beginning of a name (compressed-tensors, GPTQModel)."""
    GLOB = "glob"
    """Full name with the wildcards `*`, `?` and `[...]` (ModelOpt)."""
    MODULE = "module"
    """Name of a module, which is a layer or contains layers, or the end of such a name, or a regular
    expression that matches a module's name from its beginning (Transformers)."""


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """Pattern that names layers."""

    text: str
    kind: PatternKind

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a layer by one of its names."""
        match self.kind:
            case PatternKind.NAME:
                return self.text in list_aliases(name)
            case PatternKind.REGEX:
                pattern = compile_pattern(self.text)
            case PatternKind.GLOB:
                pattern = compile_pattern(fnmatch.translate(self.text))
            case PatternKind.MODULE:
                text = self.text.removesuffix(".weight")
                if f".{text}." in join_aliases(name):
                    return True
                pattern = compile_module(text)
        return pattern is not None and any(pattern.match(alias) for alias in list_aliases(name))

    def may_match(self, joined: str) -> bool:
        """Return False only if the pattern matches none of the layers whose `join_aliases` are joined."""
        match self.kind:
            case PatternKind.NAME:
                text = self.text
            case PatternKind.MODULE if compile_module(self.text.removesuffix(".weight")) is None:
                text = self.text.removesuffix(".weight")
            case _:
                return True
        return f".{text}." in joined


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        re.error: it is invalid.
    """
    return re.compile(text)


@lru_cache(maxsize=4096)
def compile_module(text: str) -> re.Pattern[str] | None:
    """Compile the regular expression of a pattern of the kind `MODULE`; None if it is an ordinary name."""
    if re.fullmatch(r"[\w.-]*", text):
        return None
    try:
        return re.compile(rf"(?:{text})(?:(?<=\.)|(?=\.|$))")
    except (re.error, RecursionError, OverflowError):  # a name with special characters
        return None


# A mixture has thousands of layers, and `mizzen inspect` looks up each of them several times.
@lru_cache(maxsize=1 << 15)
def join_aliases(name: str) -> str:
    """Return all names of a layer, each between dots, so that one search finds a module's name in them."""
    return "\n".join(f".{alias}." for alias in list_aliases(name))


@lru_cache(maxsize=4096)
def list_aliases(name: str) -> tuple[str, ...]:
    """Return all names that a configuration may use for a layer, beginning with the layer's name."""
    names = [name]
    parent, _, last = name.rpartition(".")
    if last in MERGED_NAMES:
        names.append(f"{parent}.{MERGED_NAMES[last]}" if parent else MERGED_NAMES[last])
    for own, whole in TEXT_PREFIXES:
        names += [whole + each.removeprefix(own) for each in names[:2] if each.startswith(own)]
    return tuple(dict.fromkeys(names))


def split_merged(name: str) -> Sequence[str]:
    """Return the names of the parts of a merged layer such as qkv_proj; empty for other layers."""
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{part}" if parent else part for part in MERGED_PARTS.get(last, ()))
