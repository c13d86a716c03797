# SPDX-License-Identifier: Apache-2.0
"""Structured output of a real engine with the demo model."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest

from demo_completions import USER, complete
from mizzen.gateway.text.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("demo-engine")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "(ab|cd){2}!"}, r"(ab|cd){2}!"),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, r"[0-9]{3}-[0-9]{2}"),
        ({"guided_choice": ['say "yes"', "no\n"]}, r'say "yes"|no\n'),
        ({"ebnf": 'root ::= "x" [0-9] "y"'}, r"x[0-9]y"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, r"left|right"),
    ],
)
async def test_answers_match_the_requested_grammar(client: Any, extra: dict[str, Any], pattern: str) -> None:
    answer = await complete(client, max_tokens=60, temperature=1.5, seed=1, n=3, **extra)
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("newer", [False, True])
async def test_structural_tags_constrain_parts_of_the_text(
    client: Any, tokenizer: Tokenizer, newer: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<"],
    }
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    response_format = {"type": "structural_tag", "format": tag} if newer else older
    bias = {str(tokenizer.encode("<", add_special_tokens=False)[0]): 100}
    answer = await complete(
        client,
        response_format=response_format,
        max_tokens=60,
        temperature=0,
        logit_bias={} if newer else bias,
    )
    assert re.search(r'<f>\{\s?"a"\s?:\s?1\s?\}</f>', answer.choices[0].text), answer.choices[0].text


@pytest.mark.parametrize("form", ["json_schema", "guided_json", "response_format"])
async def test_answers_conform_to_the_requested_schema(client: Any, form: str) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "ship", "schema": SCHEMA, "strict": True}}
    constraint: Any = {
        "json_schema": json.dumps(SCHEMA), "guided_json": SCHEMA, "response_format": wrapped,
    }[form]  # fmt: skip
    answer = await client.chat.completions.create(
        model="demo", messages=USER, max_tokens=100, temperature=1, seed=2, extra_body={form: constraint}
    )
    parsed = json.loads(answer.choices[0].message.content)
    assert set(parsed) == {"name", "size"}
    assert parsed["size"] in (1, 2, 3)


class Ship(pydantic.BaseModel):
    name: Literal["Mizzen", "Fock"]
    masts: int = pydantic.Field(ge=1, le=3)


async def test_client_parses_answers_into_its_model(client: Any) -> None:
    answer = await client.chat.completions.parse(
        model="demo", messages=USER, response_format=Ship, max_tokens=60, seed=4
    )
    assert isinstance(answer.choices[0].message.parsed, Ship)
    async with client.chat.completions.stream(
        model="demo", messages=USER, response_format=Ship, max_tokens=60, seed=4
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


async def test_json_object_format_gives_an_object(client: Any) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=USER, response_format={"type": "json_object"}, max_tokens=200, temperature=0
    )
    assert answer.choices[0].message.content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "(ab"}, "guided_regex"),
        ({"guided_regex": "(" * 10_000 + ")" * 10_000}, "guided_regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"response_format": {"type": "regex", "regex": "[a"}}, "response_format.regex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_grammar_that_does_not_compile_gets_400(
    client: Any, extra: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await complete(client, max_tokens=5, stream=stream, **extra)
    assert error.value.type == "invalid_request_error"
    assert error.value.param == param
