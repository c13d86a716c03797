# SPDX-License-Identifier: Apache-2.0
"""Shortens vectors and writes them as JSON; many of them are written off the event loop."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.text.model_properties import ModelProperties

Vector: TypeAlias = "NDArray[np.float32]"
EncodingFormat: TypeAlias = Literal["float", "base64"]
EncodedVector: TypeAlias = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}),
]
"""A vector as JSON in one of the formats of `EncodingFormat`."""

OFF_LOOP_NUMBERS = 16_384
"""Number of numbers above which they are written in a thread; this many take about two milliseconds."""

T = TypeVar("T")


def check_dimensions(
    dimensions: int | None, properties: ModelProperties, field: str, *, any_length: bool
) -> None:
    """Check that a model's vectors may be shortened to a number of dimensions.

    Args:
        dimensions: the requested number; None if the request does not set one.
        properties: the model's properties.
        field: field of the body that holds the number.
        any_length: whether the gateway shortens vectors of all models.

    Raises:
        ApiError: 400 if the model was not trained for this length.
    """
    if dimensions is None or any_length:
        return
    if not properties.shortens:
        reason = (
            "the model's config.json does not say that it was trained for shortened vectors "
            "(is_matryoshka or matryoshka_dimensions); the gateway's option --any-dimensions allows it"
        )
        raise invalid(f"{field} is not supported: {reason}", field, "unsupported_parameter")
    if properties.lengths and dimensions not in properties.lengths:
        allowed = ", ".join(map(str, properties.lengths))
        raise invalid(f"{field} must be one of {allowed}, not {dimensions}", field, "out_of_range")


def shorten_vectors(
    vectors: Sequence[Vector], dimensions: int | None, field: str, *, normalize: bool
) -> list[Vector]:
    """Return the first `dimensions` elements of each vector (float32 [n]); all elements if it is None.

    With `normalize`, shortened vectors are scaled to length 1.

    Raises:
        ApiError: 400 if the vectors have fewer elements; the error names `field`.
    """
    if dimensions is None or not vectors:
        return list(vectors)
    size = len(vectors[0])
    if dimensions > size:
        text = f"{field} must be at most {size}, as in the model's vectors, not {dimensions}"
        raise invalid(text, field, "out_of_range")
    if dimensions == size:
        return list(vectors)
    return [scale_to_unit(vector[:dimensions]) if normalize else vector[:dimensions] for vector in vectors]


def scale_to_unit(vector: Vector) -> Vector:
    """Return a vector (float32 [n]) scaled to length 1; a zero vector stays as it is."""
    length = float(np.linalg.norm(vector))
    return vector / length if length > 0 else vector


def encode_vector(vector: Vector, encoding: EncodingFormat | None) -> msgspec.Raw:
    """Return a vector (float32 [n]) as JSON: a list, or text with base64 of its little-endian float32."""
    if encoding == "base64":
        return msgspec.Raw(b'"' + base64.b64encode(vector.astype("<f4", copy=False).tobytes()) + b'"')
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


async def encode_vectors(vectors: Sequence[Vector], encoding: EncodingFormat | None) -> list[msgspec.Raw]:
    """Return each vector as JSON, see `encode_vector`.

    A thread writes many vectors, one at a time, so that the event loop gets the GIL in between.
    """
    return await run_off_loop(vectors, lambda: [encode_vector(vector, encoding) for vector in vectors])


async def run_off_loop(vectors: Sequence[Vector], work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread if the vectors have many elements."""
    if sum(map(len, vectors)) <= OFF_LOOP_NUMBERS:
        return work()
    return await asyncio.to_thread(work)


def check_finite(vectors: Sequence[Vector]) -> None:
    """Check that all elements are numbers, which JSON can hold.

    Raises:
        ApiError: 502 if an element is infinite or not a number.
    """
    for index, vector in enumerate(vectors):
        if not np.isfinite(vector).all():
            text = f"the engine returned a number that is infinite or not a number, for input {index}"
            raise ApiError(502, text, code="not_a_number")
