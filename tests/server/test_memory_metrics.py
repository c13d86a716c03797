# SPDX-License-Identifier: Apache-2.0
"""A rank measures its memory usage by purpose, and the usage is exported as metrics."""

from __future__ import annotations

import os

from prometheus_client import generate_latest

from mizzen.engine.info import WEIGHT_FORMATS, EngineInfo
from mizzen.server.metric_catalogue import MEMORY, METRICS, Phase
from mizzen.server.metrics import EngineView, build_registry
from mizzen.server.ranks.rank_status import RankStatus
from mizzen.server.status_block import StatusReader, StatusWriter, create_status_blocks


def test_memory_usage_reaches_the_metrics_by_purpose() -> None:
    info = EngineInfo(
        context_length=8,
        vocab_size=8,
        end_token_ids=(),
        page_size=4,
        pages_total=2,
        weights_bytes=11,
        kv_bytes=22,
        step_bytes=33,
        graph_bytes=6,
        device_bytes=99,
        free_bytes=20,
        dtype="bfloat16",
        device="cuda",
        format_bytes={"int4": 8, "bfloat16": 3},
    )
    block = create_status_blocks(1)
    try:
        status, reader = RankStatus(StatusWriter(block, 0)), StatusReader(block, 0)
        status.set_memory(info)
        status.enter_phase(Phase.SERVING)
        snapshot = reader.read()
    finally:
        os.close(block)
    assert [snapshot[name] for name in MEMORY] == [11, 22, 6, 40, 33, 99, 20]
    assert sum(snapshot[name] for name in MEMORY[:4]) == 99 - 20
    assert set(MEMORY) <= {metric.field for metric in METRICS}
    text = generate_latest(build_registry("m", lambda: EngineView(snapshot, "serving", "", 0.0), 4)).decode()
    sizes = {name: 8.0 if name == "int4" else 3.0 if name == "bfloat16" else 0.0 for name in WEIGHT_FORMATS}
    for name, size in sizes.items():
        assert f'mizzen_engine_weights_format_bytes{{format="{name}",model_name="m"}} {size}\n' in text
