# SPDX-License-Identifier: Apache-2.0
"""Contracts of the worker: metrics, command lines, exit codes, environment variables and log fields."""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from golden_files import check, load
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner
from worker_source import ROOT, calls, literals, log_fields

from mizzen.cli import app
from mizzen.commands import complete
from mizzen.common.json_log import JsonLines, set_up_logging
from mizzen.common.options import flag
from mizzen.engine.grammar import compile_sandbox_worker
from mizzen.gateway.gateway import ENGINE_STATES
from mizzen.gateway.telemetry.access_log import AccessLogLine
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.telemetry.request_record import RequestRecord
from mizzen.server import exit_reason, simulate
from mizzen.server.config import EngineConfig
from mizzen.server.metric_catalogue import Phase
from mizzen.server.metrics import STATES, EngineView, build_registry
from mizzen.server.ranks import follower, leader
from mizzen.server.status_block import StatusReader, create_status_blocks
from mizzen.wire.client.stream import StreamLost


def families(collected: Any) -> dict[str, Any]:
    """Return the type and samples of each metric family, with the values of each label except `version`."""
    result = {}
    for family in collected:
        samples: dict[str, dict[str, set[str]]] = {}
        for sample in family.samples:
            labels = samples.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
        result[family.name] = {
            "type": family.type,
            "samples": {
                name: {label: sorted(values) for label, values in labels.items() if label != "version"}
                for name, labels in samples.items()
            },
        }
    return result


def test_metrics_of_the_engine_are_unchanged() -> None:
    status = StatusReader(create_status_blocks(1), 0).read()
    status.values[:] = type(status.values)("d", [1.0] * len(status.values))
    view = EngineView(snapshot=status, state="serving", failure_kind="watchdog", uptime_seconds=1.0)
    text = generate_latest(build_registry("demo", lambda: view, 16)).decode()
    shown = families(text_string_to_metric_families(text))
    assert any(name.startswith("sglang:") for name in shown)
    assert any(name.startswith("vllm:") for name in shown)
    check("worker_engine_metrics", shown)


def labelled(metric: Any) -> Any:
    return {"type": metric._type, "labels": list(metric._labelnames)}


def test_metrics_of_the_gateway_are_unchanged() -> None:
    metrics = Metrics(lambda: ("demo",))
    record = RequestRecord(request_id="r", method="POST", path="/v1/completions")
    record.model, record.status, record.ended, record.error = "demo", 429, record.began + 1.0, "some_cause"
    record.first_token = record.began + 0.5
    metrics.count_request(record, "/v1/completions")
    shown = families(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    declared = {
        metric._name: labelled(metric) for metric in vars(metrics).values() if hasattr(metric, "_labelnames")
    }
    own = {name: family for name, family in shown.items() if name.startswith("mizzen_")}
    causes = {arguments[0] for _, arguments, _ in calls(StreamLost.__name__) if arguments and arguments[0]}
    check("worker_gateway_metrics", {"declared": declared, "shown": own, "causes of losses": sorted(causes)})


def described(name: str, parameter: inspect.Parameter) -> dict[str, Any]:
    """Return all attributes of a command's option or argument except its help text."""
    kind, info, default = parameter.annotation, parameter.default, parameter.default
    for extra in typing.get_args(kind)[1:] if hasattr(kind, "__metadata__") else ():
        kind, info = typing.get_args(kind)[0], extra
    names = list(info.param_decls or ())
    if info is parameter.default:
        default = info.default
    elif isinstance(
        info.default, str
    ):  # with `Annotated`, the first option name takes the position of the default
        names = [info.default, *names]
    required = default in (..., inspect.Parameter.empty)
    return {
        "name": name,
        "argument": type(info).__name__ == "ArgumentInfo",
        "names": names,
        "type": kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", ""),
        "default": None if required else plain(default),
        "required": required,
        "metavar": info.metavar,
        "bounds": [info.min, info.max],
        "variable": info.envvar,
    }


def plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | list) else str(value)


