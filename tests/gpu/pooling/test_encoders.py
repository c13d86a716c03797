# SPDX-License-Identifier: Apache-2.0
"""Encoders on a GPU: their embeddings equal those on the CPU, in float32, and in bfloat16 with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoders.twins import FAMILIES, random_prompts, save_encoder
from mizzen import LLM
from mizzen.core.request import Pooling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (1, 5, 300, 17, 140, 3, 64)


@pytest.mark.parametrize(
    ("dtype", "graph", "cosine"),
    [("float32", "auto", 0.9999), ("bfloat16", "off", 0.998), ("bfloat16", "auto", 0.998)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_those_on_the_cpu(
    tmp_path: Path, family: str, dtype: Any, graph: Any, cosine: float
) -> None:
    save_encoder(tmp_path, family, std=0.05)
    prompts = random_prompts(LENGTHS)
    vectors = []
    settings: list[Any] = [("cpu", "float32"), ("cuda", dtype)]
    for device, precision in settings:
        options: dict[str, Any] = {"cuda_graph": graph, "skip_tokenizer": True}
        with LLM(tmp_path, device=device, dtype=precision, **options) as llm:
            graphs = llm.engine._loop._runner.step.prefill_graphs  # type: ignore[attr-defined]
            assert (graphs is not None) == (precision == "bfloat16" and graph == "auto")
            vectors.append([llm.embed(prompts, pooling=pooling.value) for pooling in Pooling])
    assert (np.array(vectors[0]) * np.array(vectors[1])).sum(-1).min() > cosine
