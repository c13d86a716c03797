# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings: one vector per input, pooled from the last hidden states."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.types import Scope

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.rules import REFUSED, UNUSED, Rules, refuse
from mizzen.gateway.openai.parse import parse_prompts
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import PROMPTS, Count, Priority, doc
from mizzen.gateway.requests.fan_out import count_placement, new_routed_requests, run_each
from mizzen.gateway.requests.generation_request import GenerationRequest, Prompt
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import EmbeddingResult
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MAX_INPUTS = 2048
RULES: Rules = {"user": UNUSED, "truncate_prompt_tokens": REFUSED, "messages": refuse(reason="use input")}


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    input: Annotated[
        str | list[Any],
        Meta(
            description="Text, token ids, or a list of up to 2,048 of either; each gets one vector.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, doc("`float` (default), or `base64` of little-endian float32.")
    ] = None
    dimensions: Annotated[
        Count | None,
        doc(
            "Number of leading components to keep; `normalize` applies to the shortened vector. "
            "Useful for models with Matryoshka embeddings. A number above the model's own "
            "number of components gets 400."
        ),
    ] = None
    pooling: Annotated[
        Literal["last", "mean"] | None,
        doc(
            "Hidden state of the last token, or mean of the states of all tokens; by default the "
            "pooling that the model was trained with."
        ),
    ] = None
    normalize: Annotated[bool | None, doc("Scale vectors to length 1 (default: true).")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Add the tokenizer's special tokens, such as BOS, to texts (default: true).")
    ] = None
    priority: Annotated[Priority | None, doc("As in chat completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None
    truncate_prompt_tokens: Annotated[Any, doc("Not supported.")] = None


class EmbeddingItem(msgspec.Struct):
    """Embedding of the input at `index`."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(msgspec.Struct):
    """Response of POST /v1/embeddings."""

    data: list[EmbeddingItem]
    model: str
    usage: InputUsage
    object: str = "list"


class EmbeddingsHandler:
    """Handler of POST /v1/embeddings."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder(EmbeddingRequest, RULES, strict=gateway.config.strict_fields)

    async def __call__(self, body: bytes, scope: Scope) -> EmbeddingResponse:
        """Return an embedding for each input in a request body.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        request, generations = await self._gateway.body_reader.parse_body(body, self._parse, scope)
        get_record(scope).ignored_fields = generations[0].ignored_fields
        normalize = request.normalize is not False
        results = await embed_prompts(self._gateway, scope, generations, request.pooling, normalize)
        size = len(results[0].vector)
        if request.dimensions is not None and request.dimensions > size:
            text = f"dimensions must be at most {size}, as in the model's vectors, not {request.dimensions}"
            raise invalid(text, "dimensions", "out_of_range")
        items = [
            EmbeddingItem(
                index, encode_vector(truncate_vector(result.vector, request.dimensions, normalize), request)
            )
            for index, result in enumerate(results)
        ]
        tokens = sum(result.prompt_tokens for result in results)
        return EmbeddingResponse(items, request.model, InputUsage(tokens, tokens))

    def _parse(self, body: bytes) -> tuple[EmbeddingRequest, list[GenerationRequest]]:
        request, ignored = self._decoder.decode(body)
        prompts = parse_prompts(request.input, "input")
        if len(prompts) > MAX_INPUTS:
            text = f"input holds {len(prompts)} texts; at most {MAX_INPUTS} are allowed"
            raise invalid(text, "input", "out_of_range")
        return request, [embedding_generation(request, prompt, ignored) for prompt in prompts]


def embedding_generation(
    request: EmbeddingRequest, prompt: Prompt, ignored: tuple[str, ...]
) -> GenerationRequest:
    """Return the `GenerationRequest` for one input; `ignored` lists the body's ignored fields."""
    return GenerationRequest(
        model=request.model,
        prompt=prompt,
        prompt_field="input",
        ignored_fields=ignored,
        priority=request.priority,
        add_special_tokens=request.add_special_tokens is not False,
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
    )


async def embed_prompts(
    gateway: Gateway, scope: Scope, generations: list[GenerationRequest], pooling: str | None, normalize: bool
) -> list[EmbeddingResult]:
    """Return the embedding of each prompt, in order.

    Args:
        gateway: The gateway.
        scope: ASGI scope of the HTTP request.
        generations: One request per prompt.
        pooling: `last` or `mean`; None selects the model's own pooling.
        normalize: True to scale the vectors to length 1.

    Raises:
        ApiError: an embedding could not be computed.
    """
    dispatcher = gateway.find_active_service(generations[0].model, scope).dispatcher

    async def embed_one(routed: RoutedRequest) -> EmbeddingResult:
        gateway.restart_queue_timeout(routed.queue_entry)
        result = await dispatcher.embed(routed, pooling, normalize)
        count_placement(gateway, routed)
        gateway.metrics.for_model(routed.generation.model).cached_tokens.inc(result.cached_tokens)
        return result

    return await run_each(dispatcher, await new_routed_requests(gateway, scope, generations), embed_one)


def truncate_vector(vector: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """Return the first `dimensions` elements of a vector (float32 [n]); all elements if `dimensions` is None.

    With `normalize`, a shortened vector is rescaled to length 1.
    """
    if dimensions is None or dimensions == len(vector):
        return vector
    truncated = vector[:dimensions]
    length = float(np.linalg.norm(truncated))
    return truncated / length if normalize and length > 0 else truncated


def encode_vector(vector: np.ndarray, request: EmbeddingRequest) -> list[float] | str:
    """Return a vector (float32 [n]) in the request's `encoding_format`: as a list, or as base64 text."""
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
