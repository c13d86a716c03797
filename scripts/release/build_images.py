# SPDX-License-Identifier: Apache-2.0
"""Build the images of a release as OCI archives, with bill of materials and provenance; push them if wanted.

    python scripts/release/build_images.py --registry registry.example.com/team --out dist/images --push
    python scripts/release/build_images.py --builder buildah --target gateway --registry localhost --out out

For each target, the folder gets `TARGET.tar` (the archive), `TARGET.cdx.json` (CycloneDX, from the image) and
`TARGET.json` (reference, digest, size). With `docker`, BuildKit adds SBOM and provenance to the archive
itself; with `buildah`, the folder gets `TARGET.provenance.json`. `--push` pushes the archive with skopeo,
under the digest in `TARGET.json` and without a tag; tag_images.py tags the images of a release together.

Labels and provenance name the commit. `--push` therefore refuses a work tree with local changes, unless
`--allow-local-changes` is given, as for the registry of a dry run.

The variable BUILDAH is the command of buildah with its own options, and BUILD_OPTIONS has more options of
the build command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from oci_archive import OciArchive
from provenance import make_statement
from set_version import ROOT, read_version

TARGETS = ("operator", "gateway", "engine-cpu", "engine")
SBOM_FOLDER = "opt/mizzen/share/sbom"


def output(*command: str) -> str:
    """Run a command and return its output without the final line break; its errors are printed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.strip()


def require_committed() -> None:
    """Check that the work tree is that of the commit which labels and provenance name.

    Raises:
        ValueError: it has local changes; the message lists the files.
    """
    if changes := output("git", "status", "--porcelain"):
        raise ValueError(f"--push needs a work tree without local changes; commit or remove:\n{changes}")


def build_arguments(options: argparse.Namespace) -> dict[str, str]:
    """Return the build arguments that all images of a release get, and those of the command line."""
    base, _, digest = options.base.partition("@")
    if options.pin_base and not digest:
        digest = output("skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{base}")
    arguments = {
        "BASE": f"{base}@{digest}" if digest else base,
        "BASE_NAME": base,
        "BASE_DIGEST": digest,
        "VERSION": read_version(),
        "REVISION": output("git", "rev-parse", "HEAD"),
        "CREATED": output("git", "show", "-s", "--format=%cI", "HEAD"),
        "SOURCE": options.repository,
    }
    return arguments | dict(item.split("=", 1) for item in options.build_arg)


def build_archive(
    builder: str, target: str, reference: str, archive: Path, arguments: dict[str, str], platform: str
) -> None:
    """Build one target and write it as an OCI archive."""
    build = ["-f", "Dockerfile.worker", "--target", target, "--platform", platform]
    build += [part for item in arguments.items() for part in ("--build-arg", "=".join(item))]
    build += shlex.split(os.environ.get("BUILD_OPTIONS", ""))
    if builder == "docker":
        attest = ["--attest", "type=provenance,mode=max", "--attest", "type=sbom"]
        write = ["--output", f"type=oci,dest={archive},name={reference}"]
        subprocess.run(["docker", "buildx", "build", *build, *attest, *write, "."], check=True, cwd=ROOT)
        return
    buildah = shlex.split(os.environ.get("BUILDAH", "buildah"))
    subprocess.run([*buildah, "build", *build, "-t", reference, "."], check=True, cwd=ROOT)
    archive.unlink(missing_ok=True)
    subprocess.run([*buildah, "push", "-q", reference, f"oci-archive:{archive}"], check=True)


def write_records(
    options: argparse.Namespace, target: str, parameters: dict[str, str], began: str
) -> dict[str, Any]:
    """Write bill of materials, provenance and description of a built image; return the description."""
    out: Path = options.out
    name = f"{options.registry}/mizzen/{target}"
    with OciArchive(out / f"{target}.tar") as image:
        record = {
            "target": target,
            "reference": f"{name}:{parameters['VERSION']}",
            "digest": image.digest,
            "bytes": image.size(),
        }
        _, sbom = image.read_file(SBOM_FOLDER, ".cdx.json")
        labels = image.labels()
    if labels.get("org.opencontainers.image.revision") != parameters["REVISION"]:
        raise ValueError(f"{target}: the image has labels of another build; turn off the builder's cache")
    (out / f"{target}.cdx.json").write_bytes(sbom)
    (out / f"{target}.json").write_text(json.dumps(record, indent=1) + "\n")
    if options.builder == "buildah":
        statement = make_statement(
            (name, record["digest"]),
            parameters={"builder": options.builder, "target": target, **parameters},
            source=(options.repository, parameters["REVISION"]),
            times=(began, now()),
        )
        (out / f"{target}.provenance.json").write_text(json.dumps(statement, indent=1) + "\n")
    return record


def now() -> str:
    """Return the time in UTC, as RFC 3339."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def digest_reference(record: dict[str, Any]) -> str:
    """Return `NAME@DIGEST` of an image that `TARGET.json` describes."""
    return f"{record['reference'].rpartition(':')[0]}@{record['digest']}"


def push_archive(archive: Path, reference: str, *, plain_http: bool) -> None:
    """Push an archive with everything in it to a reference with its digest."""
    insecure = ["--dest-tls-verify=false"] if plain_http else []
    copy = ["skopeo", "copy", "--all", "--preserve-digests", *insecure]
    subprocess.run([*copy, f"oci-archive:{archive}", f"docker://{reference}"], check=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--registry", required=True, help="registry and organisation")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--builder", choices=("docker", "buildah"), default="docker")
    parser.add_argument("--target", choices=TARGETS, action="append", help="all targets by default")
    parser.add_argument("--base", default="python:3.12-slim")
    parser.add_argument("--pin-base", action="store_true", help="look up the digest of the base image")
    parser.add_argument("--platform", default="linux/amd64")
    parser.add_argument("--repository", default="https://mizzen.dev", help="URL of the source")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--push", action="store_true", help="push by digest, without a tag")
    parser.add_argument(
        "--allow-local-changes", action="store_true", help="push files that are not committed"
    )
    parser.add_argument("--plain-http", action="store_true", help="push without TLS, to a registry of a test")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.push and not options.allow_local_changes:
        require_committed()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    arguments = build_arguments(options)
    for target in options.target or TARGETS:
        archive = options.out / f"{target}.tar"
        reference = f"{options.registry}/mizzen/{target}:{arguments['VERSION']}"
        began = now()
        build_archive(options.builder, target, reference, archive, arguments, options.platform)
        record = write_records(options, target, arguments, began)
        if options.push:
            push_archive(archive, digest_reference(record), plain_http=options.plain_http)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, subprocess.CalledProcessError) as failure:
        sys.exit(str(failure))
