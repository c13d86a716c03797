# SPDX-License-Identifier: Apache-2.0
"""The command line of benchmarks/online.py: rejected options, replayed traces, and printed messages."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import online
import pytest
from online_parts.gateway_share import read_histograms
from online_parts.recorded import read_trace, trace_requests, trace_sessions
from online_parts.replay import Record
from online_parts.summary import summarize
from online_parts.trace import Session, Texts, TimedRequest, rate_of

URL = "http://127.0.0.1:1"


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the command, which must exit before it sends a request; return its message."""
    monkeypatch.setattr(sys, "argv", ["online.py", URL, *options])
    with pytest.raises(SystemExit) as caught:
        online.main()
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", "0"), "--rate: '0' must be above 0"),
        (("--rate", "1", "-1"), "--rate: '-1' must be above 0"),
        (("--requests", "0"), "--requests: '0' is not an integer"),
        (("--turns", "0"), "--turns: '0' is not an integer"),
        (("--shared", "10", "--groups", "0"), "--groups: '0' is not an integer"),
        (("--speed", "0"), "--speed: '0' must be above 0"),
        (("--body", "{bad"), "--body: '{bad' is not JSON: "),
        (("--body", "[1]"), "--body: '[1]' is not a JSON object"),
        (("--processes", "0"), "--processes: '0' is not an integer"),
    ],
)
def test_invalid_options_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert f"error: argument {message}" in refused(monkeypatch, capsys, *options)


GOOD = {"at": 1, "max_tokens": 2, "input_length": 33}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object: "),
        ("[1]", "not a JSON object"),
        (json.dumps({"at": 1}), "needs at, max_tokens, and prompt or input_length"),
        (json.dumps({**GOOD, "max_tokens": "x"}), "max_tokens is 'x', not a number"),
        (json.dumps({**GOOD, "max_tokens": -1}), "max_tokens is -1, not an integer of at least 0"),
        (json.dumps({**GOOD, "at": math.nan}), "at is nan, not a number"),
        (json.dumps({**GOOD, "input_length": 1.5}), "input_length is 1.5, not an integer of at least 1"),
        (json.dumps({**GOOD, "prompt": [1, "a"]}), "prompt is neither text nor a list of token ids"),
        (json.dumps({**GOOD, "hash_ids": 7}), "hash_ids is not a list of numbers or strings"),
        (json.dumps({**GOOD, "input_length": 900, "hash_ids": [1, 2]}),
         "2 hash_ids of --hash-block 16 tokens are 32 tokens, but input_length is 900: give the trace's "
         "--hash-block (about 450; Mooncake's is 512)"),
        (json.dumps({**GOOD, "hash_ids": [1, 2, 3]}), None),
        (json.dumps({**GOOD, "hash_ids": [1, 2, 3, 4]}), "4 hash_ids of --hash-block 16 tokens are 64"),
    ],
)  # fmt: skip
def test_an_invalid_trace_line_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    line: str,
    message: str | None,
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n  \n{line}\n")
    if message is None:
        assert len(read_trace(path, block=16)) == 2
        return
    assert f"error: {path}:4: {message}" in refused(monkeypatch, capsys, "--trace", str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--trace", "x", "--rate", "1"),
            "--rate would have no effect with --trace, which has",
        ),
        (
            ("--trace", "x", "--turns", "2", "--input", "5"),
            "--input, --turns would have no effect with",
        ),
        (("--speed", "2", "--trace-unit", "1"), "--speed, --trace-unit would have no effect without --trace"),
    ],
)
def test_options_without_effect_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert f"error: {message}" in refused(monkeypatch, capsys, *options)


def test_a_trace_with_probably_wrong_units_is_rejected_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({**GOOD, "at": at}) for at in (1000, 37_000)))
    message = refused(monkeypatch, capsys, "--trace", str(path))
    assert f"replaying {path} would take 10.0 h: give --trace-unit 0.001 if its times are" in message
    message = refused(monkeypatch, capsys, "--trace", str(path), "--speed", "4", "1.6")
    assert "would take 6.2 h" in message
    args = online.make_parser().parse_args([URL, "--trace", str(path), "--trace-unit", "1"])
    entries = online.entries_of(args)
    assert online.find_wrong_unit(args, entries, {"trace", "trace_unit"}) is None
    args.speed = [2.0]
    assert online.find_wrong_unit(args, entries, {"trace"}) is None


