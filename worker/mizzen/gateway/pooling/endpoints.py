# SPDX-License-Identifier: Apache-2.0
"""Register the endpoints that return vectors, scores or labels.

The gateway's application calls this function once at startup.
"""

from __future__ import annotations

from fastapi import FastAPI, Response

from mizzen.gateway.gateway import Gateway
from mizzen.gateway.http.api_call import JsonCall
from mizzen.gateway.openai.openapi_document import describe_operation
from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.pooling.classify import ClassifyHandler, ClassifyRequest, ClassifyResponse
from mizzen.gateway.pooling.cohere_embed import CohereEmbedHandler, CohereEmbedRequest, CohereEmbedResponse
from mizzen.gateway.pooling.embeddings import EmbeddingRequest, EmbeddingResponse, EmbeddingsHandler
from mizzen.gateway.pooling.moderations import ModerationRequest, ModerationResponse, ModerationsHandler
from mizzen.gateway.pooling.pooling_call import PoolingHandler, PoolingRequest, PoolingResponse
from mizzen.gateway.pooling.rerank import RerankHandler, RerankRequest, RerankResponse
from mizzen.gateway.pooling.score import LabelsResponse, PairsResponse, ScoreHandler, ScoreRequest


def add_pooling_endpoints(app: FastAPI, gateway: Gateway, families: FamilyOptions) -> None:
    """Add the endpoints for embeddings, scores, reranking and labels."""
    embeddings_handler, score_handler = EmbeddingsHandler(gateway, families), ScoreHandler(gateway)
    classify_handler, pooling_handler = ClassifyHandler(gateway, families), PoolingHandler(gateway, families)
    moderations_handler, cohere_embed_handler = ModerationsHandler(gateway), CohereEmbedHandler(gateway)
    rerank_handler = RerankHandler(gateway, returns_documents=True)
    cohere_handler = RerankHandler(gateway, returns_documents=False)

    @app.post("/v1/embeddings", openapi_extra=describe_operation(EmbeddingRequest, EmbeddingResponse))
    async def embed() -> Response:
        """Return an embedding for each input."""
        return JsonCall(gateway, embeddings_handler)

    @app.post("/v1/score", openapi_extra=describe_operation(ScoreRequest, PairsResponse, LabelsResponse))
    async def score() -> Response:
        """Return the similarity of text pairs, or the probability of each label as the next token."""
        return JsonCall(gateway, score_handler)

    @app.post("/v1/rerank", openapi_extra=describe_operation(RerankRequest, RerankResponse))
    @app.post("/rerank", openapi_extra=describe_operation(RerankRequest, RerankResponse))
    async def rerank() -> Response:
        """Sort documents by how well they answer a query."""
        return JsonCall(gateway, rerank_handler)

    @app.post("/v2/rerank", openapi_extra=describe_operation(RerankRequest, RerankResponse))
    async def rerank_cohere() -> Response:
        """Sort documents by how well they answer a query, as Cohere's API does."""
        return JsonCall(gateway, cohere_handler)

    @app.post("/v1/classify", openapi_extra=describe_operation(ClassifyRequest, ClassifyResponse))
    @app.post("/classify", openapi_extra=describe_operation(ClassifyRequest, ClassifyResponse))
    async def classify() -> Response:
        """Return the probabilities of a classifier's labels for each input."""
        return JsonCall(gateway, classify_handler)

    @app.post("/v1/moderations", openapi_extra=describe_operation(ModerationRequest, ModerationResponse))
    async def moderate() -> Response:
        """Say whether texts are harmful, and in which way."""
        return JsonCall(gateway, moderations_handler)

    @app.post("/pooling", openapi_extra=describe_operation(PoolingRequest, PoolingResponse))
    async def pool() -> Response:
        """Return the vector of each input, or the probabilities of its labels."""
        return JsonCall(gateway, pooling_handler)

    @app.post("/v2/embed", openapi_extra=describe_operation(CohereEmbedRequest, CohereEmbedResponse))
    async def embed_cohere() -> Response:
        """Return an embedding for each text, as Cohere's API does."""
        return JsonCall(gateway, cohere_embed_handler)
