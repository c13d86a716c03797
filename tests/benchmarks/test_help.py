# SPDX-License-Identifier: Apache-2.0
"""`--help` of the GPU benchmarks shows the complete docstring and describes every option."""

from __future__ import annotations

import argparse
import importlib
import sys

import pytest

PROGRAMS = [
    "allreduce", "attention", "decode", "experts", "gpu_all", "grammar", "mixed", "offline",
    "one_model.figures", "pooling.embed", "pooling.shared_prefixes", "prefill", "prefix", "products",
    "shape_folder", "startup",
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_complete(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    parsers: list[argparse.ArgumentParser] = []
    parse_args = argparse.ArgumentParser.parse_args

    def keep(parser: argparse.ArgumentParser, *args: object) -> argparse.Namespace:
        parsers.append(parser)
        return parse_args(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", keep)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert module.__doc__.strip() in shown
    assert not [action.dest for action in parsers[0]._actions if not action.help]
    assert "(default: None)" not in shown and "(default: False)" not in shown and "(default: [" not in shown


def test_defaults_and_choices_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["prefill", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module("prefill").main()
    shown = capsys.readouterr().out
    assert "workloads COUNTxLENGTH (default: 16x1024 4x4096 1x8192 1x32768)" in shown
    assert "--kv-cache-dtype {auto,fp8}" in shown
    assert "backend of decodes: auto, cpu, fa3" in shown
