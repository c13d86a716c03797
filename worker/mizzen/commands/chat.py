# SPDX-License-Identifier: Apache-2.0
"""`mizzen chat`: a conversation with a model on the terminal."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mizzen.commands import options
from mizzen.commands import target as targets
from mizzen.commands.serve import SERVE_EXTRAS
from mizzen.images.header import read_header
from mizzen.images.types import InvalidImage

if TYPE_CHECKING:
    from mizzen.commands.client import ApiClient, GenerationOptions

HELP = """\
/image PATH    add an image to the next question
/reset         forget the conversation
/help          show the commands
/exit          leave, as with Ctrl-D
Ctrl-C         stops an answer"""
COMMANDS = ("/image", "/reset", "/help", "/exit")


class Conversation:
    """Messages of a conversation, and the service and options that generate the next answer."""

    def __init__(self, client: ApiClient, generation_options: GenerationOptions, system: str) -> None:
        self._client, self._generation, self._system = client, generation_options, system
        self.messages: list[dict[str, Any]] = []
        self._images: list[dict[str, Any]] = []
        """Images of the next question, as parts of its message."""
        self.reset()

    def reset(self) -> None:
        """Drop all images, and all messages except the system message."""
        self._images = []
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def add_image(self, path: str) -> None:
        """Read the file of an image for the next question.

        Raises:
            OSError: the file cannot be read.
            InvalidImage: the file is not an image.
        """
        self._images.append(image_part(Path(path).expanduser().read_bytes()))

    def send_question(self, text: str, show: Callable[[str], None]) -> None:
        """Send a question, and call `show` with each piece of the streamed answer.

        If Ctrl-C stops an answer, the conversation keeps the part that was received. If the request fails, it
        keeps neither the question with its images nor the answer.

        Raises:
            ServiceError: the service rejected the request or failed during the answer.
            ServiceUnreachable: no server answers at the URL.
        """
        images, self._images = self._images, []
        question: dict[str, Any] = {"role": "user", "content": text}
        if images:
            question["content"] = [*images, {"type": "text", "text": text}]
        pieces: list[str] = []
        stream = self._client.chat([*self.messages, question], self._generation)
        try:
            for piece in stream:
                pieces.append(piece)
                show(piece)
        except KeyboardInterrupt:
            show(" [stopped]")
        finally:
            stream.close()  # type: ignore[attr-defined] # closes the connection, which ends the request
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def image_part(content: bytes) -> dict[str, Any]:
    """Return an image file as a part of a message, in OpenAI's format.

    Raises:
        InvalidImage: the file is not an image.
    """
    url = f"data:image/{read_header(content).format};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _line_reader() -> Callable[[], str]:
    """Return a function that reads the next line of input, with a line editor if the input is a terminal."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory

    commands = WordCompleter(list(COMMANDS), sentence=True)
    session: PromptSession[str] = PromptSession(
        "> ", history=InMemoryHistory(), completer=commands, complete_while_typing=False
    )
    return session.prompt


def _write_piece(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _run_conversation(conversation: Conversation, read: Callable[[], str]) -> None:
    """Answer the questions and run the commands that the user enters, until /exit or the end of input."""
    from mizzen.commands.client import ServiceError, ServiceUnreachable

    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
            print("The conversation has been forgotten.")
        elif line == "/help":
            print(HELP)
        elif line.split(maxsplit=1)[:1] == ["/image"]:
            _add_image(conversation, line.removeprefix("/image").strip())
        elif line.startswith("/"):
            print(f"{line.split()[0]} is not a command; the commands are {', '.join(COMMANDS)}")
        elif line:
            try:
                conversation.send_question(line, _write_piece)
            except (ServiceError, ServiceUnreachable) as error:
                print(f"\nmizzen: {error}", file=sys.stderr)
            else:
                print()


def _add_image(conversation: Conversation, path: str) -> None:
    """Add an image to the next question, or say why it cannot be read."""
    if not path:
        print("/image needs the path of a JPEG, PNG, WebP or GIF file")
        return
    try:
        conversation.add_image(path)
    except OSError as error:
        print(f"{path} cannot be read: {error.strerror or error}")
    except InvalidImage as error:
        print(f"{path}: {error}")
    else:
        print(f"{path} belongs to the next question.")


def _chat(
    target: targets.Target,
    *,
    model: targets.Model = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: targets.Temperature = None,
    max_tokens: targets.MaxTokens = None,
    seed: targets.Seed = None,
    timeout: targets.Timeout = 300.0,
    **values: Any,
) -> None:
    """Chat with a model on the terminal.

    Answers are streamed. Ctrl-C stops an answer, /image PATH adds an image to the next question, /reset
    forgets the conversation, /help shows the commands.
    A model folder is served until the command exits.
    """
    from mizzen.commands.client import ServiceError, ServiceUnreachable

    try:
        with targets.open_client(target, values, timeout) as client:
            settings = targets.generation_options(client, model, temperature, max_tokens, seed)
            if sys.stdin.isatty():
                print(f"Chatting with {settings.model}; /help shows the commands, Ctrl-D leaves.")
            _run_conversation(Conversation(client, settings, system), _line_reader())
    except (ServiceError, ServiceUnreachable) as error:
        print(f"mizzen: {error}", file=sys.stderr)
        raise typer.Exit(3 if isinstance(error, ServiceUnreachable) else 1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt


command = options.command(_chat, targets.folder_settings(), extras=SERVE_EXTRAS)
