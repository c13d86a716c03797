# SPDX-License-Identifier: Apache-2.0
"""Fetches from a Hugging Face hub, including server faults, interruptions and the command line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mizzen.fetch.client import _redirect_target
from mizzen.fetch.config import FetchConfig
from mizzen.fetch.errors import CorruptDownload, FetchError, ServerUnavailable
from mizzen.fetch.run import Fetch
from ports import free_ports

URI = "hf://org/tiny@main"


def test_a_model_is_fetched_completely(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, tmp_path: Path
) -> None:
    commit = hub.push(model)
    manifest = fetch(URI, endpoint=hub.api.url)
    assert manifest.revision == commit and fetched_files() == expected_files
    assert {entry.path: entry.size for entry in manifest.files} == {
        n: len(d) for n, d in expected_files.items()
    }
    written = json.loads((tmp_path / "to/.mizzen.json").read_text())
    assert written["revision"] == commit and written["source"] == URI
    assert sum(hub.cdn.served.values()) == sum(
        len(d) for n, d in expected_files.items() if n.endswith("tensors")
    )


def test_a_repository_with_gguf_files_only_is_rejected_with_advice(hub: Any, fetch: Any) -> None:
    hub.push({"model-q4.gguf": b"GGUF", "config.json": b"{}"})
    with pytest.raises(FetchError, match="has GGUF files, which are not supported, and no safetensors"):
        fetch(URI, endpoint=hub.api.url)


def test_a_second_fetch_sends_no_request_even_if_the_branch_moved(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any
) -> None:
    first = fetch(URI, endpoint=hub.api.url) if hub.push(model) else None
    hub.push({**model, "config.json": b"{}"})
    requests = len(hub.api.requests)
    assert fetch(URI, endpoint=hub.api.url) == first and fetched_files() == expected_files
    assert len(hub.api.requests) == requests


def test_only_a_deleted_file_is_fetched_again(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, tmp_path: Path
) -> None:
    hub.push(model)
    fetch(URI, endpoint=hub.api.url)
    (tmp_path / "to/model-00002-of-00002.safetensors").unlink()
    hub.cdn.served.clear()
    fetch(URI, endpoint=hub.api.url)
    assert fetched_files() == expected_files and sum(hub.cdn.served.values()) == 200 * 1024


def test_the_token_is_sent_only_to_the_hub(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, tmp_path: Path
) -> None:
    hub.push(model)
    hub.token = "hf_secret"
    with pytest.raises(FetchError, match="credentialsSecretRef"):
        fetch(URI, endpoint=hub.api.url)
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    fetch(URI, endpoint=hub.api.url, credentials=str(token))
    assert fetched_files() == expected_files
    assert hub.cdn.requests and not any("Authorization" in headers for _, _, headers in hub.cdn.requests)


@pytest.mark.parametrize(
    ("fault", "values"),
    [
        ("cuts", {"cut_after": 24_000, "cuts": 5}),
        ("short", {"short": 3}),
        ("busy", {"codes": [429, 503, 500, 502], "retry_after": "0"}),
        ("no ranges", {"no_ranges": True}),
        ("wrong bytes once", {"wrong_bytes": 1}),
    ],
)
def test_transient_server_faults_are_retried(
    hub: Any,
    fetch: Any,
    fetched_files: Any,
    model: Any,
    expected_files: Any,
    fault: str,
    values: dict[str, Any],
) -> None:
    hub.push(model)
    for name, value in values.items():
        setattr(hub.cdn.faults, name, value)
    fetch(URI, endpoint=hub.api.url, attempts=6)
    assert fetched_files() == expected_files
    assert not (
        hub.cdn.faults.cuts or hub.cdn.faults.short or hub.cdn.faults.codes or hub.cdn.faults.wrong_bytes
    )


def test_received_bytes_are_not_fetched_again_after_a_disconnect(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any
) -> None:
    hub.push(model)
    hub.cdn.faults.cut_after, hub.cdn.faults.cuts = 40_000, 4
    fetch(URI, endpoint=hub.api.url)
    weights = sum(len(data) for name, data in expected_files.items() if name.endswith("tensors"))
    buffered = 4 * 64 * 1024  # data in transit when a connection is cut is lost
    assert fetched_files() == expected_files and sum(hub.cdn.served.values()) <= weights + buffered


def test_a_file_with_a_wrong_checksum_never_gets_its_name(
    hub: Any, fetch: Any, model: Any, fetched_files: Any, tmp_path: Path
) -> None:
    hub.push(model)
    hub.advertised["model-00002-of-00002.safetensors"] = "0" * 64
    with pytest.raises(CorruptDownload, match=r"model-00002.*twice"):
        fetch(URI, endpoint=hub.api.url)
    assert "model-00002-of-00002.safetensors" not in fetched_files()
    assert not (tmp_path / "to/.mizzen.json").exists()
    hub.advertised.clear()
    fetch(URI, endpoint=hub.api.url)
    assert (tmp_path / "to/.mizzen.json").exists()


def test_git_blob_checksums_are_verified(hub: Any, fetch: Any, model: Any) -> None:
    commit = hub.push(model)
    listed = dict(hub.commits[commit])
    hub.api.answer = lambda handler: (
        handler.file(b"x" * len(listed["config.json"]))
        if handler.path.endswith("/config.json")
        else hub._api(handler)
    )
    with pytest.raises(CorruptDownload, match=r"config\.json.*git:"):
        fetch(URI, endpoint=hub.api.url)


@pytest.mark.parametrize("codes", [[503] * 50, [429] * 50])
def test_a_server_that_keeps_failing_ends_the_fetch(
    hub: Any, fetch: Any, model: Any, codes: list[int]
) -> None:
    hub.push(model)
    hub.api.faults.codes = codes
    with pytest.raises(ServerUnavailable, match=str(codes[0])):
        fetch(URI, endpoint=hub.api.url, attempts=3)
    assert len(hub.api.requests) == 3


def test_an_unreachable_server_ends_the_fetch_with_advice(fetch: Any) -> None:
    with pytest.raises(ServerUnavailable, match=r"does not answer: .*; check the network, .*HTTPS_PROXY"):
        fetch(URI, endpoint="http://127.0.0.1:9", attempts=2)


def test_a_rejected_range_is_reported_as_a_changed_file(hub: Any, fetch: Any, model: Any) -> None:
    hub.push(model)
    hub.cdn.faults.unsatisfiable = 1
    with pytest.raises(CorruptDownload, match="changed on the server"):
        fetch(URI, endpoint=hub.api.url)


@pytest.mark.parametrize("name", ["/etc/evil.json", "a\\..\\evil.json", "a//evil.json", "evil\n.json"])
def test_a_path_out_of_the_folder_is_rejected(
    hub: Any, fetch: Any, model: Any, name: str, tmp_path: Path
) -> None:
    hub.push(model)
    hub.names["config.json"] = name
    with pytest.raises(FetchError, match="not safe"):
        fetch(URI, endpoint=hub.api.url)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("name", ["../evil.json", "a/../../evil.json", ".mizzen.json"])
def test_hidden_files_are_ignored(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, name: str, tmp_path: Path
) -> None:
    hub.push(model)
    hub.names["config.json"] = name
    fetch(URI, endpoint=hub.api.url)
    assert "config.json" not in fetched_files() and not list(tmp_path.rglob("*evil*"))


def test_a_symbolic_link_in_the_folder_is_not_followed(
    hub: Any, fetch: Any, model: Any, tmp_path: Path
) -> None:
    hub.push(model)
    (tmp_path / "to").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "to/sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FetchError, match="symbolic link"):
        fetch(URI, endpoint=hub.api.url)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_unencrypted_redirect_is_not_followed() -> None:
    moved = httpx.Response(302, headers={"location": "http://cdn.example/x"})
    with pytest.raises(FetchError, match="not encrypted"):
        _redirect_target("https://hub.example/x", moved)


def test_a_model_over_max_bytes_is_rejected_before_the_first_byte(hub: Any, fetch: Any, model: Any) -> None:
    hub.push(model)
    with pytest.raises(FetchError, match="--max-bytes 1000"):
        fetch(URI, endpoint=hub.api.url, max_bytes=1000)
    assert not hub.cdn.requests


def test_a_small_volume_is_reported_with_the_missing_bytes(
    hub: Any, fetch: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(model)
    real = os.statvfs

    def little(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[4] = 1  # free blocks
        return os.statvfs_result(values)

    monkeypatch.setattr("os.statvfs", little)
    with pytest.raises(FetchError, match=r"free bytes, but \d+ are needed: make the volume larger by \d+"):
        fetch(URI, endpoint=hub.api.url)
    assert not hub.cdn.requests


COMMAND = [sys.executable, "-m", "mizzen.cli", "fetch", URI]


def start(hub: Any, to: Path, *options: str, **more: Any) -> subprocess.Popen[str]:
    command = [*COMMAND, "--to", str(to), "--endpoint", hub.api.url, *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)


def test_a_full_disk_ends_the_fetch_with_a_remedy(hub: Any, model: Any, tmp_path: Path) -> None:
    hub.push(model)
    message = tmp_path / "message"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(hub, tmp_path / "to", "--termination-message", str(message), preexec_fn=limit)
    assert process.wait(120) == 1
    assert "make the volume larger" in message.read_text()


def test_a_killed_fetch_resumes_with_the_same_revision(
    hub: Any, fetched_files: Any, blob: Callable[..., bytes], tmp_path: Path
) -> None:
    size = 24 * 1024 * 1024
    files = {"config.json": b"{}", "model.safetensors": blob(size)}
    commit = hub.push(files)
    hub.cdn.faults.gate = threading.Event()
    first = start(hub, tmp_path / "to", "--connections", "2")
    assert hub.cdn.faults.held.wait(120)
    notes = tmp_path / "to/model.safetensors.partial.done"
    deadline = threading.Event()
    while not notes.exists() or not notes.read_text():
        assert not deadline.wait(0.02) and first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    noted = max(int(line.split()[1]) for line in notes.read_text().splitlines())
    assert not (tmp_path / "to/.mizzen.json").exists() and noted >= 8 * 1024 * 1024
    hub.push({"config.json": b"moved", "model.safetensors": b"moved"})  # the branch moves during the fetch
    hub.cdn.faults.gate.set()
    hub.cdn.settle()
    hub.cdn.served.clear()
    second = start(hub, tmp_path / "to")
    assert second.wait(120) == 0, second.stderr
    assert fetched_files() == files and sum(hub.cdn.served.values()) == size - noted
    assert json.loads((tmp_path / "to/.mizzen.json").read_text())["revision"] == commit


def test_a_stopped_fetch_exits_quickly_and_keeps_its_data(hub: Any, model: Any, tmp_path: Path) -> None:
    hub.push(model)
    hub.cdn.faults.gate = threading.Event()
    message = tmp_path / "message"
    process = start(hub, tmp_path / "to", "--termination-message", str(message), "--timeout-seconds", "600")
    assert hub.cdn.faults.held.wait(120)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    hub.cdn.faults.gate.set()
    assert "kept for the next start" in message.read_text()


def test_concurrent_fetches_download_each_file_once(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, tmp_path: Path
) -> None:
    hub.push(model)
    hub.cdn.faults.gate = threading.Event()
    results: list[Any] = []
    config = FetchConfig(endpoint=hub.api.url, connections=1)
    fetches = [Fetch(URI, tmp_path / "to", config) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda fetch_process=fetch_process: results.append(fetch_process.run()))
        for fetch_process in fetches
    ]
    threads[0].start()
    assert hub.cdn.faults.held.wait(60)
    threads[1].start()
    while fetches[1].progress.snapshot()["phase"] != "waiting":
        assert threads[1].is_alive()
    hub.cdn.faults.gate.set()
    for thread in threads:
        thread.join(120)
    assert len(results) == 2 and results[0] == results[1] and fetched_files() == expected_files
    weights = sum(len(data) for name, data in expected_files.items() if name.endswith("tensors"))
    assert sum(hub.cdn.served.values()) == weights


def test_a_folder_with_another_model_is_left_unchanged(
    hub: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any
) -> None:
    hub.push(model)
    hub.push({"config.json": b"{}"}, branch="other")
    fetch(URI, endpoint=hub.api.url)
    with pytest.raises(FetchError, match="choose another folder"):
        fetch("hf://org/tiny@other", endpoint=hub.api.url)
    assert fetched_files() == expected_files


def test_pickles_are_fetched_only_if_included(hub: Any, fetch: Any, fetched_files: Any, model: Any) -> None:
    hub.push(model)
    fetch(URI, endpoint=hub.api.url, include=("*.bin",))
    assert set(fetched_files()) == {"pytorch_model.bin"}


@pytest.mark.parametrize("uri", ["hf://org/none@main", "hf://org/tiny@none"])
def test_a_missing_model_or_revision_is_reported(hub: Any, fetch: Any, model: Any, uri: str) -> None:
    hub.push(model)
    with pytest.raises(FetchError, match="no such model or revision"):
        fetch(uri, endpoint=hub.api.url)


def test_the_result_has_the_sizes_of_the_model(hub: Any, model: Any, tmp_path: Path) -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "torch_dtype": "float32",
    }
    header = b"{}"
    weights = len(header).to_bytes(8, "little") + header
    hub.push({"config.json": json.dumps(fields).encode(), "model.safetensors": weights})
    message = tmp_path / "message"
    process = start(hub, tmp_path / "to", "--termination-message", str(message))
    assert process.wait(120) == 0
    sizes = json.loads(message.read_text())
    layer = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    assert (sizes["parameters"], sizes["dtype"]) == (2 * 100 * 16 + layer + 16, "float32")


def test_the_command_reports_its_result_and_progress(
    hub: Any, model: Any, expected_files: Any, tmp_path: Path
) -> None:
    commit = hub.push(model)
    hub.cdn.faults.gate = threading.Event()
    message = tmp_path / "message"
    port = free_ports()
    options = ("--progress-port", str(port), "--termination-message", str(message))
    process = start(hub, tmp_path / "to", *options)
    assert hub.cdn.faults.held.wait(120)
    shown = httpx.get(f"http://127.0.0.1:{port}/progress", timeout=60).json()
    assert shown["phase"] == "downloading" and shown["revision"] == commit
    assert shown["totalBytes"] == sum(map(len, expected_files.values())) > shown["fetchedBytes"]
    hub.cdn.faults.gate.set()
    assert process.wait(120) == 0
    result = json.loads(message.read_text())
    assert result == {"revision": commit, "bytes": shown["totalBytes"], "files": len(expected_files)}
    assert "s3cret" not in (process.stderr.read() if process.stderr else "")
