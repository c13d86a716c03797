"""POST /v1/embeddings: one vector of the last hidden states for each input."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.types import Scope

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.decode_body import decode, refuse_unserved
from mizzen.gateway.openai.parse import prompts
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import PROMPTS, Count, Priority, doc
from mizzen.gateway.requests.fan_out import count_placement, new_routed_requests, run_each
from mizzen.gateway.requests.generation_request import GenerationRequest, Prompt
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import EmbeddingResult

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MAX_INPUTS = 2048
HARMLESS: dict[str, tuple[Any, ...]] = {"truncate_prompt_tokens": ()}


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
            "Keep this number of leading components and rescale to length 1, for models "
            "trained that way (Matryoshka). More than the model has gets 400."
        ),
    ] = None
    pooling: Annotated[
        Literal["last", "mean"] | None,
        doc("State of the last token, or mean over all tokens; by default as the model was trained."),
    ] = None
    normalize: Annotated[bool | None, doc("Scale vectors to length 1 (default: true).")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Add the tokenizer's special tokens, such as BOS, to texts (default: true).")
    ] = None
    priority: Annotated[Priority | None, doc("As in completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None
    truncate_prompt_tokens: Annotated[Any, doc("Not supported.")] = None


class EmbeddingItem(msgspec.Struct):
    """One vector."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(msgspec.Struct):
    """Response of POST /v1/embeddings."""

    data: list[EmbeddingItem]
    model: str
    usage: InputUsage
    object: str = "list"


class Embeddings:
    """Answers requests for embeddings."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    async def __call__(self, body: bytes, scope: Scope) -> EmbeddingResponse:
        """Return the vectors of a body's inputs.

        Raises:
            ApiError: the request is wrong, or cannot be served.
        """
        request, generations = await self._gateway.body_reader.parse_body(body, self._read, scope)
        normalize = request.normalize is not False
        vectors = await embed(self._gateway, scope, generations, request.pooling, normalize)
        size = len(vectors[0].vector)
        if request.dimensions is not None and request.dimensions > size:
            text = f"dimensions must be at most {size}, the model's, not {request.dimensions}"
            raise invalid(text, "dimensions", "out_of_range")
        items = [
            EmbeddingItem(index, encoded(shortened(one.vector, request.dimensions, normalize), request))
            for index, one in enumerate(vectors)
        ]
        tokens = sum(one.prompt_tokens for one in vectors)
        return EmbeddingResponse(items, request.model, InputUsage(tokens, tokens))

    def _read(self, body: bytes) -> tuple[EmbeddingRequest, list[GenerationRequest]]:
        request = decode(self._decoder, body)
        refuse_unserved(request, HARMLESS)
        found = prompts(request.input, "input")
        if len(found) > MAX_INPUTS:
            text = f"input holds {len(found)} texts; at most {MAX_INPUTS} are allowed"
            raise invalid(text, "input", "out_of_range")
        return request, [wish_of(request, one) for one in found]


def wish_of(request: EmbeddingRequest, prompt: Prompt) -> GenerationRequest:
    """Return what a request asks for with one of its inputs."""
    return GenerationRequest(
        model=request.model,
        prompt=prompt,
        prompt_field="input",
        priority=request.priority,
        add_special_tokens=request.add_special_tokens is not False,
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
    )


async def embed(
    gateway: Gateway, scope: Scope, generations: list[GenerationRequest], pooling: str | None, normalize: bool
) -> list[EmbeddingResult]:
    """Return the vectors of prompts, in their order; `pooling` None is the model's own.

    Raises:
        ApiError: one of them cannot be had.
    """
    dispatcher = gateway.open_service(generations[0].model, scope).dispatcher

    async def one(routed: RoutedRequest) -> EmbeddingResult:
        gateway.restart_queue_timeout(routed.queue_entry)
        found = await dispatcher.embed(routed, pooling, normalize)
        count_placement(gateway, routed)
        gateway.metrics.for_model(routed.generation.model).cached_tokens.inc(found.cached_tokens)
        return found

    return await run_each(dispatcher, new_routed_requests(gateway, scope, generations), one)


def shortened(vector: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """Return the first `dimensions` numbers of a vector (float32 [n]), of length 1 again if asked for."""
    if dimensions is None or dimensions == len(vector):
        return vector
    short = vector[:dimensions]
    length = float(np.linalg.norm(short))
    return short / length if normalize and length > 0 else short


def encoded(vector: np.ndarray, request: EmbeddingRequest) -> list[float] | str:
    """Return a vector (float32 [n]) as the request wants it."""
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
