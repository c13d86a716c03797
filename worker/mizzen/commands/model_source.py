# SPDX-License-Identifier: Apache-2.0
"""Models that `serve` accepts: a folder on this machine, or a source from which it fetches the model."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import typer

from mizzen.commands.progress import StartupProgress
from mizzen.common.cache import cache_dir
from mizzen.common.packaged_files import find_demo_model
from mizzen.weights.checkpoint_files import WEIGHTS_ADVICE, describe_gguf

POLL_SECONDS = 0.2
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./+-]{1,255})?")
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+?)(?:/.*)?")
HUB_ADVICE = "or the name of a model on the hub, such as Qwen/Qwen3-0.6B, or demo for the packaged model"


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that is fetched into the cache before it is served.

    Attributes:
        uri: source of the model, such as `hf://Qwen/Qwen3-0.6B`.
        name: name under which the model is served by default.
        folder: folder of the model in the cache.
    """

    uri: str
    name: str
    folder: Path


def find_model(text: str) -> Path | RemoteModel:
    """Return the model folder or the remote model that the user names.

    Args:
        text: a folder, `demo` for the packaged demo model, a hub model such as `Qwen/Qwen3-0.6B@main`, or a
            URI (hf://, s3:// or oci://).

    Raises:
        typer.BadParameter: the text is not one of these; the message says what is possible.
    """
    if text.startswith(("hf://", "s3://", "oci://")):
        return _remote(text)
    if match := _HUB_PAGE.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is a web page: write hf://{match[1]}")
    if demo := find_demo_model(text):
        return demo
    path = Path(text)
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        gguf = next(path.glob("*.gguf"), None)
        raise typer.BadParameter(
            describe_gguf(str(gguf)) if gguf else f"{text!r} has no config.json; {WEIGHTS_ADVICE}"
        )
    if path.exists():
        raise typer.BadParameter(
            describe_gguf(text)
            if path.suffix == ".gguf"
            else f"{text!r} is not a folder; {WEIGHTS_ADVICE}, {HUB_ADVICE}"
        )
    if _HUB_NAME.fullmatch(text):
        if path.parent.is_dir():  # more likely a mistyped path than a model of an organization with this name
            raise typer.BadParameter(
                f"{text!r} is not a folder; {WEIGHTS_ADVICE}, or hf://{text} to fetch this model from the hub"
            )
        return _remote(f"hf://{text}")
    raise typer.BadParameter(f"{text!r} is not a folder; {WEIGHTS_ADVICE}, {HUB_ADVICE}")


def _remote(uri: str) -> RemoteModel:
    from mizzen.fetch.errors import FetchError
    from mizzen.fetch.source import HubSource, OciSource, parse_source

    try:
        source = parse_source(uri)
    except FetchError as error:
        raise typer.BadParameter(str(error)) from error
    if isinstance(source, HubSource):
        name = source.repo
        folder = Path("hf", f"{source.repo}@{quote(source.revision, safe='')}")
    else:
        path = source.repository if isinstance(source, OciSource) else source.prefix or source.bucket
        name = path.strip("/").rpartition("/")[2]
        folder = Path(quote(uri, safe=""))
    return RemoteModel(uri, name, cache_dir().expanduser() / "models" / folder)


def fetch_model(model: RemoteModel, progress: StartupProgress) -> None:
    """Fetch a model into the cache and show the progress; a model that is complete is not fetched again.

    Raises:
        typer.Exit: the fetch failed (code 1) or signal n stopped it (code 128 + n); a note says why.
        typer.BadParameter: `HF_ENDPOINT` is invalid.
    """
    from mizzen.fetch.config import FetchConfig
    from mizzen.fetch.errors import FetchError, FetchStopped
    from mizzen.fetch.run import Fetch

    try:
        config = FetchConfig(termination_message="")
        stop = threading.Event()
        fetch = Fetch(model.uri, model.folder, config, stop=stop)
    except (FetchError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    with _stop_on_signals(stop) as signals, ThreadPoolExecutor(1) as pool, progress:
        running = pool.submit(fetch.run)
        while not wait_for((running,), POLL_SECONDS).done:
            snapshot = fetch.progress.snapshot()
            progress.update(*_describe(model, snapshot))
        try:
            running.result()
        except FetchStopped as error:
            progress.note(f"stopped fetching {model.uri}; the data fetched so far is kept in {model.folder}")
            raise typer.Exit(128 + signals[0] if signals else 1) from error
        except (FetchError, OSError) as error:
            progress.note(f"{model.uri} cannot be fetched: {error}")
            raise typer.Exit(1) from error
        progress.note(f"{model.uri} is in {model.folder}")


def _describe(model: RemoteModel, snapshot: dict[str, Any]) -> tuple[str, float | None, str]:
    """Return the state, the fetched share and the details of a fetch, for `StartupProgress.update`."""
    total = snapshot["totalBytes"]
    if not total:
        return f"fetching {model.uri}", None, snapshot["message"]
    details = f"{_format_bytes(snapshot['fetchedBytes'])} of {_format_bytes(total)}"
    if snapshot["bytesPerSecond"]:
        details += f", {_format_bytes(snapshot['bytesPerSecond'])}/s, {snapshot['secondsLeft']} s left"
    if snapshot["message"]:
        details += f"; {snapshot['message']}"
    return f"fetching {model.uri}", snapshot["fetchedBytes"] / total, details


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


@contextlib.contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[list[int]]:
    """Set `stop` when SIGINT or SIGTERM arrives, and yield the list of the received signals."""
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        received.append(number)
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
