# SPDX-License-Identifier: Apache-2.0
"""The API's schema, the wire message and the engine agree with the definition of each sampling parameter."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mizzen.core.request import Request
from mizzen.core.sampling_params import PARAMETERS, Grammar, GrammarKind, Parameter, SamplingParams
from mizzen.core.side_outputs import has_slot_options
from mizzen.gateway.openai.parse import RequestParser
from mizzen.gateway.openai.sampling_fields import completion_fields
from mizzen.gateway.openai.schemas import ChatRequest, CompletionRequest, SamplingFields
from mizzen.gateway.requests.engine_request import engine_sampling
from mizzen.gateway.responses.schemas import CHAT_FIELDS, ResponsesRequest
from mizzen.wire.codec import encode, engine_decoder
from mizzen.wire.messages import Generate, Sampling
from mizzen.wire.server.invalid_request import InvalidRequest
from mizzen.wire.server.request_validation import MessageValidator
from source_code import parse_source

WORKER = Path(__file__).parents[2] / "worker/mizzen"
VALIDATION = MessageValidator(vocab_size=1000, context_length=100)
PROMPT = np.array([1, 2, 3], "<i4").tobytes()
NUMBERS = [parameter for parameter in PARAMETERS if parameter.bounds is not None]
FIELDS = [parameter for parameter in PARAMETERS if parameter.request_field]
SENT = [parameter for parameter in PARAMETERS if parameter.sent]
OTHERS: dict[str, tuple[Any, Any]] = {
    "ignore_eos": (True, True),
    "stop_token_ids": ([7, 9], (7, 9)),
    "stop": (["a", "b"], ("a", "b")),
    "logit_bias": ({"5": 1.5, "6": -100}, ((5, 1.5), (6, -100.0))),
}
"""For each parameter that is not a single number: a value in a request, and the engine's value for it."""
SPECIAL = {"top_k": {-1: 0}, "top_p": {0.0: 1.0}}
"""Values that the API accepts outside the engine's bounds, and the engine's values for them."""


def schema_bounds(name: str, request: type[msgspec.Struct]) -> tuple[float, float]:
    """Return the minimum and maximum of a field in the API's schema; a missing bound is infinite."""
    _, components = msgspec.json.schema_components([request], ref_template="{name}")
    field = components[request.__name__]["properties"][name]
    (number,) = [
        schema for schema in field.get("anyOf", [field]) if schema.get("type") in ("number", "integer")
    ]
    return number.get("minimum", -math.inf), number.get("maximum", math.inf)


def request_values(parameter: Parameter) -> list[tuple[Any, Any]]:
    """Return pairs of a field's value in a request and the engine's value for it.

    For a numeric parameter, the values are the API's bounds and one value between them.
    """
    if parameter.bounds is None:
        return [OTHERS[parameter.name]]
    low, high = schema_bounds(parameter.name, CompletionRequest)
    if math.isinf(low):
        low, high = parameter.bounds.low, parameter.bounds.high
    is_integer = parameter.wire_type is not float
    between = int(low + 3) if is_integer else low + 0.625 * (high - low)
    api_values = [int(value) if is_integer else float(value) for value in (low, between, high)]
    return [(value, SPECIAL.get(parameter.name, {}).get(value, value)) for value in api_values]


def in_engine(**fields: Any) -> SamplingParams:
    """Send the fields of a completion request through the wire encoding; return the engine's parameters."""
    generation = RequestParser().parse_completion(
        msgspec.json.encode({"model": "m", "prompt": "p", **fields})
    )
    sampling = engine_sampling(generation, None, np.empty(0, np.int32))  # type: ignore[arg-type]
    message = engine_decoder()(encode(Generate(1, PROMPT, sampling)))
    assert isinstance(message, Generate)
    return VALIDATION.to_request(message, 0.0).sampling


def names(parameters: list[Parameter]) -> list[str]:
    return [parameter.name for parameter in parameters]


def test_request_schemas_have_the_fields_of_parameters_with_a_request_field() -> None:
    for request in (ChatRequest, CompletionRequest):
        assert set(names(FIELDS)) <= set(request.__struct_fields__)
    assert set(SamplingFields.__struct_fields__) <= set(names(FIELDS))
    assert set(SamplingFields.__struct_fields__) <= set(ResponsesRequest.__struct_fields__) & set(CHAT_FIELDS)


@pytest.mark.parametrize("parameter", [p for p in NUMBERS if p.request_field], ids=lambda p: p.name)
def test_schema_bounds_lie_within_the_engine_bounds(parameter: Parameter) -> None:
    assert parameter.bounds is not None
    for request in (ChatRequest, CompletionRequest):
        low, high = schema_bounds(parameter.name, request)
        special = SPECIAL.get(parameter.name, {})
        assert low >= parameter.bounds.low or low in special or parameter.name == "seed"
        assert high <= parameter.bounds.high or parameter.name == "seed"  # JSON Schema has no 64-bit integer


