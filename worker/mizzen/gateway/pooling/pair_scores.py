# SPDX-License-Identifier: Apache-2.0
"""Scores how well documents answer a query, in the way that suits the model.

- A model that generates text judges each pair: the score is P(yes) / (P(yes) + P(no)) of its next token.
- A cross-encoder computes the score of each pair: the logistic function of its only logit.
- An embedding model embeds the query and the documents: the score is the cosine of their vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from starlette.types import Scope

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.pooling.classify import apply_activation, classify_prompts
from mizzen.gateway.pooling.embeddings import embed_prompts
from mizzen.gateway.pooling.inputs import prompt_generations
from mizzen.gateway.pooling.label_logprobs import LABEL_SAMPLING, normalize_logprobs, score_labels
from mizzen.gateway.pooling.pair_prompts import PairPrompt
from mizzen.gateway.pooling.service_model import ServiceModel, find_service_model
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.text.model_properties import ModelProperties

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """Options of a request that scores pairs."""

    model: str
    priority: int | None = None
    instruction: str | None = None
    max_document_tokens: int | None = None
    truncate: int | None = None
    """Number of tokens to which a prompt is cut, at the end of its document; -1 for the context length."""
    activation: bool = True
    """Whether scores are probabilities; False for logits."""
    document_field: str = "documents[{}]"
    """Path of a document in the request's body; `{}` stands for its index."""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of documents, in order, and the number of prompt tokens."""

    scores: list[float]
    prompt_tokens: int


async def score_documents(
    gateway: Gateway, scope: Scope, options: PairOptions, query: str, documents: Sequence[str]
) -> PairScores:
    """Return the scores of documents for a query.

    Raises:
        ApiError: the request is invalid, or no engine could serve it.
    """
    probe = pair_generation(options, query, documents[0], 0)
    served = await find_service_model(gateway, scope, probe)
    classifies = served.properties.task == "classify"
    pairs = [
        pair_generation(options, query, document, index, classifies=classifies)
        for index, document in enumerate(documents)
    ]
    if classifies:
        result = await score_by_head(gateway, scope, options, served, pairs)
    elif served.properties.task == "embed":
        result = await score_by_cosine(gateway, scope, options, served, query, documents)
    else:
        result = await score_by_labels(gateway, scope, options, pairs)
    for index, score in enumerate(result.scores):
        if not math.isfinite(score):
            field = options.document_field.format(index)
            raise ApiError(502, f"the engine's score of {field} is not a number", code="not_a_number")
    return result


def pair_generation(
    options: PairOptions, query: str, document: str, index: int, *, classifies: bool = False
) -> GenerationRequest:
    """Return the request that judges one pair; `index` is the document's."""
    return GenerationRequest(
        model=options.model,
        prompt=document,  # for estimates and logs: copies of a long query would fill the memory
        prompt_source=PairPrompt(
            query=query,
            document=document,
            instruction=options.instruction,
            classifies=classifies,
            max_document_tokens=options.max_document_tokens,
            truncate=options.truncate,
        ),
        prompt_field=options.document_field.format(index),
        ignored_fields=options.ignored,
        priority=options.priority,
        sampling=LABEL_SAMPLING,
    )


async def score_by_head(
    gateway: Gateway, scope: Scope, options: PairOptions, served: ServiceModel, pairs: list[GenerationRequest]
) -> PairScores:
    """Return the logistic function of each pair's logit, or the logit itself.

    Raises:
        ApiError: 400 if the model has several labels.
    """
    results = await classify_prompts(gateway, scope, served, pairs)
    if any(len(result.vector) != 1 for result in results):
        text = "model has several labels: only a classifier with one label scores pairs; use /v1/classify"
        raise invalid(text, "model", "unsupported_model")
    vectors = [
        apply_activation(result.vector, served.properties, activated=options.activation) for result in results
    ]
    scores = [float(vector[0]) for vector in vectors]
    return PairScores(scores, sum(result.prompt_tokens for result in results))


async def score_by_labels(
    gateway: Gateway, scope: Scope, options: PairOptions, pairs: list[GenerationRequest]
) -> PairScores:
    """Return the probability of `yes` against `no` as the next token of each prompt, or the logit of it."""
    results = await score_labels(gateway, scope, pairs)
    scores = [
        normalize_logprobs(logprobs)[0] if options.activation else logprobs[0] - logprobs[1]
        for logprobs, _ in results
    ]
    return PairScores(scores, sum(tokens for _, tokens in results))


async def score_by_cosine(
    gateway: Gateway,
    scope: Scope,
    options: PairOptions,
    served: ServiceModel,
    query: str,
    documents: Sequence[str],
) -> PairScores:
    """Return the cosine of the query's vector and each document's.

    The query and the documents are preceded by the prompts that the model was trained with, and `instruction`
    replaces the one of the query.
    """
    limits = [limit for limit in (options.truncate, options.max_document_tokens) if limit is not None]
    positive = [limit for limit in limits if limit > 0]
    truncate = min(positive) if positive else limits[0] if limits else None
    before = served.properties.document_prompt
    question = prompt_generations(
        options.model,
        [f"{query_prompt(served.properties, options.instruction)}{query}"],
        "query",
        priority=options.priority,
        ignored=options.ignored,
    )
    texts = prompt_generations(
        options.model,
        [f"{before}{document}" for document in documents],
        options.document_field,
        truncate=truncate,
        priority=options.priority,
    )
    first, *others = await embed_prompts(gateway, scope, [*question, *texts], None, normalize=True)
    scores = [float(np.dot(first.vector, other.vector)) for other in others]
    return PairScores(scores, first.prompt_tokens + sum(other.prompt_tokens for other in others))


def query_prompt(properties: ModelProperties, instruction: str | None) -> str:
    """Return the text that precedes an embedding model's query, with the request's instruction, if any."""
    if instruction is None:
        return properties.query_prompt
    return f"Instruct: {instruction}\nQuery:"
