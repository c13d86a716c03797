# SPDX-License-Identifier: Apache-2.0
"""Structured output of whole engines with random weights, whose logits never favor valid output."""

from __future__ import annotations

import copy
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grammar_kit as gk
import jsonschema
import numpy as np
import pytest

from mizzen.core.request import Finished, FinishReason, Request
from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams
from mizzen.engine.grammar.compile_service import GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", 3, None]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "age", "more"],
    "additionalProperties": False,
    "$defs": {
        "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "number"}], "minItems": 2}
    },
}
CALLS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "token", "token": gk.CALL},
            {
                "type": "tags_with_separator",
                "tags": [
                    {
                        "type": "tag",
                        "begin": '<tool_call>{"name": "f", "arguments": ',
                        "content": {"type": "json_schema", "json_schema": PERSON, "max_whitespace_cnt": 1},
                        "end": "}</tool_call>",
                    }
                ],
                "separator": "\n",
                "at_least_one": True,
                "stop_after_first": True,
            },
        ],
    },
}
REGEX = r"(\d{3}-)+[a-f]{2,4}(yes|no)?"
EBNF = 'root ::= "<" word ("," word)* ">"\nword ::= [a-z] [a-z0-9]? | "é"'
GRAMMARS = {
    kind: Grammar(kind, text)
    for kind, text in (
        (GrammarKind.JSON_OBJECT, ""),
        (GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
        (GrammarKind.REGEX, REGEX),
        (GrammarKind.EBNF, EBNF),
        (GrammarKind.STRUCTURAL_TAG, json.dumps(CALLS)),
    )
}


def conforms(kind: GrammarKind, text: bytes) -> None:
    """Check that a complete text conforms to the grammar of its kind, independently of the engine."""
    if kind is GrammarKind.JSON_OBJECT:
        value = json.loads(text)
        assert isinstance(value, dict)
    elif kind is GrammarKind.JSON_SCHEMA:
        jsonschema.validate(json.loads(text), PERSON)
    elif kind is GrammarKind.REGEX:
        assert re.fullmatch(REGEX, text.decode())
    elif kind is GrammarKind.EBNF:
        assert re.fullmatch(r"<([a-z][a-z0-9]?|é)(,([a-z][a-z0-9]?|é))*>", text.decode())
    else:
        body = text.removeprefix(b'\xff[CALL]<tool_call>{"name": "f", "arguments": ')
        assert body != text
        jsonschema.validate(json.loads(body.removesuffix(b"}</tool_call>")), PERSON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    gk.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    new_compiler = gk.compiler(folder)
    yield new_compiler
    new_compiler.close()


@pytest.fixture
def model(kit: SimpleNamespace, folder: Path) -> Path:
    if not (folder / "config.json").exists():
        kit.save_model(folder, "qwen3", vocab_size=gk.VOCABULARY, max_position_embeddings=1024)
    return folder


def params(folder: Path, grammar: Grammar | None, i: int, **fields: object) -> SamplingParams:
    kinds = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 100},
        {"temperature": 0.8, "min_p": 0.01, "frequency_penalty": 0.3},
    ]
    bias = gk.closing(folder) if grammar is not None else ()
    fields_of_request = {"max_tokens": 160, "logit_bias": bias, "grammar": grammar, **kinds[i % 4], **fields}
    return SamplingParams(**fields_of_request)  # type: ignore[arg-type]


