# SPDX-License-Identifier: Apache-2.0
"""POST /v2/embed: vectors of texts, in the shape of Cohere's API."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.types import Scope

from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.rules import Rules, refuse
from mizzen.gateway.openai.schemas import Count, Priority, doc
from mizzen.gateway.pooling.embeddings import embed_vectors
from mizzen.gateway.pooling.inputs import MAX_INPUTS, prompt_generations
from mizzen.gateway.pooling.rerank import ApiVersion, BilledUnits, CohereMeta, CohereTokens
from mizzen.gateway.pooling.service_model import find_service_model
from mizzen.gateway.pooling.vectors import Vector, encode_vectors, run_off_loop
from mizzen.gateway.requests.text_batch import WHOLE_CONTEXT
from mizzen.gateway.telemetry.request_record import get_record
from mizzen.gateway.text.model_properties import DOCUMENT_PROMPTS, QUERY_PROMPTS, ModelProperties

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

InputType: TypeAlias = Literal["search_document", "search_query", "classification", "clustering", "image"]
EmbeddingType: TypeAlias = Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]
MAX_TYPES = 6
RULES: Rules = {
    "images": refuse([], reason="the model reads text only"),
    "inputs": refuse([], reason="use texts"),
}


class CohereEmbedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v2/embed."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    texts: Annotated[list[str], doc("Up to 2,048 texts; each gets one vector.")]
    input_type: Annotated[
        InputType | None,
        doc(
            "Kind of the texts. The model's prompt for this kind precedes each text, if "
            "`config_sentence_transformers.json` has one. `image` gets 400."
        ),
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None,
        doc(
            "Forms of the vectors (default: `float`): `base64` of little-endian float32; `ubinary` and "
            "`binary`, one bit per component, which is 1 if the component is positive, in unsigned or signed "
            "bytes. `int8` and `uint8` get 400, because they need ranges measured on other texts."
        ),
    ] = None
    output_dimension: Annotated[Count | None, doc("As `dimensions` in embeddings.")] = None
    truncate: Annotated[
        Literal["NONE", "END", "START"] | None,
        doc("Cut texts that exceed the context at their end (`END`, default), or refuse them (`NONE`)."),
    ] = None
    max_tokens: Annotated[
        Count | None, doc("Cut each text at its end to this number of tokens, unless `truncate` is `NONE`.")
    ] = None
    priority: Annotated[Priority | None, doc("As in chat completions.")] = None
    images: Annotated[Any, doc("Not supported.")] = None
    inputs: Annotated[Any, doc("Not supported: use `texts`.")] = None


class CohereEmbeddings(msgspec.Struct, rename={"floats": "float"}):
    """Vectors of all texts, in each requested form."""

    floats: list[msgspec.Raw] | UnsetType = UNSET
    base64: list[msgspec.Raw] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class CohereEmbedResponse(msgspec.Struct):
    """Response of POST /v2/embed."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"


class CohereEmbedHandler:
    """Handler of POST /v2/embed."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder(CohereEmbedRequest, RULES, strict=gateway.config.strict_fields)

    async def __call__(self, body: bytes, scope: Scope) -> CohereEmbedResponse:
        """Return the vector of each text in a request body.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        gateway = self._gateway
        request, ignored = await gateway.body_reader.parse_body(body, self._decoder.decode, scope)
        get_record(scope).ignored_fields = ignored
        types = check_request(request)
        first = prompt_generations(request.model, request.texts[:1], "texts[{}]", priority=request.priority)
        served = await find_service_model(gateway, scope, first[0])
        before = input_prompt(served.properties, request.input_type)
        generations = prompt_generations(
            request.model,
            [before + text for text in request.texts],
            "texts[{}]",
            truncate=None if request.truncate == "NONE" else request.max_tokens or WHOLE_CONTEXT,
            priority=request.priority,
            ignored=ignored,
        )
        vectors, usage = await embed_vectors(
            gateway, scope, generations, request.output_dimension, field="output_dimension"
        )
        embeddings = CohereEmbeddings()
        for form in types:
            if form in ("float", "base64"):
                encoded = await encode_vectors(vectors, form)
                setattr(embeddings, "floats" if form == "float" else form, encoded)
            else:
                packed = await run_off_loop(vectors, lambda form=form: pack_bits(vectors, form))
                setattr(embeddings, form, packed)
        tokens = usage.prompt_tokens
        meta = CohereMeta(ApiVersion(), BilledUnits(input_tokens=tokens), CohereTokens(tokens))
        return CohereEmbedResponse(f"embd-{secrets.token_hex(12)}", embeddings, request.texts, meta)


def check_request(request: CohereEmbedRequest) -> list[EmbeddingType]:
    """Return the requested forms of vectors, each one once.

    Raises:
        ApiError: 400 for a number of texts or forms, a form, a kind of input or a truncation that is not
            supported.
    """
    if not 0 < len(request.texts) <= MAX_INPUTS:
        raise invalid(f"texts must hold 1 to {MAX_INPUTS} texts", "texts", "out_of_range")
    if request.input_type == "image":
        raise invalid("input_type image is not supported", "input_type", "unsupported_parameter")
    if request.truncate == "START":
        text = "truncate START is not supported: texts are cut at their end, so that instructions stay whole"
        raise invalid(text, "truncate", "unsupported_parameter")
    types: list[EmbeddingType] = request.embedding_types or ["float"]
    if len(types) > MAX_TYPES:
        text = f"embedding_types must hold at most {MAX_TYPES} types"
        raise invalid(text, "embedding_types", "out_of_range")
    for index, form in enumerate(types):
        if form in ("int8", "uint8"):
            name = f"embedding_types[{index}]"
            text = f"{name}: {form} is not supported, because it needs ranges that are not known; use ubinary"
            raise invalid(text, name, "unsupported_parameter")
    return list(dict.fromkeys(types))


def input_prompt(properties: ModelProperties, kind: InputType | None) -> str:
    """Return the text that precedes texts of a kind; empty if the model has none."""
    if kind is None:
        return ""
    names = {"search_query": QUERY_PROMPTS, "search_document": DOCUMENT_PROMPTS}
    return properties.find_prompt(names.get(kind, (kind,)))


def pack_bits(vectors: list[Vector], form: str) -> list[list[int]]:
    """Return the signs of each vector's components as bytes, the first component as the highest bit.

    Bytes are unsigned for `ubinary`; for `binary`, 128 is subtracted, as in sentence-transformers.
    """
    offset = 0 if form == "ubinary" else 128
    return [(np.packbits(vector > 0).astype(np.int16) - offset).tolist() for vector in vectors]
