# SPDX-License-Identifier: Apache-2.0
"""`mizzen inspect`: says before a model is loaded whether it is served, and which contexts fit on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mizzen.commands.model_source import RemoteModel, find_model
from mizzen.commands.options import build, settings
from mizzen.commands.options import command as build_command
from mizzen.engine.config import EngineOptions

if TYPE_CHECKING:
    from mizzen.inspection.model_files import ModelFiles

NOT_SERVED = 1
OPTIONS = (
    "dtype",
    "quantization",
    "model_implementation",
    "kv_cache_dtype",
    "memory_fraction",
    "max_running_requests",
    "prefill_chunk_tokens",
    "page_size",
)
"""Options of the engine that change the implementation of a model or the memory which it needs."""


def _inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A model folder, a config.json, demo for the packaged model, the name of a model on the "
            "hub, or a URI"
        ),
    ],
    gpu: Annotated[
        str, typer.Option(metavar="GPU", help="GPU whose memory is checked, such as h100, or its size in GiB")
    ] = "",
    tensor: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of GPUs that share the model; 1, 2, 4 and 8 by default"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--context-length",
            min=2,
            metavar="N",
            help="Wanted number of prompt and output tokens of a request; by default the model's limit",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    **values: Any,
) -> None:
    """Say whether a model is served, and which contexts fit on a GPU, without loading the model.

    Exit codes: 0 the model is served, 1 it is not served or does not fit on the GPU, 2 wrong options, or the
    model cannot be read.
    """
    import msgspec

    from mizzen.inspection.gpus import GIB, gpu_bytes
    from mizzen.inspection.inspect_model import inspect_model
    from mizzen.inspection.text import format_inspection
    from mizzen.layers.sharding import SUGGESTED_SIZES

    options = build(EngineOptions, {"model": model, "context_length": context, **values})
    try:
        memory = gpu_bytes(gpu) if gpu else 0
    except ValueError as error:
        raise typer.BadParameter(f"--gpu {error}") from error
    named = f"{memory / GIB:.1f} GiB" + (f" ({gpu})" if gpu and not gpu[0].isdigit() else "")
    try:
        result = inspect_model(
            read_model(model),
            options,
            tensors=(tensor,) if tensor else SUGGESTED_SIZES,
            gpu=named if gpu else "",
            memory=memory,
            code=True,
        )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(msgspec.json.encode(result).decode() if as_json else format_inspection(result))
    if not (result.served and result.fits and any(size.possible for size in result.tensor_sizes)):
        raise typer.Exit(NOT_SERVED)


def read_model(text: str) -> ModelFiles:
    """Read the files of the model that the user names; only config.json of a remote model is fetched.

    Raises:
        ConfigError: config.json is missing or cannot be read.
        typer.BadParameter: the model cannot be found.
    """
    from mizzen.fetch.store import MANIFEST
    from mizzen.inspection.model_files import ModelFiles, read_config_file, read_folder
    from mizzen.weights.checkpoint_files import describe_gguf

    path = Path(text)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFiles(name=text, fields=None, problem=describe_gguf(text))
        return read_config_file(path)
    if path.is_dir():
        return read_folder(path)
    found = find_model(text)
    if isinstance(found, Path):
        return read_folder(found)
    return read_folder(found.folder) if (found.folder / MANIFEST).is_file() else peek_model(found)


def peek_model(model: RemoteModel) -> ModelFiles:
    """List the files of a remote model, and fetch its configuration into memory.

    Raises:
        ConfigError: the model has no config.json, or it is invalid.
        typer.BadParameter: the source cannot be read.
    """
    from mizzen.fetch.config import FetchConfig
    from mizzen.fetch.errors import FetchError, UnsupportedFormat
    from mizzen.fetch.run import Fetch
    from mizzen.inspection.model_files import ModelFiles, read_listing
    from mizzen.quantization.reader import MODELOPT_FILE

    try:
        config = FetchConfig(include=("*",), attempts=2)
        listing = Fetch(model.uri, model.folder, config).peek(("config.json", MODELOPT_FILE))
    except UnsupportedFormat as error:
        return ModelFiles(name=model.uri, fields=None, problem=str(error))
    except FetchError as error:
        raise typer.BadParameter(str(error)) from error
    return read_listing(model.uri, listing.sizes, listing.contents)


command = build_command(_inspect, [setting for setting in settings(EngineOptions) if setting.name in OPTIONS])
