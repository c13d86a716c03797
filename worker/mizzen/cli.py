# SPDX-License-Identifier: Apache-2.0
"""Command line `mizzen`. Each command imports its dependencies when it runs, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

import mizzen
from mizzen.commands import chat, complete, fetch, inspect, processes, serve
from mizzen.commands.serve_command import ServeCommand

app = typer.Typer(
    name="mizzen",
    help="Serve language models: on this machine with `serve`, on Kubernetes with an InferenceService.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mizzen {mizzen.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options that precede a command."""


app.command("serve", cls=ServeCommand)(serve.command)
app.command("chat")(chat.command)
app.command("complete")(complete.command)
app.command("fetch")(fetch.command)
app.command("inspect")(inspect.command)
app.command("engine", cls=ServeCommand)(processes.engine)
app.command("gateway", cls=ServeCommand)(processes.gateway)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
