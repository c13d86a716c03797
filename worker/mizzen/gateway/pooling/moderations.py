# SPDX-License-Identifier: Apache-2.0
"""POST /v1/moderations: whether texts are harmful, by a classifier's labels or a guard model's answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Scope

from mizzen.common.model_task import ScoreActivation
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.rules import UNUSED, Rules
from mizzen.gateway.openai.schemas import Priority, doc
from mizzen.gateway.pooling.classify import apply_activation, classify_prompts, label_names
from mizzen.gateway.pooling.guards import GuardForm, GuardPrompt, find_guard_form
from mizzen.gateway.pooling.inputs import prompt_generations
from mizzen.gateway.pooling.label_logprobs import LABEL_SAMPLING, normalize_logprobs, score_labels
from mizzen.gateway.pooling.moderation_categories import (
    OPENAI_CATEGORIES,
    THRESHOLD,
    map_scores,
    parse_mapping,
)
from mizzen.gateway.pooling.service_model import ServiceModel, find_service_model
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.requests.text_batch import WHOLE_CONTEXT
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MAX_TEXTS = 512
RULES: Rules = {"user": UNUSED}


class ModerationPart(msgspec.Struct):
    """Part of an input."""

    type: str
    text: str | None = None
    image_url: Any = None


class ModerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/moderations."""

    input: Annotated[
        str | list[str | ModerationPart],
        doc("A text, up to 512 texts, or parts of type `text`; each gets one result. Images get 400."),
    ]
    model: Annotated[
        str | None, doc("A name listed in `/v1/models` (default: the first one, if there is only one).")
    ] = None
    priority: Annotated[Priority | None, doc("As in chat completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None


class ModerationResult(msgspec.Struct):
    """Result for one text."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: Annotated[
        dict[str, list[str]],
        Meta(description="`text` for each category that the model judges; the scores of others are 0."),
    ]


class ModerationResponse(msgspec.Struct):
    """Response of POST /v1/moderations."""

    id: str
    model: str
    results: list[ModerationResult]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Judgement of a model on a text."""

    scores: dict[str, float]
    """Score of each of the model's labels, 0 to 1."""
    named: str | None = None
    """Label that a guard model names for a text that it calls unsafe. The label's score may be low, because
    it competes with similar ones."""


class ModerationsHandler:
    """Handler of POST /v1/moderations."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._mapping = parse_mapping(gateway.config.moderation_category)
        self._decoder = BodyDecoder(ModerationRequest, RULES, strict=gateway.config.strict_fields)

    async def __call__(self, body: bytes, scope: Scope) -> ModerationResponse:
        """Return a result for each text in a request body.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        gateway = self._gateway
        request, ignored = await gateway.body_reader.parse_body(body, self._decoder.decode, scope)
        get_record(scope).ignored_fields = ignored
        texts = input_texts(request)
        model = request.model or self._only_model(scope)
        generations = prompt_generations(
            model, texts, "input[{}]", truncate=WHOLE_CONTEXT, priority=request.priority, ignored=ignored
        )
        served = await find_service_model(gateway, scope, generations[0])
        if served.properties.task == "classify":
            judgements = await self._classify(scope, served, generations)
        else:
            form = find_guard_form(served.text)
            if form is None:
                raise not_a_moderator()
            judgements = await self._judge_by_guard(scope, form, texts, generations)
        results = [build_result(judgement, self._mapping) for judgement in judgements]
        return ModerationResponse(f"modr-{secrets.token_hex(12)}", model, results)

    def _only_model(self, scope: Scope) -> str:
        """Return the name of the first model, if all names belong to the same service.

        Raises:
            ApiError: 400 if several models are served, or none that the request may use.
        """
        models = self._gateway.models_for(scope)
        if not models:
            raise invalid("model is required: the API key may use none of the served models", "model")
        if len({service.name for _, service in models}) != 1:
            raise invalid("model is required: several models are served", "model", "missing_field")
        return models[0][0]

    async def _classify(
        self, scope: Scope, served: ServiceModel, generations: list[GenerationRequest]
    ) -> list[Judgement]:
        """Return the judgement of a classifier on each text."""
        results = await classify_prompts(self._gateway, scope, served, generations)
        properties = served.properties
        if properties.activation == ScoreActivation.NONE:  # thresholds need probabilities
            properties = replace(properties, activation="")
        names = label_names(properties, len(results[0].vector))
        probabilities = [
            apply_activation(result.vector, properties, activated=True).tolist() for result in results
        ]
        return [Judgement(dict(zip(names, row, strict=True))) for row in probabilities]

    async def _judge_by_guard(
        self, scope: Scope, form: GuardForm, texts: Sequence[str], generations: list[GenerationRequest]
    ) -> list[Judgement]:
        """Return the judgement of a guard model on each text.

        The score of a category is the probability that the verdict is not "safe", times that of the category
        being named first.
        """
        prompts = [
            replace(
                generation,
                prompt_source=GuardPrompt(text, form, categories, generation.prompt_field),
                sampling=LABEL_SAMPLING,
            )
            for generation, text in zip(generations, texts, strict=True)
            for categories in (False, True)
        ]
        results = await score_labels(self._gateway, scope, prompts)
        judgements: list[Judgement] = []
        for index in range(0, len(results), 2):
            verdicts, categories = (normalize_logprobs(results[index + at][0]) for at in (0, 1))
            unsafe = 1 - verdicts[0]
            scores = {label: unsafe * p for label, p in zip(form.labels, categories, strict=True)}
            worst = max(scores, key=lambda label: scores[label])
            judgements.append(Judgement(scores, worst if unsafe >= THRESHOLD else None))
        return judgements


def input_texts(request: ModerationRequest) -> list[str]:
    """Return the texts of a request.

    Raises:
        ApiError: 400 if there are no texts or too many, or a part is not text.
    """
    items = [request.input] if isinstance(request.input, str) else request.input
    if not 0 < len(items) <= MAX_TEXTS:
        raise invalid(f"input must hold 1 to {MAX_TEXTS} texts", "input", "out_of_range")
    texts: list[str] = []
    for index, item in enumerate(items):
        if isinstance(item, str):
            texts.append(item)
        elif item.type == "text" and item.text is not None:
            texts.append(item.text)
        else:
            name = f"input[{index}]"
            raise invalid(f"{name}: only parts of type text are supported", name, "unsupported_content")
    return texts


def build_result(judgement: Judgement, mapping: Mapping[str, str]) -> ModerationResult:
    """Return the result for one text; OpenAI's categories are always present.

    `mapping` holds the categories of labels that the operator configured.
    """
    scores = map_scores(judgement.scores, mapping)
    named = map_scores({judgement.named: 1.0}, mapping) if judgement.named is not None else {}
    all_scores = dict.fromkeys(OPENAI_CATEGORIES, 0.0) | scores
    categories = {name: score >= THRESHOLD or name in named for name, score in all_scores.items()}
    applied = {name: ["text"] if name in scores else [] for name in all_scores}
    return ModerationResult(any(categories.values()), categories, all_scores, applied)


def not_a_moderator() -> ApiError:
    """Return the 400 error for a model that cannot moderate."""
    return invalid(
        "model is neither a classifier nor a known guard model (Llama Guard 3, Qwen3Guard-Gen): its chat "
        "template has no list of categories",
        "model",
        "unsupported_model",
    )