def test_a_run_announces_its_duration() -> None:
    first, second = TimedRequest(0.0, "a", 1), TimedRequest(200.0, "b", 1)
    assert online.announce("rate 1", [Session((first,)), Session((second,))]) == (
        "rate 1: 2 requests, the last starts in 3 min"
    )
    assert online.announce("rate 2", [Session((first, second)), Session((first,))]) == (
        "rate 2: 3 requests in 2 sessions of several turns, the last starts in 0 s"
    )


def test_an_empty_trace_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    assert f"error: {path} contains no requests" in refused(monkeypatch, capsys, "--trace", str(path))
    path.write_text(json.dumps({**GOOD, "prompt": [1]}))
    options = ("--text", "--chat", "--trace", str(path))
    assert "prompts of token ids, which --chat cannot send" in refused(monkeypatch, capsys, *options)


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 20, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 1000, "input_length": 17, "output_length": 4, "hash_ids": [1, 2, 7]},
        {"at": 2000, "prompt": [5, 6], "max_tokens": 3},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    texts = Texts(np.random.default_rng(0), 1000)
    requests = trace_requests(read_trace(path, block=8), texts, unit=1e-3, block=8)
    sessions = trace_sessions(requests, speed=2.0)
    prompts = [session.requests[0].prompt for session in sessions]
    assert [session.requests[0].after for session in sessions] == [0, 0.5, 1]
    assert [len(prompt) for prompt in prompts] == [17, 2, 20]
    assert prompts[0][:16] == prompts[2][:16]
    assert [session.requests[0].output for session in sessions] == [4, 3, 5]
    assert rate_of(sessions) == 2.0


def test_a_shortened_trace_keeps_the_first_requests_by_time_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, count = tmp_path / "trace.jsonl", 250
    path.write_text("\n".join(json.dumps({**GOOD, "at": -at}) for at in range(count)))
    args = online.make_parser().parse_args([URL, "--trace", str(path)])
    assert len(online.entries_of(args)) == count
    assert not capsys.readouterr().out
    args.requests = 3
    assert [entry.at for entry in online.entries_of(args)] == [-249, -248, -247]
    assert capsys.readouterr().out == "the first 3 of 250 requests of the trace, by time\n"


@pytest.mark.parametrize(
    ("kind", "detail", "option"),
    [
        ("status 400", "prompt contains the token id 9999; ids go from 0 to 511", "--vocabulary"),
        ("status 400", "Token id 9999 is out of vocabulary", "--vocabulary"),
        ("status 404", "the model 'x' does not exist here; available models: demo", "--model"),
        ("status 404", "The model `x` does not exist.", "--model"),
        ("status 400", "max_tokens must be at least 1", ""),
        ("status 503", "the model is loading", ""),
    ],
)
def test_errors_hint_at_the_option_to_change(kind: str, detail: str, option: str) -> None:
    hint = online.hint(kind, detail)
    assert option in hint and bool(hint) == bool(option)


def test_the_number_of_tokens_per_piece_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        Record(0.0, sent=0.0, end=2.0, tokens_at=[0.5, 1.0], output_tokens=5),
        Record(0.0, sent=0.0, end=2.0, tokens_at=[1.0], output_tokens=1),
    ]
    result = summarize(records, warm=0.0, most_first=None, most_token=None)
    assert result["tokens_per_piece"] == 2
    online.print_run("rate 1", result, 0.0)
    assert capsys.readouterr().out.split()[-3:] == ["2.00", "2", "0"]


def test_errors_and_missing_latencies_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(0.5, sent=0.5, end=1.0, error="status 404", detail="no")
    result: dict[str, Any] = summarize([record], warm=9.0, most_first=None, most_token=None)
    online.print_run("rate 1", result, 9.0)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "1 x status 404: no",
        "no latencies: --warm is 9 s, but the last request was due at 0.5 s",
    ]


def test_metrics_that_fail_after_a_run_leave_its_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages: list[Any] = [read_histograms([]), ConnectionRefusedError("refused")]

    def fetch(urls: list[str]) -> Any:
        found = pages.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(online, "fetch_histograms", fetch)
    monkeypatch.setattr(online, "run", lambda *_: [])
    monkeypatch.setattr(online, "summarize", lambda *_, **__: {"output_tokens_per_second": 5.0})
    args = online.make_parser().parse_args(["http://gateway", "--metrics", "http://gateway/metrics"])
    session = Session((TimedRequest(0.0, [1], 1),))
    target: Any = None
    result = online.measure(args, target, [session])
    assert (result["gateway_ms"], result["output_tokens_per_second"]) == (None, 5.0)
    assert "no latency of the gateway: the metrics cannot be read: refused" in capsys.readouterr().out
