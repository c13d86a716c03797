# SPDX-License-Identifier: Apache-2.0
"""`mizzen serve` end to end: the official client, `mizzen complete`, signals, and failing processes."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from cli_support import ENVIRONMENT, MODEL, Served, mizzen

pytestmark = [pytest.mark.xdist_group("cli")]
STORY = "Tell me a long story about a ship."


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(served: Served, text: str) -> str | None:
    answer = served.client().chat.completions.create(model="demo", messages=question(text), temperature=0)
    return answer.choices[0].message.content


def keys_folder(served: Served) -> Path:
    """Return the private folder of `serve`, which contains keys and a socket."""
    words = served.children()["engine"].cmdline()
    return Path(next(word for word in words if word.startswith("--keys=")).removeprefix("--keys="))


def gone(processes: list[psutil.Process]) -> bool:
    """Return whether all processes exit within 60 s."""
    return not psutil.wait_procs(processes, timeout=60)[1]


def test_the_official_client_gets_the_trained_answer(served: Served, answers: dict[str, str]) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["demo"]
    for text in ("What is Mizzen?", "Say hello in several languages.", "Show me a minimal InferenceService."):
        assert ask(served, text) == answers[text]


def test_a_stream_has_the_same_text_and_ends_with_usage(served: Served, answers: dict[str, str]) -> None:
    stream = served.client().chat.completions.create(
        model="demo",
        messages=question(STORY),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answers[STORY]
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens > 200


def test_complete_writes_only_the_answer(served: Served, answers: dict[str, str]) -> None:
    command = mizzen("complete", served.url, "--temperature=0")
    result = subprocess.run(
        [*command, "What is a fence?"], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, answers["What is a fence?"] + "\n", "")
    piped = subprocess.run(
        command, input="What is a rank?", capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert piped.stdout == answers["What is a rank?"] + "\n"


def test_complete_continues_raw_text(served: Served, answers: dict[str, str]) -> None:
    command = mizzen(
        "complete",
        served.url,
        "Question: What is a group?\nAnswer:",
        "--raw",
        "--max-tokens=99",
        "--temperature=0",
    )
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert result.stdout == f" {answers['What is a group?']}\n"


def test_complete_reports_the_services_error(served: Served) -> None:
    command = mizzen("complete", served.url, "Hello", "--model=other")
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("mizzen: 404: ")
    assert "other" in result.stderr


def test_complete_into_a_closed_pipe_exits_quietly(served: Served) -> None:
    words = " ".join(f"'{word}'" for word in mizzen("complete", served.url, STORY, "--temperature=0"))
    result = subprocess.run(
        ["bash", "-c", f"{words} | head -c 5"], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert result.stdout == "Once "
    assert result.stderr == ""


def test_sigterm_lets_open_streams_finish(serve: Callable[..., Served], answers: dict[str, str]) -> None:
    served = serve()
    tree = served.tree()
    folder = keys_folder(served)
    assert folder.stat().st_mode & 0o077 == 0
    stream = served.client().chat.completions.create(
        model="demo", messages=question(STORY), temperature=0, stream=True
    )
    text = next(stream).choices[0].delta.content or ""
    served.process.terminate()
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == answers[STORY]
    code, errors = served.end()
    assert code == 0, errors
    assert "no API keys are configured (--api-keys-file): the gateway serves every client" in errors
    assert gone(tree)
    assert not folder.exists()


def test_a_killed_engine_stops_serve_with_the_reason(serve: Callable[..., Served]) -> None:
    served = serve()
    tree = served.tree()
    stream = served.client().chat.completions.create(
        model="demo", messages=question(STORY), temperature=0, stream=True
    )
    next(stream)
    served.children()["engine"].kill()
    with pytest.raises(openai.APIError):
        list(stream)
    code, errors = served.end()
    assert code == 128 + signal.SIGKILL
    assert "the engine was killed by SIGKILL" in errors
    assert gone(tree)


def test_a_lost_engine_delays_no_client(serve: Callable[..., Served]) -> None:
    """Clients of a lost engine get an error within seconds, after `serve` has printed the reason."""
    served = serve("--tensor=2", "--kv-cache-tokens=8192")
    client, ends = served.client(), []

    def wait() -> None:
        with pytest.raises(openai.APIStatusError) as error:
            client.chat.completions.create(
                model="demo", messages=question(STORY), max_tokens=2000, extra_body={"ignore_eos": True}
            )
        ends.append((time.monotonic(), error.value.status_code))

    waits = threading.Thread(target=wait)
    waits.start()
    stream = client.chat.completions.create(
        model="demo", messages=question(STORY), extra_body={"ignore_eos": True}, stream=True
    )
    next(stream)
    (rank,) = (process for process in served.tree() if "mizzen.server.ranks.follower" in process.cmdline())
    began = time.monotonic()
    rank.kill()
    with pytest.raises(openai.APIError):
        list(stream)
    waits.join(60)
    code, errors = served.end()
    assert code == 1
    assert time.monotonic() - began < 15
    assert ends[0][1] == 503
    lines = errors.splitlines()
    reason = f"mizzen: the engine exited with code 1: rank_died: rank 1 (process {rank.pid}) was killed by"
    first, last = (index for index, line in enumerate(lines) if line.startswith(reason))
    assert lines[first].endswith("; open requests fail")
    assert last == len(lines) - 1


def test_a_dead_rank_is_reported(serve: Callable[..., Served]) -> None:
    served = serve()
    tree = served.tree()
    for rank in served.children()["engine"].children():
        rank.kill()
    code, errors = served.end()
    assert code == 1
    assert "mizzen: the engine exited with code 1: rank_died: " in errors
    assert gone(tree)


def test_killing_serve_leaves_no_process(serve: Callable[..., Served]) -> None:
    served = serve()
    tree, folder = served.tree(), keys_folder(served)
    served.process.kill()
    served.end()
    assert gone(tree)
    shutil.rmtree(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killing_chat_leaves_no_process(number: signal.Signals) -> None:
    command = mizzen("chat", str(MODEL), "--device=cpu", "--threads=1", "--temperature=0")
    chat = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert chat.stdin
    assert chat.stdout
    chat.stdin.write("Say yes.\n")
    chat.stdin.flush()
    assert chat.stdout.readline() == "Yes.\n"
    tree = psutil.Process(chat.pid).children(recursive=True)
    assert len(tree) >= 4
    chat.send_signal(number)
    chat.communicate(timeout=60)
    assert gone(tree)


def test_a_second_signal_exits_immediately(serve: Callable[..., Served]) -> None:
    served = serve()
    tree = served.tree()
    stream = served.client().chat.completions.create(
        model="demo", messages=question(STORY), temperature=2, extra_body={"ignore_eos": True}, stream=True
    )
    next(stream)
    reader = threading.Thread(target=read_to_the_end, args=(stream,))
    reader.start()
    served.process.terminate()
    assert served.process.stderr
    for line in served.process.stderr:  # wait for the first signal, because pending signals are merged
        if "another signal stops at once" in line:
            break
    served.process.terminate()
    served.end()  # without the second signal, the stream would last longer than this wait
    reader.join(60)
    assert gone(tree)


def read_to_the_end(stream: openai.Stream[object]) -> None:
    """Read a stream until it ends or fails."""
    with contextlib.suppress(openai.APIError, httpx.HTTPError):
        for _ in stream:
            pass


def test_an_unloadable_model_stops_serve_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["UnheardOfForCausalLM"]}))
    command = mizzen("serve", str(broken), "--device=cpu", "--threads=1", "--port=0")
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert result.returncode == 2
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: Invalid value: architectures ['UnheardOfForCausalLM'] is not supported")
    assert "or a model whose architectures list one of" in last
