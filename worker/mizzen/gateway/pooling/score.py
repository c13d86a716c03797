# SPDX-License-Identifier: Apache-2.0
"""POST /v1/score: similarity of text pairs (vLLM's form), or probabilities of labels (SGLang's form)."""

from __future__ import annotations

import math
import secrets
import time
from array import array
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.types import Scope

from mizzen.core.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.rules import UNUSED, Rules
from mizzen.gateway.openai.parse import parse_prompts
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import PROMPTS, Priority, TokenId, doc
from mizzen.gateway.pooling.embeddings import embed_prompts
from mizzen.gateway.pooling.inputs import MAX_JOINED_LENGTH, ONE_PASS
from mizzen.gateway.pooling.label_logprobs import normalize_logprobs, score_labels
from mizzen.gateway.pooling.pair_scores import PairOptions, PairScores, pair_generation, score_by_head
from mizzen.gateway.pooling.service_model import ServiceModel, find_service_model
from mizzen.gateway.pooling.vectors import check_finite
from mizzen.gateway.requests.generation_request import MAX_SEQUENCES, GenerationRequest, Prompt
from mizzen.gateway.telemetry.request_record import get_record

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

RULES: Rules = {"user": UNUSED}


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/score: vLLM's form compares texts, SGLang's form scores labels."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    text_1: Annotated[
        str | list[str] | None,
        doc(
            "vLLM's form: one text, or as many texts as `text_2` has. Scores are those of a cross-encoder, "
            "or else cosine similarities of the embeddings."
        ),
    ] = None
    text_2: Annotated[str | list[str] | None, doc("Texts to compare with `text_1`, up to 1,024.")] = None
    query: Annotated[
        str | list[Any] | None,
        Meta(
            description="SGLang's form: text or token ids, which each item extends to a prompt.",
            extra_json_schema={"anyOf": PROMPTS[:2]},
        ),
    ] = None
    items: Annotated[
        str | list[Any] | None,
        Meta(
            description="Continuations of the query: texts, or lists of token ids if `query` is token ids.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ] = None
    label_token_ids: Annotated[
        list[TokenId] | None,
        doc(
            "Ids of up to 128 tokens; a score is the probability that the token comes next after the prompt."
        ),
    ] = None
    apply_softmax: Annotated[
        bool | None, doc("Scale the scores of each prompt to a sum of 1 (default: false).")
    ] = None
    item_first: Annotated[bool | None, doc("Put each item before the query (default: false).")] = None
    priority: Annotated[Priority | None, doc("As in chat completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None


class ScoreItem(msgspec.Struct):
    """Score of the pair of texts at `index`."""

    index: int
    score: float
    object: str = "score"


class PairsResponse(msgspec.Struct):
    """Response to a score request in vLLM's form: one score per pair of texts."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: InputUsage
    object: str = "list"


class LabelsResponse(msgspec.Struct):
    """Response to a score request in SGLang's form: one list of label scores per item."""

    scores: Annotated[list[list[float]], Meta(description="One row per item, one number per label.")]
    model: str
    usage: InputUsage
    object: str = "scoring"


class ScoreHandler:
    """Handler of POST /v1/score."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder(ScoreRequest, RULES, strict=gateway.config.strict_fields)

    async def __call__(self, body: bytes, scope: Scope) -> PairsResponse | LabelsResponse:
        """Return the scores of the text pairs or items in a request body.

        Raises:
            ApiError: the request is invalid, or no engine could serve it.
        """
        parsed = await self._gateway.body_reader.parse_body(body, self._parse, scope)
        request, generations, get_record(scope).ignored_fields = parsed
        if request.items is not None:
            return await self._score_labels(request, generations, scope)
        return await self._score_pairs(request, generations, scope)

    def _parse(self, body: bytes) -> tuple[ScoreRequest, list[GenerationRequest], tuple[str, ...]]:
        """Return the decoded body, a `GenerationRequest` for each prompt, and the paths of ignored fields.

        Raises:
            ApiError: 400 if a field is invalid or missing, or the two forms are mixed; the error names the
                field.
        """
        request, ignored = self._decoder.decode(body)
        pairs, labels = ("text_1", "text_2"), ("query", "items", "label_token_ids")
        given_fields = [name for name in pairs + labels if getattr(request, name) is not None]
        expected = labels if given_fields and given_fields[0] in labels else pairs
        for name in expected:
            if name not in given_fields:
                raise invalid(
                    f"{name} is required with {given_fields[0] if given_fields else 'model'}",
                    name,
                    "missing_field",
                )
        options = ("apply_softmax", "item_first")  # only for labels
        given_fields += [name for name in options if expected is pairs and getattr(request, name)]
        for name in given_fields:
            if name not in expected:
                raise invalid(
                    f"{name} cannot be combined with {expected[0]}: use only one of the two forms", name
                )
        generations = pair_generations(request) if expected is pairs else label_generations(request)
        return request, generations, ignored

    async def _score_pairs(
        self, request: ScoreRequest, generations: list[GenerationRequest], scope: Scope
    ) -> PairsResponse:
        served = await find_service_model(self._gateway, scope, generations[0])
        if served.properties.task == "classify":
            scored = await self._judge_pairs(request, served, scope)
        else:
            scored = await self._compare_pairs(request, generations, scope)
        scores = [ScoreItem(index, score) for index, score in enumerate(scored.scores)]
        tokens = scored.prompt_tokens
        name = f"score-{secrets.token_hex(12)}"
        return PairsResponse(name, int(time.time()), request.model, scores, InputUsage(tokens, tokens))

    async def _judge_pairs(self, request: ScoreRequest, served: ServiceModel, scope: Scope) -> PairScores:
        """Return the scores that a cross-encoder gives to the pairs.

        Raises:
            ApiError: 400 if the prompts would be too long, 503 if no engine could serve them.
        """
        left, right = text_list(request.text_1, "text_1"), text_list(request.text_2, "text_2")
        if len(left) == 1 and len(left[0]) * len(right) > MAX_JOINED_LENGTH:
            text = f"text_1, {len(left[0])} long, is too long for {len(right)} texts in text_2: send fewer"
            raise invalid(text, "text_2", "out_of_range")
        field = "text_2" if isinstance(request.text_2, str) else "text_2[{}]"
        options = PairOptions(model=request.model, priority=request.priority, document_field=field)
        pairs = [
            pair_generation(options, left[index if len(left) > 1 else 0], text, index, classifies=True)
            for index, text in enumerate(right)
        ]
        return await score_by_head(self._gateway, scope, options, served, pairs)

    async def _compare_pairs(
        self, request: ScoreRequest, generations: list[GenerationRequest], scope: Scope
    ) -> PairScores:
        """Return the cosines of the embeddings of the pairs."""
        results = await embed_prompts(self._gateway, scope, generations, None, normalize=True)
        check_finite([result.vector for result in results])
        first_count = 1 if isinstance(request.text_1, str) else len(request.text_1 or ())
        first, second = results[:first_count], results[first_count:]
        scores = [
            float(np.dot(first[index if first_count > 1 else 0].vector, other.vector))
            for index, other in enumerate(second)
        ]
        return PairScores(scores, sum(result.prompt_tokens for result in results))

    async def _score_labels(
        self, request: ScoreRequest, generations: list[GenerationRequest], scope: Scope
    ) -> LabelsResponse:
        results = await score_labels(self._gateway, scope, generations)
        scores = [
            normalize_logprobs(logprobs) if request.apply_softmax else list(map(math.exp, logprobs))
            for logprobs, _ in results
        ]
        tokens = sum(count for _, count in results)
        return LabelsResponse(scores, request.model, InputUsage(tokens, tokens))


def pair_generations(request: ScoreRequest) -> list[GenerationRequest]:
    """Return the embedding requests for vLLM's form: all of `text_1`, then all of `text_2`.

    Raises:
        ApiError: 400 if there are no texts or too many, or `text_1` has neither one text nor as many as
            `text_2`.
    """
    left, right = text_list(request.text_1, "text_1"), text_list(request.text_2, "text_2")
    if len(left) not in (1, len(right)):
        text = f"text_1 must hold one text or as many as text_2 ({len(right)}), not {len(left)}"
        raise invalid(text, "text_1")
    fields = [*field_names(request.text_1, "text_1"), *field_names(request.text_2, "text_2")]
    prompts = zip([*left, *right], fields, strict=True)
    return [score_generation(request, item, field, ONE_PASS) for item, field in prompts]


def label_generations(request: ScoreRequest) -> list[GenerationRequest]:
    """Return a generation request for each item of SGLang's form.

    Raises:
        ApiError: 400 if there are no labels or too many, or `join_prompts` rejects the items.
    """
    labels = tuple(request.label_token_ids or ())
    if not 0 < len(labels) <= MAX_LOGPROB_TOKEN_IDS:
        text = f"label_token_ids must hold 1 to {MAX_LOGPROB_TOKEN_IDS} tokens"
        raise invalid(text, "label_token_ids")
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=labels)
    prompts = zip(join_prompts(request), field_names(request.items, "items"), strict=True)
    return [score_generation(request, prompt, field, sampling) for prompt, field in prompts]


def field_names(value: str | list[Any] | None, name: str) -> list[str]:
    """Return the path of each prompt in the value of field `name`, which is one prompt or a list of them."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        return [f"{name}[{index}]" for index in range(len(value))]
    return [name]


def text_list(value: str | list[str] | None, name: str) -> list[str]:
    """Return the value of field `name`, one text or several, as a list.

    Raises:
        ApiError: 400 if there are no texts, or too many.
    """
    texts = [value] if isinstance(value, str) else value or []
    if not 0 < len(texts) <= MAX_SEQUENCES:
        raise invalid(f"{name} must hold 1 to {MAX_SEQUENCES} texts", name)
    return texts


def join_prompts(request: ScoreRequest) -> list[Prompt]:
    """Return the prompts of a request in SGLang's form: the query joined with each item.

    Raises:
        ApiError: 400 if text and token ids are mixed, the query is a list of texts, or there are too many
            items.
    """
    query, *others = parse_prompts("" if request.query is None else request.query, "query")
    items = parse_prompts("" if request.items is None else request.items, "items")
    if others:
        raise invalid("query must be one text, or token ids", "query")
    if len(items) > MAX_SEQUENCES:
        raise invalid(f"items holds {len(items)} items; at most {MAX_SEQUENCES} are allowed", "items")
    if len(query) * len(items) > MAX_JOINED_LENGTH:
        text = f"query, {len(query)} long, is too long for {len(items)} prompts: send fewer items"
        raise invalid(text, "items", "out_of_range")
    return [join_prompt(query, item, bool(request.item_first)) for item in items]


def join_prompt(query: Prompt, item: Prompt, item_first: bool) -> Prompt:
    """Return the prompt that joins a query and an item; with `item_first`, the item comes first.

    Raises:
        ApiError: 400 if one of them is text and the other is token ids.
    """
    if isinstance(query, str) and isinstance(item, str):
        return item + query if item_first else query + item
    if isinstance(query, array) and isinstance(item, array):
        return item + query if item_first else query + item
    raise mixed_kinds_error()


def mixed_kinds_error() -> ApiError:
    """Return a 400 error for a text query with items that are token ids, or the reverse."""
    return invalid("items must be texts if query is text, and token ids if query is token ids", "items")


def score_generation(
    request: ScoreRequest, prompt: Prompt, field: str, sampling: SamplingParams
) -> GenerationRequest:
    """Return the generation request for one prompt of a score request, which is at `field` of the body."""
    return GenerationRequest(
        model=request.model,
        prompt=prompt,
        prompt_field=field,
        sampling=sampling,
        priority=request.priority,
    )
