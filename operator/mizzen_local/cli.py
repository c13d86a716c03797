# SPDX-License-Identifier: Apache-2.0
"""The command line `mizzen-local`.

Each command imports its modules only when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mizzen.common.extras import SERVE_MODULES, describe_missing_module, require_modules
from mizzen_local.errors import LocalError

if TYPE_CHECKING:
    from mizzen_local.cluster import Cluster

app = typer.Typer(
    name="mizzen-local",
    help="A Kubernetes cluster with Mizzen on this machine: no containers, no GPU, no root.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OPERATOR_MODULES = ("aiohttp", "kopf", "kubernetes")
"""Modules of the operator, which are checked before a cluster starts."""
Gpus = Annotated[int, typer.Option(min=0, max=1024, help="Number of nvidia.com/gpu that the node offers.")]
Values = Annotated[
    Path | None,
    typer.Option("-f", "--values", help="YAML file with values of the operator's chart, as for Helm."),
]
Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Namespace.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mizzen-local {metadata.version('mizzen')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Accept the options that precede the command.

    The cluster's state is kept in the folder MIZZEN_LOCAL_DIR, or else in the user's cache folder.
    """


def _open_cluster() -> Cluster:
    from mizzen_local.cluster import Cluster
    from mizzen_local.state import cluster_folder

    return Cluster(cluster_folder())


def _read_values(path: Path | None) -> dict[str, Any]:
    """Return the values in a YAML file; none without a file.

    Raises:
        LocalError: the file cannot be read, or contains something else.
    """
    if path is None:
        return {}
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LocalError(f"--values {path}: {error}") from error
    if not isinstance(values, dict):
        raise LocalError(f"--values {path}: it must contain values by name, such as acceleratorProfiles")
    return values


def _reporter() -> _Reporter:
    return _Reporter(time.monotonic())


class _Reporter:
    """Prints progress to standard error, with the seconds since the command started."""

    def __init__(self, start: float) -> None:
        self._start = start

    def __call__(self, line: str) -> None:
        typer.echo(f"[{time.monotonic() - self._start:5.1f} s] {line}", err=True)


@contextlib.contextmanager
def _report_errors() -> Iterator[None]:
    """Print an error as a message and exit with code 1; exit with code 130 if interrupted.

    Errors are a LocalError and a package that is not installed.
    """
    try:
        yield
    except LocalError as error:
        typer.echo(f"mizzen-local: {error}", err=True)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        typer.echo(describe_missing_module(error, "mizzen-local", "local"), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("mizzen-local: interrupted", err=True)
        raise typer.Exit(130) from None


@app.command()
def up(
    gpus: Gpus = 8,
    values: Values = None,
    bare: Annotated[bool, typer.Option("--bare", help="Without the CRD and the operator.")] = False,
) -> None:
    """Start the cluster; return when the operator is running and holds its Lease."""
    with _report_errors():
        if bare and values:
            raise LocalError("--values has no effect with --bare, which installs no operator: leave one out")
        if not bare:
            require_modules(*OPERATOR_MODULES)
        cluster, report = _open_cluster(), _reporter()
        cluster.up(gpus=gpus, operator=not bare, values=_read_values(values), report=report)
        report("the cluster is up")
        typer.echo(f"export KUBECONFIG={cluster.state.kubeconfig}")


@app.command()
def down() -> None:
    """Stop the cluster and delete its files."""
    with _report_errors():
        cluster = _open_cluster()
        existed = cluster.down()
        typer.echo(f"the cluster in {cluster.state.folder} is down" if existed else "there is no cluster")


@app.command()
def status() -> None:
    """Show the cluster's processes, node, pods and services; exit with code 1 unless the cluster is up."""
    with _report_errors():
        cluster = _open_cluster()
        state = cluster.state.status()
        typer.echo(f"cluster   {cluster.state.folder}: {state}")
        for process in cluster.state.processes():
            typer.echo(f"  {process.name:<26}{f'pid {process.pid}' if process.alive() else 'has ended'}")
        if state != "up":
            raise typer.Exit(1)
        typer.echo(f"server    {cluster.state.read_settings().server}")
        typer.echo(f"programs  {cluster.state.read_settings().assets}")
        kubectl = cluster.kubectl()
        typer.echo(kubectl("get", "nodes,pods", "-A").strip())
        if "inferenceservices" in kubectl("api-resources", "--api-group=mizzen.dev", "-o", "name"):
            typer.echo(kubectl("get", "inferenceservices.mizzen.dev", "-A", "-o", "wide").strip())


@app.command()
def logs(
    target: Annotated[
        str, typer.Argument(help="A process such as kube-apiserver or node, a pod, or a part of pods' names.")
    ] = "",
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Namespace; all if empty.")] = "",
    container: Annotated[str, typer.Option("-c", "--container", help="Container; all if empty.")] = "",
    previous: Annotated[
        bool, typer.Option("-p", "--previous", help="Print the run before the last.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new lines as they are written.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Number of last lines to print of each log.")
    ] = None,
) -> None:
    """Print logs; without a target, list the processes and pods that have logs."""
    with _report_errors():
        from mizzen_local import logs as files
        from mizzen_local.cluster import ClusterError

        folder = _open_cluster().state.logs
        if not folder.is_dir():
            raise ClusterError(f"there are no logs in {folder}; mizzen-local up starts a cluster")
        if not target:
            typer.echo("\n".join(files.list_targets(folder)))
            return
        selected = files.find_logs(folder, target, namespace, container, previous=previous)
        if not selected:
            raise ClusterError(
                f"there is no log of {target!r}; there are: {', '.join(files.list_targets(folder))}"
            )
        files.print_logs(selected, sys.stdout, tail=tail, follow=follow)


@app.command()
def kubeconfig() -> None:
    """Print the path of the administrator's kubeconfig."""
    with _report_errors():
        cluster = _open_cluster()
        cluster.require_up()
        typer.echo(cluster.state.kubeconfig)


@app.command()
def url(service: str, namespace: Namespace = "default") -> None:
    """Print the URL at which this machine reaches an InferenceService (…/v1) or a Service."""
    with _report_errors():
        from mizzen_local.urls import service_url

        typer.echo(service_url(_open_cluster().kubectl(), service, namespace))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def kubectl(context: typer.Context) -> None:
    """Run kubectl against the cluster."""
    with _report_errors():
        _open_cluster().kubectl().replace_process(*context.args)


@app.command()
def assets() -> None:
    """Print the folder of the control plane's programs; download or build missing ones."""
    with _report_errors():
        from mizzen_local.assets import find_programs

        typer.echo(find_programs(report=_reporter()))


@app.command()
def demo(gpus: Gpus = 8, values: Values = None) -> None:
    """Start a cluster if none is up, apply the example service, and print its answer to one question."""
    with _report_errors():
        require_modules(*OPERATOR_MODULES, *SERVE_MODULES)
        from mizzen_local import demo as demo_module

        demo_module.run_demo(_open_cluster(), gpus=gpus, values=_read_values(values), report=_reporter())


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
