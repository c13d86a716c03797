# SPDX-License-Identifier: Apache-2.0
"""Runs requests on a whole engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mizzen.core.request import Finished, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.engine.loading.loader import load_engine


def make(folder: Path, delay: Any = None, **options: Any) -> Engine:
    """Load a small engine; `options` are engine options."""
    settings = {"page_size": 4, "kv_cache_tokens": 2048, "threads": 1, "check_integrity": True, **options}
    return load_engine(EngineOptions(model=str(folder), device="cpu", **settings), delay=delay)


def requests_of(prompts: list[np.ndarray], params: list[SamplingParams]) -> list[Request]:
    """Return a request for each prompt, with ids from 0 on."""
    pairs = enumerate(zip(prompts, params, strict=True))
    return [Request(rid=i, prompt=p, sampling=s, seed=1000 + i) for i, (p, s) in pairs]


def run_requests(
    engine: Engine, requests: list[Request], arrivals: list[int] | None = None
) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    """Run requests and close the engine; return each request's output tokens and `Finished` by id.

    `arrivals` gives the number of the step before which each request is submitted; by default, step 0.
    """
    due = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    tokens: dict[int, list[int]] = {request.rid: [] for request in requests}
    ends: dict[int, Finished] = {}
    step = 0
    try:
        while due or engine.busy:
            while due and due[0][0] <= step:
                engine.submit(due.pop(0)[1])
            output = engine.step(float(step))
            step += 1
            if output is not None:
                for rid, offset, token in zip(output.rids, output.offsets, output.tokens, strict=True):
                    assert offset == len(tokens[rid])
                    tokens[rid].append(int(token))
                ends |= {end.rid: end for end in output.finished}
            ends |= {end.rid: end for end in engine.drain_finished()}
    finally:
        engine.close()
    return tokens, ends
