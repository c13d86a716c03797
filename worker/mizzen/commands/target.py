# SPDX-License-Identifier: Apache-2.0
"""Target of `chat` and `complete`: the URL of a service, or a model folder, which is served temporarily."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from mizzen.commands.children import terminate_with_parent
from mizzen.commands.model_source import find_model
from mizzen.commands.options import Setting
from mizzen.commands.serve import serve_settings
from mizzen.common.extras import SERVE_MODULES, require_modules
from mizzen.common.options import flag

if TYPE_CHECKING:
    from mizzen.commands.client import ApiClient, GenerationOptions

STOP_SECONDS = 15.0
LOG_LINES = 20

Target = Annotated[
    str, typer.Argument(help="URL of a service, such as http://127.0.0.1:8000/v1, or a model as for `serve`.")
]
Model = Annotated[str, typer.Option(help="Name of the model; by default the service's first model.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=2,
        help="Sampling temperature; 0 chooses the most probable token; the service's default is 1.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum length of the answer in tokens; with --raw the API's default is 16."),
]
Seed = Annotated[int | None, typer.Option(help="Random seed, which makes the answer reproducible.")]
Timeout = Annotated[
    float, typer.Option(min=1, help="Maximum time to wait for the next piece of the answer, in seconds.")
]
FOLDER_OPTIONS = ("device", "dtype", "tensor", "threads", "context_length")
"""Options of `serve` that `chat` and `complete` accept with a model folder; other options need `mizzen
serve`."""


def folder_settings() -> list[Setting]:
    """Return the settings for serving a model folder; a setting that is None has the default of `serve`."""
    return [
        dataclasses.replace(setting, default=None, optional=True)
        for setting in serve_settings()
        if setting.name in FOLDER_OPTIONS
    ]


@contextlib.contextmanager
def open_client(target: str, values: Mapping[str, Any], timeout_seconds: float) -> Iterator[ApiClient]:
    """Yield a client of the service at a URL, or of a temporary service that serves a model folder.

    Args:
        target: URL or model folder.
        values: Values of the settings from `folder_settings`, by name; a setting that was not given is None.
        timeout_seconds: Maximum time to wait for the next piece of an answer.

    Raises:
        typer.BadParameter: the target is neither a URL nor a model folder, or `values` contains options for
            a model folder although the target is a URL.
        ModuleNotFoundError: a package that serves models is not installed.
        ServiceError: the folder could not be served; the message contains the end of the log.
    """
    from mizzen.commands.client import ApiClient

    serve_options = [f"{flag(name)}={value}" for name, value in values.items() if value is not None]
    if target.startswith(("http://", "https://")):
        if serve_options:
            raise typer.BadParameter(f"{' '.join(serve_options)}: this needs a model folder instead of a URL")
        with ApiClient(target, timeout_seconds) as client:
            yield client
        return
    require_modules(*SERVE_MODULES)
    try:
        find_model(target)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, or the URL of a service (http://…)") from error
    with _serve_folder(target, serve_options) as url, ApiClient(url, timeout_seconds) as client:
        yield client


def generation_options(
    client: ApiClient, model: str, temperature: float | None, max_tokens: int | None, seed: int | None
) -> GenerationOptions:
    """Return the generation options; without a model name, use the service's first model."""
    from mizzen.commands.client import GenerationOptions, ServiceError

    if not model:
        names = client.models()
        if not names:
            raise ServiceError(f"{client.url} serves no model")
        model = names[0]
    return GenerationOptions(model=model, temperature=temperature, max_tokens=max_tokens, seed=seed)


@contextlib.contextmanager
def _serve_folder(folder: str, serve_options: Sequence[str]) -> Iterator[str]:
    """Run `mizzen serve` for a model folder, and yield the URL of the service."""
    command = [sys.executable, "-P", "-m", "mizzen.cli", "serve", "--port=0", *serve_options, "--", folder]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=terminate_with_parent,
        )
        try:
            with _spinner(f"loading {folder}"):
                url = _read_url(process, log)
            yield url
        finally:
            _stop_serve(process)


def _spinner(text: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that shows a spinner if standard error is a terminal."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def _read_url(process: subprocess.Popen[str], log: IO[str]) -> str:
    """Wait until `serve` is ready, and return the URL that it prints."""
    from mizzen.commands.client import ServiceError

    assert process.stdout is not None
    url = process.stdout.readline().strip()  # empty if serve exits, e.g. because its startup takes too long
    if not url:
        process.wait()
        log.seek(0)
        raise ServiceError(
            "the model could not be served:\n" + "".join(log.readlines()[-LOG_LINES:]).rstrip()
        )
    return url


def _stop_serve(process: subprocess.Popen[str]) -> None:
    """Stop `serve` without waiting for running requests to finish, because it has no other clients."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # a second signal makes serve kill its children
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
