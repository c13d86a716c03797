# SPDX-License-Identifier: Apache-2.0
"""Traces of engine steps: what they contain, when they are written, and which errors are raised."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mizzen.core.request import Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.engine.loading.loader import load_engine

TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def make(kit: SimpleNamespace, folder: Path, **options: Any) -> Engine:
    kit.save_model(folder, "qwen3")
    chosen = {"device": "cpu", "kv_cache_tokens": 256, "threads": 1, **options}
    return load_engine(EngineOptions(model=str(folder), **chosen))


def run(engine: Engine, rid: int) -> list[int]:
    engine.submit(Request(rid=rid, prompt=np.arange(3, 9, dtype=np.int32), sampling=TEN))
    tokens: list[int] = []
    while engine.busy:
        output = engine.step(0.0)
        tokens += [] if output is None else output.tokens.tolist()
    return tokens


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_trace_holds_the_configured_number_of_steps(
    kit: SimpleNamespace, tmp_path: Path, depth: int
) -> None:
    traces = tmp_path / "a/traces"
    engine = make(kit, tmp_path, profile=str(traces), profile_steps=3, steps_in_flight=depth)
    plain = run(engine, 1)
    assert not list(traces.iterdir())
    engine.profile()
    assert run(engine, 2) == plain
    (path,) = traces.iterdir()
    names = [event["name"] for event in events(path) if event.get("cat") == "user_annotation"]
    steps = [name for name in names if name.startswith("step ")]
    assert len(steps) >= 3
    assert steps[0].endswith("0 decodes, 6 prompt tokens")
    assert steps[1].endswith("1 decodes, 0 prompt tokens")
    assert names.count("wait for tokens") >= 3
    # The trace also contains the operators of the thread that runs steps.
    assert any(event["name"] == "aten::linear" for event in events(path))
    engine.profile()
    run(engine, 3)
    assert len(list(traces.iterdir())) == 2
    engine.close()


def test_closing_the_engine_writes_a_started_trace(kit: SimpleNamespace, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    engine = make(kit, tmp_path, profile=str(traces), profile_steps=500)
    engine.profile()
    run(engine, 1)
    assert not list(traces.iterdir())
    engine.close()
    assert len(list(traces.iterdir())) == 1


def test_profile_errors_name_the_option(kit: SimpleNamespace, tmp_path: Path) -> None:
    engine = make(kit, tmp_path)
    with pytest.raises(ValueError, match="start the engine with --profile FOLDER"):
        engine.profile()
    engine.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--profile .*file is not a writable folder"):
        make(kit, tmp_path, profile=str(tmp_path / "file"))
