# SPDX-License-Identifier: Apache-2.0
"""`mizzen complete`: writes the answer to one prompt, for scripts."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from mizzen.commands import options
from mizzen.commands import target as targets
from mizzen.commands.serve import SERVE_EXTRAS

FAILED, UNREACHABLE, INTERRUPTED = 1, 3, 130


def _complete(
    target: targets.Target,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")] = "-",
    *,
    model: targets.Model = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt without applying the chat template.")
    ] = False,
    temperature: targets.Temperature = None,
    max_tokens: targets.MaxTokens = None,
    seed: targets.Seed = None,
    timeout: targets.Timeout = 300.0,
    **values: Any,
) -> None:
    """Write the answer to a prompt to standard output.

    Exit codes: 0 success, 1 the service rejected the request or failed, 2 wrong options, 3 no server answers
    at the URL, 130 interrupted. Errors go to standard error.
    """
    from mizzen.commands.client import ServiceError, ServiceUnreachable

    if raw and system:
        raise typer.BadParameter("--system needs the chat template; omit --raw or --system")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty; give it as an argument or on standard input")
    try:
        with targets.open_client(target, values, timeout) as client:
            settings = targets.generation_options(client, model, temperature, max_tokens, seed)
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": text})
            pieces = client.complete(text, settings) if raw else client.chat(messages, settings)
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
    except (ServiceError, ServiceUnreachable) as error:
        print(f"mizzen: {error}", file=sys.stderr)
        raise typer.Exit(UNREACHABLE if isinstance(error, ServiceUnreachable) else FAILED) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED) from interrupt
    except BrokenPipeError as error:
        # otherwise flushing at exit fails too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from error


command = options.command(_complete, targets.folder_settings(), extras=SERVE_EXTRAS)
