"""From a hub, through everything that happens on the way."""

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

from mizzen.fetch.client import _next
from mizzen.fetch.config import FetchConfig
from mizzen.fetch.errors import Corrupt, FetchError, Unreachable
from mizzen.fetch.run import Fetch
from ports import free_ports

URI = "hf://org/tiny@main"


def test_a_model_comes_whole(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any, tmp_path: Path
) -> None:
    commit = hub.push(model)
    manifest = fetch(URI, endpoint=hub.api.url)
    assert manifest.revision == commit and there() == wanted
    assert {entry.path: entry.size for entry in manifest.files} == {n: len(d) for n, d in wanted.items()}
    written = json.loads((tmp_path / "to/.mizzen.json").read_text())
    assert written["revision"] == commit and written["source"] == URI
    assert sum(hub.cdn.served.values()) == sum(len(d) for n, d in wanted.items() if n.endswith("tensors"))


def test_a_second_fetch_asks_nobody_and_a_moved_branch_changes_nothing(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any
) -> None:
    first = fetch(URI, endpoint=hub.api.url) if hub.push(model) else None
    hub.push({**model, "config.json": b"{}"})
    asked = len(hub.api.requests)
    assert fetch(URI, endpoint=hub.api.url) == first and there() == wanted
    assert len(hub.api.requests) == asked


def test_a_file_that_was_lost_is_fetched_again_and_no_other(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any, tmp_path: Path
) -> None:
    hub.push(model)
    fetch(URI, endpoint=hub.api.url)
    (tmp_path / "to/model-00002-of-00002.safetensors").unlink()
    hub.cdn.served.clear()
    fetch(URI, endpoint=hub.api.url)
    assert there() == wanted and sum(hub.cdn.served.values()) == 200 * 1024


def test_the_token_goes_to_the_hub_alone(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any, tmp_path: Path
) -> None:
    hub.push(model)
    hub.token = "hf_secret"
    with pytest.raises(FetchError, match="credentialsSecretRef"):
        fetch(URI, endpoint=hub.api.url)
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    fetch(URI, endpoint=hub.api.url, credentials=str(token))
    assert there() == wanted
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
def test_a_server_with_faults_is_outlived(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any, fault: str, values: dict[str, Any]
) -> None:
    hub.push(model)
    for name, value in values.items():
        setattr(hub.cdn.faults, name, value)
    fetch(URI, endpoint=hub.api.url, attempts=6)
    assert there() == wanted
    assert not (
        hub.cdn.faults.cuts or hub.cdn.faults.short or hub.cdn.faults.codes or hub.cdn.faults.wrong_bytes
    )


def test_bytes_before_a_cut_are_not_sent_again(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any
) -> None:
    hub.push(model)
    hub.cdn.faults.cut_after, hub.cdn.faults.cuts = 40_000, 4
    fetch(URI, endpoint=hub.api.url)
    weights = sum(len(data) for name, data in wanted.items() if name.endswith("tensors"))
    buffered = 4 * 64 * 1024  # what is on its way when a connection is cut is lost
    assert there() == wanted and sum(hub.cdn.served.values()) <= weights + buffered


def test_the_servers_word_is_final(hub: Any, fetch: Any, model: Any, there: Any, tmp_path: Path) -> None:
    hub.push(model)
    hub.promised["model-00002-of-00002.safetensors"] = "0" * 64
    with pytest.raises(Corrupt, match=r"model-00002.*twice"):
        fetch(URI, endpoint=hub.api.url)
    assert "model-00002-of-00002.safetensors" not in there()
    assert not (tmp_path / "to/.mizzen.json").exists()
    hub.promised.clear()
    fetch(URI, endpoint=hub.api.url)
    assert (tmp_path / "to/.mizzen.json").exists()


def test_a_git_file_is_checked_too(hub: Any, fetch: Any, model: Any) -> None:
    commit = hub.push(model)
    listed = dict(hub.commits[commit])
    hub.api.answer = lambda handler: (
        handler.file(b"x" * len(listed["config.json"]))
        if handler.path.endswith("/config.json")
        else hub._api(handler)
    )
    with pytest.raises(Corrupt, match=r"config\.json.*git:"):
        fetch(URI, endpoint=hub.api.url)


@pytest.mark.parametrize("codes", [[503] * 50, [429] * 50])
def test_a_server_that_never_answers_ends_it(hub: Any, fetch: Any, model: Any, codes: list[int]) -> None:
    hub.push(model)
    hub.api.faults.codes = codes
    with pytest.raises(Unreachable, match=str(codes[0])):
        fetch(URI, endpoint=hub.api.url, attempts=3)
    assert len(hub.api.requests) == 3


def test_a_range_that_is_refused_says_that_the_file_changed(hub: Any, fetch: Any, model: Any) -> None:
    hub.push(model)
    hub.cdn.faults.unsatisfiable = 1
    with pytest.raises(Corrupt, match="another file at the server"):
        fetch(URI, endpoint=hub.api.url)


@pytest.mark.parametrize("name", ["/etc/evil.json", "a\\..\\evil.json", "a//evil.json", "evil\n.json"])
def test_a_name_that_leads_elsewhere_is_refused(
    hub: Any, fetch: Any, model: Any, name: str, tmp_path: Path
) -> None:
    hub.push(model)
    hub.names["config.json"] = name
    with pytest.raises(FetchError, match="not safe"):
        fetch(URI, endpoint=hub.api.url)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("name", ["../evil.json", "a/../../evil.json", ".mizzen.json"])
