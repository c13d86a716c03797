# SPDX-License-Identifier: Apache-2.0
"""`mizzen chat` on a pseudo-terminal: streaming, history, commands, Ctrl-C, exit."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_support import ENVIRONMENT, MODEL, Served, mizzen
from PIL import Image

pytestmark = [pytest.mark.xdist_group("cli")]
STORY = "Tell me a long story about a ship."
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")
PROMPT = ">"


class Terminal:
    """A program that runs on a pseudo-terminal, with its input and output."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**ENVIRONMENT, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        listen = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background jobs inherit an ignored SIGINT
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: os.login_tty(os.dup(0)),
        )
        signal.signal(signal.SIGINT, listen)
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, text: str, seconds: float = 60) -> str:
        """Return the output up to and including `text`; keep the rest for the next call."""
        deadline = time.monotonic() + seconds
        while text not in self._seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self._seen!r}"
            if select.select([self._master], [], [], left)[0]:
                try:
                    self._seen = ESCAPES.sub(
                        "", self._seen + os.read(self._master, 65536).decode(errors="replace")
                    )
                except OSError as error:
                    raise AssertionError(f"ended before {text!r}: {self._seen!r}") from error
        output, _, self._seen = self._seen.partition(text)
        return output + text

    def end(self) -> int:
        """Read the remaining output until the program exits; return its exit code."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self._seen += os.read(self._master, 65536).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*command: str) -> Terminal:
        opened.append(Terminal(*command))
        return opened[-1]

    yield open_terminal
    for shell in opened:
        shell.close()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_conversation_on_a_terminal(
    served: Served, answers: dict[str, str], terminal: Callable[..., Terminal]
) -> None:
    chat = terminal(*mizzen("chat", served.url, "--temperature=0"))
    chat.read_until("Chatting with demo")
    chat.read_until(PROMPT)

    chat.type("What is Mizzen?\r")
    assert flat(answers["What is Mizzen?"]) in flat(chat.read_until("OpenAI-compatible URL.\n"))
    chat.read_until(PROMPT)

    chat.type("What is a pod?\r")  # a second turn of the conversation
    chat.read_until("an address and a life.\n")
    chat.read_until(PROMPT)

    chat.type("/help\r")
    assert "/reset" in chat.read_until("stops an answer")
    chat.read_until(PROMPT)
    chat.type("/nonsense\r")
    chat.read_until("/nonsense is not a command; the commands are /image, /reset, /help, /exit")
    chat.read_until(PROMPT)
    chat.type("/reset\r")
    chat.read_until("The conversation has been forgotten.")
    chat.read_until(PROMPT)

    for _ in range(5):  # on a busy machine the answer may be complete before the key arrives
        chat.type(f"{STORY}\r")
        chat.read_until("Once there was")
        chat.type("\x03")
        stopped = chat.read_until(PROMPT)
        chat.type("/reset\r")
        chat.read_until("forgotten.")
        chat.read_until(PROMPT)
        if "[stopped]" in stopped:
            break
    assert "[stopped]" in stopped
    assert "smallest mast is raised first" not in stopped
    chat.type("What is a rank?\r")
    chat.read_until("share one copy of the model.")
    chat.read_until(PROMPT)
    chat.type("\x04")
    assert chat.end() == 0


def test_a_model_folder_is_served_while_the_shell_runs(
    answers: dict[str, str], terminal: Callable[..., Terminal]
) -> None:
    chat = terminal(*mizzen("chat", str(MODEL), "--device=cpu", "--threads=1", "--temperature=0"))
    chat.read_until("Chatting with demo")
    chat.read_until(PROMPT)
    chat.type("What is a slot?\r")
    assert flat(answers["What is a slot?"]) in flat(chat.read_until("how it samples.\n"))
    chat.read_until(PROMPT)
    chat.type("/exit\r")
    assert chat.end() == 0


def test_lines_from_a_pipe_are_answered(served: Served, answers: dict[str, str]) -> None:
    command = mizzen("chat", served.url, "--temperature=0")
    result = subprocess.run(
        command,
        input="What is a group?\n/reset\nWhat is a fence?\n",
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
    )
    forgotten = "The conversation has been forgotten."
    expected = [answers["What is a group?"], forgotten, answers["What is a fence?"]]
    assert (result.returncode, result.stdout.splitlines()) == (0, expected), result.stderr


def test_an_image_belongs_to_the_next_question(served: Served, tmp_path: Path) -> None:
    image, text = tmp_path / "a red square.png", tmp_path / "notes.txt"
    Image.new("RGB", (40, 30), "red").save(image)
    text.write_text("no image")
    result = subprocess.run(
        mizzen("chat", served.url, "--temperature=0"),
        input=f"/image {tmp_path / 'absent'}\n/image {text}\n/image\n/image {image}\nWhat is this?\n"
        "What is a fence?\n",
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
    )
    lines = result.stdout.splitlines()
    assert lines[:4] == [
        f"{tmp_path / 'absent'} cannot be read: No such file or directory",
        f"{text}: the image has an unknown format: send a JPEG, PNG, WebP or GIF file",
        "/image needs the path of a JPEG, PNG, WebP or GIF file",
        f"{image} belongs to the next question.",
    ]
    assert "the model demo reads text only" in result.stderr  # the demo model takes no images
    assert lines[-1].startswith("A fence is")  # the next question has no image


def test_serve_shows_its_progress_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    serve = terminal(*mizzen("serve", str(MODEL), "--device=cpu", "--threads=1", "--port=0"))
    serve.read_until("engine: ")
    shown = serve.read_until("/v1\n")
    assert "mizzen: serving demo on cpu; Ctrl-C stops it" in shown
    assert '"level"' not in shown
    serve.type("\x03")
    serve.read_until("mizzen: stopping")
    assert serve.end() == 0
