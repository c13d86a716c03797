# SPDX-License-Identifier: Apache-2.0
"""Run the tests of this folder on a cluster: build the images, load them into its nodes, test, and clean up.

`E2E_LOAD` selects how the nodes get the images:

- `kind`: Docker builds them; `kind load docker-image` loads them into the cluster `$KIND_CLUSTER` (by default
  `kind`)
- `registry`: Docker builds them; `docker push` pushes them to `$E2E_PREFIX`, such as
  registry.example.com/mizzen
- `kube`: the program `$KUBE`, with the verbs up, build, push, run and down, builds and delivers them; it also
  creates the cluster

With `kind` and `registry`, KUBECONFIG selects the cluster, and its default StorageClass provisions the volume
for models. If `E2E_ENGINE_SITE` names a folder on the nodes that contains torch, the engine's image is built
without torch (with `kube`, the default is this environment's site-packages). On clusters without a
StorageClass, `E2E_MODEL_FOLDER` names an empty folder on the nodes for models (with `kube`, the default is a
temporary folder).

The charts are packaged by the release scripts. If `E2E_RELEASE` names the folder of a release, such as
`make release-dry-run` makes it, the test installs its package and its images, and builds none. This needs
skopeo.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from artifacts import ROOT, find_package, image_archive, package_command, release_folder

TARGETS = ("operator", "gateway", "engine-cpu")
LEFT_OUT = "torch xgrammar"
FILES = [f"tests/e2e/test_{part}.py" for part in ("quickstart", "product", "models", "groups", "removal")]
"""Test files, in the order of the installation's life."""


@dataclass(frozen=True)
class ImageDelivery:
    """Commands that build images, deliver them to the nodes, and create and remove the cluster.

    Attributes:
        prefix: prefix of the images' repositories.
        pull_policy: image pull policy of all pods.
        build: returns the command that builds an image with options.
        deliver: returns the command that delivers an image to the nodes.
        load: returns the command that delivers all images of an archive, in Docker's format, to the nodes;
            None if images are pushed to a registry.
        within: prefix of commands that access the cluster.
        up: command that creates the cluster; None if it exists already.
        down: command that removes the cluster; None to keep it.
    """

    prefix: str
    pull_policy: str
    build: Callable[[str, list[str]], list[str]]
    deliver: Callable[[str], list[str]]
    load: Callable[[str], list[str]] | None
    within: tuple[str, ...] = ()
    up: tuple[str, ...] | None = None
    down: tuple[str, ...] | None = None


def call(*command: str) -> None:
    """Run a command in the repository's folder; its output goes to the output of this program.

    Raises:
        SystemExit: the command failed.
    """
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with {status}")


def docker_build(image: str, options: list[str]) -> list[str]:
    """Return the command that builds an image with Docker."""
    return ["docker", "build", "-t", image, *options, str(ROOT)]


def image_delivery(load: str) -> ImageDelivery:
    """Return the delivery for a value of `E2E_LOAD`.

    Raises:
        SystemExit: the value is unknown, or an environment variable that it needs is not set.
    """
    if load == "kube":
        kube = os.environ.get("KUBE") or sys.exit(
            "E2E_LOAD=kube needs KUBE, the program that makes the cluster"
        )
        return ImageDelivery(
            prefix="localhost/mizzen",
            pull_policy="Never",
            build=lambda image, options: [kube, "build", image, str(ROOT), *options],
            deliver=lambda image: [kube, "push", image],
            load=lambda archive: [kube, "load", archive],
            within=(kube, "run"),
            up=(kube, "up"),
            down=(kube, "down"),
        )
    if load == "kind":
        name = os.environ.get("KIND_CLUSTER", "kind")
        image, archive = (
            ["kind", "load", kind, "--name", name] for kind in ("docker-image", "image-archive")
        )
        return ImageDelivery(
            prefix="localhost/mizzen",
            pull_policy="Never",
            build=docker_build,
            deliver=lambda name: [*image, name],
            load=lambda path: [*archive, path],
        )
    if load == "registry":
        prefix = os.environ.get("E2E_PREFIX") or sys.exit("E2E_LOAD=registry needs E2E_PREFIX")
        return ImageDelivery(
            prefix, "Always", docker_build, deliver=lambda image: ["docker", "push", image], load=None
        )
    sys.exit(f"E2E_LOAD must be kind, kube or registry, not {load!r}")


def engine_site(load: str) -> str:
    """Return the nodes' folder that has the engine's packages; empty if the image contains all packages."""
    own = sysconfig.get_path("purelib") if load == "kube" else ""
    return os.environ.get("E2E_ENGINE_SITE", own)


def build_options(target: str, version: str, site: str) -> list[str]:
    """Return the build options of a target; with a `site` folder, engine images lack torch and xgrammar."""
    options = ["-f", str(ROOT / "Dockerfile.worker"), "--target", target, "--build-arg", f"VERSION={version}"]
    if target == "engine-cpu":
        left_out = LEFT_OUT if site else ""
        index = os.environ.get("E2E_TORCH_INDEX", "")
        options += ["--build-arg", f"WITHOUT={left_out}", "--build-arg", f"TORCH_INDEX={index}"]
    return options


def chart_version() -> str:
    """Return the tag of the images that the chart uses by default, as the quick start does."""
    return yaml.safe_load((ROOT / "charts/mizzen/Chart.yaml").read_text())["appVersion"]


