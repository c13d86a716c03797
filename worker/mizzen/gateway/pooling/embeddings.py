# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings: one vector per input, pooled from the last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from starlette.types import Scope

from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import Count, doc
from mizzen.gateway.pooling.inputs import InputReader, PooledInput
from mizzen.gateway.pooling.service_model import find_service_model
from mizzen.gateway.pooling.vectors import (
    EncodedVector,
    EncodingFormat,
    Vector,
    check_dimensions,
    check_finite,
    encode_vectors,
    shorten_vectors,
)
from mizzen.gateway.requests.fan_out import count_placement, new_routed_requests, run_each
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import EmbeddingResult

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


class EmbeddingRequest(PooledInput, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    encoding_format: Annotated[
        EncodingFormat | None, doc("`float` (default), or `base64` of little-endian float32.")
    ] = None
    dimensions: Annotated[
        Count | None,
        doc(
            "Number of leading components to keep, if the model was trained for it (Matryoshka); "
            "`normalize` applies to the shortened vector. Other models, and numbers above the model's own "
            "number of components, get 400."
        ),
    ] = None
    pooling: Annotated[
        Literal["last", "mean", "cls"] | None,
        doc(
            "Hidden state of the last token, mean of the states of all tokens, or state of the first "
            "token (`cls`); by default the pooling that the model was trained with."
        ),
    ] = None
    normalize: Annotated[bool | None, doc("Scale vectors to length 1 (default: true).")] = None


class EmbeddingItem(msgspec.Struct):
    """Embedding of the input at `index`."""

    index: int
    embedding: EncodedVector
    object: str = "embedding"


class EmbeddingResponse(msgspec.Struct):
    """Response of POST /v1/embeddings."""

    data: list[EmbeddingItem]
    model: str
    usage: InputUsage
    object: str = "list"


class EmbeddingsHandler:
    """Handler of POST /v1/embeddings."""

    def __init__(self, gateway: Gateway, families: FamilyOptions) -> None:
        self._gateway = gateway
        self._reader = InputReader(gateway, families, EmbeddingRequest)

    async def __call__(self, body: bytes, scope: Scope) -> EmbeddingResponse:
        """Return an embedding for each input in a request body.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        gateway = self._gateway
        request, generations = await self._reader.read(body, scope)
        vectors, usage = await embed_vectors(
            gateway,
            scope,
            generations,
            request.dimensions,
            pooling=request.pooling,
            normalize=request.normalize is not False,
        )
        encoded = await encode_vectors(vectors, request.encoding_format)
        items = [EmbeddingItem(index, text) for index, text in enumerate(encoded)]
        return EmbeddingResponse(items, request.model, usage)


def count_usage(results: Sequence[EmbeddingResult]) -> InputUsage:
    """Return the number of prompt tokens of all results."""
    tokens = sum(result.prompt_tokens for result in results)
    return InputUsage(tokens, tokens)


async def embed_vectors(
    gateway: Gateway,
    scope: Scope,
    generations: list[GenerationRequest],
    dimensions: int | None,
    *,
    field: str = "dimensions",
    pooling: str | None = None,
    normalize: bool = True,
) -> tuple[list[Vector], InputUsage]:
    """Return the vector of each prompt, in order, and the number of prompt tokens.

    Args:
        gateway: The gateway.
        scope: ASGI scope of the HTTP request.
        generations: One request per prompt.
        dimensions: Number of elements to which the vectors are shortened; None for all.
        field: Field of the body that holds `dimensions`.
        pooling: As in `embed_prompts`.
        normalize: True to scale the vectors, after shortening, to length 1.

    Raises:
        ApiError: the vectors may not be shortened to this number, or could not be computed.
    """
    if dimensions is not None:
        served = await find_service_model(gateway, scope, generations[0])
        any_length = gateway.config.any_dimensions
        check_dimensions(dimensions, served.properties, field, any_length=any_length)
    results = await embed_prompts(gateway, scope, generations, pooling, normalize)
    vectors = [result.vector for result in results]
    check_finite(vectors)
    return shorten_vectors(vectors, dimensions, field, normalize=normalize), count_usage(results)


async def embed_prompts(
    gateway: Gateway,
    scope: Scope,
    generations: list[GenerationRequest],
    pooling: str | None,
    normalize: bool,
    classify: bool = False,
) -> list[EmbeddingResult]:
    """Return the embedding of each prompt, in order.

    Args:
        gateway: The gateway.
        scope: ASGI scope of the HTTP request.
        generations: One request per prompt.
        pooling: `last`, `mean` or `cls`; None selects the model's own pooling.
        normalize: True to scale the vectors to length 1.
        classify: True to return the logits of a classifier's labels instead of embeddings.

    Raises:
        ApiError: an embedding could not be computed.
    """
    dispatcher = gateway.find_active_service(generations[0].model, scope).dispatcher

    async def embed_one(routed: RoutedRequest) -> EmbeddingResult:
        gateway.restart_queue_timeout(routed.queue_entry)
        result = await dispatcher.embed(routed, pooling, normalize, classify)
        count_placement(gateway, routed)
        gateway.metrics.for_model(routed.generation.model).cached_tokens.inc(result.cached_tokens)
        return result

    return await run_each(dispatcher, await new_routed_requests(gateway, scope, generations), embed_one)
