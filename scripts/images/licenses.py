# SPDX-License-Identifier: Apache-2.0
"""Collect the license texts of all installed Python distributions, as their licenses require of an image.

Writes one folder per distribution, and `index.txt`: names, versions, licenses and numbers of texts. The index
also lists the Debian packages whose files the compiler of the image needs.

    python licenses.py /opt/mizzen/lib/python3.12/site-packages /opt/mizzen/share/licenses
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

TEXT = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|AUTHORS|COPYRIGHT)", re.IGNORECASE)


def license_name(distribution: Distribution) -> str:
    """Return the license that a distribution's metadata declare, on one line."""
    metadata = distribution.metadata
    declared = metadata.get("License-Expression") or metadata.get("License") or ""
    if not declared or "\n" in declared:  # some distributions put the whole text there
        classifiers = metadata.get_all("Classifier") or []
        names = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
        declared = ", ".join(names) or declared.partition("\n")[0]
    return declared.strip() or "not declared"


def license_files(distribution: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield the license texts of a distribution, with their paths below its metadata folder."""
    for entry in distribution.files or ():
        folder = next((index for index, part in enumerate(entry.parts) if part.endswith(".dist-info")), None)
        if folder is None:
            continue
        inner = entry.parts[folder + 1 :]
        if inner[0] in ("licenses", "license_files") or TEXT.match(inner[-1]):
            path = Path(str(distribution.locate_file(entry)))
            if path.is_file():
                yield "/".join(inner), path


def collect(site: Path, target: Path) -> list[str]:
    """Copy all license texts from the distributions in `site` to `target`; return the lines of the index."""
    lines = []
    for distribution in sorted(distributions(path=[str(site)]), key=lambda item: item.name.lower()):
        count = 0
        for name, path in license_files(distribution):
            copy = target / f"{distribution.name}-{distribution.version}" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            count += 1
        lines.append(f"{distribution.name} {distribution.version}\t{license_name(distribution)}\t{count}")
    return lines


def list_debian(packages: Path) -> list[str]:
    """Return the index lines of the Debian packages in a file; install_compiler.py has copied their texts."""
    if not packages.is_file():
        return []
    versions = json.loads(packages.read_text(encoding="utf-8"))
    return [f"{name} {version}\tsee its text\t1" for name, version in versions.items()]


def main() -> None:
    site, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    debian = list_debian(target.parent / "debian-packages.json")
    lines = collect(site, target)
    (target / "index.txt").write_text("".join(f"{line}\n" for line in lines + debian), encoding="utf-8")
    print(f"{target}: licenses of {len(lines)} distributions")


if __name__ == "__main__":
    main()