@pytest.mark.parametrize("parameter", FIELDS, ids=lambda p: p.name)
def test_a_field_of_a_request_arrives_in_the_engine(parameter: Parameter) -> None:
    for value, expected in request_values(parameter):
        if parameter.name == "top_p" and value == 0:
            assert (in_engine(top_p=0).top_p, in_engine(top_p=0).top_k) == (1.0, 1)
            continue
        if parameter.name in ("top_k", "min_tokens"):  # lowered to the vocabulary size or the context length
            limit = VALIDATION.vocab_size if parameter.name == "top_k" else VALIDATION.context_length
            value, expected = min(value, limit), min(expected, limit)
        extra = {"max_tokens": 100} if parameter.name == "min_tokens" else {}
        params = in_engine(**{parameter.name: value}, **extra)
        assert getattr(params, parameter.name) == (expected if parameter.sent else parameter.default)


@pytest.mark.parametrize("parameter", FIELDS, ids=lambda p: p.name)
def test_a_parameter_becomes_a_field_of_a_request(parameter: Parameter) -> None:
    for _, value in request_values(parameter):
        if parameter.name == "top_p" and value == 0:
            continue  # the engine has no such value
        value = min(value, 5) if parameter.name == "min_tokens" else value
        params = SamplingParams(**{parameter.name: value}, max_tokens=5)
        fields = msgspec.json.encode({"model": "m", "prompt": "p", **completion_fields(params)})
        assert RequestParser().parse_completion(fields).sampling == params


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_OBJECT, ""),
        (GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        (GrammarKind.REGEX, "a+"),
        (GrammarKind.EBNF, 'root ::= "a"'),
        (GrammarKind.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}'),
    ],
)
def test_a_grammar_becomes_a_field_of_a_request(kind: GrammarKind, text: str) -> None:
    params = SamplingParams(grammar=Grammar(kind, text), max_tokens=5)
    fields = msgspec.json.encode({"model": "m", "prompt": "p", **completion_fields(params)})
    assert RequestParser().parse_completion(fields).sampling == params


def test_a_request_without_fields_has_the_defaults_of_the_parameters() -> None:
    params = in_engine()
    defaults = {parameter.name: parameter.default for parameter in PARAMETERS}
    assert params == SamplingParams(**{**defaults, "max_tokens": 16})  # the default of completions only
    assert SamplingParams() == SamplingParams(**defaults)


def test_the_wire_has_the_parameters_in_the_order_of_their_declaration() -> None:
    fields = msgspec.structs.fields(Sampling)
    assert [field.name for field in fields] == names(SENT)
    assert [field.default for field in fields] == [parameter.default for parameter in SENT]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Sampling())) == [
        list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        for parameter in SENT
    ]


@pytest.mark.parametrize("parameter", NUMBERS, ids=lambda p: p.name)
def test_the_engine_refuses_numbers_outside_the_bounds(parameter: Parameter) -> None:
    assert parameter.bounds is not None
    step = 1 if parameter.wire_type is not float else 0.5
    for wrong in (parameter.bounds.low - step, parameter.bounds.high + step):
        if math.isinf(wrong) or not -(2**63) <= wrong < 2**64:
            continue  # the wire cannot encode such a number
        if parameter.name in ("top_k", "min_tokens") and wrong > 0:
            continue  # lowered to the vocabulary size or the context length instead
        rule = re.escape(f"{parameter.name} must be {parameter.bounds.rule}, not ")
        with pytest.raises(InvalidRequest, match=rule):
            VALIDATION.to_request(Generate(1, PROMPT, Sampling(**{parameter.name: wrong})), 0.0)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: p.name)
def test_a_request_takes_per_slot_state_only_for_parameters_that_need_it(parameter: Parameter) -> None:
    values = {name: value for name, (_, value) in OTHERS.items()}
    values |= {"logprob_token_ids": (), "grammar": Grammar(GrammarKind.REGEX, "a"), "temperature": 0.5}
    value = values.get(parameter.name, 0.5 if parameter.wire_type is float else 3)
    params = SamplingParams(**{parameter.name: value})
    request = Request(rid=1, prompt=np.array([1], np.int32), sampling=params)
    assert has_slot_options(request) is parameter.slot_option


@pytest.mark.parametrize("name", names(SENT))
def test_the_engine_or_its_scheduler_reads_each_parameter(name: str) -> None:
    readers = []
    for folder in ("core", "engine"):
        for path in (WORKER / folder).rglob("*.py"):
            nodes = ast.walk(parse_source(path.read_text()))
            if path.stem != "sampling_params" and any(
                isinstance(node, ast.Attribute) and node.attr == name for node in nodes
            ):
                readers.append(path)
    assert readers or name == "seed"  # `Request.seed` is computed from the parameter when a message is read
