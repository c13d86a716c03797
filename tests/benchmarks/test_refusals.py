# SPDX-License-Identifier: Apache-2.0
"""If a figure cannot be measured, benchmarks report an error instead, and do not wait forever."""

from __future__ import annotations

from collections.abc import Iterator

import decode
import mixed
import numpy as np
import offline
import prefix
import pytest
from common_parts.gpu import token_bound
from common_parts.shapes import shape_folder
from prefill import prefill

from mizzen import LLM, SamplingParams

LONG = "prompt rejected: prompt has {} tokens; the KV capacity of 512 leaves room for 511: "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"kv_cache_tokens": 512, "threads": 1, "load_format": "dummy", "max_running_requests": 4}
    with shape_folder("tiny") as folder, LLM(folder, device="cpu", skip_tokenizer=True, **options) as engine:
        yield engine


def prompts(count: int, length: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 512, (count, length)).astype(np.int32))


def message_of(caught: pytest.ExceptionInfo[SystemExit]) -> str:
    return str(caught.value.code)


def test_rejected_prompts_have_no_time(llm: LLM) -> None:
    assert prefill(llm, 1, 40, 0) > 0
    with pytest.raises(SystemExit) as caught:
        prefill(llm, 1, 600, 0)
    assert message_of(caught).startswith("error: 1x600: " + LONG.format(600))
    assert "kv_cache_tokens" in message_of(caught)


def test_a_first_token_that_never_comes_has_no_time(llm: LLM) -> None:
    with pytest.raises(SystemExit) as caught:
        prefix.first_token(llm, prompts(1, 700))
    assert message_of(caught).startswith("error: 1 of 700 tokens: " + LONG.format(700))


def test_a_hit_must_find_the_whole_prefix(llm: LLM) -> None:
    shared, own = prompts(2, 200)
    prefix.first_token(llm, [shared])
    _, cached = prefix.first_token(llm, [np.concatenate([shared, own[:8]])])
    prefix.check_hit(llm, 200, 8, cached)
    assert cached == 192  # whole pages
    _, cached = prefix.first_token(llm, [own])
    with pytest.raises(SystemExit, match="error: only 0 of 200 tokens of the prefix were in the cache"):
        prefix.check_hit(llm, 200, 8, cached)


def test_a_hit_computes_at_least_one_token(llm: LLM) -> None:
    (shared,) = np.random.default_rng(3).integers(0, 512, (1, 64)).astype(np.int32)
    prefix.first_token(llm, [shared])
    _, cached = prefix.first_token(llm, [shared])
    assert cached == prefix.reusable(64, 0, 16) == 48
    prefix.check_hit(llm, 64, 0, cached)


@pytest.mark.parametrize(
    ("streams", "length", "message"),
    [
        (2, 600, "prompts with 2 streams: " + LONG.format(600)),
        (1, 400, "a stream ended after 312 tokens, before the prompts: use fewer --streams"),
    ],
)
def test_streams_do_not_wait_for_a_rejected_prompt(llm: LLM, streams: int, length: int, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        mixed.run_streams(llm, streams, prompts(3, length), np.random.default_rng(0))
    assert message_of(caught).startswith("error: " + message)
    for rid in range(streams + 3):
        llm.engine.abort(rid)
    while llm.engine.busy:
        llm.engine.step(0.0)
    llm.engine.drain_finished()


def test_an_idle_engine_ends_the_measurement(llm: LLM) -> None:
    with pytest.raises(SystemExit, match="error: the engine is idle although 3 streams should run"):
        mixed.step(llm, 3)


@pytest.mark.parametrize(
    ("count", "length", "message"),
    [
        (1, 600, "batch 1: " + LONG.format(600)),
        (1, 500, "a prompt and 34 further tokens exceed the KV cache of 512 tokens: lower "
         "--context or --long, or raise --engine kv_cache_tokens"),
        (6, 20, "max_running_requests is 4: raise it for a batch of 6"),
        (4, 300, "the KV cache of 512 tokens has no room for a batch of 4: lower --batch or "),
    ],
)  # fmt: skip
def test_a_batch_that_never_decoded_together_says_why(
    llm: LLM, count: int, length: int, message: str
) -> None:
    sampling = SamplingParams(max_tokens=decode.LAST + 2, ignore_eos=True)
    with pytest.raises(SystemExit) as caught:
        decode.step_seconds(llm, prompts(count, length), sampling)
    assert message_of(caught).startswith("error: " + message)


def small(**options: object) -> LLM:
    with shape_folder("tiny") as folder:
        common = {"threads": 1, "load_format": "dummy", "kv_cache_tokens": 512}
        return LLM(folder, device="cpu", skip_tokenizer=True, **{**common, **options})


def test_the_advice_names_the_option_that_bounds_a_request(llm: LLM) -> None:
    assert token_bound(llm) == ("the KV cache of 512 tokens", "raise --engine kv_cache_tokens")
    with small(context_length=128) as capped:
        assert token_bound(capped) == ("the context length of 128 tokens", "raise --engine context_length")
    with small(kv_cache_tokens=65536) as large:
        assert token_bound(large) == ("the context length of 40960 tokens", "")


def test_a_batch_that_exceeds_the_queue_is_an_error() -> None:
    with small(max_waiting_requests=2) as llm, pytest.raises(SystemExit) as caught:
        decode.step_seconds(llm, prompts(4, 20), SamplingParams(max_tokens=200, ignore_eos=True))
    assert message_of(caught).endswith(
        "2 requests are waiting already; try again later: use fewer prompts at once, or raise --engine "
        "max_waiting_requests"
    )


def test_answers_that_are_too_long_are_rejected_before_anything_runs(llm: LLM) -> None:
    offline.check_room(llm, [10, 400], [20, 112])
    with pytest.raises(SystemExit) as caught:
        offline.check_room(llm, [10, 400], [20, 113])
    assert message_of(caught) == (
        "error: a prompt of 400 and an answer of 113 tokens exceed the KV cache of 512 tokens: "
        "lower --context or --output, or raise --engine kv_cache_tokens"
    )
