# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of the control plane from the published Go modules."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).parent / "go"
NAMES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
PACKAGES_PER_REPORT = 250  # compiled packages per line of progress
Report = Callable[[str], None]


class BuildError(Exception):
    """A build failed; the message names the command and ends with its output."""


def build(folder: Path, *, kubernetes: str, etcd: str, report: Report) -> None:
    """Build all programs; takes about five minutes on two cores.

    Args:
        folder: existing folder for the programs.
        kubernetes: version of Kubernetes, without the leading v.
        etcd: version of etcd, without the leading v.
        report: called with each line of progress.

    Raises:
        BuildError: Go is not installed, or a `go` command failed.
    """
    go = shutil.which("go")
    if go is None:
        raise BuildError("there is no Go on the PATH (https://go.dev/dl)")
    report("building the control plane from its Go modules; about five minutes on two cores, once")
    with tempfile.TemporaryDirectory(prefix="mizzen-local-build-") as work:
        _build_etcd(go, Path(work) / "etcd", folder, etcd, report)
        _build_kubernetes(go, Path(work) / "kubernetes", folder, kubernetes, report)


def _build_etcd(go: str, work: Path, folder: Path, version: str, report: Report) -> None:
    shutil.copytree(SOURCES / "etcd", work)
    (work / "go.mod").write_text(
        f"module mizzen.dev/etcd\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 v{version}\n"
    )
    _compile(go, work, folder / "etcd", "etcd", flags=[], report=report)


def _build_kubernetes(go: str, work: Path, folder: Path, version: str, report: Report) -> None:
    """Build one program that contains all Kubernetes programs; create a link to it for each program's name.

    The go.mod of Kubernetes replaces the staged modules with folders of the Kubernetes repository. The
    published module lacks these folders, so this build uses the published versions of the staged modules.
    """
    shutil.copytree(SOURCES / "kubernetes", work)
    (work / "go.mod").write_text("module mizzen.dev/kubernetes\n")
    report("downloading the source of Kubernetes")
    output = _run_go(go, work, "mod", "download", "-json", f"k8s.io/kubernetes@v{version}")
    source = Path(json.loads(output)["Dir"])
    modules = staged_modules((source / "go.mod").read_text())
    module_version = f"v0.{version.split('.', 1)[1]}"
    replacements = "\n".join(f"\t{module} => {module} {module_version}" for module in modules)
    (work / "go.mod").write_text(
        "module mizzen.dev/kubernetes\n\ngo 1.26.0\n\ngodebug default=go1.26\n\n"
        f"require k8s.io/kubernetes v{version}\n\nreplace (\n{replacements}\n)\n"
    )
    shutil.copy(source / "go.sum", work / "go.sum")
    (work / "go.sum").chmod(0o644)
    major, minor, _ = version.split(".")
    flags = [
        f"-X {package}.{key}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for key, value in (("gitVersion", f"v{version}"), ("gitMajor", major), ("gitMinor", minor))
    ]
    _compile(go, work, folder / "kubernetes", "Kubernetes", flags=flags, report=report)
    for name in NAMES:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to("kubernetes")


def staged_modules(go_mod: str) -> list[str]:
    """Return the modules that the go.mod of Kubernetes replaces with folders below `staging`."""
    return re.findall(r"^\s*(?:replace\s+)?(k8s\.io/\S+)\s*=>\s*\./staging/", go_mod, re.MULTILINE)


def _go_environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=mod"}


def _run_go(go: str, work: Path, *arguments: str) -> str:
    run = subprocess.run(
        [go, *arguments], cwd=work, env=_go_environment(), capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise BuildError(f"go {' '.join(arguments)}: {(run.stderr or run.stdout).strip()[-2000:]}")
    return run.stdout


def _compile(go: str, work: Path, program: Path, name: str, *, flags: list[str], report: Report) -> None:
    """Build one program, after downloading its dependencies."""
    report(f"downloading the dependencies of {name}")
    _run_go(go, work, "mod", "tidy")
    command = [go, "build", "-v", "-trimpath", "-ldflags", " ".join(["-s", "-w", *flags]), "-o", str(program)]
    output: list[str] = []
    with subprocess.Popen(
        [*command, "."], cwd=work, env=_go_environment(), stderr=subprocess.PIPE, text=True
    ) as building:
        for line in building.stderr or ():
            output.append(line)
            if len(output) % PACKAGES_PER_REPORT == 0:
                report(f"building {name}: {len(output)} packages")
    if building.returncode:
        raise BuildError(f"go build of {name}: {''.join(output[-20:]).strip()}")
    report(f"built {name}")
