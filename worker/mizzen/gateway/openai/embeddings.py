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
from mizzen.gateway.requests.fan_out import count_placed, each_job, new_jobs
from mizzen.gateway.requests.generation_request import Prompt, Wish
from mizzen.gateway.routing.dispatcher import Embedded, Job

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MAX_INPUTS = 2048
HARMLESS: dict[str, tuple[Any, ...]] = {"truncate_prompt_tokens": ()}


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: Annotated[str, doc("A name of `/v1/models`; another is 404.")]
    input: Annotated[
        str | list[Any],
        Meta(
            description="Text, token ids, or a list of up to 2,048 of either; one vector for each.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, doc("`float` (default), or `base64` of little-endian float32.")
    ] = None
    dimensions: Annotated[
        Count | None,
        doc(
            "Keep the first so many numbers, scaled to length 1 again: for models trained so (Matryoshka)."
            " More than the model has is 400."
        ),
    ] = None
    pooling: Annotated[
        Literal["last", "mean"] | None,
        doc("The last token's state, or the mean over all tokens; by default what the model was made for."),
    ] = None
    normalize: Annotated[bool | None, doc("Scale vectors to length 1 (default).")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Let the tokenizer add its BOS, say, to texts (default).")
    ] = None
    priority: Annotated[Priority | None, doc("As in completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None
    truncate_prompt_tokens: Annotated[Any, doc("Refused by name.")] = None


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
        request, wishes = await self._gateway.reader.read(body, self._read, scope)
        normalize = request.normalize is not False
        vectors = await embed(self._gateway, scope, wishes, request.pooling, normalize)
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

    def _read(self, body: bytes) -> tuple[EmbeddingRequest, list[Wish]]:
        request = decode(self._decoder, body)
        refuse_unserved(request, HARMLESS)
        found = prompts(request.input, "input")
        if len(found) > MAX_INPUTS:
            text = f"input holds {len(found)} texts; at most {MAX_INPUTS} are allowed"
            raise invalid(text, "input", "out_of_range")
        return request, [wish_of(request, one) for one in found]


def wish_of(request: EmbeddingRequest, prompt: Prompt) -> Wish:
    """Return what a request asks for with one of its inputs."""
    return Wish(
        model=request.model,
        prompt=prompt,
        prompt_field="input",
        priority=request.priority,
        add_special_tokens=request.add_special_tokens is not False,
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
    )


async def embed(
    gateway: Gateway, scope: Scope, wishes: list[Wish], pooling: str | None, normalize: bool
) -> list[Embedded]:
    """Return the vectors of prompts, in their order; `pooling` None is the model's own.

    Raises:
        ApiError: one of them cannot be had.
    """
    dispatcher = gateway.service_of(wishes[0].model, scope).dispatcher

    async def one(job: Job) -> Embedded:
        gateway.wait_from_now(job.ticket)
        found = await dispatcher.embed(job, pooling, normalize)
        count_placed(gateway, job)
        gateway.metrics.of(job.wish.model).cached_tokens.inc(found.cached_tokens)
        return found

    return await each_job(dispatcher, new_jobs(gateway, scope, wishes), one)


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
