# SPDX-License-Identifier: Apache-2.0
"""`mizzen fetch`: downloads a model from a hub, a bucket or a registry into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mizzen.commands.options import build, settings
from mizzen.commands.options import command as build_command
from mizzen.fetch.config import FetchConfig


def _fetch(
    source: Annotated[
        str, typer.Argument(help="hf://org/name@revision, s3://bucket/prefix or oci://host/repository:tag")
    ],
    to: Annotated[
        Path, typer.Option("--to", help="Folder that contains only this model; created if missing")
    ],
    **values: Any,
) -> None:
    """Fetch a model into a folder.

    Files are checked against their checksums. An interrupted download resumes, and a complete model is not
    downloaded again.
    """
    config = build(FetchConfig, values)
    from mizzen.fetch.run import run_fetch

    raise typer.Exit(run_fetch(source, to, config))


command = build_command(_fetch, settings(FetchConfig))
