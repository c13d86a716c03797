"""Run the tests of this folder on a cluster: make the images, bring them to its nodes, test, and clean up.

`E2E_LOAD` says how the nodes get the images:

- `kind`: Docker builds them, `kind load docker-image` brings them to the cluster `$KIND_CLUSTER` (kind)
- `registry`: Docker builds them, `docker push` takes them to `$E2E_PREFIX`: registry.example.com/mizzen
- `kube`: `$KUBE` names a program with the verbs up, build, push, run and down, which makes the cluster too

With `kind` and `registry`, KUBECONFIG names the cluster, and its default StorageClass makes the volume for
models. `E2E_ENGINE_SITE` is a folder of nodes with torch, which the engine's image then leaves out (with
`kube`: this environment's own, unless it is set and empty), and `E2E_MODEL_FOLDER` an empty one for models,
where there is no StorageClass (with `kube`: a temporary one).
"""

from __future__ import annotations

import argparse
import os
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

ROOT = Path(__file__).parents[2]
TARGETS = ("operator", "gateway", "engine-cpu")
LEFT_OUT = "torch xgrammar"
FILES = [f"tests/e2e/test_{part}.py" for part in ("product", "models", "groups", "removal")]
"""The life of an installation, in order."""


@dataclass(frozen=True)
class Way:
    """How images come to the nodes.

    Attributes:
        prefix: of the images' repositories.
        pull_policy: of pods.
        build: gives the command that builds an image with some options.
        deliver: gives the command that takes an image to the nodes.
        within: the words before a command that talks to the cluster.
        up: makes the cluster, `down` removes it; None where it is there already.
    """

    prefix: str
    pull_policy: str
    build: Callable[[str, list[str]], list[str]]
    deliver: Callable[[str], list[str]]
    within: tuple[str, ...] = ()
    up: tuple[str, ...] | None = None
    down: tuple[str, ...] | None = None


def call(*command: str) -> None:
    """Run a command; its output is this program's.

    Raises:
        SystemExit: it failed.
    """
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with {status}")


def docker_build(image: str, options: list[str]) -> list[str]:
    """The command that builds an image with Docker."""
    return ["docker", "build", "-t", image, *options, str(ROOT)]


def way(load: str) -> Way:
    """Return the way that `E2E_LOAD` names.

    Raises:
        SystemExit: it names none, or a variable that it needs is not set.
    """
    if load == "kube":
        kube = os.environ.get("KUBE") or sys.exit(
            "E2E_LOAD=kube needs KUBE, the program that makes the cluster"
        )
        return Way(
            prefix="localhost/mizzen",
            pull_policy="Never",
            build=lambda image, options: [kube, "build", image, str(ROOT), *options],
            deliver=lambda image: [kube, "push", image],
            within=(kube, "run"),
            up=(kube, "up"),
            down=(kube, "down"),
        )
    if load == "kind":
        name = os.environ.get("KIND_CLUSTER", "kind")
        kind = ["kind", "load", "docker-image", "--name", name]
        return Way("localhost/mizzen", "Never", docker_build, lambda image: [*kind, image])
    if load == "registry":
        prefix = os.environ.get("E2E_PREFIX") or sys.exit("E2E_LOAD=registry needs E2E_PREFIX")
        return Way(prefix, "Always", docker_build, lambda image: ["docker", "push", image])
    sys.exit(f"E2E_LOAD must be kind, kube or registry, not {load!r}")


def engine_site(load: str) -> str:
    """Return the nodes' folder with the engine's packages; empty where the image holds them all."""
    own = sysconfig.get_path("purelib") if load == "kube" else ""
    return os.environ.get("E2E_ENGINE_SITE", own)


def options(target: str, version: str, site: str) -> list[str]:
    """The options of a target's build."""
    given = ["-f", str(ROOT / "Dockerfile.worker"), "--target", target, "--build-arg", f"VERSION={version}"]
    if target == "engine-cpu":
        left_out = LEFT_OUT if site else ""
        index = os.environ.get("E2E_TORCH_INDEX", "")
        given += ["--build-arg", f"WITHOUT={left_out}", "--build-arg", f"TORCH_INDEX={index}"]
    return given


def timed(what: str, action: Callable[[], None]) -> None:
    """Do something and say how long it took."""
    began = time.monotonic()
    action()
    print(f"e2e: {time.monotonic() - began:6.1f} s  {what}", flush=True)


def build(how: Way, site: str, target: str, tag: str) -> None:
    """Build an image under a tag."""
    image = f"{how.prefix}/{target}:{tag}"
    timed(f"built {image}", lambda: call(*how.build(image, options(target, tag, site))))


def bring(how: Way, site: str, target: str, tags: tuple[str, ...]) -> None:
    """Build an image and take it to the nodes, under each of the tags."""
    for tag in tags:
        image = f"{how.prefix}/{target}:{tag}"
        build(how, site, target, tag)
        timed(f"delivered {image}", lambda image=image: call(*how.deliver(image)))


def prepare(how: Way, site: str, tags: tuple[str, ...]) -> None:
    """Make the cluster, then an image for the stages that all share, then the others side by side.

    One after the other: both what makes a cluster and what builds install packages that a machine lacks.
    """
    timed("cluster up", lambda: call(*how.up or ("true",)))
    build(how, site, TARGETS[0], tags[0])
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(bring, how, site, target, tags) for target in TARGETS]:
            made.result()


@contextmanager
def model_folder(load: str) -> Iterator[str]:
    """A folder of nodes for models; empty where the cluster makes volumes by itself."""
    given = os.environ.get("E2E_MODEL_FOLDER", "")
    if load != "kube" or given:
        yield given
        return
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="models-", dir=ROOT / "build") as folder:
        yield folder


def test(how: Way, site: str, models: str, tags: tuple[str, ...], arguments: list[str]) -> int:
    """Run the tests; return pytest's exit status."""
    environment = {
        "E2E_PREFIX": how.prefix,
        "E2E_TAG": tags[0],
        "E2E_NEXT_TAG": tags[1],
        "E2E_PULL_POLICY": how.pull_policy,
        "E2E_ENGINE_SITE": site,
        "E2E_MODEL_FOLDER": models,
        "E2E_OUT": os.environ.get("E2E_OUT", str(ROOT / "build/e2e")),
    }
    pytest = [sys.executable, "-m", "pytest", *FILES, "-n", "0", "-x", "-s", "-v", *arguments]
    variables = [f"{name}={value}" for name, value in environment.items()]
    return subprocess.run([*how.within, "env", *variables, *pytest], cwd=ROOT, check=False).returncode


def interrupted(number: int, _: object) -> None:
    """End by an exception, so that the cluster is removed."""
    raise SystemExit(128 + number)


def main() -> int:
    """Make, test, clean up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args().pytest
    load = os.environ.get("E2E_LOAD", "")
    how, site, tags = way(load), engine_site(load), ("e2e", "e2e-next")
    signal.signal(signal.SIGTERM, interrupted)
    try:
        timed("cluster up, images built and delivered", lambda: prepare(how, site, tags))
        began = time.monotonic()
        with model_folder(load) as models:
            status = test(how, site, models, tags, arguments)
        print(f"e2e: {time.monotonic() - began:6.1f} s  tests", flush=True)
        return status
    finally:
        if how.down:
            timed("cluster down", lambda: call(*how.down or ()))


if __name__ == "__main__":
    sys.exit(main())