def traffic(kit: SimpleNamespace, folder: Path, rounds: int = 4) -> list[Request]:
    """Return requests with all kinds of grammars, and unconstrained ones."""
    rng = random.Random(5)
    grammars = [*GRAMMARS.values(), None]
    each = [params(folder, grammars[i % 6], i // 6 + i) for i in range(6 * rounds)]
    each = [p if p.grammar else params(folder, None, i, max_tokens=20) for i, p in enumerate(each)]
    prompts = [kit.tokens(rng.randint(1, 40), seed=i, vocab=250) for i in range(len(each))]
    return gk.requests_of(prompts, each)


def test_complete_outputs_conform_and_unconstrained_rows_do_not_change(
    kit: SimpleNamespace, model: Path, compiler: GrammarCompiler
) -> None:
    requests = traffic(kit, model)
    engine = gk.make(model, compiler, max_running_requests=10)
    tokens, ends = gk.run(engine, requests)
    results = gk.texts(model, tokens)
    complete: dict[GrammarKind, int] = dict.fromkeys(GRAMMARS, 0)
    for request in requests:
        grammar, end = request.sampling.grammar, ends[request.rid]
        assert end.reason in (FinishReason.STOP, FinishReason.LENGTH), end
        if grammar is None:
            continue
        assert gk.EOS not in tokens[request.rid][:-1]
        if end.reason is FinishReason.STOP:
            conforms(grammar.kind, results[request.rid])
            complete[grammar.kind] += 1
    assert all(complete.values()), complete
    free = [request for request in requests if request.sampling.grammar is None]
    alone, _ = gk.run(gk.make(model, compiler, max_running_requests=10), free)
    assert alone == {request.rid: tokens[request.rid] for request in free}


def test_batching_overlap_chunks_and_preemption_change_no_token(
    kit: SimpleNamespace, model: Path, compiler: GrammarCompiler
) -> None:
    requests = traffic(kit, model, rounds=2)
    long = [params(model, GRAMMARS[GrammarKind.EBNF], i, logit_bias=()) for i in range(4)]
    prompts = [kit.tokens(4, seed=100 + i, vocab=250) for i in range(len(long))]
    requests = (
        gk.requests_of(prompts, long, first=len(requests)) + requests
    )  # too few pages for all running requests
    plain, plain_ends = gk.run(
        gk.make(model, compiler, steps_in_flight=1, max_running_requests=1, prefix_cache="none"), requests
    )
    for options in (
        {"steps_in_flight": 4, "prefill_chunk_tokens": 7},
        {"steps_in_flight": 2, "kv_cache_tokens": 208, "context_length": 208},
    ):
        engine = gk.make(model, compiler, lambda plan: 0.001 * (plan.step % 3 == 0), **options)
        retracted = gk.watch_retractions(engine)
        tokens, ends = gk.run(engine, requests)
        assert bool(retracted) == ("context_length" in options)
        assert tokens == plain, options
        assert {rid: end.reason for rid, end in ends.items()} == {
            rid: end.reason for rid, end in plain_ends.items()
        }


def test_a_request_resumes_where_another_engine_stopped(
    kit: SimpleNamespace, model: Path, compiler: GrammarCompiler
) -> None:
    requests = [request for request in traffic(kit, model, rounds=1) if request.sampling.grammar]
    uninterrupted, ends = gk.run(gk.make(model, compiler), requests)
    resumed = []
    for request in requests:
        first_half = uninterrupted[request.rid][: max(1, len(uninterrupted[request.rid]) // 2)]
        prompt = np.concatenate([request.prompt, np.array(first_half, np.int32)])
        resumed.append(
            Request(
                rid=request.rid, prompt=prompt, sampling=request.sampling, seed=request.seed,
                generated=len(first_half),
            )
        )  # fmt: skip
    rerun, resumed_ends = gk.run(gk.make(model, compiler), resumed)
    for request in resumed:
        rid = request.rid
        assert rerun[rid] == uninterrupted[rid][request.generated :]
        assert resumed_ends[rid].reason is ends[rid].reason


def test_nonconforming_output_fails_only_its_request(
    kit: SimpleNamespace, model: Path, compiler: GrammarCompiler
) -> None:
    good, bad = (r for r in traffic(kit, model, rounds=1)[1:3])
    alone, _ = gk.run(gk.make(model, compiler), [good])
    prompt = np.concatenate([bad.prompt, np.array([100, 101], np.int32)])
    wrong = Request(rid=99, prompt=prompt, sampling=bad.sampling, seed=1, generated=2)
    tokens, ends = gk.run(gk.make(model, compiler), [good, wrong])
    assert tokens[good.rid] == alone[good.rid]
    assert ends[99].reason is FinishReason.ERROR
    assert ends[99].message == "grammar: token 100 does not conform to it"
    assert ends[99].at_fault, "no other engine is to try again"
    assert not ends[99].refused


def test_grammars_combine_with_min_tokens_stop_tokens_and_ignore_eos(
    kit: SimpleNamespace, model: Path, compiler: GrammarCompiler
) -> None:
    digits, exact = Grammar(GrammarKind.REGEX, r"\d*"), Grammar(GrammarKind.REGEX, "ab")
    hot = {"temperature": 1.0, "max_tokens": 60, "logit_bias": ((gk.EOS, 30.0),)}
    nine = 4 + ord("9")
    each = [
        SamplingParams(grammar=digits, min_tokens=9, **hot),
        SamplingParams(
            grammar=exact, min_tokens=9, **hot
        ),  # if the grammar allows only an end token, it is sampled
        SamplingParams(grammar=digits, ignore_eos=True, **hot),
        SamplingParams(
            grammar=digits, stop_token_ids=(nine,), max_tokens=60, logit_bias=((gk.EOS, -100.0), (nine, 1.0))
        ),
    ]
    tokens, ends = gk.run(gk.make(model, compiler), gk.requests_of([kit.tokens(5, vocab=250)] * 4, each))
    results = gk.texts(model, tokens)
    assert len(tokens[0]) >= 10
    assert re.fullmatch(rb"\d{9,}", results[0])
    assert results[1] == b"ab"
    assert all(end.reason is FinishReason.STOP for end in ends.values())
    assert ends[3].stop_token == nine
    assert re.fullmatch(rb"[0-8]*9|\d*?9", results[3])


def test_a_compilation_does_not_delay_others_and_can_be_aborted(
    kit: SimpleNamespace, model: Path, compiler: GrammarCompiler
) -> None:
    engine = gk.make(model, compiler)
    free = traffic(kit, model, rounds=1)[5]
    unknown = Grammar(GrammarKind.REGEX, "(abort|me)+")
    waiting = Request(rid=77, prompt=free.prompt, sampling=params(model, unknown, 1))
    with compiler._sandbox._lock:  # while the test holds the lock, no grammar is compiled
        engine.submit(waiting)
        tokens: list[int] = []
        engine.submit(free)
        ends: dict[int, Finished] = {}
        deadline = time.monotonic() + 60
        while free.rid not in ends:
            assert time.monotonic() < deadline
            output = engine.step(time.monotonic())
            if output is not None:
                tokens += output.tokens.tolist()
                ends |= {end.rid: end for end in output.finished}
        assert engine.busy
        assert engine.load().waiting == 1
        assert engine.load().waiting_tokens == len(waiting.prompt)
        engine.abort(waiting.rid)
        engine.step(time.monotonic())
        (end,) = engine.drain_finished()
        assert (end.rid, end.reason) == (waiting.rid, FinishReason.ABORT)
        assert not engine.busy
    rerun, ends = gk.run(engine, [waiting])
    assert ends[waiting.rid].reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert gk.texts(model, rerun)[77].startswith((b"abort", b"me"))


def test_an_invalid_grammar_is_rejected_before_it_runs(
    kit: SimpleNamespace, model: Path, compiler: GrammarCompiler
) -> None:
    wrong = [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "thing"}'),
        Grammar(GrammarKind.REGEX, "(a"),
        Grammar(GrammarKind.EBNF, "root ::= other"),
        Grammar(GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "odd"}}'),
        Grammar(GrammarKind.REGEX, "a" * (1 << 20)),
    ]
    engine = gk.make(model, compiler)
    refused = compiler.counts.refused
    each = [SamplingParams(grammar=grammar, max_tokens=5) for grammar in wrong]
    tokens, ends = gk.run(engine, gk.requests_of([kit.tokens(5, vocab=250)] * 5, each))
    assert not any(tokens.values())
    reasons = [ends[i].message for i in range(5)]
    for reason, expected in zip(
        reasons, ('"type" at /', "parenthesis", '"other"', "odd", "bytes"), strict=True
    ):
        assert reason.startswith("grammar: ")
        assert expected in reason
    assert all(end.refused and end.reason is FinishReason.ERROR for end in ends.values())
    assert engine.grammar_counts.refused == refused + 5


def test_cached_grammars_are_reused(kit: SimpleNamespace, model: Path, compiler: GrammarCompiler) -> None:
    engine, before = gk.make(model, compiler), copy.copy(compiler.counts)
    params = [SamplingParams(grammar=Grammar(GrammarKind.REGEX, "find me"), max_tokens=4, temperature=0)] * 3
    prompts = [kit.tokens(5, vocab=250)] * 3
    gk.run(engine, gk.requests_of(prompts, params), close=False)
    counts = engine.grammar_counts
    assert (counts.compiled - before.compiled, counts.hits - before.hits) == (1, 0)
    gk.run(engine, gk.requests_of(prompts, params, first=10))
    assert (counts.compiled - before.compiled, counts.hits - before.hits) == (1, 3)
    assert counts.compile_seconds > before.compile_seconds
    assert counts.masks > before.masks
