# SPDX-License-Identifier: Apache-2.0
"""Build the documentation of one version into a site that keeps the versions before.

    python scripts/release/build_docs.py site --alias latest
    python scripts/release/build_docs.py site --version dev

The site has a folder for each version, a folder for each alias with a copy of its version, `versions.json`
(from which the theme makes its menu of versions, in the format of mike) and an index.html that leads to the
alias `latest`, or to the newest version. Only the highest version gets an alias, so a patch of an older
release does not become `latest`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from set_version import ROOT, read_version

INDEX = (
    '<!doctype html><meta charset="utf-8"><title>Mizzen</title>'
    '<meta http-equiv="refresh" content="0; url={}/">\n'
)


def order(version: str) -> tuple[int, ...]:
    """Return the sort key of a version; names such as `dev` come before all numbers."""
    return tuple(int(part) for part in version.split(".")) if re.fullmatch(r"\d+(\.\d+)*", version) else (-1,)


def list_versions(known: list[dict[str, Any]], version: str, alias: str) -> list[dict[str, Any]]:
    """Return the entries of versions.json, newest first, after a version has been added.

    An alias belongs to one version: the new one takes it from the others, unless one of them is higher.
    """
    if any(order(entry["version"]) > order(version) for entry in known):
        alias = ""
    others = [entry for entry in known if entry["version"] != version]
    kept = [{**entry, "aliases": [name for name in entry["aliases"] if name != alias]} for entry in others]
    had = [name for entry in known if entry["version"] == version for name in entry["aliases"]]
    aliases = sorted({*had, alias} - {""})
    kept.append({"version": version, "title": version, "aliases": aliases})
    return sorted(kept, key=lambda entry: order(entry["version"]), reverse=True)


def build_docs(site: Path, version: str, alias: str) -> None:
    """Build the pages of a version into the site, and bring the list of versions up to date.

    Raises:
        subprocess.CalledProcessError: mkdocs reported an error or a warning.
    """
    site.mkdir(parents=True, exist_ok=True)
    target = site / version
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", target.resolve()]
    subprocess.run(mkdocs, check=True, cwd=ROOT)
    listing = site / "versions.json"
    known = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else []
    entries = list_versions(known, version, alias)
    [built] = [entry for entry in entries if entry["version"] == version]
    for name in built["aliases"]:
        shutil.rmtree(site / name, ignore_errors=True)
        shutil.copytree(target, site / name)
    listing.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    start = "latest" if (site / "latest").is_dir() else entries[0]["version"]
    (site / "index.html").write_text(INDEX.format(start), encoding="utf-8")
    (site / ".nojekyll").touch()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path)
    parser.add_argument("--version", default="", help="version of the pages; that of the package by default")
    parser.add_argument(
        "--alias", default="", help="second name, such as latest, if the version is the highest"
    )
    options = parser.parse_args()
    try:
        build_docs(options.site, options.version or read_version(), options.alias)
    except (ValueError, subprocess.CalledProcessError) as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main()
