# SPDX-License-Identifier: Apache-2.0
"""Make a whole release in an empty folder, sign it with a new key, and verify it; nothing is published.

    make release-dry-run OUT=/tmp/release
    make release-dry-run OUT=/tmp/release DRY_RUN="--builder buildah --target gateway"

Images are built if docker or buildah is installed. If crane is installed, it runs a registry on the loopback
address, to which images and charts are pushed and where they are signed. Without cosign, nothing is signed.
The last lines say what was left out, and list each artifact with its size.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

from build_images import TARGETS
from package_charts import CHARTS
from set_version import read_version

HERE = Path(__file__).resolve().parent
NOWHERE = "registry.example.com/team"
REGISTRY_SECONDS = 30


def run(*command: str | Path) -> None:
    """Run a command, with its output in the output of this program."""
    subprocess.run([str(part) for part in command], check=True)


def script(name: str, *arguments: str | Path) -> None:
    """Run another release script."""
    run(sys.executable, HERE / name, *arguments)


class DryRun:
    """One dry run: its folder, its options, and the times of its steps."""

    def __init__(self, out: Path, options: argparse.Namespace) -> None:
        self.out, self.options, self.version = out, options, read_version()
        self.left_out: list[str] = []
        self.built: list[str] = []
        self.seconds: dict[str, float] = {}

    def step(self, name: str, action: Callable[[], None]) -> None:
        """Run a step and note how long it took."""
        print(f"== {name}", flush=True)
        began = time.monotonic()
        action()
        self.seconds[name] = time.monotonic() - began

    def make(self) -> None:
        """Run all steps."""
        with loopback_registry(self.out / "registry.log") as address:
            registry = f"{address}/team" if address else NOWHERE
            if not address:
                self.left_out.append("a registry (crane is not installed): nothing is pushed")
            push = ["--push", "--plain-http"] if address else []
            self.step("release notes", self.write_notes)
            self.step("wheel and source distribution", lambda: script("build_dist.py", self.out / "python"))
            self.step("wheel in a new environment", self.install_wheel)
            charts = ["--registry", registry, "--out", self.out / "chart", *push]
            self.step("charts", lambda: script("package_charts.py", *charts))
            self.step("docs", lambda: script("build_docs.py", self.out / "docs", "--alias", "latest"))
            self.build_images(registry, push)
            if shutil.which("cosign"):
                self.step("signatures", lambda: self.sign(registry if address else ""))
            else:
                self.left_out.append("signatures: cosign is not installed")
            if address and self.built:
                self.scan()
                targets = [part for target in self.built for part in ("--target", target)]
                command = [self.out / "images", *targets, "--plain-http"]
                self.step("tags of images", lambda: script("tag_images.py", *command))

    def write_notes(self) -> None:
        """Write the release notes, even if the version is marked as unreleased."""
        notes = subprocess.run(
            [sys.executable, HERE / "release_notes.py", self.version, "--draft", "--registry", NOWHERE],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        (self.out / "notes.md").write_bytes(notes)

    def install_wheel(self) -> None:
        """Install the wheel in a new environment, and start its program."""
        folder = self.out / "environment"
        venv.create(folder, with_pip=True)
        [wheel] = (self.out / "python").glob("*.whl")
        run(folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        shown = subprocess.run(
            [folder / "bin/mizzen", "--version"], check=True, capture_output=True, text=True
        ).stdout
        shutil.rmtree(folder)
        if shown.strip() != f"mizzen {self.version}":
            raise ValueError(f"the installed program says {shown!r}")

    def build_images(self, registry: str, push: list[str]) -> None:
        """Build images with the builder that the options name or that is installed."""
        found = next((name for name in ("docker", "buildah") if shutil.which(name)), "")
        builder = self.options.builder or found
        if builder in ("", "none"):
            self.left_out.append("images: " + ("not wanted" if builder else "no builder is installed"))
            return
        for target in self.options.target or TARGETS:
            command = ["--builder", builder, "--registry", registry, "--target", target, *push]
            command += ["--out", self.out / "images", "--base", self.options.base, "--allow-local-changes"]
            command += [part for item in self.options.build_arg for part in ("--build-arg", item)]
            self.step(f"image {target}", lambda command=command: script("build_images.py", *command))
            self.built.append(target)

    def scan(self) -> None:
        """Scan the images in the registry, if grype is installed."""
        if not shutil.which("grype"):
            self.left_out.append("a scan for vulnerabilities: grype is not installed")
            return
        records = [self.out / "images" / f"{target}.json" for target in self.built]
        self.step("scan for vulnerabilities", lambda: script("scan_images.py", *records, "--plain-http"))

    def sign(self, registry: str) -> None:
        """Sign and verify files and, with a registry, images and the charts in it."""
        os.environ["COSIGN_PASSWORD"] = "of a key that is used once"
        run("cosign", "generate-key-pair", "--output-key-prefix", self.out / "key")
        images = self.out / "images"
        what: list[str | Path] = [self.out / "python", *(self.out / "chart").glob("*.tgz")]
        what += images.glob("*.provenance.json")
        if registry:
            for name in CHARTS:
                digest = (self.out / f"chart/{name}.digest").read_text().strip()
                what.append(f"{registry}/charts/{name}@{digest}")
            what += [path for path in images.glob("*.json") if path.stem in TARGETS]
        http = ["--plain-http"] if registry else []
        script("sign.py", "sign", "--key", self.out / "key.key", *http, *what)
        script("sign.py", "verify", "--key", self.out / "key.pub", *http, *what)

    def report(self) -> None:
        """Print times, artifacts with sizes, and what was left out."""
        print("\n== Result")
        for name, seconds in self.seconds.items():
            print(f"{seconds:8.1f} s  {name}")
        for part in sorted(self.out.iterdir()):
            files = [path for path in (part, *part.rglob("*")) if path.is_file()]
            shown = {part: files} if part.name == "docs" else {path: [path] for path in sorted(files)}
            for path, inside in shown.items():
                size = sum(file.stat().st_size for file in inside)
                print(f"{size / 1e6:8.2f} MB {path.relative_to(self.out)}")
        for reason in self.left_out:
            print(f"left out: {reason}")


@contextlib.contextmanager
def loopback_registry(log: Path) -> Iterator[str]:
    """Run a registry on the loopback address; yield its address, which is empty if crane is not installed."""
    crane = shutil.which("crane")
    if crane is None:
        yield ""
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [crane, "registry", "serve", "--address", address], stdout=file, stderr=file
        )
    try:
        wait_until_open(address, process)
        yield address
    finally:
        process.terminate()
        process.wait()


def wait_until_open(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server accepts connections.

    Raises:
        ValueError: it ended, or it did not start in time.
    """
    host, _, port = address.partition(":")
    deadline = time.monotonic() + REGISTRY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.1)
    raise ValueError(f"the registry on {address} did not start")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="empty folder")
    parser.add_argument("--builder", choices=("docker", "buildah", "none"), default="")
    parser.add_argument("--target", choices=TARGETS, action="append", help="all targets by default")
    parser.add_argument("--base", default="python:3.12-slim")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        sys.exit(f"{out} is not empty")
    try:
        dry_run = DryRun(out, options)
        dry_run.make()
    except (ValueError, subprocess.CalledProcessError) as failure:
        sys.exit(str(failure))
    dry_run.report()


if __name__ == "__main__":
    main()
