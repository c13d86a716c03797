# SPDX-License-Identifier: Apache-2.0
"""Sign and verify the artifacts of a release with cosign.

    python scripts/release/sign.py sign dist/python dist/images/*.json
    python scripts/release/sign.py verify --key cosign.pub dist/python dist/images/*.json

A folder means all files in it. A description of an image (`TARGET.json` of build_images.py) means the image
in its registry and its bill of materials; `REGISTRY/NAME@sha256:...` means an artifact in a registry, such as
the chart. Without `--key`, signatures are keyless: cosign gets a certificate for the identity of the workflow
that runs it, and records the signature in the public transparency log. With `--key` it does neither.
The variable COSIGN_PASSWORD has the password of the key.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BUNDLE = ".sigstore.json"


class Cosign:
    """Signs and verifies with a key, or without one for the identity of a workflow."""

    def __init__(self, key: str, identity: list[str], *, plain_http: bool) -> None:
        """Use a key file or, if `key` is empty, `identity`: cosign's options for the certificate."""
        self._sign = ["--yes", *(["--key", key, "--tlog-upload=false"] if key else [])]
        self._verify = ["--key", key, "--insecure-ignore-tlog=true"] if key else identity
        self._registry = ["--allow-http-registry"] if plain_http else []

    def sign_file(self, path: Path) -> None:
        """Write the signature of a file beside it."""
        self._run("sign-blob", *self._sign, "--bundle", f"{path}{BUNDLE}", str(path))

    def verify_file(self, path: Path) -> None:
        """Check the signature beside a file."""
        self._run("verify-blob", *self._verify, "--bundle", f"{path}{BUNDLE}", str(path))

    def sign_artifact(self, reference: str, sbom: Path | None) -> None:
        """Sign an artifact in a registry and, with `sbom`, attest its bill of materials.

        `reference` has a digest. All parts of an index are signed too.
        """
        self._run("sign", *self._sign, *self._registry, "--recursive", reference)
        if sbom:
            attest = ("--type", "cyclonedx", "--predicate", str(sbom))
            self._run("attest", *self._sign, *self._registry, *attest, reference)

    def verify_artifact(self, reference: str, sbom: Path | None) -> None:
        """Check the signature of an artifact in a registry and, with `sbom`, that it has an attestation."""
        self._run("verify", *self._verify, *self._registry, reference)
        if sbom:
            self._run("verify-attestation", *self._verify, *self._registry, "--type", "cyclonedx", reference)

    def _run(self, *command: str) -> None:
        run = subprocess.run(["cosign", *command], capture_output=True, text=True, check=False)
        if run.returncode:
            raise ValueError(f"cosign {' '.join(command)} failed:\n{run.stderr.strip()}")


def find_files(path: Path) -> Iterator[Path]:
    """Yield the files to sign at a path: itself or, for a folder, the files in it except signatures."""
    if path.is_dir():
        yield from sorted(item for item in path.iterdir() if item.is_file() and BUNDLE not in item.name)
    else:
        yield path


def handle(cosign: Cosign, verb: str, what: str) -> None:
    """Sign or verify an artifact in a registry, a file, or all files of a folder."""
    path, reference, sbom = Path(what), "", None
    if "@sha256:" in what and not path.exists():
        reference = what
    elif path.name.count(".") == 1 and path.suffix == ".json":
        image = json.loads(path.read_text(encoding="utf-8"))
        reference = f"{image['reference'].rpartition(':')[0]}@{image['digest']}"
        sbom = path.with_suffix(".cdx.json")
    if reference:
        (cosign.sign_artifact if verb == "sign" else cosign.verify_artifact)(reference, sbom)
        print(f"{verb}: {reference}")
        return
    files = list(find_files(path))
    if not files:
        raise ValueError(f"{what}: there is no file to {verb}")
    for file in files:
        (cosign.sign_file if verb == "sign" else cosign.verify_file)(file)
        print(f"{verb}: {file}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("sign", "verify"))
    parser.add_argument("what", nargs="+")
    parser.add_argument("--key", default="")
    parser.add_argument("--identity", default="", help="URL of the workflow that signed, with its tag")
    parser.add_argument("--issuer", default="https://token.actions.githubusercontent.com")
    parser.add_argument("--plain-http", action="store_true", help="use a registry of a test, without TLS")
    options = parser.parse_args()
    if options.verb == "verify" and not (options.key or options.identity):
        parser.error("verify needs --key or --identity")
    identity = ["--certificate-identity", options.identity, "--certificate-oidc-issuer", options.issuer]
    cosign = Cosign(options.key, identity, plain_http=options.plain_http)
    try:
        for what in options.what:
            handle(cosign, options.verb, what)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
