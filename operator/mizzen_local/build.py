"""The control plane's programs, built from the published Go modules."""

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
STEP = 250  # packages between two lines of progress
Report = Callable[[str], None]


class BuildError(Exception):
    """The build failed; the message says where."""


def build(folder: Path, *, kubernetes: str, etcd: str, report: Report) -> None:
    """Build all programs into a folder; about five minutes on two cores.

    Args:
        folder: gets the programs.
        kubernetes, etcd: versions, without v.
        report: gets a line of progress at a time.

    Raises:
        BuildError: there is no Go, or it failed.
    """
    go = shutil.which("go")
    if go is None:
        raise BuildError("there is no Go on the PATH (https://go.dev/dl)")
    report("building the control plane from its Go modules; about five minutes on two cores, once")
    with tempfile.TemporaryDirectory(prefix="mizzen-local-build-") as work:
        _etcd(go, Path(work) / "etcd", folder, etcd, report)
        _kubernetes(go, Path(work) / "kubernetes", folder, kubernetes, report)


def _etcd(go: str, work: Path, folder: Path, version: str, report: Report) -> None:
    shutil.copytree(SOURCES / "etcd", work)
    (work / "go.mod").write_text(
        f"module mizzen.dev/etcd\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 v{version}\n"
    )
    _compile(go, work, folder / "etcd", "etcd", [], report)


def _kubernetes(go: str, work: Path, folder: Path, version: str, report: Report) -> None:
    """Kubernetes is a module that replaces its parts by folders; here they are published versions again."""
    shutil.copytree(SOURCES / "kubernetes", work)
    (work / "go.mod").write_text("module mizzen.dev/kubernetes\n")
    report("downloading the source of Kubernetes")
    answer = _go(go, work, "mod", "download", "-json", f"k8s.io/kubernetes@v{version}")
    source = Path(json.loads(answer)["Dir"])
    parts = staged_modules((source / "go.mod").read_text())
    staged = f"v0.{version.split('.', 1)[1]}"
    replacements = "\n".join(f"\t{part} => {part} {staged}" for part in parts)
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
    _compile(go, work, folder / "kubernetes", "Kubernetes", flags, report)
    for name in NAMES:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to("kubernetes")


def staged_modules(go_mod: str) -> list[str]:
    """The modules that Kubernetes' go.mod replaces by folders of its own."""
    return re.findall(r"^\s*(?:replace\s+)?(k8s\.io/\S+)\s*=>\s*\./staging/", go_mod, re.MULTILINE)


def _environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=mod"}


def _go(go: str, work: Path, *arguments: str) -> str:
    run = subprocess.run(
        [go, *arguments], cwd=work, env=_environment(), capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise BuildError(f"go {' '.join(arguments)}: {(run.stderr or run.stdout).strip()[-2000:]}")
    return run.stdout


def _compile(go: str, work: Path, program: Path, name: str, flags: list[str], report: Report) -> None:
    """Resolve the dependencies and build one program, with progress."""
    report(f"downloading what {name} needs")
    _go(go, work, "mod", "tidy")
    command = [go, "build", "-v", "-trimpath", "-ldflags", " ".join(["-s", "-w", *flags]), "-o", str(program)]
    said: list[str] = []
    with subprocess.Popen(
        [*command, "."], cwd=work, env=_environment(), stderr=subprocess.PIPE, text=True
    ) as building:
        for line in building.stderr or ():
            said.append(line)
            if len(said) % STEP == 0:
                report(f"building {name}: {len(said)} packages")
    if building.returncode:
        raise BuildError(f"go build of {name}: {''.join(said[-20:]).strip()}")
    report(f"built {name}")
