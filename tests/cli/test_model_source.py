# SPDX-License-Identifier: Apache-2.0
"""Models that `serve` fetches, the device that it chooses, and options of other servers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import typer
from cli_support import ENVIRONMENT, MODEL, mizzen
from typer.testing import CliRunner

import model_servers
from mizzen.cli import app
from mizzen.commands import serve
from mizzen.commands.model_source import RemoteModel, find_model
from mizzen.commands.options import settings
from mizzen.commands.progress import PlainProgress
from mizzen.commands.serve import choose_device, serve_settings
from mizzen.common.foreign_options import FOREIGN_BY_NAME
from mizzen.common.options import flag
from mizzen.fetch.config import FetchConfig
from mizzen.fetch.environment import read_hub_token, use_hub_endpoint
from mizzen.fetch.errors import FetchError
from mizzen.server.config import EngineConfig
from mizzen.server.gpus import GpuSearch, check_gpus

pytestmark = [pytest.mark.xdist_group("cli")]
TOKEN = "hf_test"


@pytest.fixture
def hub() -> Iterator[model_servers.Hub]:
    """A hub with the demo model as org/tiny, which requires a token."""
    server = model_servers.Hub()
    server.push({path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()})
    server.token = TOKEN
    yield server
    server.close()


def environment(hub: model_servers.Hub, cache: Path, token: str = TOKEN) -> dict[str, str]:
    return {**ENVIRONMENT, "HF_ENDPOINT": hub.api.url, "HF_TOKEN": token, "MIZZEN_CACHE_DIR": str(cache)}


def test_serve_fetches_a_hub_model_and_serves_it_by_its_name(
    hub: model_servers.Hub, answers: dict[str, str], tmp_path: Path
) -> None:
    command = mizzen("serve", "org/tiny", "--threads=1", "--port=0", "--device=cpu")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(hub, tmp_path),
    ) as process:
        assert process.stdout
        url = process.stdout.readline().strip()
        try:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
            answer = client.chat.completions.create(
                model="org/tiny", messages=[{"role": "user", "content": "What is a slot?"}], temperature=0
            )
        finally:
            process.terminate()
            errors = process.communicate(timeout=60)[1]
    assert answer.choices[0].message.content == answers["What is a slot?"]
    folder = tmp_path / "models/hf/org/tiny@main"
    assert f"mizzen: hf://org/tiny is in {folder}" in errors.splitlines()
    assert (folder / ".mizzen.json").is_file()


def run_serve(*words: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        mizzen("serve", *words, "--device=cpu"), capture_output=True, text=True, env=variables, timeout=120
    )


def test_a_fetch_that_fails_says_why(hub: model_servers.Hub, tmp_path: Path) -> None:
    result = run_serve("org/tiny", variables=environment(hub, tmp_path, token="wrong"))
    assert result.returncode == 1
    assert "hf://org/tiny@main: access denied (401)" in result.stderr.splitlines()[-1]
    assert "HF_TOKEN" in result.stderr
    result = run_serve("org/other", variables=environment(hub, tmp_path))
    assert result.returncode == 1
    assert "the hub has no such model or revision" in result.stderr


def test_a_port_in_use_is_reported_before_the_download(hub: model_servers.Hub, tmp_path: Path) -> None:
    port = hub.api.server_address[1]
    result = run_serve("org/tiny", f"--port={port}", variables=environment(hub, tmp_path))
    assert result.returncode == 2
    assert "choose another port with --port" in " ".join(result.stderr.split())
    assert not hub.api.requests


@pytest.mark.parametrize(
    ("text", "uri", "name", "folder"),
    [
        ("Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "hf/Qwen/Qwen3-0.6B@main"),
        ("Qwen/Qwen3-0.6B@a/b", "hf://Qwen/Qwen3-0.6B@a/b", "Qwen/Qwen3-0.6B", "hf/Qwen/Qwen3-0.6B@a%2Fb"),
        ("hf://gpt2", "hf://gpt2", "gpt2", "hf/gpt2@main"),
        ("s3://bucket/models/m1", "s3://bucket/models/m1", "m1", "s3%3A%2F%2Fbucket%2Fmodels%2Fm1"),
        ("oci://reg/org/m:v1", "oci://reg/org/m:v1", "m", "oci%3A%2F%2Freg%2Forg%2Fm%3Av1"),
    ],
)
def test_a_remote_model_has_a_folder_and_a_name(
    text: str, uri: str, name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path))
    assert find_model(text) == RemoteModel(uri, name, tmp_path / "models" / folder)


def test_a_folder_is_preferred_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/tiny").mkdir(parents=True)
    (tmp_path / "org/tiny/config.json").touch()
    assert find_model("org/tiny") == Path("org/tiny")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/tiny2", "hf://org/tiny2"),
        ("nowhere", "such as Qwen/Qwen3-0.6B"),
        ("/no/such/folder", "is not a folder"),
        ("org/empty", "has no config.json"),
        ("org/gguf", "GGUF format, which is not supported"),
        ("org/gguf/model.gguf", "GGUF format, which is not supported"),
        ("org/gguf/notes.txt", "is not a folder"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "hf://Qwen/Qwen3-0.6B"),
        ("s3://B", "is not a source"),
    ],
)
def test_a_text_that_names_no_model_is_rejected_with_advice(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/empty").mkdir(parents=True)
    (tmp_path / "org/gguf").mkdir()
    for name in ("model.gguf", "notes.txt"):
        (tmp_path / "org/gguf" / name).touch()
    with pytest.raises(typer.BadParameter) as error:
        find_model(text)
    assert expected in str(error.value)


def test_the_token_is_sent_only_to_the_hub_of_the_environment() -> None:
    variables = {"HF_ENDPOINT": "https://hub.example", "HF_TOKEN": "t"}
    config = use_hub_endpoint(FetchConfig(), variables)
    assert (config.endpoint, read_hub_token(config, variables)) == ("https://hub.example", "t")
    assert read_hub_token(use_hub_endpoint(FetchConfig(), {"HF_TOKEN": "t"}), {"HF_TOKEN": "t"}) == "t"
    other = use_hub_endpoint(FetchConfig(endpoint="https://other.example"), variables)
    assert (other.endpoint, read_hub_token(other, variables)) == ("https://other.example", "")
    with pytest.raises(FetchError, match="HF_ENDPOINT is invalid"):
        use_hub_endpoint(FetchConfig(), {"HF_ENDPOINT": "hub"})


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")],
)
def test_the_device_is_cuda_if_there_is_a_gpu(
    device: str, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mizzen.server.gpus.find_gpus", lambda: GpuSearch(gpus, "" if gpus else "no driver"))
    assert choose_device(device, 1, PlainProgress()) == chosen
    slow = "no GPU found (no driver): --device auto chooses cpu, which is slow"
    assert (slow in capsys.readouterr().err) == (device == "auto" and not gpus)


def test_too_few_gpus_are_reported() -> None:
    with pytest.raises(ValueError, match="--device cuda finds no GPU here \\(no driver\\): use --device cpu"):
        check_gpus(1, GpuSearch(0, "no driver"))
    with pytest.raises(ValueError, match="--tensor 4 needs as many GPUs, but this machine has 2"):
        check_gpus(4, GpuSearch(2))


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_a_missing_gpu_is_reported_without_importing_torch(command: str) -> None:
    script = (
        "import sys\n"
        "from mizzen.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules)\n"
    )
    model = [str(MODEL)] if command == "serve" else [f"--model={MODEL}"]
    result = subprocess.run(
        [sys.executable, "-c", script, command, *model, "--device=cuda"],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    if command == "engine" and result.returncode != 2:
        pytest.skip("this machine has a driver; only ranks find out that it offers no GPU")
    assert result.returncode == 2
    assert result.stdout.endswith("False\n")
    assert "--device cuda finds no GPU here" in result.stderr + result.stdout


def test_options_of_other_servers_are_translated() -> None:
    for words, expected in (
        (("serve", str(MODEL), "--tensor-parallel-size", "2"), "--tensor N"),
        (("serve", str(MODEL), "--max-model-len=4096"), "--context-length N"),
        (("serve", "--model-path", str(MODEL)), "mizzen serve Qwen/Qwen3-0.6B"),
        (("gateway", "--tool-call-parser=hermes"), "--tool-parser NAME"),
        (("serve", str(MODEL), "--speculative-config.method=ngram"), "speculative decoding is not supported"),
        (("engine", "--model", str(MODEL), "--mem-fraction-static=0.8"), "--memory-fraction X"),
    ):
        result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert expected in result.stderr


def test_every_translation_names_existing_options() -> None:
    own = {flag(setting.name) for setting in serve_settings()}
    known = own | {flag(setting.name) for setting in settings(EngineConfig)}
    assert not own & set(FOREIGN_BY_NAME)
    for name, entry in FOREIGN_BY_NAME.items():
        assert entry.instead
        for option in re.findall(r"--[a-z-]+", entry.instead):
            assert option in known, f"{name}: {entry.instead}"


def test_options_of_expert_parallelism_lead_to_the_number_of_groups() -> None:
    for name in ("--enable-expert-parallel", "--ep-size"):
        assert FOREIGN_BY_NAME[name].instead.startswith("--expert N")


def test_serve_reports_a_device_that_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("mizzen.server.gpus.find_gpus", lambda: GpuSearch(0, "no driver"))
    monkeypatch.setattr(serve, "run_processes", lambda config, _: seen.append(config.engine.device) or 0)
    result = CliRunner().invoke(app, ["serve", str(MODEL), "--port=0"])
    assert (result.exit_code, seen) == (0, ["cpu"])
    assert "chooses cpu" in result.stderr
