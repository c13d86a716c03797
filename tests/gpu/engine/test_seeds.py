# SPDX-License-Identifier: Apache-2.0
"""A seeded request samples the same tokens alone, with other requests and among aborts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper import WITH_FA3
from small_models import VOCABULARY

from mizzen import LLM, SamplingParams
from mizzen.core.request import Request
from mizzen.engine.loading import warmup

pytestmark = WITH_FA3
OUTPUT = 40


def test_other_requests_parameters_change_no_sample(folder: Path) -> None:
    """Other requests vary in tokens and seeds, but not in number and length, so the kernels are the same."""
    own = np.random.default_rng(9).integers(3, VOCABULARY, 50).tolist()
    options: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running_requests": 8, "prefix_cache": "none"}
    with LLM(folder, device="cuda", skip_tokenizer=True, **options) as llm:

        def tokens(seed: int, variant: int) -> list[int]:
            draw = np.random.default_rng(variant)
            prompts = [own, *(draw.integers(3, VOCABULARY, n).tolist() for n in (5, 20, 64, 90))]
            params = [
                SamplingParams(temperature=1.0, seed=seed + i * variant, max_tokens=OUTPUT, ignore_eos=True)
                for i in range(len(prompts))
            ]
            return llm.generate(prompts, params)[0].token_ids

        first = tokens(7, 1)
        assert tokens(7, 1) == tokens(7, 2) == tokens(7, 3) == first
        assert tokens(8, 1) != first
        assert len(set(first)) > 5


def test_a_seeded_request_is_the_same_alone_with_others_and_among_aborts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All batches are padded to one size, so that other requests do not change the rounding.
    monkeypatch.setattr(warmup, "batch_sizes", lambda largest: [largest])
    draw = np.random.default_rng(1)
    # Nearly greedy: among many equally probable tokens, rounding alone would change every fourth sample.
    sampling = SamplingParams(temperature=0.05, max_tokens=OUTPUT, ignore_eos=True)
    prompt = draw.integers(3, VOCABULARY, 50).astype(np.int32)
    with LLM(
        folder,
        device="cuda",
        skip_tokenizer=True,
        kv_cache_tokens=4096,
        max_running_requests=16,
        prefix_cache="none",
        check_integrity=True,
    ) as llm:
        engine = llm.engine

        def generate(seed: int, company: bool) -> list[int]:
            actual: list[int] = []
            live = {0}
            engine.submit(Request(rid=0, prompt=prompt, sampling=sampling, seed=seed))
            rid = 0
            while live:
                if company and 0 in live and len(actual) > 0 and len(live) < 20:
                    rid += 1
                    companion_prompt = draw.integers(3, VOCABULARY, int(draw.integers(1, 60))).astype(
                        np.int32
                    )
                    engine.submit(Request(rid=rid, prompt=companion_prompt, sampling=sampling, seed=rid))
                    live.add(rid)
                companions = sorted(live - {0})
                if companions and draw.random() < 0.2:
                    engine.abort(int(draw.choice(companions)))
                output = engine.step(time.monotonic())
                finished = list(engine.drain_finished())
                if output is not None:
                    actual += output.tokens[output.rids == 0].tolist()
                    finished += output.finished
                live -= {end.rid for end in finished}
            return actual

        seeds = range(70, 86)
        alone = [generate(seed, False) for seed in seeds]
        crowded = [generate(seed, True) for seed in seeds]
        while engine.busy:  # a step may still be in flight
            engine.step(time.monotonic())
        load = engine.load()
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
        assert engine.integrity_faults == 0
    assert [len(tokens) for tokens in alone + crowded] == [OUTPUT] * 2 * len(seeds)
    # Steps with prefill run other kernels, which round differently: in bfloat16, one sample in 40 changes
    # here, and all tokens after it differ. On average, 0.62 of the tokens precede the change; the standard
    # deviation of the mean over 16 seeds is 0.09, and the bound is four of these below.
    equal_tokens = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), OUTPUT)
        for x, y in zip(alone, crowded, strict=True)
    ]
    assert sum(equal_tokens) > 0.25 * OUTPUT * len(seeds)
