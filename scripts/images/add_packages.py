# SPDX-License-Identifier: Apache-2.0
"""Add the Debian packages whose files an image contains to its CycloneDX bill of materials.

python add_packages.py mizzen-engine.cdx.json debian-packages.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def component(name: str, version: str) -> dict[str, Any]:
    """Return the component of a Debian package."""
    purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch=amd64"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main() -> None:
    bill, packages = Path(sys.argv[1]), Path(sys.argv[2])
    content = json.loads(bill.read_text(encoding="utf-8"))
    versions: dict[str, str] = json.loads(packages.read_text(encoding="utf-8"))
    content["components"] += [component(*item) for item in versions.items()]
    bill.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
