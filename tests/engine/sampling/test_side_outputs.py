# SPDX-License-Identifier: Apache-2.0
"""Log probabilities, embeddings and penalized answers equal a reference, and requests can be resumed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import logits_reference
import numpy as np
import pytest
import torch
from small_llm import SHARED, open_llm

from mizzen import SamplingParams
from mizzen.core.outputs import RequestLogprobs
from mizzen.core.request import FinishReason, Pooling, Request
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.engine.loading.loader import load_engine
from mizzen.offline import Completion


def exact_logprobs(model: Any, kit: SimpleNamespace, tokens: list[int]) -> np.ndarray:
    """Return Transformers' log probabilities of the token that follows each token, [tokens, vocab]."""
    return torch.log_softmax(kit.oracle(model, np.array(tokens)).double(), -1).numpy()


def check_prompt(model: Any, kit: SimpleNamespace, prompt: list[int], answer: Completion, top: int) -> None:
    exact = exact_logprobs(model, kit, prompt)
    assert answer.prompt_logprobs is not None
    assert [entry.token for entry in answer.prompt_logprobs] == prompt[1:]
    for row, entry in zip(exact, answer.prompt_logprobs, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:top].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:top], abs=1e-4)


def check_output(
    model: Any, kit: SimpleNamespace, prompt: list[int], answer: Completion, params: SamplingParams
) -> None:
    exact = exact_logprobs(model, kit, prompt + answer.token_ids)[len(prompt) - 1 :]
    assert answer.logprobs is not None
    assert [entry.token for entry in answer.logprobs] == answer.token_ids
    for row, entry in zip(exact, answer.logprobs, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        assert len(entry.top) == params.logprobs
        assert [value for _, value in entry.top] == pytest.approx(
            np.sort(row)[::-1][: params.logprobs], abs=1e-4
        )
        assert entry.requested == pytest.approx([row[i] for i in params.logprob_token_ids], abs=1e-4)


@pytest.mark.parametrize("chunk", [7, 8192])
def test_logprobs_equal_transformers(model: Any, kit: SimpleNamespace, tmp_path: Path, chunk: int) -> None:
    prompts = [kit.tokens(n, seed=n).tolist() for n in (1, 2, 33, 60)]
    prompts.append(prompts[3][:40] + prompts[2])  # shares a prefix with a cached prompt
    params = [
        SamplingParams(temperature=1, seed=1, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=3),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0, logprob_token_ids=(9, 4)),
        SamplingParams(
            temperature=0.5, seed=2, max_tokens=7, ignore_eos=True, logprobs=20, prompt_logprobs=0
        ),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        SamplingParams(
            temperature=0,
            max_tokens=8,
            ignore_eos=True,
            logprobs=1,
            logprob_token_ids=(7,),
            prompt_logprobs=1,
        ),
    ]
    with open_llm(tmp_path, prefill_chunk_tokens=chunk) as llm:
        llm.generate([prompts[3]], params[3])
        answers = llm.generate(prompts, params)
    for prompt, answer, sampling in zip(prompts, answers, params, strict=True):
        if sampling.prompt_logprobs is None:
            assert answer.prompt_logprobs is None
        else:
            check_prompt(model, kit, prompt, answer, sampling.prompt_logprobs)
            assert answer.cached_tokens == 0
        if sampling.logprobs is None:
            assert answer.logprobs is None
        else:
            check_output(model, kit, prompt, answer, sampling)
    assert answers[3].cached_tokens > 0


WITH_PENALTIES = [
    SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.8, logprobs=4),
    SamplingParams(temperature=0, max_tokens=24, frequency_penalty=1.5, presence_penalty=0.4, min_tokens=24),
    SamplingParams(temperature=0, max_tokens=24, presence_penalty=-2.0, logit_bias=((7, 6.0), (9, -100.0))),
    SamplingParams(
        temperature=0, max_tokens=24, frequency_penalty=-0.5, repetition_penalty=0.7, min_tokens=9
    ),
    SamplingParams(temperature=0, max_tokens=24),
]


