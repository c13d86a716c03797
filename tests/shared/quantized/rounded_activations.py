# SPDX-License-Identifier: Apache-2.0
"""Reference of products with quantized activations, in NumPy.

`round_activations` returns the activations that a quantized product works on, so that the product itself can
be computed in float64 with the dequantized weights.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

import e4m3

Kind = Literal["e4m3", "int8"]
LARGEST = {"e4m3": e4m3.MAX, "int8": 127.0}
MIN_AMAX = 1e-10
"""Least magnitude from which a dynamic scale is computed; rows of zeros thus have a finite scale."""


def round_activations(x: np.ndarray, kind: Kind, *, group: int | None = None) -> np.ndarray:
    """Round activations with dynamic scales, one for each token, or for each group of columns of a token.

    Args:
        x: float32 [tokens, columns].
        kind: Type of the codes.
        group: Columns of a group, which must divide the number of columns; None for all.

    Returns:
        The rounded activations, code * scale, in float32.
    """
    parts = x.reshape(len(x), -1, group or x.shape[1])
    amax = np.maximum(np.abs(parts).max(axis=2, keepdims=True), np.float32(MIN_AMAX))
    scales = amax / np.float32(LARGEST[kind])
    return (round_codes(parts / scales, kind) * scales).reshape(x.shape)


def round_static(x: np.ndarray, kind: Kind, scale: float, zero_point: int = 0) -> np.ndarray:
    """Round activations with one static scale; larger ones saturate.

    `zero_point` is the code of 0, for int8. The result is (code - zero_point) * scale, in float32.
    """
    codes = round_codes(x / np.float32(scale) + np.float32(zero_point), kind)
    return (codes - np.float32(zero_point)) * np.float32(scale)


def round_codes(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Round values to codes of a kind; return the codes' values in float32."""
    if kind == "e4m3":
        return e4m3.decode(e4m3.encode(values))
    return np.clip(np.rint(values), -128, 127).astype(np.float32)


def multiply(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply x [tokens, columns] by the transpose of `weight` [rows, columns], in float64."""
    return x.astype(np.float64) @ weight.astype(np.float64).T
