# SPDX-License-Identifier: Apache-2.0
"""Distributions of the lengths of prompts and outputs, in tokens."""

from __future__ import annotations

import argparse
import re

import numpy as np


class Lengths:
    """Distribution of lengths in tokens, each at least 1.

    It is constant (`100` or `D(100)`), uniform with inclusive bounds (`U(100,1024)`), normal with mean and
    standard deviation (`N(480,240)`), or lognormal with median and standard deviation of the logarithm
    (`L(500,1.2)`).
    """

    FORM = re.compile(r"^(?:([DUNL])\(([\d.]+)(?:,([\d.]+))?\)|(\d+))$")

    def __init__(self, text: str) -> None:
        """Parse a distribution.

        Raises:
            ValueError: the text does not have one of these forms.
        """
        match = self.FORM.match(text.replace(" ", ""))
        if match is None or (match[1] in ("U", "N", "L")) != (match[3] is not None):
            raise ValueError(
                f"{text!r} must have the form 100, D(100), U(100,1024), N(480,240) or L(500,1.2)"
            )
        self.text = text
        self.kind = match[1] or "D"
        self.first = float(match[2] or match[4])
        self.second = float(match[3] or 0)
        if self.kind == "U" and self.second < self.first:
            raise ValueError(f"{text!r}: the upper bound is below the lower bound")

    def __str__(self) -> str:
        """Return the text that the distribution was parsed from."""
        return self.text

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Return `count` random lengths."""
        match self.kind:
            case "D":
                values = np.full(count, self.first)
            case "U":
                values = random.integers(int(self.first), int(self.second) + 1, count)
            case "N":
                values = random.normal(self.first, self.second, count)
            case _:
                values = self.first * np.exp(random.normal(0, self.second, count))
        return np.maximum(np.rint(values), 1).astype(int).tolist()


def lengths(text: str) -> Lengths:
    """Parse a distribution of lengths, such as `U(100,1024)`, for argparse."""
    try:
        return Lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