def generate_reference(
    model: Any, kit: SimpleNamespace, prompt: list[int], params: SamplingParams
) -> list[int]:
    """Continue a prompt with Transformers' logits and the NumPy reference."""
    output: list[int] = []
    while len(output) < (params.max_tokens or 0):
        logits = kit.oracle(model, np.array(prompt + output))[-1].numpy()
        output.append(int(logits_reference.process(logits, params, prompt, output, (2,)).argmax()))
        if output[-1] == 2:
            break
    return output


def test_penalized_answers_equal_the_reference(model: Any, kit: SimpleNamespace, tmp_path: Path) -> None:
    prompts = [kit.tokens(n, seed=n).tolist() for n in (3, 20, 41, 12, 30)]
    expected = [generate_reference(model, kit, p, s) for p, s in zip(prompts, WITH_PENALTIES, strict=True)]
    for options in ({}, {"steps_in_flight": 1, "max_running_requests": 2}, {"prefill_chunk_tokens": 6}):
        with open_llm(tmp_path, **options) as llm:
            assert [a.token_ids for a in llm.generate(prompts, WITH_PENALTIES)] == expected
            rerun = llm.generate(prompts, WITH_PENALTIES)
        assert [a.token_ids for a in rerun] == expected
        assert rerun[2].cached_tokens > 0
    for entry, token in zip(rerun[0].logprobs or [], expected[0], strict=True):
        assert entry.top[0] == (
            token,
            entry.logprob,
        )  # logprobs of processed logits, so the greedy token is the most probable one


