# SPDX-License-Identifier: Apache-2.0
"""Start-up on a GPU: the reported progress, and the fallback if a kernel package is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashinfer_kit import need
from hopper import WITH_FA3
from small_models import VOCABULARY

from mizzen import LLM, SamplingParams
from mizzen.attention import flash_attention3, flashinfer
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.decode_graphs import batch_sizes
from mizzen.engine.loading.loader import load_engine

pytestmark = WITH_FA3


def test_start_up_reports_the_number_of_graphs(folder: Path) -> None:
    phases: list[str] = []
    output: list[tuple[str, int, int]] = []
    options = EngineOptions(
        model=str(folder),
        device="cuda",
        kv_cache_tokens=4096,
        max_running_requests=16,
        prefill_chunk_tokens=256,
    )
    engine = load_engine(options, phases.append, lambda done, total: output.append((phases[-1], done, total)))
    engine.close()
    assert phases == ["config", "weights", "kv", "graphs", "warmup"] == list(engine.info.phases)
    graph_progress = [(done, total) for phase, done, total in output if phase == "graphs"]
    assert [done for done, _ in graph_progress] == list(range(1, graph_progress[0][1] + 1))
    assert len(graph_progress) > len(batch_sizes(16))  # there are also graphs of steps with prefill
    assert engine.info.attention == ("split", "fa3")
    assert engine.info.step_bytes > 0
    assert engine.info.graph_bytes > 0


def test_flashinfer_is_the_fallback_for_fa3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flashinfer")
    need("fa2", 64, window=False)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(3, VOCABULARY, n).tolist() for n in (1, 16, 17, 130, 333)]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {
        "kv_cache_tokens": 4096,
        "max_running_requests": 12,
        "prefill_chunk_tokens": 256,
    }

    def tokens(expected_backends: tuple[str, str]) -> list[int]:
        with LLM(folder, device="cuda", skip_tokenizer=True, **options) as llm:
            assert llm.engine.info.attention == expected_backends
            return [token for answer in llm.generate(prompts, greedy) for token in answer.token_ids]

    with_fa3 = tokens(("split", "fa3"))
    monkeypatch.setattr(flash_attention3, "unsupported_reason", lambda geometry, kv: "it is another GPU")
    monkeypatch.setattr(flashinfer, "unsupported_reason", lambda geometry, kv, template="fa2": None)
    with_flashinfer = tokens(("split", "flashinfer"))
    assert sum(a == b for a, b in zip(with_fa3, with_flashinfer, strict=True)) > 0.8 * len(with_fa3)
