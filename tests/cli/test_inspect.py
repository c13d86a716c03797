# SPDX-License-Identifier: Apache-2.0
"""`mizzen inspect`: its exit codes, its JSON, and models on a hub, from which it fetches only config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import MODEL
from typer.testing import CliRunner, Result

import model_servers
from mizzen.cli import app

DEMO = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[model_servers.Hub]:
    """A hub whose repository org/tiny is empty, and an empty cache of models."""
    server = model_servers.Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.api.url)
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path / "cache"))
    yield server
    server.close()


def inspect(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_a_folder_that_is_served() -> None:
    result = inspect(MODEL, "--gpu", "h100")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{MODEL}: served by the native implementation"
    assert "  architecture  LlamaForCausalLM (Llama)" in lines
    assert "on 79.1 GiB (h100), for each GPU:" in lines


def test_json_has_all_numbers() -> None:
    result = inspect(MODEL / "config.json", "--json", "--gpu", "80", "--tensor", "2", "--context", "1000")
    values = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (values["served"], values["implementation"], values["parameters"]) == (True, "native", 1451712)
    assert [size["tensor"] for size in values["tensorSizes"]] == [2]
    (fit,) = values["memoryFits"]
    assert (fit["tensor"], fit["longestRequest"], fit["fits"]) == (2, 1000, True)


@pytest.mark.parametrize(
    "arguments", [("--gpu", "0.3"), ("--tensor", "3"), ("--gpu", "1", "--prefill-chunk-tokens", "400000")]
)
def test_a_model_that_does_not_fit(arguments: tuple[str, ...]) -> None:
    result = inspect(MODEL, *arguments)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout or "not 3: num_attention_heads" in result.stdout


def test_a_model_that_is_not_served(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["MambaForCausalLM"], "state_size": 16}))
    result = inspect(tmp_path)
    assert result.exit_code == 1
    assert "state_size describes layers with a recurrent state instead of attention" in result.stdout
    assert json.loads(inspect(config, "--json").stdout)["served"] is False
    file = tmp_path / "model.gguf"
    file.touch()
    assert "model.gguf' is in the GGUF format" in inspect(file).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((MODEL, "--gpu", "voodoo2"), "--gpu must be a size in GiB"),
        ((MODEL, "--context", "4096"), "--context-length 4096 exceeds"),
        ((MODEL, "--kv-cache-dtype", "fp8", "--dtype", "float32"), "--kv-cache-dtype fp8 needs"),
        ((MODEL / "nothing",), "is not a folder"),
        ((MODEL.parent,), "has no config.json"),
        ((MODEL / "tokenizer_config.txt",), "is not a folder"),
    ],
)
def test_wrong_options_are_explained(
    arguments: tuple[str | Path, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    result = inspect(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_only_the_config_of_a_hub_model_is_fetched(hub: model_servers.Hub, tmp_path: Path) -> None:
    hub.push(DEMO)
    result = inspect("org/tiny", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    size = sum(len(body) for name, body in DEMO.items() if name.endswith(".safetensors"))
    assert (values["model"], values["served"], values["fileBytes"]) == ("hf://org/tiny", True, size)
    fetched = [path for _, path, _ in hub.api.requests if "/resolve/" in path]
    assert [path.rpartition("/")[2] for path in fetched] == ["config.json"]
    assert not (tmp_path / "cache").exists()


def test_a_hub_model_with_gguf_files_only_is_not_served(hub: model_servers.Hub) -> None:
    hub.push({"config.json": DEMO["config.json"], "tiny.Q4_K_M.gguf": b"GGUF"})
    result = inspect("org/tiny")
    assert result.exit_code == 1
    assert "has GGUF files, which are not supported, and no safetensors" in result.stdout


def test_a_hub_model_that_does_not_exist(hub: model_servers.Hub) -> None:
    result = inspect("org/other")
    assert result.exit_code == 2
    assert "org/other" in result.stderr


def test_a_model_in_the_cache_needs_no_hub(hub: model_servers.Hub, tmp_path: Path) -> None:
    folder = tmp_path / "cache/models/hf/org/tiny@main"
    folder.mkdir(parents=True)
    for name, body in {**DEMO, ".mizzen.json": b"{}"}.items():
        (folder / name).write_bytes(body)
    result = inspect("org/tiny", "--json")
    assert json.loads(result.stdout)["model"] == str(folder)
    assert not hub.api.requests
