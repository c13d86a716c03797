"""The command line `mizzen-local`. Commands import what they need when they run: `--help` is quick."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer

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
Gpus = Annotated[int, typer.Option(min=0, max=1024, help="How many nvidia.com/gpu the node offers.")]
Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Namespace.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mizzen-local {metadata.version('mizzen')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """State is kept under MIZZEN_LOCAL_DIR, or in the user's cache folder."""


def _cluster() -> Cluster:
    from mizzen_local.cluster import Cluster
    from mizzen_local.state import cluster_folder

    return Cluster(cluster_folder())


def _reporter() -> _Reporter:
    return _Reporter(time.monotonic())


class _Reporter:
    """Prints progress on standard error, with the seconds since the start."""

    def __init__(self, begun: float) -> None:
        self._begun = begun

    def __call__(self, line: str) -> None:
        typer.echo(f"[{time.monotonic() - self._begun:5.1f} s] {line}", err=True)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors that a user can do something about into a message and exit code 1."""
    try:
        yield
    except LocalError as error:
        typer.echo(f"mizzen-local: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("mizzen-local: interrupted", err=True)
        raise typer.Exit(130) from None


@app.command()
def up(
    gpus: Gpus = 8,
    bare: Annotated[bool, typer.Option("--bare", help="Without the CRD and the operator.")] = False,
) -> None:
    """Start the cluster; returns when the operator runs and leads."""
    with _errors():
        cluster, report = _cluster(), _reporter()
        cluster.up(gpus=gpus, operator=not bare, report=report)
        report("the cluster is up")
        typer.echo(f"export KUBECONFIG={cluster.state.kubeconfig}")


@app.command()
def down() -> None:
    """Stop the cluster and remove everything of it."""
    with _errors():
        cluster = _cluster()
        there = cluster.down()
        typer.echo(f"the cluster in {cluster.state.folder} is down" if there else "there is no cluster")


@app.command()
def status() -> None:
    """Show the parts, the node and the services; exit code 1 unless everything runs."""
    with _errors():
        cluster = _cluster()
        state = cluster.state.state()
        typer.echo(f"cluster   {cluster.state.folder}: {state}")
        for process in cluster.state.processes():
            typer.echo(f"  {process.name:<26}{f'pid {process.pid}' if process.alive() else 'has ended'}")
        if state != "up":
            raise typer.Exit(1)
        typer.echo(f"server    {cluster.state.facts().server}")
        typer.echo(f"programs  {cluster.state.facts().assets}")
        kubectl = cluster.kubectl()
        typer.echo(kubectl("get", "nodes,pods", "-A").strip())
        if "inferenceservices" in kubectl("api-resources", "--api-group=mizzen.dev", "-o", "name"):
            typer.echo(kubectl("get", "inferenceservices", "-A", "-o", "wide").strip())


@app.command()
def logs(
    target: Annotated[
        str, typer.Argument(help="A part such as kube-apiserver or node, a pod, or a part of pods' names.")
    ] = "",
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Namespace; all when empty.")] = "",
    container: Annotated[str, typer.Option("-c", "--container", help="Container; all when empty.")] = "",
    previous: Annotated[bool, typer.Option("-p", "--previous", help="The run before the last.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what comes.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many lines of each log.")] = None,
) -> None:
    """Print logs; without a target, what there are logs of."""
    with _errors():
        from mizzen_local import logs as files
        from mizzen_local.cluster import ClusterError

        folder = _cluster().state.logs
        if not folder.is_dir():
            raise ClusterError(f"there are no logs in {folder}; mizzen-local up starts a cluster")
        if not target:
            typer.echo("\n".join(files.known(folder)))
            return
        found = files.find(folder, target, namespace, container, previous=previous)
        if not found:
            raise ClusterError(f"there is no log of {target!r}; there are: {', '.join(files.known(folder))}")
        files.show(found, sys.stdout, tail=tail, follow=follow)


@app.command()
def kubeconfig() -> None:
    """Print the path of the administrator's kubeconfig."""
    with _errors():
        cluster = _cluster()
        cluster.require()
        typer.echo(cluster.state.kubeconfig)


@app.command()
def url(service: str, namespace: Namespace = "default") -> None:
    """Print the URL of an InferenceService (…/v1) or of a Service, as this machine reaches it."""
    with _errors():
        from mizzen_local.urls import service_url

        typer.echo(service_url(_cluster().kubectl(), service, namespace))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def kubectl(context: typer.Context) -> None:
    """Run the cluster's kubectl on the cluster."""
    with _errors():
        _cluster().kubectl().replace_this_program(*context.args)


@app.command()
def assets() -> None:
    """Print the folder of the control plane's programs; fetches or builds them when they are missing."""
    with _errors():
        from mizzen_local.assets import find

        typer.echo(find(report=_reporter()))


@app.command()
def demo(gpus: Gpus = 8) -> None:
    """Start a cluster if none is up, apply the example, and print one chat answer."""
    with _errors():
        from mizzen_local import demo as walk

        walk.run(_cluster(), gpus=gpus, report=_reporter())


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
