# SPDX-License-Identifier: Apache-2.0
"""Scan images in a registry with grype; fail if one has a critical vulnerability for which there is a fix.

    python scripts/release/scan_images.py dist/images/gateway.json

The arguments are the files `TARGET.json` of build_images.py. Grype takes credentials from `docker login`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from build_images import digest_reference

SEVERITIES = ("negligible", "low", "medium", "high", "critical")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", nargs="+", type=Path)
    parser.add_argument(
        "--fail-on", choices=SEVERITIES, default="critical", help="lowest severity that fails"
    )
    parser.add_argument("--plain-http", action="store_true", help="use a registry of a test, without TLS")
    options = parser.parse_args()
    insecure = {"GRYPE_REGISTRY_INSECURE_USE_HTTP": "true"} if options.plain_http else {}
    failed = []
    for path in options.record:
        reference = digest_reference(json.loads(path.read_text(encoding="utf-8")))
        command = ["grype", f"registry:{reference}", "--only-fixed", "--fail-on", options.fail_on]
        if subprocess.run(command, env={**os.environ, **insecure}, check=False).returncode:
            failed.append(reference)
    if failed:
        sys.exit(f"grype failed, or found vulnerabilities that have a fix, in {', '.join(failed)}")


if __name__ == "__main__":
    try:
        main()
    except OSError as failure:
        sys.exit(f"cannot run grype: {failure}")
