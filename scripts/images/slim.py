# SPDX-License-Identifier: Apache-2.0
"""Reduce the size of an installed environment: remove the tests of libraries, and zip the Kubernetes client.

The generated Kubernetes client has thousands of small modules, and a program imports only a few of them. As a
zip archive on the module path it takes a fifth of the space, and every module remains importable.

    python slim.py /opt/mizzen/lib/python3.12/site-packages
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

ARCHIVED = ("kubernetes",)
TESTS = ("tests", "test", "testing")
KEPT = ("numpy/testing",)
"""Folders that match `TESTS` but must stay, because their library imports them."""
UNTOUCHED = {"mizzen", "torch"}
"""Packages that keep all folders: Mizzen's Helm chart has `templates/tests`, and torch imports its own."""


def drop_tests(site: Path) -> int:
    """Remove the test folders of installed packages and return their number."""
    found = [path.relative_to(site) for name in TESTS for path in site.glob(f"**/{name}") if path.is_dir()]
    folders = [path for path in found if path.as_posix() not in KEPT and not UNTOUCHED & set(path.parts)]
    for folder in folders:
        shutil.rmtree(site / folder, ignore_errors=True)
    return len(folders)


def archive(site: Path, package: str) -> Path | None:
    """Move a pure Python package, with sources and bytecode, into `<package>.zip` on the module path.

    Returns:
        The archive, or None if the package is not installed.

    Raises:
        ValueError: the package contains a native module, which could not be imported from an archive.
    """
    folder = site / package
    if not folder.is_dir():
        return None
    native = [path for path in folder.rglob("*") if path.suffix in (".so", ".pyd")]
    if native:
        raise ValueError(
            f"{package} contains {native[0].name}: only pure Python can be imported from an archive"
        )
    target = site / f"{package}.zip"
    with zipfile.PyZipFile(str(target), "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writepy(str(folder))
        for source in sorted(folder.rglob("*.py")):
            bundle.write(source, source.relative_to(site))
    shutil.rmtree(folder)
    (site / f"{package}-archive.pth").write_text(f"{target}\n")
    return target


def main() -> None:
    site = Path(sys.argv[1])
    print(f"removed {drop_tests(site)} test folders")
    for package in ARCHIVED:
        if target := archive(site, package):
            print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