def mixed_params(count: int) -> list[SamplingParams]:
    """Return seeded parameters of all kinds."""
    rng = random.Random(8)
    return [
        SamplingParams(
            seed=i,
            temperature=rng.choice([0.0, 0.8, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            max_tokens=rng.randint(5, 25),
            frequency_penalty=rng.choice([0.0, 0.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
            min_tokens=rng.choice([0, 0, 12]),
            logit_bias=rng.choice([(), ((5, 3.0),)]),
            stop_token_ids=tuple(range(20, 30)),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        for i in range(count)
    ]


def check_equal(completion: Completion, expected: Completion) -> None:
    assert completion.token_ids == expected.token_ids
    for logprobs, reference in (
        (completion.logprobs, expected.logprobs),
        (completion.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert (logprobs is None) == (reference is None)
        for a, b in zip(logprobs or [], reference or [], strict=True):
            assert a.token == b.token
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_answers_are_the_same_alone_in_a_batch_and_after_preemption(
    model: Any, kit: SimpleNamespace, tmp_path: Path
) -> None:
    params = mixed_params(18)
    base = kit.tokens(40, seed=77).tolist()
    rng = random.Random(1)
    prompts = [
        base[: rng.choice([0, 24, 40])] + kit.tokens(rng.randint(1, 25), seed=i).tolist() for i in range(18)
    ]
    with open_llm(tmp_path, prefix_cache="none", steps_in_flight=1, max_running_requests=1) as llm:
        alone = [llm.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    assert len({len(answer.token_ids) for answer in alone}) > 5
    for options in ({}, {"kv_cache_tokens": 160}, {"prefill_chunk_tokens": 5, "steps_in_flight": 3}):
        with open_llm(tmp_path, **options) as llm:
            for completion, batched in zip(alone, llm.generate(prompts, params), strict=True):
                check_equal(completion, batched)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_equal_transformers(
    model: Any, kit: SimpleNamespace, tmp_path: Path, pooling: str, normalize: bool
) -> None:
    prompts = [kit.tokens(n, seed=n).tolist() for n in (1, 5, 64, 30, 50)]
    prompts.append(prompts[2][:40] + prompts[1])
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        vector = states[-1] if pooling == "last" else states.mean(0)
        expected.append(torch.nn.functional.normalize(vector, dim=0) if normalize else vector)
    for options in ({}, {"prefill_chunk_tokens": 7}, {"kv_cache_tokens": 80, "prefill_chunk_tokens": 16}):
        with open_llm(tmp_path, **options) as llm:
            for _ in range(2):  # the second run uses cached prefixes where the pooling method allows it
                vectors = llm.embed(prompts, pooling=pooling, normalize=normalize)
                np.testing.assert_allclose(vectors, torch.stack(expected).numpy(), atol=2e-5)
            assert not llm.engine.busy


def test_embeddings_and_answers_share_batches(model: Any, kit: SimpleNamespace, tmp_path: Path) -> None:
    engine = load_engine(EngineOptions(model=str(tmp_path), device="cpu", **SHARED, prefill_chunk_tokens=8))
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [kit.tokens(n, seed=n) for n in (9, 30, 17, 26)]
    requests = [
        Request(rid=i, prompt=p, sampling=greedy, pooling=None if i % 2 else Pooling.MEAN)
        for i, p in enumerate(prompts)
    ]
    tokens, ends, vectors = run_requests(engine, requests)
    assert set(vectors) == {0, 2}
    assert [len(tokens[i]) for i in range(4)] == [0, 12, 0, 12]
    assert [ends[i].output_tokens for i in range(4)] == [0, 12, 0, 12]
    for i in (0, 2):
        with torch.inference_mode():
            states = model.model(torch.from_numpy(prompts[i].astype(np.int64))[None]).last_hidden_state[0]
        expected_vector = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
        np.testing.assert_allclose(vectors[i], expected_vector, atol=2e-5)


def run_requests(
    engine: Engine, requests: list[Request]
) -> tuple[dict[int, list[int]], dict[int, Any], dict[int, Any]]:
    """Run requests to their ends, close the engine, and return their tokens, `Finished` and vectors by id."""
    tokens: dict[int, list[int]] = {request.rid: [] for request in requests}
    ends: dict[int, Any] = {}
    vectors: dict[int, Any] = {}
    for request in requests:
        engine.submit(request)
    while engine.busy:
        output = engine.step(0.0)
        if output is not None:
            for rid, offset, token in zip(output.rids, output.offsets, output.tokens, strict=True):
                request = requests[[r.rid for r in requests].index(rid)]
                assert offset == len(tokens[rid]) + request.generated
                tokens[rid].append(int(token))
            check_rids(output.side_outputs.logprobs, output.rids.tolist())
            vectors |= {vector.rid: vector.vector for vector in output.side_outputs.vectors}
            ends |= {end.rid: end for end in output.finished}
        ends |= {end.rid: end for end in engine.drain_finished()}
    engine.close()
    return tokens, ends, vectors


def check_rids(reports: tuple[RequestLogprobs, ...], rids: list[int]) -> None:
    assert all(report.prompt or report.rid in rids for report in reports)


@pytest.mark.parametrize("cut", [1, 6, 13])
def test_a_resumed_request_continues_with_the_same_tokens(
    model: Any, kit: SimpleNamespace, tmp_path: Path, cut: int
) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=16, frequency_penalty=1.0, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, max_tokens=16, repetition_penalty=1.3, min_tokens=16),
        SamplingParams(temperature=0.7, seed=5, max_tokens=16, top_p=0.9, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=16, min_tokens=15, prompt_logprobs=1),
    ]
    prompts = [kit.tokens(n, seed=n) for n in (9, 14, 3, 21)]

    def engine() -> Engine:
        return load_engine(EngineOptions(model=str(tmp_path), device="cpu", **SHARED))

    first = [
        Request(rid=i, prompt=p, sampling=s, seed=s.seed or 0)
        for i, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]
    full_outputs, ends, _ = run_requests(engine(), first)
    assert all(len(tokens) > 13 for tokens in full_outputs.values())
    continued = [
        Request(
            rid=r.rid,
            prompt=np.append(r.prompt, full_outputs[r.rid][:cut]).astype(np.int32),
            sampling=replace(r.sampling, prompt_logprobs=None),
            seed=r.seed,
            generated=cut,
        )
        for r in first
    ]
    resumed, resumed_ends, _ = run_requests(engine(), continued)
    assert resumed == {rid: tokens[cut:] for rid, tokens in full_outputs.items()}
    for rid, end in ends.items():
        assert replace_cached(resumed_ends[rid]) == replace_cached(end)
    assert {end.reason for end in ends.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


def replace_cached(end: Any) -> Any:
    return (end.reason, end.prompt_tokens, end.output_tokens, end.stop_token)
