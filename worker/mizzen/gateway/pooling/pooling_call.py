# SPDX-License-Identifier: Apache-2.0
"""POST /pooling: the vector of each input, or a classifier's logits or probabilities, in vLLM's shape."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from starlette.types import Scope

from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import Count, doc
from mizzen.gateway.pooling.classify import apply_activation, classify_prompts
from mizzen.gateway.pooling.embeddings import count_usage, embed_vectors
from mizzen.gateway.pooling.inputs import InputReader, PooledInput
from mizzen.gateway.pooling.service_model import find_service_model
from mizzen.gateway.pooling.vectors import EncodedVector, EncodingFormat, encode_vectors

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


class PoolingRequest(PooledInput, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /pooling."""

    task: Annotated[
        Literal["embed", "classify"] | None,
        doc("`embed` for vectors, `classify` for a classifier's labels; by default the model's own task."),
    ] = None
    encoding_format: Annotated[EncodingFormat | None, doc("As in embeddings.")] = None
    dimensions: Annotated[Count | None, doc("As in embeddings.")] = None
    activation: Annotated[
        bool | None,
        doc("Whether vectors are scaled to length 1, and labels have probabilities (default: true)."),
    ] = None
    use_activation: Annotated[bool | None, doc("Other name of `activation`, as in vLLM.")] = None


class PooledItem(msgspec.Struct):
    """Vector of the input at `index`."""

    index: int
    data: EncodedVector
    object: str = "pooling"


class PoolingResponse(msgspec.Struct):
    """Response of POST /pooling."""

    id: str
    created: int
    model: str
    data: list[PooledItem]
    usage: InputUsage
    object: str = "list"


class PoolingHandler:
    """Handler of POST /pooling."""

    def __init__(self, gateway: Gateway, families: FamilyOptions) -> None:
        self._gateway = gateway
        self._reader = InputReader(gateway, families, PoolingRequest)

    async def __call__(self, body: bytes, scope: Scope) -> PoolingResponse:
        """Return the vector of each input in a request body.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        gateway = self._gateway
        request, generations = await self._reader.read(body, scope)
        served = await find_service_model(gateway, scope, generations[0])
        activated = False not in (request.activation, request.use_activation)
        classifies = (request.task or served.properties.task) == "classify"
        if classifies and request.dimensions is not None:
            raise invalid("dimensions needs the task embed", "dimensions")
        if classifies:
            results = await classify_prompts(gateway, scope, served, generations)
            vectors = [
                apply_activation(result.vector, served.properties, activated=activated) for result in results
            ]
            usage = count_usage(results)
        else:
            vectors, usage = await embed_vectors(
                gateway, scope, generations, request.dimensions, normalize=activated
            )
        encoded = await encode_vectors(vectors, request.encoding_format)
        items = [PooledItem(index, text) for index, text in enumerate(encoded)]
        name = f"pool-{secrets.token_hex(12)}"
        return PoolingResponse(name, int(time.time()), request.model, items, usage)