def test_hidden_names_are_not_even_looked_at(
    hub: Any, fetch: Any, there: Any, model: Any, name: str, tmp_path: Path
) -> None:
    hub.push(model)
    hub.names["config.json"] = name
    fetch(URI, endpoint=hub.api.url)
    assert "config.json" not in there() and not list(tmp_path.rglob("*evil*"))


def test_a_link_in_the_folder_is_not_followed(hub: Any, fetch: Any, model: Any, tmp_path: Path) -> None:
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
        _next("https://hub.example/x", moved)


def test_too_much_is_refused_before_the_first_byte(hub: Any, fetch: Any, model: Any) -> None:
    hub.push(model)
    with pytest.raises(FetchError, match="--max-bytes 1000"):
        fetch(URI, endpoint=hub.api.url, max_bytes=1000)
    assert not hub.cdn.requests


def test_a_small_volume_is_refused_with_the_numbers(
    hub: Any, fetch: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(model)
    real = os.statvfs

    def little(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[4] = 1  # free blocks
        return os.statvfs_result(values)

    monkeypatch.setattr("os.statvfs", little)
    with pytest.raises(FetchError, match=r"bytes free, \d+ are needed: make the volume larger by \d+"):
        fetch(URI, endpoint=hub.api.url)
    assert not hub.cdn.requests


COMMAND = [sys.executable, "-m", "mizzen.cli", "fetch", URI]


def start(hub: Any, to: Path, *options: str, **more: Any) -> subprocess.Popen[str]:
    command = [*COMMAND, "--to", str(to), "--endpoint", hub.api.url, *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)


def test_a_full_disk_ends_it_with_a_way_out(hub: Any, model: Any, tmp_path: Path) -> None:
    hub.push(model)
    message = tmp_path / "message"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(hub, tmp_path / "to", "--termination-message", str(message), preexec_fn=limit)
    assert process.wait(120) == 1
    assert "make the volume larger" in message.read_text()


def test_a_killed_fetch_goes_on_where_it_was(
    hub: Any, there: Any, blob: Callable[..., bytes], tmp_path: Path
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
    hub.push({"config.json": b"moved", "model.safetensors": b"moved"})  # the branch moves on meanwhile
    hub.cdn.faults.gate.set()
    hub.cdn.settle()
    hub.cdn.served.clear()
    second = start(hub, tmp_path / "to")
    assert second.wait(120) == 0, second.stderr
    assert there() == files and sum(hub.cdn.served.values()) == size - noted
    assert json.loads((tmp_path / "to/.mizzen.json").read_text())["revision"] == commit


def test_a_stopped_fetch_ends_soon_and_keeps_what_came(hub: Any, model: Any, tmp_path: Path) -> None:
    hub.push(model)
    hub.cdn.faults.gate = threading.Event()
    message = tmp_path / "message"
    process = start(hub, tmp_path / "to", "--termination-message", str(message), "--timeout-seconds", "600")
    assert hub.cdn.faults.held.wait(120)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    hub.cdn.faults.gate.set()
    assert "kept for the next start" in message.read_text()


def test_two_fetchers_share_the_work_of_one(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any, tmp_path: Path
) -> None:
    hub.push(model)
    hub.cdn.faults.gate = threading.Event()
    results: list[Any] = []
    config = FetchConfig(endpoint=hub.api.url, connections=1)
    fetches = [Fetch(URI, tmp_path / "to", config) for _ in range(2)]
    threads = [threading.Thread(target=lambda one=one: results.append(one.run())) for one in fetches]
    threads[0].start()
    assert hub.cdn.faults.held.wait(60)
    threads[1].start()
    while fetches[1].progress.snapshot()["phase"] != "waiting":
        assert threads[1].is_alive()
    hub.cdn.faults.gate.set()
    for thread in threads:
        thread.join(120)
    assert len(results) == 2 and results[0] == results[1] and there() == wanted
    weights = sum(len(data) for name, data in wanted.items() if name.endswith("tensors"))
    assert sum(hub.cdn.served.values()) == weights


def test_a_folder_of_another_model_is_left_alone(
    hub: Any, fetch: Any, there: Any, model: Any, wanted: Any
) -> None:
    hub.push(model)
    hub.push({"config.json": b"{}"}, branch="other")
    fetch(URI, endpoint=hub.api.url)
    with pytest.raises(FetchError, match="choose another folder"):
        fetch("hf://org/tiny@other", endpoint=hub.api.url)
    assert there() == wanted


def test_pickles_come_only_when_asked_for(hub: Any, fetch: Any, there: Any, model: Any) -> None:
    hub.push(model)
    fetch(URI, endpoint=hub.api.url, include=("*.bin",))
    assert set(there()) == {"pytorch_model.bin"}


@pytest.mark.parametrize("uri", ["hf://org/none@main", "hf://org/tiny@none"])
def test_what_is_not_there_is_said(hub: Any, fetch: Any, model: Any, uri: str) -> None:
    hub.push(model)
    with pytest.raises(FetchError, match="no such model or revision"):
        fetch(uri, endpoint=hub.api.url)


def test_the_command_reports_its_result_and_progress(
    hub: Any, model: Any, wanted: Any, tmp_path: Path
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
    assert shown["totalBytes"] == sum(map(len, wanted.values())) > shown["fetchedBytes"]
    hub.cdn.faults.gate.set()
    assert process.wait(120) == 0
    result = json.loads(message.read_text())
    assert result == {"revision": commit, "bytes": shown["totalBytes"], "files": len(wanted)}
    assert "s3cret" not in (process.stderr.read() if process.stderr else "")