def run_timed(label: str, action: Callable[[], None]) -> None:
    """Run an action and print how many seconds it took."""
    began = time.monotonic()
    action()
    print(f"e2e: {time.monotonic() - began:6.1f} s  {label}", flush=True)


def build(delivery: ImageDelivery, site: str, target: str, tag: str) -> None:
    """Build the image of a target, and give it a tag."""
    image = f"{delivery.prefix}/{target}:{tag}"
    run_timed(f"built {image}", lambda: call(*delivery.build(image, build_options(target, tag, site))))


def build_and_deliver(delivery: ImageDelivery, site: str, target: str, tags: tuple[str, ...]) -> None:
    """For each tag, build the image of a target and deliver it to the nodes."""
    for tag in tags:
        image = f"{delivery.prefix}/{target}:{tag}"
        build(delivery, site, target, tag)
        run_timed(f"delivered {image}", lambda image=image: call(*delivery.deliver(image)))


def deliver_archive(delivery: ImageDelivery, archive: Path, target: str, tags: tuple[str, ...]) -> None:
    """Deliver an image of a release to the nodes, with all tags."""
    images = [f"{delivery.prefix}/{target}:{tag}" for tag in tags]
    copy = ["skopeo", "copy", "--quiet", f"oci-archive:{archive}"]
    if delivery.load is None:
        for image in images:
            call(*copy, f"docker://{image}")
        return
    with tempfile.TemporaryDirectory(prefix="mizzen-e2e-") as folder:
        named = f"{folder}/{target}.tar"
        more = [part for image in images[1:] for part in ("--additional-tag", image)]
        call(*copy, *more, f"docker-archive:{named}:{images[0]}")
        call(*delivery.load(named))


def prepare(delivery: ImageDelivery, site: str, tags: tuple[str, ...], release: Path | None) -> Path:
    """Create the cluster, deliver the images to it, and return the package of the operator's chart.

    Without a release, build one image to cache the shared stages, then all images concurrently. The first two
    steps are not concurrent, because each may install packages that the machine lacks.
    """
    run_timed("cluster up", lambda: call(*delivery.up or ("true",)))
    if release is not None:
        for target in TARGETS:
            archive = image_archive(release, target)
            label = f"delivered {archive}"
            run_timed(label, lambda a=archive, t=target: deliver_archive(delivery, a, t, tags))
        return find_package(release / "chart")
    build(delivery, site, TARGETS[0], tags[0])
    with ThreadPoolExecutor() as pool:
        for task in [pool.submit(build_and_deliver, delivery, site, target, tags) for target in TARGETS]:
            task.result()
    charts = ROOT / "build/e2e-charts"
    shutil.rmtree(charts, ignore_errors=True)  # it may have a package of another version
    call(*delivery.within, *package_command(charts, delivery.prefix))
    return find_package(charts)


@contextmanager
def model_folder(load: str) -> Iterator[str]:
    """Yield a folder on the nodes for models; empty if the cluster provisions volumes."""
    configured = os.environ.get("E2E_MODEL_FOLDER", "")
    if load != "kube" or configured:
        yield configured
        return
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="models-", dir=ROOT / "build") as folder:
        yield folder


def test(
    delivery: ImageDelivery, settings: dict[str, str], tags: tuple[str, ...], arguments: list[str]
) -> int:
    """Run the tests, with more environment variables, and return the exit status of pytest."""
    environment = {
        **settings,
        "E2E_PREFIX": delivery.prefix,
        "E2E_TAG": tags[0],
        "E2E_NEXT_TAG": tags[1],
        "E2E_PULL_POLICY": delivery.pull_policy,
        "E2E_OUT": os.environ.get("E2E_OUT", str(ROOT / "build/e2e")),
    }
    pytest = [sys.executable, "-m", "pytest", *FILES, "-n", "0", "-x", "-s", "-v", *arguments]
    variables = [f"{name}={value}" for name, value in environment.items()]
    return subprocess.run([*delivery.within, "env", *variables, *pytest], cwd=ROOT, check=False).returncode


def interrupted(number: int, _: object) -> None:
    """Handle a signal: raise an exception that ends the program after the cluster has been removed."""
    raise SystemExit(128 + number)


def main() -> int:
    """Prepare the cluster, run the tests, clean up, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args().pytest
    load = os.environ.get("E2E_LOAD", "")
    delivery, site, tags = image_delivery(load), engine_site(load), ("e2e", "e2e-next", chart_version())
    release = release_folder()
    signal.signal(signal.SIGTERM, interrupted)
    try:
        began = time.monotonic()
        chart = prepare(delivery, site, tags, release)
        print(f"e2e: {time.monotonic() - began:6.1f} s  cluster up, images delivered", flush=True)
        began = time.monotonic()
        with model_folder(load) as models:
            settings = {"E2E_CHART": str(chart), "E2E_ENGINE_SITE": site, "E2E_MODEL_FOLDER": models}
            status = test(delivery, settings, tags, arguments)
        print(f"e2e: {time.monotonic() - began:6.1f} s  tests", flush=True)
        return status
    finally:
        if delivery.down:
            run_timed("cluster down", lambda: call(*delivery.down or ()))


if __name__ == "__main__":
    sys.exit(main())
