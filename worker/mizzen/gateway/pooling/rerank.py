# SPDX-License-Identifier: Apache-2.0
"""POST /v1/rerank, /rerank and /v2/rerank: sort documents by how well they answer a query.

The response has the fields of Cohere's, Jina's, vLLM's and Voyage's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Scope

from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.rules import UNUSED, Rules, refuse
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import Count, Priority, doc
from mizzen.gateway.pooling.inputs import MAX_JOINED_LENGTH
from mizzen.gateway.pooling.pair_scores import PairOptions, score_documents
from mizzen.gateway.requests.generation_request import MAX_SEQUENCES
from mizzen.gateway.requests.text_batch import check_truncation
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

RULES: Rules = {
    "user": UNUSED,
    "rank_fields": refuse([], ["text"], reason="documents have only a text"),
    "max_chunks_per_doc": refuse(reason="documents are not divided; use max_tokens_per_doc"),
}


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/rerank, /rerank and /v2/rerank."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    query: Annotated[str, doc("The query; it is never cut.")]
    documents: Annotated[list[str | Document], doc("Up to 1,024 documents: texts, or objects with a `text`.")]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, doc("Number of results; 0 means all documents (default).")
    ] = None
    return_documents: Annotated[
        bool | None, doc("Return each document's text (default: true, but false for /v2/rerank).")
    ] = None
    instruction: Annotated[
        str | None, doc("Task of the reranker, as in Qwen3-Reranker's prompts (default: web search).")
    ] = None
    max_tokens_per_doc: Annotated[
        Count | None, doc("Cut each document at its end to this number of tokens.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        doc(
            "Cut each prompt to this number of tokens, at the end of its document; -1 means the context "
            "length. By default, a prompt that is too long gets 400."
        ),
    ] = None
    activation: Annotated[
        bool | None, doc("Whether scores of a reranker are probabilities (default) or, with false, logits.")
    ] = None
    use_activation: Annotated[bool | None, doc("Other name of `activation`, as in vLLM.")] = None
    apply_softmax: Annotated[bool | None, doc("Other name of `activation`, as in SGLang.")] = None
    priority: Annotated[Priority | None, doc("As in chat completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None
    rank_fields: Annotated[Any, doc('Only `["text"]`.')] = None
    max_chunks_per_doc: Annotated[Any, doc("Not supported: use `max_tokens_per_doc`.")] = None


class RerankDocument(msgspec.Struct):
    """A document in a response."""

    text: str


class RerankResult(msgspec.Struct):
    """Score of the document at `index` of the request."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RankedDocument(msgspec.Struct):
    """Score of the document at `index` of the request, in Voyage's shape."""

    index: int
    relevance_score: float


class ApiVersion(msgspec.Struct):
    """Version of Cohere's API."""

    version: str = "2"


class BilledUnits(msgspec.Struct):
    """Units of a request, as Cohere counts them."""

    search_units: int | UnsetType = UNSET
    input_tokens: int | UnsetType = UNSET


class CohereTokens(msgspec.Struct):
    """Token count of a request, in Cohere's form."""

    input_tokens: int


class CohereMeta(msgspec.Struct):
    """Metadata of a request, in Cohere's form."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: CohereTokens


class RerankResponse(msgspec.Struct):
    """Response of POST /v1/rerank, /rerank and /v2/rerank; the best result comes first."""

    id: str
    model: str
    results: list[RerankResult]
    data: Annotated[list[RankedDocument], Meta(description="The same results in Voyage's shape.")]
    usage: InputUsage
    meta: CohereMeta
    object: str = "list"


class RerankHandler:
    """Handler of the paths for reranking."""

    def __init__(self, gateway: Gateway, *, returns_documents: bool) -> None:
        """Create the handler; `returns_documents` is the default of `return_documents`."""
        self._gateway = gateway
        self._returns_documents = returns_documents
        self._decoder = BodyDecoder(RerankRequest, RULES, strict=gateway.config.strict_fields)

    async def __call__(self, body: bytes, scope: Scope) -> RerankResponse:
        """Return the documents' scores, the highest first.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        request, ignored = await self._gateway.body_reader.parse_body(body, self._decoder.decode, scope)
        get_record(scope).ignored_fields = ignored
        texts = check_documents(request)
        options = PairOptions(
            model=request.model,
            priority=request.priority,
            instruction=request.instruction,
            max_document_tokens=request.max_tokens_per_doc,
            truncate=request.truncate_prompt_tokens,
            activation=False not in (request.activation, request.use_activation, request.apply_softmax),
            ignored=ignored,
        )
        scored = await score_documents(self._gateway, scope, options, request.query, texts)
        order = sorted(range(len(texts)), key=lambda index: -scored.scores[index])
        returns = self._returns_documents if request.return_documents is None else request.return_documents
        results = [
            RerankResult(index, scored.scores[index], RerankDocument(texts[index]) if returns else UNSET)
            for index in order[: request.top_n or None]
        ]
        tokens = scored.prompt_tokens
        return RerankResponse(
            f"rerank-{secrets.token_hex(12)}",
            request.model,
            results,
            [RankedDocument(result.index, result.relevance_score) for result in results],
            InputUsage(tokens, tokens),
            CohereMeta(ApiVersion(), BilledUnits(search_units=1), CohereTokens(tokens)),
        )


def check_documents(request: RerankRequest) -> list[str]:
    """Return the texts of a request's documents.

    Raises:
        ApiError: 400 if the query or a document is empty, or there are no documents or too many, also for the
            length of the query and the instruction.
    """
    check_truncation(request.truncate_prompt_tokens)
    documents: Sequence[str | Document] = request.documents
    if not request.query:
        raise invalid("query is empty", "query")
    if not 0 < len(documents) <= MAX_SEQUENCES:
        raise invalid(f"documents must hold 1 to {MAX_SEQUENCES} documents", "documents", "out_of_range")
    length = len(request.query) + len(request.instruction or "")
    if length * len(documents) > MAX_JOINED_LENGTH:
        name = "query with instruction" if request.instruction else "query"
        text = f"{name}, {length} long, is too long for {len(documents)} documents: send fewer"
        raise invalid(text, "documents", "out_of_range")
    texts = [document if isinstance(document, str) else document.text for document in documents]
    for index, text in enumerate(texts):
        if not text:
            raise invalid(f"documents[{index}] is empty", f"documents[{index}]")
    return texts
