# SPDX-License-Identifier: Apache-2.0
"""Package the Helm charts of a release: the operator's, with the registry of its images, and the catalog.

    python scripts/release/package_charts.py --registry registry.example.com/team --out dist/chart

With `--push`, the packages are pushed to `oci://REGISTRY/charts`, and the file NAME.digest in the output
folder has the digest of the chart NAME in the registry. The variable HELM names the program (`helm` by
default).
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from set_version import ROOT, read_version

OPERATOR = "mizzen"
CATALOG = "mizzen-models"
CHARTS = (OPERATOR, CATALOG)
"""Names of the charts, which are also the names of their folders in charts/."""
REGISTRY = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*")
UNSET = '  registry: ""\n'


def write_chart(name: str, folder: Path, registry: str) -> None:
    """Write a chart of a release to a folder, without symbolic links.

    The operator's chart, the only one with images, gets the registry as their default.

    Raises:
        ValueError: the registry is not a host with an optional path, or values.yaml does not have the line
            that is replaced.
    """
    if not REGISTRY.fullmatch(registry):
        raise ValueError(f"--registry {registry!r}: write a host and a path, as in registry.example.com/team")
    shutil.copytree(ROOT / "charts" / name, folder)
    if name != OPERATOR:
        return
    values = folder / "values.yaml"
    text = values.read_text(encoding="utf-8")
    if text.count(UNSET) != 1:
        raise ValueError(f"charts/{name}/values.yaml: images.registry is not empty")
    values.write_text(text.replace(UNSET, f'  registry: "{registry}"\n'), encoding="utf-8")
    page = runpy.run_path(str(ROOT / "scripts/chart_reference.py"))["page"]
    (folder / "README.md").write_text(page(folder), encoding="utf-8")


def package_chart(name: str, registry: str, out: Path) -> Path:
    """Lint and package a chart of a release; return the path of the package."""
    version = read_version()
    helm = os.environ.get("HELM", "helm")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        chart = Path(work) / name
        write_chart(name, chart, registry)
        subprocess.run([helm, "lint", "--strict", chart], check=True)
        subprocess.run([helm, "package", chart, "--destination", out], check=True)
    return out / f"{name}-{version}.tgz"


def push_chart(package: Path, registry: str, *, plain_http: bool) -> str:
    """Push the package of a chart; return its digest in the registry.

    Raises:
        ValueError: helm failed, or did not report the digest; the message has its output.
    """
    command = [os.environ.get("HELM", "helm"), "push", package, f"oci://{registry}/charts"]
    pushed = subprocess.run(
        [*command, *(["--plain-http"] if plain_http else [])],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    digest = re.search(r"sha256:[0-9a-f]{64}", pushed.stdout)
    if pushed.returncode or digest is None:
        raise ValueError(f"helm push did not report the digest of the chart:\n{pushed.stdout}")
    print(pushed.stdout, end="")
    return digest[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--registry", required=True, help="registry and organisation, without oci://")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--push", action="store_true")
    parser.add_argument("--plain-http", action="store_true", help="push without TLS, to a registry of a test")
    options = parser.parse_args()
    try:
        packages = {name: package_chart(name, options.registry, options.out) for name in CHARTS}
        for name, package in packages.items() if options.push else ():
            digest = push_chart(package, options.registry, plain_http=options.plain_http)
            (options.out / f"{name}.digest").write_text(f"{digest}\n", encoding="utf-8")
    except (ValueError, subprocess.CalledProcessError) as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main()
