"""POST /v1/score: how near texts are (vLLM's form), or how probable labels come next (SGLang's)."""

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

from mizzen.core.sampling_params import SamplingParams
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.openai.decode_body import decode
from mizzen.gateway.openai.embeddings import embed
from mizzen.gateway.openai.parse import prompts
from mizzen.gateway.openai.response_bodies import InputUsage
from mizzen.gateway.openai.schemas import PROMPTS, Priority, TokenId, doc
from mizzen.gateway.requests.fan_out import count_placement, new_routed_requests, run_each
from mizzen.gateway.requests.generation_request import MAX_SEQUENCES, GenerationRequest, Prompt
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.dispatcher import Dispatcher
from mizzen.wire.client.stream import EngineRefused, StreamLost

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

MAX_LABELS = 256
MAX_JOINED = 16 * 1024 * 1024
"""Characters or tokens of all prompts together: the query is in each of them."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/score, in one of two forms."""

    model: Annotated[str, doc("A name listed in `/v1/models`; any other name gets 404.")]
    text_1: Annotated[
        str | list[str] | None,
        doc(
            "vLLM's format: one text, or as many as `text_2`. Scores are cosine similarities "
            "of the embeddings."
        ),
    ] = None
    text_2: Annotated[str | list[str] | None, doc("Texts to compare with `text_1`, up to 1,024.")] = None
    query: Annotated[
        str | list[Any] | None,
        Meta(
            description="SGLang's format: the beginning of each prompt.",
            extra_json_schema={"anyOf": PROMPTS[:2]},
        ),
    ] = None
    items: Annotated[
        str | list[Any] | None,
        Meta(
            description="Continuations of the prompts: texts, or token ids if `query` is token ids.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ] = None
    label_token_ids: Annotated[
        list[TokenId] | None, doc("Up to 256 tokens; their probabilities as the next token are the scores.")
    ] = None
    apply_softmax: Annotated[
        bool | None, doc("Scale the scores of each prompt to a sum of 1 (default: false).")
    ] = None
    item_first: Annotated[bool | None, doc("Put items before the query (default: false).")] = None
    priority: Annotated[Priority | None, doc("As in completions.")] = None
    user: Annotated[str | None, doc("Accepted, not used.")] = None


class ScoreItem(msgspec.Struct):
    """The score of one pair of texts."""

    index: int
    score: float
    object: str = "score"


class PairsResponse(msgspec.Struct):
    """Response to vLLM's form."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: InputUsage
    object: str = "list"


class LabelsResponse(msgspec.Struct):
    """Response to SGLang's form."""

    scores: Annotated[list[list[float]], Meta(description="One row an item, one number a label.")]
    model: str
    usage: InputUsage
    object: str = "scoring"


class Scores:
    """Answers requests for scores."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(ScoreRequest)

    async def __call__(self, body: bytes, scope: Scope) -> PairsResponse | LabelsResponse:
        """Return the scores that a body asks for.

        Raises:
            ApiError: the request is wrong, or cannot be served.
        """
        request, generations = await self._gateway.body_reader.parse_body(body, self._read, scope)
        if request.items is not None:
            return await self._labels(request, generations, scope)
        return await self._pairs(request, generations, scope)

    def _read(self, body: bytes) -> tuple[ScoreRequest, list[GenerationRequest]]:
        """Return a request with what engines are asked for it.

        Raises:
            ApiError: 400, which names the field.
        """
        request = decode(self._decoder, body)
        pairs, labels = ("text_1", "text_2"), ("query", "items", "label_token_ids")
        given = [name for name in pairs + labels if getattr(request, name) is not None]
        form = labels if given and given[0] in labels else pairs
        for name in form:
            if name not in given:
                raise invalid(
                    f"{name} is required beside {given[0] if given else 'model'}", name, "missing_field"
                )
        options = ("apply_softmax", "item_first")  # of labels
        given += [name for name in options if form is pairs and getattr(request, name)]
        for name in given:
            if name not in form:
                raise invalid(f"{name} does not belong beside {form[0]}: the forms are two", name)
        return request, pair_wishes(request) if form is pairs else label_wishes(request)

    async def _pairs(
        self, request: ScoreRequest, generations: list[GenerationRequest], scope: Scope
    ) -> PairsResponse:
        found = await embed(self._gateway, scope, generations, None, normalize=True)
        left = 1 if isinstance(request.text_1, str) else len(request.text_1 or ())
        first, second = found[:left], found[left:]
        scores = [
            ScoreItem(index, float(np.dot(first[index if left > 1 else 0].vector, other.vector)))
            for index, other in enumerate(second)
        ]
        tokens = sum(one.prompt_tokens for one in found)
        name = f"score-{secrets.token_hex(12)}"
        return PairsResponse(name, int(time.time()), request.model, scores, InputUsage(tokens, tokens))

    async def _labels(
        self, request: ScoreRequest, generations: list[GenerationRequest], scope: Scope
    ) -> LabelsResponse:
        dispatcher = self._gateway.open_service(request.model, scope).dispatcher
        routed_requests = new_routed_requests(self._gateway, scope, generations)
        found = await run_each(
            dispatcher, routed_requests, lambda routed: self._label_scores(routed, dispatcher)
        )
        scores = [scaled(logprobs, bool(request.apply_softmax)) for logprobs, _ in found]
        tokens = sum(count for _, count in found)
        return LabelsResponse(scores, request.model, InputUsage(tokens, tokens))

    async def _label_scores(
        self, routed: RoutedRequest, dispatcher: Dispatcher
    ) -> tuple[tuple[float, ...], int]:
        """Return the labels' log probabilities to come next, and how many tokens the prompt has."""
        self._gateway.restart_queue_timeout(routed.queue_entry)
        running = await dispatcher.place(routed)
        count_placement(self._gateway, routed)
        try:
            tokens, _ = await running.next_tokens()
            self._gateway.metrics.for_model(routed.generation.model).output_tokens.inc(len(tokens))
            if routed.record is not None:
                routed.record.prompt_tokens += len(routed.prompt)
                routed.record.completion_tokens += len(tokens)
            return running.take_logprobs()[0].asked, len(routed.prompt)
        except (StreamLost, EngineRefused) as error:
            raise unavailable(str(error), code="engine_lost") from error
        finally:
            running.close()


def pair_wishes(request: ScoreRequest) -> list[GenerationRequest]:
    """Return what is embedded for vLLM's form: first all of `text_1`, then all of `text_2`.

    Raises:
        ApiError: 400 for none, too many, or numbers that do not match.
    """
    left, right = texts(request.text_1, "text_1"), texts(request.text_2, "text_2")
    if len(left) not in (1, len(right)):
        text = f"text_1 must hold one text or as many as text_2 ({len(right)}), not {len(left)}"
        raise invalid(text, "text_1")
    return [wish_of(request, one, GREEDY) for one in [*left, *right]]


def label_wishes(request: ScoreRequest) -> list[GenerationRequest]:
    """Return what is asked for SGLang's form, an item each.

    Raises:
        ApiError: 400, as `joined`, and for too few or too many labels.
    """
    labels = tuple(request.label_token_ids or ())
    if not 0 < len(labels) <= MAX_LABELS:
        raise invalid(f"label_token_ids must hold 1 to {MAX_LABELS} tokens", "label_token_ids")
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=labels)
    return [wish_of(request, prompt, asked) for prompt in joined(request)]


def texts(given: str | list[str] | None, name: str) -> list[str]:
    """Return the texts of a field.

    Raises:
        ApiError: 400 for none, or too many.
    """
    found = [given] if isinstance(given, str) else given or []
    if not 0 < len(found) <= MAX_SEQUENCES:
        raise invalid(f"{name} must hold 1 to {MAX_SEQUENCES} texts", name)
    return found


def joined(request: ScoreRequest) -> list[Prompt]:
    """Return the prompts of a request in SGLang's form: its query with each of its items.

    Raises:
        ApiError: 400 for a mixture of texts and token ids, or too many.
    """
    query, *others = prompts("" if request.query is None else request.query, "query")
    items = prompts("" if request.items is None else request.items, "items")
    if others:
        raise invalid("query must be one text, or token ids", "query")
    if len(items) > MAX_SEQUENCES:
        raise invalid(f"items holds {len(items)} items; at most {MAX_SEQUENCES} are allowed", "items")
    if len(query) * len(items) > MAX_JOINED:
        text = f"query, {len(query)} long, is too long to begin {len(items)} prompts: send fewer items"
        raise invalid(text, "items", "out_of_range")
    return [pair(query, item, bool(request.item_first)) for item in items]


def pair(query: Prompt, item: Prompt, item_first: bool) -> Prompt:
    """Return one prompt.

    Raises:
        ApiError: 400 when one is text and the other is not.
    """
    if isinstance(query, str) and isinstance(item, str):
        return item + query if item_first else query + item
    if isinstance(query, array) and isinstance(item, array):
        return item + query if item_first else query + item
    raise mixed()


def mixed() -> ApiError:
    """Return the 400 of a query and an item of two kinds."""
    return invalid("items must be texts when query is one, and token ids when query is token ids", "items")


def wish_of(request: ScoreRequest, prompt: Prompt, sampling: SamplingParams) -> GenerationRequest:
    """Return what a request asks for with one prompt."""
    return GenerationRequest(
        model=request.model,
        prompt=prompt,
        prompt_field="text_1" if request.items is None else "items",
        sampling=sampling,
        priority=request.priority,
    )


def scaled(logprobs: tuple[float, ...], softmax: bool) -> list[float]:
    """Return probabilities, of all tokens or among the labels."""
    if not softmax:
        return [math.exp(one) for one in logprobs]
    most = max(logprobs)
    shares = [math.exp(one - most) for one in logprobs]
    return [share / sum(shares) for share in shares]
