# SPDX-License-Identifier: Apache-2.0
"""Give the images of a release their tags, once all of them are in the registry.

    python scripts/release/tag_images.py dist/images

The folder has `TARGET.json` of each image, from build_images.py, which pushes images without tags. Nothing is
tagged if the description of an image is missing, or if a tag exists with another digest, because tags of
releases do not move. The command may be repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from build_images import TARGETS, digest_reference


def read_records(folder: Path, targets: list[str]) -> list[dict[str, Any]]:
    """Return the descriptions of all images of a release.

    Raises:
        ValueError: one is missing, or they are of several versions.
    """
    paths = [folder / f"{target}.json" for target in targets]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise ValueError(f"nothing is tagged, because images are missing: {', '.join(missing)}")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    versions = sorted({record["reference"].rpartition(":")[2] for record in records})
    if len(versions) != 1:
        raise ValueError(f"nothing is tagged, because the images have versions {', '.join(versions)}")
    return records


def find_digest(reference: str, *, plain_http: bool) -> str:
    """Return the digest of a tag in a registry; empty if there is no such tag.

    Raises:
        ValueError: the registry did not answer.
    """
    options = ["--tls-verify=false"] if plain_http else []
    command = ["skopeo", "inspect", *options, "--format", "{{.Digest}}", f"docker://{reference}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode == 0:
        return shown.stdout.strip()
    if any(absent in shown.stderr for absent in ("manifest unknown", "name unknown")):
        return ""
    raise ValueError(f"cannot look up {reference}:\n{shown.stderr.strip()}")


def tag_images(records: list[dict[str, Any]], *, plain_http: bool) -> None:
    """Tag images that have no tag yet.

    Raises:
        ValueError: a tag has another digest; then nothing is tagged.
    """
    found = [find_digest(record["reference"], plain_http=plain_http) for record in records]
    for record, digest in zip(records, found, strict=True):
        if digest not in ("", record["digest"]):
            raise ValueError(
                f"nothing is tagged, because {record['reference']} is {digest} in the registry, not "
                f"{record['digest']}: release another version"
            )
    insecure = ["--src-tls-verify=false", "--dest-tls-verify=false"] if plain_http else []
    for record, digest in zip(records, found, strict=True):
        if not digest:
            images = [f"docker://{digest_reference(record)}", f"docker://{record['reference']}"]
            subprocess.run(["skopeo", "copy", "--all", "--preserve-digests", *insecure, *images], check=True)
        print(f"{record['reference']} is {record['digest']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", choices=TARGETS, action="append", help="all targets by default")
    parser.add_argument("--plain-http", action="store_true", help="use a registry of a test, without TLS")
    options = parser.parse_args()
    records = read_records(options.folder, options.target or list(TARGETS))
    tag_images(records, plain_http=options.plain_http)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, subprocess.CalledProcessError) as failure:
        sys.exit(str(failure))
