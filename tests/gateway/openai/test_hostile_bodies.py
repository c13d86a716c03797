# SPDX-License-Identifier: Apache-2.0
"""Hostile and meaningless bodies: every endpoint names the fault and keeps serving."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

USER = [{"role": "user", "content": "a"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": USER, "max_tokens": 2},
    "/v1/completions": {"model": "demo", "prompt": "a", "max_tokens": 2},
    "/v1/responses": {"model": "demo", "input": "a", "max_output_tokens": 16},
    "/v1/embeddings": {"model": "demo", "input": "a"},
    "/v1/score": {"model": "demo", "text_1": "a", "text_2": "b"},
    "/tokenize": {"model": "demo", "prompt": "a"},
    "/detokenize": {"model": "demo", "tokens": [1]},
}
PATHS = sorted(VALID)
DEEP = 50_000

RAW: dict[str, bytes] = {
    "nothing": b"",
    "space": b"   ",
    "half": b'{"model": "demo"',
    "array": b"[]",
    "number": b"3",
    "text": b'"demo"',
    "null": b"null",
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "a cut character": b'{"model": "\xe4\xb8"}',
    "a NUL": b"\x00",
    "a BOM": b'\xef\xbb\xbf{"model": "demo"}',
    "UTF-16": '{"model": "demo"}'.encode("utf-16"),
    "deep arrays": b"[" * DEEP,
    "deep arrays, closed": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "two objects": b"{}{}",
    "NaN": b'{"model": NaN}',
    "a form": b"model=demo&prompt=a",
}


@pytest.fixture(scope="module")
def http(simulated_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=simulated_url, timeout=60) as client:
        yield client


def is_error(response: httpx.Response, *statuses: int) -> None:
    assert response.status_code in statuses, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(response.content) < 20_000
    if response.status_code < 500:
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
def test_valid_bodies_are_accepted(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=VALID[path])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_not_objects_get_400(http: httpx.Client, path: str) -> None:
    for content in RAW.values():
        is_error(http.post(path, content=content), 400)


@pytest.mark.parametrize("path", PATHS)
def test_oversized_body_gets_413(http: httpx.Client, path: str) -> None:
    content = b'{"model": "' + b"x" * (9 << 20) + b'"}'
    is_error(http.post(path, content=content), 413)


@pytest.mark.parametrize("path", PATHS)
def test_field_of_a_wrong_type_is_named(http: httpx.Client, path: str) -> None:
    for field in VALID[path]:
        for wrong in (None, True, 1.5, {"a": {}}, [[{}]], -(10**30), 10**400, "\x00", {}):
            body = json.dumps({**VALID[path], field: wrong})
            response = http.post(path, content=body)
            if response.status_code != 200:  # a NUL character is valid text, and null is often a default
                is_error(response, 400, 404)
                assert field in (response.json()["error"]["param"] or field)


LONG = {
    "/v1/chat/completions": [
        {"messages": USER * 10_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
        {"stop": ["x" * 1024] * 16, "messages": [{"role": "user", "content": "x" * 100_000}]},
        {"logit_bias": {str(i): 1 for i in range(100_000)}},
        {"guided_json": {"description": "b" * 600_000}},
        {"guided_choice": ["a" * 100] * 10_000},
        {"guided_regex": "世" * 500_000},
        {"chat_template_kwargs": {"x" * 100_000: 1, "messages": 2}},
        {"model": "x" * 1_000_000},
    ],
    "/v1/completions": [
        {"prompt": "a " * 300_000},
        {"prompt": [1] * 300_000},
        {"prompt": [[1]] * 100_000},
        {"prompt": [2**31 - 1]},
        {"stop_token_ids": [1] * 100_000},
        {"n": 128, "best_of": 127},
        {"n": 128, "prompt": ["a"] * 9},
        {"model": "demo\r\nx-injected: 1"},
    ],
    "/v1/embeddings": [
        {"input": ["a"] * 3000},
        {"input": [[]]},
        {"dimensions": 10**9},
        {"input": "a " * 200_000},
    ],
    "/v1/responses": [
        {"input": "a " * 200_000},
        {"input": []},
        {"instructions": "a " * 200_000},
        {"input": [{"role": "system", "content": "x" * 60}] * 60_000},
    ],
    "/v1/score": [
        {"text_2": ["a"] * 2000},
        {"text_1": []},
        {"text_1": None, "text_2": None, "label_token_ids": [1], "query": "a" * 10**6, "items": ["a"] * 999},
    ],
    "/tokenize": [{"prompt": ["a"] * 2000}, {"prompt": None}],
    "/detokenize": [{"tokens": [2**31]}, {"tokens": [-1]}],
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_values_beyond_limits_get_400(http: httpx.Client, path: str) -> None:
    for change in LONG[path]:
        response = http.post(path, json={**VALID[path], **change})
        is_error(response, 400, 404)
        assert "x-injected" not in response.headers


def test_grammar_too_long_for_an_engine_does_not_affect_other_requests(http: httpx.Client) -> None:
    names = {"世" * 400_000: {"type": "string"}}
    parameters = {"type": "object", "properties": names}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for change in ({"guided_regex": "世" * 500_000}, {"tools": tools, "tool_choice": "required"}):
        body = {**VALID["/v1/chat/completions"], "max_tokens": 60, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as other:
            events = other.iter_lines()
            assert "data:" in next(events)
            response = http.post("/v1/chat/completions", json={**VALID["/v1/chat/completions"], **change})
            is_error(response, 400)
            lines = [line for line in events if line]
        assert lines[-1] == "data: [DONE]"


def test_unpaired_surrogates_get_400(http: httpx.Client) -> None:
    for path in PATHS:
        body = json.dumps(VALID[path]).replace('"a"', '"\\ud800"')
        response = http.post(path, content=body)
        if response.status_code != 200:
            is_error(response, 400)


def test_half_closed_and_reset_sockets_do_no_harm(simulated_url: str, http: httpx.Client) -> None:
    address = simulated_url.removeprefix("http://").split(":")
    body = json.dumps({**VALID["/v1/completions"], "stream": True, "max_tokens": 50}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for sent, shut in (
        (head[:20], False), (head, False), (head + body[:10], False), (head + body[:10], True),
        (head + body, True), (head + body, False), (head + body + head, False),
    ):  # fmt: skip
        with socket.create_connection((address[0], int(address[1])), timeout=60) as connection:
            connection.sendall(sent)
            if shut:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
    assert http.post("/v1/completions", json=VALID["/v1/completions"]).status_code == 200


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
CHAT_FIELDS = [
    "messages", "n", "temperature", "top_p", "stop", "tools", "tool_choice", "response_format", "logit_bias",
    "logprobs", "top_logprobs", "seed", "stream", "stream_options", "max_completion_tokens", "guided_json",
    "guided_regex", "guided_choice", "ebnf", "structured_outputs", "chat_template_kwargs", "min_tokens",
]  # fmt: skip


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(changes=st.dictionaries(st.sampled_from(CHAT_FIELDS), JSON, min_size=1, max_size=3))
def test_any_value_of_any_field_is_accepted_or_gets_400(http: httpx.Client, changes: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    response = http.post(path, json={**VALID[path], **changes})
    if response.status_code != 200:
        is_error(response, 400)
