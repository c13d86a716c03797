# SPDX-License-Identifier: Apache-2.0
"""`scripts/trace_waterfall.py` prints the spans of a file that a collector wrote."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts/trace_waterfall.py"))


def span(number: int, name: str, parent: int, began: int, ended: int, **fields: Any) -> dict[str, Any]:
    """Return a span of OTLP in JSON; times are milliseconds after a fixed moment."""
    zero = 1_795_688_186_000
    ids = {"traceId": "ab" * 16, "spanId": f"{number:016x}", "parentSpanId": f"{parent:016x}"}
    times = {"startTimeUnixNano": f"{zero + began}000000", "endTimeUnixNano": f"{zero + ended}000000"}
    return {**ids, "name": name, **times, **fields}


def named(key: str, value: str) -> list[dict[str, Any]]:
    return [
        {"key": "mizzen.attempts", "value": {"intValue": "2"}},
        {"key": key, "value": {"stringValue": value}},
    ]


def message(*spans: dict[str, Any]) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}) + "\n"


ENGINE = message(
    span(5, "decode", 4, 100, 400),
    span(6, "preemption", 5, 200, 300, attributes=named("mizzen.preemption.reason", "priority")),
    span(4, "engine.request", 3, 50, 400),
)
GATEWAY = message(
    span(3, "engine", 1, 50, 400, attributes=named("engine.name", "b"), status={"code": 1}),
    span(1, "POST /v1/completions", 99, 0, 400),
    span(
        2,
        "engine",
        1,
        10,
        40,
        attributes=named("engine.name", "a"),
        status={"code": 2, "message": "connection"},
    ),
)
OLDER = message({**span(1, "GET /v1/models", 0, -900, -800), "traceId": "cd" * 16})
EXPECTED = """\
trace abababababababababababababababab

span                            begin  duration   (ms)
POST /v1/completions              0.0     400.0  |████████████████████████████████████████|
  engine a (connection)          10.0      30.0  | ███                                    |
  engine b                       50.0     350.0  |     ███████████████████████████████████|
    engine.request               50.0     350.0  |     ███████████████████████████████████|
      decode                    100.0     300.0  |          ██████████████████████████████|
        preemption priority     200.0     100.0  |                    ██████████          |
"""


@pytest.mark.parametrize(
    ("text", "words", "code", "output"),
    [
        (ENGINE + "\n" + GATEWAY + OLDER, [], 0, EXPECTED),
        (OLDER + ENGINE + GATEWAY, ["--trace", "ab" * 16], 0, EXPECTED),
        (ENGINE, ["--trace", "ef" * 16], 1, ""),
        ("", [], 1, ""),
        ("no JSON", [], 1, ""),
        (message({"name": "without ids"}), [], 1, ""),
    ],
    ids=["last trace", "chosen trace", "unknown trace", "empty file", "no JSON", "malformed span"],
)
def test_trace_of_a_file_is_printed(
    text: str,
    words: list[str],
    code: int,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["trace_waterfall.py", str(file), *words])
    assert SCRIPT["main"]() == code
    printed = capsys.readouterr()
    assert printed.out == output
    assert (str(file) in printed.err) == bool(code)
