# SPDX-License-Identifier: Apache-2.0
"""POST /v1/classify and /classify: probabilities of a classifier's labels, in vLLM's shape."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta
from starlette.types import Scope

from mizzen.common import model_task
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.output_form import FamilyOptions
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import doc
from mizzen.gateway.pooling.embeddings import count_usage, embed_prompts
from mizzen.gateway.pooling.inputs import InputReader, PooledInput
from mizzen.gateway.pooling.service_model import ServiceModel, find_service_model
from mizzen.gateway.pooling.vectors import Vector, check_finite
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.routing.dispatcher import EmbeddingResult
from mizzen.gateway.text.model_properties import ModelProperties

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


class ClassifyRequest(PooledInput, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/classify and /classify."""

    activation: Annotated[
        bool | None,
        doc(
            "Whether `probs` are probabilities (default) or, with false, logits. A single label and labels "
            "that do not exclude each other get the logistic function, other labels the softmax."
        ),
    ] = None
    use_activation: Annotated[bool | None, doc("Other name of `activation`, as in vLLM.")] = None


class ClassifiedItem(msgspec.Struct):
    """Labels of the input at `index`."""

    index: int
    label: Annotated[str, Meta(description="The most probable label.")]
    probs: Annotated[list[float], Meta(description="Probability of each label, or its logit.")]
    num_classes: int


class ClassifyResponse(msgspec.Struct):
    """Response of POST /v1/classify and /classify."""

    id: str
    created: int
    model: str
    data: list[ClassifiedItem]
    usage: InputUsage
    object: str = "list"


class ClassifyHandler:
    """Handler of POST /v1/classify and /classify."""

    def __init__(self, gateway: Gateway, families: FamilyOptions) -> None:
        self._gateway = gateway
        self._reader = InputReader(gateway, families, ClassifyRequest)

    async def __call__(self, body: bytes, scope: Scope) -> ClassifyResponse:
        """Return the labels of each input in a request body.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        gateway = self._gateway
        request, generations = await self._reader.read(body, scope)
        served = await find_service_model(gateway, scope, generations[0])
        results = await classify_prompts(gateway, scope, served, generations)
        activated = False not in (request.activation, request.use_activation)
        names = label_names(served.properties, len(results[0].vector))
        items: list[ClassifiedItem] = []
        for index, result in enumerate(results):
            probabilities = apply_activation(result.vector, served.properties, activated=activated)
            label = names[int(np.argmax(result.vector))]
            items.append(ClassifiedItem(index, label, probabilities.tolist(), len(probabilities)))
        name = f"classify-{secrets.token_hex(12)}"
        return ClassifyResponse(name, int(time.time()), request.model, items, count_usage(results))


async def classify_prompts(
    gateway: Gateway, scope: Scope, served: ServiceModel, generations: list[GenerationRequest]
) -> list[EmbeddingResult]:
    """Return the logits of a classifier's labels for each prompt, in order.

    Raises:
        ApiError: the model is not a classifier, or the labels could not be computed.
    """
    if served.properties.task != "classify":
        raise not_a_classifier()
    results = await embed_prompts(gateway, scope, generations, None, normalize=False, classify=True)
    check_finite([result.vector for result in results])
    return results


def apply_activation(logits: Vector, properties: ModelProperties, *, activated: bool) -> Vector:
    """Return the scores of labels (float32 [labels]); the logits themselves unless `activated`."""
    if not activated:
        return logits
    named = properties.activation  # empty for the default, also if the engine is older than this gateway
    activation = model_task.ScoreActivation(named) if named else model_task.default_activation(len(logits))
    return model_task.apply_activation(logits, activation)


def label_names(properties: ModelProperties, count: int) -> list[str]:
    """Return the names of a classifier's `count` labels; LABEL_0 and so on for those without one."""
    known = properties.labels
    return [known[index] if index < len(known) else f"LABEL_{index}" for index in range(count)]


def not_a_classifier() -> ApiError:
    """Return the 400 error for a model without a classification head."""
    text = "model is not a classifier: it has no classification head (a *ForSequenceClassification model has)"
    return invalid(text, "model", "unsupported_model")
