# SPDX-License-Identifier: Apache-2.0
"""Requests with images to a gateway, through each API: limits, errors, and the prompts that engines get."""

from __future__ import annotations

import ast
import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import mizzen.gateway
from image_part_kit import data_url, image_part, png
from mizzen.gateway.images.hold import FETCH_CODE
from mizzen.gateway.images.limits import IMAGE_ERROR_CODES

FILE = png(56, 56)
BASE64 = base64.b64encode(FILE).decode()
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(*parts: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request with one message."""
    return {"model": "demo", "messages": [{"role": role, "content": list(parts)}], "max_tokens": 2, **fields}


def linked(url: str) -> dict[str, Any]:
    """Return the part of a chat message with an image that has this URL."""
    return {"type": "image_url", "image_url": url}


def responses(*content: Any) -> dict[str, Any]:
    """Return the body of a Responses request with one message."""
    return {"model": "demo", "input": [{"role": "user", "content": list(content)}], "max_output_tokens": 2}


def messages(*content: Any) -> dict[str, Any]:
    """Return the body of a Messages request with one message."""
    return {"model": "demo", "messages": [{"role": "user", "content": list(content)}], "max_tokens": 2}


IMAGE = image_part(FILE)
TEXT = {"type": "text", "text": "What is this?"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
INPUT = {"type": "input_image", "image_url": data_url(FILE), "detail": "auto"}
REQUESTS = {
    "/v1/chat/completions": chat(IMAGE, TEXT),
    "/v1/responses": responses(INPUT, {"type": "input_text", "text": "What is this?"}),
    "/v1/messages": messages(BLOCK, TEXT),
}


async def post(gateway: Any, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(gateway.url + path, json=body)


async def test_all_apis_make_the_same_prompt_and_count_its_tokens(
    live: Any, qwen_engine: Any, qwen: Any
) -> None:
    gateway = await live(qwen_engine)
    for path, body in REQUESTS.items():
        response = await post(gateway, path, body)
        assert response.status_code == 200, response.text
    prompts = [np.frombuffer(request.prompt, "<i4").tolist() for request in qwen_engine.requests]
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[0].count(qwen.image_rules.placeholder_id) == 4
    usage = (await post(gateway, "/v1/chat/completions", chat(IMAGE, TEXT))).json()["usage"]
    assert usage["prompt_tokens"] == len(prompts[0])
    tokens = (await post(gateway, "/tokenize", {"messages": chat(IMAGE, TEXT)["messages"]})).json()
    assert tokens["tokens"] == prompts[0]
    counted = await post(
        gateway, "/v1/messages/count_tokens", {"model": "demo", "messages": messages(BLOCK, TEXT)["messages"]}
    )
    assert counted.json()["input_tokens"] == len(prompts[0])
    assert gateway.gateway.body_budget.used == 0


async def test_choices_share_a_prompt_with_images(live: Any, qwen_engine: Any) -> None:
    gateway = await live(qwen_engine)
    response = await post(gateway, "/v1/chat/completions", chat(TEXT, IMAGE, n=3, temperature=1.0))
    assert len(response.json()["choices"]) == 3
    assert len({request.prompt for request in qwen_engine.requests}) == 1
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{gateway.url}/v1/chat/completions", json=chat(IMAGE, stream=True)) as sent,
    ):
        assert "data: [DONE]" in [line async for line in sent.aiter_lines()]


BAD: list[tuple[dict[str, Any], str, str]] = [
    (chat(IMAGE, role="system"), "messages[0].content[0]", "must not have images"),
    (chat(IMAGE, role="assistant"), "messages[0].content[0]", "must not have images"),
    (chat(image_part(FILE, detail="original")), "messages[0].content[0].image_url.detail", "detail"),
    (chat({"type": "image_url"}), "messages[0].content[0].image_url", "is required"),
    (chat({**IMAGE, "text": "a"}), "messages[0].content[0].text", "not allowed beside"),
    (chat({"type": "text", "image_url": "data:"}), "messages[0].content[0].type", "needs the type"),
    (chat(linked("data:image/png,abc")), "messages[0].content[0]", "must have the form"),
    (chat(linked("data:image/png;base64,a")), "messages[0].content[0]", "not valid Base64"),
    (chat(linked("data:;base64,AA==AAAA")), "messages[0].content[0]", "not valid Base64"),
    (chat(linked("data:;base64,")), "messages[0].content[0]", "the image is empty"),
    (chat(linked("data:;base64,AAAA")), "messages[0].content[0]", "unknown format"),
    (chat(linked("ftp://a/b")), "messages[0].content[0]", "must begin with data:"),
    (chat(linked("https://a.b/c")), "messages[0].content[0]", "--image-urls is refused"),
    (chat(*[IMAGE] * 3), "messages[0].content[2]", "at most 2 images (--max-images)"),
    (chat(TEXT, image_part(png(1, 1))), "messages[0].content[1]", "1 x 1 pixels: at least 2 are required"),
    (chat(TEXT, image_part(png(101, 100))), "messages[0].content[1]", "--max-image-pixels"),
    (chat(image_part(FILE + bytes(4000))), "messages[0].content[0]", "--max-image-bytes"),
    (chat(image_part(png(100, 1)), image_part(FILE[:30])), "messages[0].content[1]", ""),
    (chat(TEXT, image_part(png(1, 99)), max_tokens=2000), "messages", "the context length is"),
]


async def test_invalid_images_are_named(live: Any, qwen_engine: Any) -> None:
    gateway = await live(qwen_engine, max_images=2, max_image_bytes=2048, max_image_pixels=10_000)
    for body, param, message in BAD:
        response = await post(gateway, "/v1/chat/completions", body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert (error["param"], message in error["message"]) == (param, True), (str(body)[:200], error)
        assert len(error["message"]) < 300
    assert not qwen_engine.requests
    assert gateway.gateway.body_budget.used == 0


async def test_metrics_count_images_by_source_and_refusals_by_cause(live: Any, qwen_engine: Any) -> None:
    gateway = await live(qwen_engine, max_images=2, max_image_bytes=2048, max_image_pixels=10_000)
    refused = {
        "too_many_images": chat(*[IMAGE] * 3),
        "image_too_large": chat(image_part(FILE + bytes(4000))),
        "invalid_image": chat(linked("data:;base64,AAAA")),
        "unsupported_content": chat(linked("https://a.b/c")),
    }
    for code, body in refused.items():
        assert (await post(gateway, "/v1/chat/completions", body)).json()["error"]["code"] == code
    for code, file in (("image_too_large", png(101, 100)), ("invalid_image", png(1, 1))):
        answer = await post(gateway, "/v1/chat/completions", chat(image_part(file)))
        assert answer.json()["error"]["code"] == code
    for path, body in REQUESTS.items():
        assert (await post(gateway, path, body)).status_code == 200
    counts = {"image_too_large": 2, "invalid_image": 2}
    lines = gateway.gateway.metrics_text().decode().splitlines()
    for code in IMAGE_ERROR_CODES:
        count = counts.get(code, int(code in refused))
        assert f'mizzen_gateway_images_refused_total{{cause="{code}"}} {count:.1f}' in lines
    assert 'mizzen_gateway_images_total{source="data"} 3.0' in lines
    assert 'mizzen_gateway_images_total{source="https"} 0.0' in lines


def test_every_code_of_an_image_error_is_known_to_the_metrics() -> None:
    """Each call of `ImagePartError` names a code of `IMAGE_ERROR_CODES`, or has the default."""
    folder = Path(mizzen.gateway.__file__).parent
    used = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ImagePartError":
                code = node.args[2] if len(node.args) > 2 else ast.Constant("invalid_image")
                used.add(FETCH_CODE if isinstance(code, ast.Name) else ast.literal_eval(code))
    assert used == set(IMAGE_ERROR_CODES)


async def test_other_apis_name_their_own_fields(live: Any, qwen_engine: Any) -> None:
    gateway = await live(qwen_engine, max_images=2)
    text = {"type": "input_text", "text": "a"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [TEXT, {**BLOCK, "source": {"type": "url", "url": "x:"}}],
    }
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    chat_with_result = [{"role": "user", "content": "q"}, use, {"role": "user", "content": [result]}]
    pixel = png(1, 1)
    pixel_source = {**BLOCK["source"], "data": base64.b64encode(pixel).decode()}
    of_file = {**BLOCK, "source": {"type": "file", "file_id": "f"}}
    cases = [
        (
            "/v1/responses",
            responses(text, {**INPUT, "image_url": "data:;base64,AAAA"}),
            "input[0].content[1]",
        ),
        ("/v1/responses", responses(text, {"type": "input_image", "file_id": "f"}), "input[0].content[1]"),
        ("/v1/responses", responses({**INPUT, "detail": "original"}), "input[0].content[0]"),
        ("/v1/responses", responses(text, {**INPUT, "image_url": data_url(pixel)}), "input[0].content[1]"),
        ("/v1/messages", messages(TEXT, {**BLOCK, "source": pixel_source}), "messages[0].content[1]"),
        ("/v1/messages", messages(TEXT, BLOCK, BLOCK, BLOCK), "messages[0].content[3]"),
        ("/v1/messages", messages(of_file), "messages[0].content[0].source.type"),
        ("/v1/messages", messages({**BLOCK, "source": {"type": "base64"}}), "messages[0].content[0]"),
        ("/v1/messages", {**messages(), "messages": chat_with_result}, "messages[2].content[0].content[1]"),
    ]
    for path, body, name in cases:
        response = await post(gateway, path, body)
        error = response.json()["error"]
        assert response.status_code == 400, (path, error)
        assert name in error["message"], (path, error)
        assert error.get("param", name) == name


async def test_tool_results_of_all_apis_may_have_images(live: Any, qwen_engine: Any) -> None:
    gateway = await live(qwen_engine)
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [BLOCK, TEXT]}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [INPUT]}
    question = {"role": "user", "content": "q"}
    tool = {"role": "tool", "tool_call_id": "c1", "content": [IMAGE, TEXT]}
    result_turn = {"role": "user", "content": [result]}
    requests = {
        "/v1/chat/completions": {"messages": [question, {"role": "assistant", "tool_calls": [CALL]}, tool]},
        "/v1/messages": {"messages": [question, {"role": "assistant", "content": [use]}, result_turn]},
        "/v1/responses": {"input": [question, call, output]},
    }
    for path, body in requests.items():
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        response = await post(gateway, path, {"model": "demo", limit: 2, **body})
        assert response.status_code == 200, response.text
    assert len(qwen_engine.requests) == 3


@pytest.mark.parametrize("described", [False, True])
async def test_a_text_model_refuses_images(
    live: Any, scripted: Any, qwen_files: Any, tokenizer_files: Any, described: bool
) -> None:
    """An engine that reads no images serves the model as a text model, whatever its files say."""
    gateway = await live(scripted(qwen_files if described else tokenizer_files, images=not described))
    paths = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/messages": "messages"}
    for path, field in paths.items():
        response = await post(gateway, path, REQUESTS[path])
        assert response.status_code == 400
        expected = f"{field}[0].content[0]: the model demo reads text only, no images"
        assert response.json()["error"]["message"] == expected
    response = await post(gateway, "/v1/embeddings", {"model": "demo", "messages": chat(IMAGE)["messages"]})
    assert response.status_code == 400


async def test_bodies_with_images_may_be_larger_than_texts(live: Any, qwen_engine: Any) -> None:
    limits = {"max_body_bytes": 4096, "max_image_body_bytes": 40_000, "access_log": "off"}
    gateway = await live(qwen_engine, **limits)
    padded = image_part(FILE + bytes(20_000))
    assert (await post(gateway, "/v1/chat/completions", chat(padded))).status_code == 200
    block = {
        "type": "image",
        "source": {"type": "base64", "data": base64.b64encode(FILE + bytes(20_000)).decode()},
    }
    assert (await post(gateway, "/v1/messages", messages(block))).status_code == 200
    for parts in (
        [padded, {"type": "text", "text": "a" * 4096}],
        [{"type": "text", "text": "a" * 4096}],
        [padded] * 2,
    ):
        response = await post(gateway, "/v1/chat/completions", chat(*parts))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_text_model_keeps_the_limit_of_bodies(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(), max_body_bytes=4096)
    response = await post(gateway, "/v1/chat/completions", chat(image_part(FILE + bytes(5000))))
    assert response.status_code == 413


async def test_images_count_as_bytes_in_work(live: Any, qwen_engine: Any, until: Any) -> None:
    content = FILE + bytes(60_000)
    qwen_engine.does.step_seconds = 0.2
    gateway = await live(qwen_engine, max_bodies_bytes=250_000, max_body_bytes=100_000)
    budget = gateway.gateway.body_budget
    first = asyncio.create_task(
        post(gateway, "/v1/chat/completions", chat(image_part(content), max_tokens=20))
    )
    await until(lambda: budget.used > 2 * len(content))
    response = await post(gateway, "/v1/chat/completions", chat(image_part(content)))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "bodies_too_large")
    assert (await first).status_code == 200
    await until(lambda: not budget.used)