def test_options_of_all_commands_are_unchanged() -> None:
    callback = app.registered_callback
    assert callback is not None
    functions = {"": callback.callback, **{info.name: info.callback for info in app.registered_commands}}
    options_by_command = {}
    for name, function in functions.items():
        assert function is not None
        parameters = inspect.signature(function, eval_str=True).parameters
        options_by_command[f"mizzen {name}".strip()] = [described(*item) for item in parameters.items()]
    check("worker_commands", options_by_command)


def test_help_names_every_option_of_the_golden_file() -> None:
    golden = load("worker_commands")
    for command, options in golden.items():
        words = [*command.split()[1:], "--help"]
        shown = set(re.findall(r"--[a-z][a-z0-9-]*", CliRunner().invoke(app, words).output))
        long = {part for option in options for name in option["names"] for part in name.split("/")}
        long |= {flag(option["name"]) for option in options if not option["names"] and not option["argument"]}
        assert {name for name in long if name.startswith("--")} <= shown, command


class Captured(Exception):
    """Raised instead of parsing the command line."""


PROGRAMS: dict[str, Callable[[], object]] = {
    "rank": lambda: leader.main(EngineConfig, leader.import_engine),
    "follower": follower.main,
    "simulate": lambda: simulate.parse_config([]),
    "grammar sandbox": compile_sandbox_worker.main,
}


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> list[argparse.ArgumentParser]:
    captured: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        captured.append(self)
        raise Captured

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    return captured


def test_options_of_internal_programs_are_unchanged(parsers: list[argparse.ArgumentParser]) -> None:
    options_by_program = {}
    for name, program in PROGRAMS.items():
        with pytest.raises(Captured):
            program()
        options_by_program[name] = [
            {
                "names": action.option_strings or [action.dest],
                "type": action.type.__name__ if action.type in (int, float, str, bool) else None,
                "default": plain(action.default),
                "required": action.required,
                "metavar": action.metavar,
                "choices": None if action.choices is None else list(action.choices),
            }
            for action in parsers.pop()._actions
        ]
    check("worker_programs", options_by_program)


def test_exit_codes_and_exit_kinds_are_unchanged() -> None:
    kinds = set()
    for _, arguments, keywords in calls(exit_reason.ExitReason.__name__):
        kinds |= {text for text in [*arguments[1:2], keywords.get("kind")] if isinstance(text, str)}
    check(
        "worker_ends",
        {
            "wrong configuration": [exit_reason.CONFIGURATION_EXIT_CODE, exit_reason.MISCONFIGURED],
            "failed, unreachable, interrupted": [complete.FAILED, complete.UNREACHABLE, complete.INTERRUPTED],
            "kinds": sorted(kinds - {""}),
            "states of an engine": list(STATES),
            "states of an engine in the gateway": list(ENGINE_STATES),
            "phases": {phase.name: int(phase) for phase in Phase},
        },
    )


def test_environment_variables_are_unchanged() -> None:
    prefixes = "MIZZEN|OTEL|KUBE|POD|CUDA|FLASHINFER|TRITON|XDG|HF|AWS|TOKENIZERS|NCCL"
    check(
        "worker_variables",
        {
            "worker": literals(rf"({prefixes})(_[A-Z0-9]+)*"),
            "operator, local clusters, benchmarks and scripts": sorted(
                {
                    name
                    for folder in ("operator", "benchmarks", "scripts")
                    for name in literals(r"MIZZEN(_[A-Z0-9]+)+_?", ROOT / folder)
                }
            ),
        },
    )


def test_log_fields_are_unchanged() -> None:
    class Given:
        created, msecs, levelname, exc_info, fields = 0.0, 0, "INFO", None, {}

        def getMessage(self) -> str:
            return "event"

    fixed = {key for _, _, keywords in calls(set_up_logging.__name__) for key in keywords}
    check(
        "worker_logs",
        {
            "every line": list(msgspec.json.decode(JsonLines().format(Given()))),  # type: ignore[arg-type]
            "of a process": sorted(fixed),
            "fields": log_fields(),
            "access log": [field.encode_name for field in msgspec.structs.fields(AccessLogLine)],
        },
    )
