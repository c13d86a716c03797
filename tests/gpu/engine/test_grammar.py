# SPDX-License-Identifier: Apache-2.0
"""Structured output on a GPU, with and without graphs; the host fills masks while the model runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grammar_kit as gk
import numpy as np
import pytest
import torch
import transformers

from mizzen.core.request import FinishReason, Request
from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams
from mizzen.engine.grammar.compile_service import GrammarCompiler
from mizzen.engine.loading import warmup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REGEX = r"(\d{3}-)+[a-f]{2,4}(yes|no)?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPTIONS = {"device": "cuda", "dtype": "bfloat16", "page_size": 16, "max_running_requests": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Qwen3 over a byte vocabulary."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=gk.VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=gk.EOS,
    )
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.bfloat16().save_pretrained(folder)
    gk.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    new_compiler = gk.compiler(folder)
    yield new_compiler
    new_compiler.close()


def traffic(folder: Path, count: int = 24) -> list[Request]:
    """Return requests with three kinds of sampling; three quarters of them have one of three grammars."""
    grammars = [
        Grammar(GrammarKind.REGEX, REGEX),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        Grammar(GrammarKind.JSON_OBJECT),
        None,
    ]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.5},
    ]
    params = [
        SamplingParams(
            grammar=grammars[i % 4],
            max_tokens=120 if i % 4 < 3 else 40,
            logit_bias=gk.closing(folder) if i % 4 < 3 else (),
            **kinds[i % 3],
        )
        for i in range(count)
    ]
    rng = np.random.default_rng(4)
    prompts = [rng.integers(4, 250, rng.integers(1, 60)).astype(np.int32) for _ in range(count)]
    return gk.requests_of(prompts, params)


def test_complete_outputs_conform_and_unconstrained_rows_do_not_change(
    folder: Path, compiler: GrammarCompiler
) -> None:
    requests = traffic(folder)
    tokens, ends = gk.run(gk.make(folder, compiler, **OPTIONS), requests)
    results, complete = gk.texts(folder, tokens), 0
    for request in requests:
        grammar, end = request.sampling.grammar, ends[request.rid]
        assert end.reason in (FinishReason.STOP, FinishReason.LENGTH), end
        if grammar is None or end.reason is FinishReason.LENGTH:
            continue
        complete += 1
        text = results[request.rid].decode()
        if grammar.kind is GrammarKind.REGEX:
            assert re.fullmatch(REGEX, text)
        else:
            value = json.loads(text)
            assert isinstance(value, dict)
            if grammar.kind is GrammarKind.JSON_SCHEMA:
                assert set(value) == {"name", "age"}
                assert len(value["name"]) <= 9
                assert value["age"] <= 130
    assert complete >= len(requests) // 4


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_graphs_and_overlap_keep_outputs_conforming(
    folder: Path, compiler: GrammarCompiler, depth: int
) -> None:
    matching = [r for r in traffic(folder) if r.sampling.grammar == Grammar(GrammarKind.REGEX, REGEX)]
    for graphs in ("auto", "off"):
        options = {**OPTIONS, "steps_in_flight": depth, "cuda_graph": graphs}
        tokens, ends = gk.run(gk.make(folder, compiler, **options), matching)
        results = gk.texts(folder, tokens)
        assert all(end.reason is not FinishReason.ERROR for end in ends.values())
        for rid, end in ends.items():
            if end.reason is FinishReason.STOP:
                assert re.fullmatch(REGEX, results[rid].decode())
            else:
                assert re.match(r"(\d{3}-)+", results[rid].decode())


def test_filters_with_grammars_in_graphs_equal_eager_steps(
    folder: Path, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without padding, captured and eager steps have the same shapes, so they run the same kernels.
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: list(range(1, largest + 1)))
    kinds = [
        {"top_p": 0.9},
        {"top_k": 20, "frequency_penalty": 1.0},
        {"min_p": 0.05, "logprobs": 3},
        {},
    ]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=30,
            ignore_eos=True,
            grammar=Grammar(GrammarKind.REGEX, REGEX) if i % 2 else None,
            **kinds[i // 2 % 4],
        )
        for i in range(24)
    ]
    rng = np.random.default_rng(6)
    prompts = [rng.integers(4, 250, rng.integers(1, 60)).astype(np.int32) for _ in params]
    requests, results = gk.requests_of(prompts, params), []
    for graphs in ("auto", "off"):
        options = {**OPTIONS, "dtype": "float32", "cuda_graph": graphs, "cuda_graph_max_tokens": 0}
        tokens, ends = gk.run(gk.make(folder, compiler, **options), requests)
        assert all(end.reason is not FinishReason.ERROR for end in ends.values())
        results.append(tokens)
    assert results[0] == results[1]
    texts = gk.texts(folder, results[0])
    assert all(re.match(r"\d{3}-", texts[r.rid].decode()) for r in requests if r.sampling.grammar)


def test_preemption_keeps_outputs_conforming(folder: Path, compiler: GrammarCompiler) -> None:
    options = {**OPTIONS, "kv_cache_tokens": 208, "context_length": 208}
    engine = gk.make(folder, compiler, **options)
    retracted = gk.watch_retractions(engine)
    tokens, ends = gk.run(engine, traffic(folder))
    assert retracted
    results = gk.texts(folder, tokens)
    for request in traffic(folder):
        grammar, end = request.sampling.grammar, ends[request.rid]
        assert end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if grammar is not None and grammar.kind is not GrammarKind.REGEX and end.reason is FinishReason.STOP:
            json.loads(results[request.rid])
