# SPDX-License-Identifier: Apache-2.0
"""A step trace on a GPU contains the steps' names and their kernels, including those of captured graphs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mizzen import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 4


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_trace_holds_steps_and_their_kernels(folder: Path, tmp_path: Path, graphs: str) -> None:
    traces = tmp_path / "traces"
    options: dict[str, Any] = {"kv_cache_tokens": 1024, "max_running_requests": 4, "cuda_graph": graphs}
    sampling = SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True)
    with LLM(
        folder, device="cuda", skip_tokenizer=True, profile=str(traces), profile_steps=STEPS, **options
    ) as llm:
        plain = llm.generate([[5, 6, 7]], sampling)[0].token_ids
        assert not list(traces.iterdir())
        llm.engine.profile()
        assert llm.generate([[5, 6, 7]], sampling)[0].token_ids == plain
    (path,) = traces.iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [event["name"] for event in ranges if event["name"].startswith("step ")]
    assert len(steps) >= STEPS
    assert steps[0].endswith("0 decodes, 3 prompt tokens")
    assert steps[1].endswith("1 decodes, 0 prompt tokens")
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) >= STEPS
    assert sum(event["dur"] for event in kernels) > 0
