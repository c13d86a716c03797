# SPDX-License-Identifier: Apache-2.0
"""Mutated valid bodies are accepted or get 400, never 500."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from mizzen.gateway.text.tokenizer import Tokenizer

TEMPLATE = (Path(__file__).parents[1] / "templates/qwen3.jinja").read_text()
ANSWER = '<think>x</think>Hi\n<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
USER = {"role": "user", "content": [{"type": "text", "text": "a"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})
CHAT: dict[str, Any] = {"model": "demo", "messages": [USER], "max_tokens": 5}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "a", "max_output_tokens": 16}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {
        **CHAT, "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                             {"role": "tool", "tool_call_id": "c", "content": "x"}],
        "tools": [TOOL], "tool_choice": "auto", "stop": ["x", "y"], "stream": True, "seed": 1,
        "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "user": "u", "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": True},
    }),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "response_format": FORM}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"structural_tag": TAG}}),
    ("/v1/completions", {
        "model": "demo", "prompt": ["a", "b"], "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2,
    }),
    ("/v1/responses", {
        **RESPONSE, "instructions": "i", "stream": True, "text": {"format": {"type": "text"}},
        "input": [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": []},
                  {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "x"}],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
    }),
]  # fmt: skip
DEEP = {f"@{levels}": levels for levels in (50, 120, 151, 400, 901, 5000)}
"""For each placeholder string, the number of nested lists or objects that replace it in the JSON."""
ODD: list[Any] = [
    None, True, 0, -1, 3.0, 1.5, 1e300, 2**31, 2**63, 10**30, float("nan"), float("inf"),
    "", "\0", "\ud800", "a\udc00", "🙂", "null", '{"a":', '{"format": "\\ud800"}', "<tool_call>", "</think>",
    "{{ x }}", "x" * 5000, [], {}, [None], [[]], [1.0], {"a": 1}, {"\ud800": 1}, {"$ref": "#"}, {"not": {}},
    *DEEP,
]  # fmt: skip


def paths(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values that are nested in a JSON value, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in inner:
        yield (*place, step)
        yield from paths(item, (*place, step))


def mutate(body: dict[str, Any], chance: random.Random) -> bytes:
    """Remove one value of a body, or replace it by an unusual one; return the changed body as JSON."""
    changed = json.loads(json.dumps(body))
    *way, last = chance.choice(list(paths(changed)))
    inner = changed
    for step in way:
        inner = inner[step]
    if chance.random() < 0.1:
        del inner[last]
    else:
        inner[last] = chance.choice(ODD)
    text = json.dumps(changed, ensure_ascii=chance.random() < 0.8)
    for name, levels in DEEP.items():
        opening, closing = ('{"a":', "}") if levels % 2 else ("[", "]")
        text = text.replace(json.dumps(name), opening * levels + "1" + closing * levels)
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("seed", range(3))
async def test_mutated_bodies_never_get_500(
    live: Any, scripted: Any, tokenizer_files: dict[str, bytes], seed: int
) -> None:
    inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
    inner.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    config = json.dumps({"chat_template": TEMPLATE}).encode()
    files = {"tokenizer.json": inner.to_str().encode(), "tokenizer_config.json": config}
    engine = scripted(files, vocab_size=inner.get_vocab_size())
    tokenizer = Tokenizer(inner)
    engine.does.end = tokenizer.token_id("<|im_end|>")
    engine.does.reply = [*tokenizer.encode(ANSWER, add_special_tokens=False), engine.does.end]
    engine.does.tokens_a_step = 7
    gateway = await live(engine, access_log="off")
    chance, statuses = random.Random(seed), set()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for path, body in BODIES:
            assert (await http.post(path, json=body)).status_code == 200
            for _ in range(25):
                content = mutate(body, chance)
                response = await http.post(path, content=content)
                statuses.add(response.status_code)
                assert response.status_code in (200, 400, 404), (content[:2000], response.text)
                if response.status_code == 200:
                    assert '"error":{' not in response.text, content[:2000]
                else:
                    error = response.json()["error"]
                    assert error["message"]
                    assert error["type"] == "invalid_request_error"
                    assert len(response.content) < 2000, content[:2000]
    assert statuses >= {200, 400}
