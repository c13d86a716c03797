# SPDX-License-Identifier: Apache-2.0
"""Reads settings of images from config.json and preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen.images.types import PixelNormalization

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3
"""Pillow's number of bicubic resampling."""


class ImageSettings:
    """A JSON object with typed access to its fields; null counts as missing.

    All methods raise ValueError, which names the file and the field, for a value of the wrong type.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def error(self, name: str, rule: str) -> ValueError:
        """Return an error that names a field and the `rule` it violates ("must be true")."""
        return ValueError(f"{self._source}: {name} {rule}, not {self._values.get(name)!r:.100}")

    def has(self, name: str) -> bool:
        """Return whether a field is set."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int) -> int:
        """Read a positive integer."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "must be a positive integer")
        return value

    def token_id(self, names: tuple[str, ...], default: int) -> int:
        """Read a token id, the first of the fields `names` that is set."""
        name = next((name for name in names if self.has(name)), names[0])
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, "must be a token id")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Read a Boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def require_flag(self, name: str) -> None:
        """Check that a Boolean is true or missing."""
        if not self.flag(name, True):
            raise self.error(name, "must be true")

    def text(self, name: str, default: str) -> str:
        """Read a string."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def section(self, name: str) -> ImageSettings:
        """Return the settings of an object; those of a missing object are empty."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return ImageSettings(value or {}, f"{self._source}: {name}")

    def edges(self, name: str, default: dict[str, int]) -> dict[str, int]:
        """Read a size as edges by name, such as `height` and `width`; one integer gives both of these."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"height": value, "width": value}
        edges = value if isinstance(value, dict) else {}
        edges = {key: edge for key, edge in edges.items() if edge is not None}
        if not edges or not all(type(edge) is int and edge > 0 for edge in edges.values()):
            raise self.error(name, "must be an object with positive integers")
        return edges

    def pairs(self, name: str, default: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Read a list of pairs of positive integers, which must not be empty."""
        value = self._values.get(name)
        if value is None:
            return default
        pairs = value if isinstance(value, list | tuple) else ()
        if not pairs or not all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(type(edge) is int and edge > 0 for edge in pair)
            for pair in pairs
        ):
            raise self.error(name, "must be pairs of positive integers")
        return tuple((pair[0], pair[1]) for pair in pairs)

    def channels(self, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """Read three numbers, one for each channel; a single number counts for all channels."""
        value = self._values.get(name)
        value = default if value is None else value
        value = [value] * 3 if isinstance(value, int | float) else value
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise self.error(name, "must be three numbers")
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in value):
            raise self.error(name, "must be three numbers")
        return float(value[0]), float(value[1]), float(value[2])

    def normalization(
        self,
        mean: tuple[float, float, float] = CLIP_MEAN,
        deviation: tuple[float, float, float] = CLIP_DEVIATION,
    ) -> PixelNormalization:
        """Read the normalization from an image processor's fields, with these defaults."""
        scale = self._values.get("rescale_factor")
        scale = 1 / 255 if scale is None else scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or scale <= 0:
            raise self.error("rescale_factor", "must be a positive number")
        if not self.flag("do_normalize", True):
            mean, deviation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        else:
            mean, deviation = self.channels("image_mean", mean), self.channels("image_std", deviation)
        if min(deviation) <= 0:
            raise self.error("image_std", "must be positive")
        return PixelNormalization(float(scale) if self.flag("do_rescale", True) else 1.0, mean, deviation)


def find_token_text(tokens: Mapping[str, int], token_id: int, default: str) -> str:
    """Return the text of an added token; `default` if `tokens` lacks the token or gives it this text."""
    if tokens.get(default) == token_id:
        return default
    return next((text for text, number in tokens.items() if number == token_id), default)
