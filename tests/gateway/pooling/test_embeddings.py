# SPDX-License-Identifier: Apache-2.0
"""Embeddings: truncation, conversations, shortened vectors, large batches and errors."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from mizzen.common.sentence_transformers import POOLING_FILE
from mizzen.gateway.requests.text_batch import split_texts
from mizzen.gateway.text.tokenizer import Tokenizer

LONG = "Mizzen serves language models on Kubernetes. " * 200


def with_end_token(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a model whose prompts begin with <s> and end with </s>."""
    inner = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    ids = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return {**files, "tokenizer.json": inner.to_str().encode()}


async def test_truncation_keeps_the_beginning_and_special_tokens(
    post: Any, scripted: Any, tokenizer_files: Any, received: Any
) -> None:
    engine = scripted(with_end_token(tokenizer_files))
    inner = tokenizers.Tokenizer.from_buffer(engine.files["tokenizer.json"])
    inner.enable_truncation(8)
    inputs = ["short", LONG, "a b c d e f g h"]
    response = await post(engine, "/v1/embeddings", input=inputs, truncate_prompt_tokens=8)
    assert response.status_code == 200, response.text
    assert [received(message) for message in engine.embeds] == [inner.encode(text).ids for text in inputs]
    response = await post(engine, "/v1/embeddings", input=[[5, 6, 7], [8]], truncate_prompt_tokens=2)
    assert [received(message) for message in engine.embeds[3:]] == [[5, 6], [8]]
    response = await post(engine, "/v1/embeddings", input=LONG * 2, truncate_prompt_tokens=-1)
    assert response.status_code == 200, response.text
    assert len(received(engine.embeds[-1])) == 2047


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ["a", LONG * 3, "b"]}, "input[1]"),
        ({"input": ["a", ""], "add_special_tokens": False}, "input[1]"),
        ({"input": [[1], [2, -1]]}, "input[1]"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({}, "input"),
    ],
)
async def test_invalid_input_is_named(post: Any, scripted: Any, body: Any, param: str) -> None:
    response = await post(scripted(), "/v1/embeddings", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_conversation_is_rendered_by_the_template(
    post: Any, scripted: Any, tokenizer: Tokenizer, received: Any
) -> None:
    engine = scripted()
    messages = [{"role": "system", "content": "Embed."}, {"role": "user", "content": "A ship"}]
    response = await post(engine, "/v1/embeddings", messages=messages)
    assert response.status_code == 200, response.text
    text = "<s><|im_start|>system\nEmbed.<|im_end|>\n<|im_start|>user\nA ship<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert received(engine.embeds[0]) == ids
    await post(engine, "/v1/embeddings", messages=messages, truncate_prompt_tokens=9)
    assert received(engine.embeds[1]) == ids[:9]
    await post(engine, "/v1/embeddings", messages=messages, add_generation_prompt=True)
    assert len(received(engine.embeds[2])) > len(ids)


SHORTENS = {"model_type": "x", "matryoshka_dimensions": [2, 4]}


@pytest.mark.parametrize(
    ("config", "options", "dimensions", "expected"),
    [
        ({}, {}, 2, "unsupported_parameter"),
        ({}, {"any_dimensions": True}, 2, [0.6, 0.8]),
        ({"is_matryoshka": True}, {}, 3, [0.3 / 0.7, 0.4 / 0.7, np.sqrt(0.24) / 0.7]),
        (SHORTENS, {}, 2, [0.6, 0.8]),
        (SHORTENS, {}, 3, "out_of_range"),
        ({"is_matryoshka": True}, {}, 5, "out_of_range"),
        ({"model_type": "qwen3"}, {}, 2, [0.6, 0.8]),
    ],
)
async def test_vectors_are_shortened_only_if_the_model_allows_it(
    post: Any, scripted: Any, tokenizer_files: Any, config: Any, options: Any, dimensions: int, expected: Any
) -> None:
    files = {**tokenizer_files, "config.json": json.dumps(config).encode()}
    files[POOLING_FILE] = json.dumps({"pooling_mode": "lasttoken"}).encode()
    engine = scripted(files)
    engine.does.vector = lambda message: [0.3, 0.4, float(np.sqrt(0.24)), float(np.sqrt(0.51))]
    response = await post(engine, "/v1/embeddings", gateway=options, input="a", dimensions=dimensions)
    if isinstance(expected, str):
        assert response.json()["error"]["code"] == expected
        assert response.json()["error"]["param"] == "dimensions"
    else:
        assert response.json()["data"][0]["embedding"] == pytest.approx(expected)


async def test_large_batch_keeps_its_order(
    live: Any, scripted: Any, tokenizer: Tokenizer, received: Any
) -> None:
    """The official client asks for base64 and decodes it."""
    engine = scripted()
    engine.does.vector = lambda message: [len(received(message)) / 64, *[0.5] * 15]
    gateway = await live(engine)
    texts = ["ship " * (1 + index % 13) for index in range(2048)]
    answer = await gateway.client().embeddings.create(model="demo", input=texts)
    lengths = [len(tokenizer.encode(text)) for text in texts]
    assert [item.embedding[0] for item in answer.data] == [length / 64 for length in lengths]
    assert [item.index for item in answer.data] == list(range(2048))
    assert answer.usage.total_tokens == sum(lengths)
    raw = await gateway.client().embeddings.with_raw_response.create(
        model="demo", input="ship", encoding_format="base64"
    )
    packed = json.loads(raw.content)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4")[1:].tolist() == [0.5] * 15


async def test_vector_that_is_not_a_number_is_an_error(post: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.vector = lambda message: [float("inf")]
    response = await post(engine, "/v1/embeddings", input=["a", "b"])
    assert (response.status_code, response.json()["error"]["code"]) == (502, "not_a_number")


def test_pieces_cover_all_texts_and_are_bounded() -> None:
    texts = ["x" * 100_000, "y" * 100_000, "z", *["w"] * 300]
    pieces = split_texts(texts)
    assert [index for piece in pieces for index in piece] == list(range(len(texts)))
    assert [len(piece) for piece in pieces] == [2, 128, 128, 45]
