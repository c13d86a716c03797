# SPDX-License-Identifier: Apache-2.0
"""Help, shell completion, and error messages for invalid options."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mizzen
from mizzen.cli import app
from mizzen.commands.options import arguments, settings
from mizzen.commands.serve import reserve_port
from mizzen.common.options import flag
from mizzen.gateway.config import GatewayConfig
from mizzen.server.config import EngineConfig

MODEL = str(Path(__file__).parents[2] / "models/demo")


def run(*words: str, stdin: str = "") -> Any:
    return CliRunner().invoke(app, list(words), input=stdin, env={"COLUMNS": "100"})


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "engine", "gateway"])
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.output
    assert command in run("--help").output


@pytest.mark.parametrize(("command", "config"), [("engine", EngineConfig), ("gateway", GatewayConfig)])
def test_every_field_is_an_option_with_its_help(command: str, config: type) -> None:
    text = re.sub(r"-\n\s+", "-", run(command, "--help").output)  # lines are also broken after hyphens
    words = " ".join(text.split())
    for setting in settings(config):
        assert f"{flag(setting.name)} " in words
        assert setting.help in words


def test_serve_has_an_option_for_every_field_it_does_not_set() -> None:
    shown = run("serve", "--help").output
    hidden = {
        *("model", "wire_bind", "keys", "engine_id", "revision", "termination_message", "http_host"),
        *("engine", "service", "namespace", "admin_host", "admin_token_file", "suspended"),
        *("services_file", "services_config_map", "access_log"),
    }
    for config in (EngineConfig, GatewayConfig):
        for setting in settings(config):
            assert (f"{flag(setting.name)} " in shown) == (setting.name not in hidden), setting.name


def test_the_version_is_printed() -> None:
    assert run("--version").output == f"mizzen {mizzen.__version__}\n"


def test_the_shell_completes_commands() -> None:
    environment = {
        **os.environ,
        "_MIZZEN_COMPLETE": "complete_bash",
        "COMP_WORDS": "mizzen ser",
        "COMP_CWORD": "1",
    }
    program = Path(sys.executable).with_name("mizzen")
    result = subprocess.run(
        [program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.split() == ["serve"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("chat_template.jinja", "{% if %}", "the default chat template, line 1"),
    ],
)
def test_unreadable_tokenizer_files_are_reported_before_startup(
    name: str, content: str | None, reason: str, tmp_path: Path
) -> None:
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    result = run("serve", str(tmp_path))
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serve", MODEL, "--prot=1"), ("--prot", "--port")),
        (("srve", MODEL), ("srve", "serve")),
        (("serve", MODEL, "--device=gpu"), ("--device", "gpu", "cuda", "cpu")),
        (("serve", MODEL, "--page-size=0"), ("--page-size", "1")),
        (("serve", MODEL, "--page-size=many"), ("--page-size", "integer")),
        (("serve", MODEL, "--memory-fraction=1.5"), ("--memory-fraction", "0.99")),
        (("serve", MODEL, "--tensor=3"), ("--tensor", "3")),
        (("serve", "nowhere"), ("nowhere", "config.json")),
        (("serve", str(Path(__file__).parent)), ("no config.json",)),
        (("serve", MODEL, "--host=192.0.2.1"), ("192.0.2.1", "cannot listen")),
        (("serve",), ("model",)),
        (("engine",), ("--model",)),
        (("gateway",), ("--served-name",)),
        (("gateway", "--served-name=m", "--max-attempts=11"), ("--max-attempts", "10")),
        (("complete", "nowhere", "Hello"), ("nowhere", "URL", "config.json")),
        (("complete", "http://127.0.0.1:1", "Hello", "--device=cpu"), ("--device", "model folder")),
        (("complete", MODEL, "Hello", "--raw", "--system=x"), ("--raw", "--system")),
        (("complete", MODEL, "  "), ("empty",)),
        (("complete", MODEL, "Hello", "--temperature=3"), ("--temperature", "2")),
        (("chat", "nowhere"), ("nowhere", "URL", "config.json")),
    ],
)
def test_an_invalid_option_is_reported_with_the_allowed_values(
    words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    result = run(*words)
    assert result.exit_code == 2
    for text in expected:
        assert text in result.stderr
    assert "Traceback" not in result.output


def test_a_reserved_port_is_not_given_out_twice() -> None:
    with contextlib.ExitStack() as reserved:
        port = reserve_port(reserved, "127.0.0.1", 0)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("option", ["--port", "--http-port", "--admin-port"])
def test_a_port_in_use_is_reported_with_the_option_to_change_it(option: str) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        result = run("serve", MODEL, f"{option}={port}")
    assert result.exit_code == 2
    message = " ".join(result.stderr.replace("│", " ").split())
    assert f"port {port}" in message
    assert f"choose another port with {option}," in message


def test_an_unreachable_url_has_its_own_exit_code() -> None:
    for command, stdin in (("complete", ""), ("chat", "Hello\n")):
        words = [command, "http://127.0.0.1:1/v1", *(["Hello"] if command == "complete" else [])]
        result = run(*words, stdin=stdin)
        assert result.exit_code == 3
        assert "no server answers at http://127.0.0.1:1/v1" in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(model="-m", context_length=5, max_step_milliseconds=2.5, check_integrity=True),
        EngineConfig(model="m", kv_cache_tokens=None, served_name="a b", keys="/k=1"),
        GatewayConfig(served_name="m", alias=("a", "b"), engine=("tcp://127.0.0.1:1",), suspended=True),
    ],
)
def test_a_configuration_survives_the_command_line(config: Any) -> None:
    import typer.main

    name = "engine" if isinstance(config, EngineConfig) else "gateway"
    group: Any = typer.main.get_command(app)
    with group.commands[name].make_context(name, arguments(config)) as context:
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in context.params.items()}
    assert type(config)(**values) == config
    assert dataclasses.asdict(type(config)(**values)) == dataclasses.asdict(config)
