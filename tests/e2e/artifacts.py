# SPDX-License-Identifier: Apache-2.0
"""The artifacts that the test installs: the packages of the charts, and images as archives.

They are made by the release scripts: by a release (or its dry run), whose folder `E2E_RELEASE` names, or
else by `package_charts.py` now.
"""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def release_folder() -> Path | None:
    """Return the folder with the artifacts of a release; None if the test must make the artifacts.

    Raises:
        SystemExit: `E2E_RELEASE` names a folder without artifacts of a release.
    """
    folder = os.environ.get("E2E_RELEASE")
    if not folder:
        return None
    if not list(Path(folder, "chart").glob("mizzen-[0-9]*.tgz")):
        sys.exit(f"E2E_RELEASE: {folder} contains no package of a chart: make it with make release-dry-run")
    return Path(folder).resolve()


def find_package(folder: Path) -> Path:
    """Return the package of the operator's chart in a folder."""
    [package] = folder.glob("mizzen-[0-9]*.tgz")
    return package


def package_command(out: Path, prefix: str) -> list[str]:
    """Return the command that packages the charts with the registry of images with this prefix."""
    script = str(ROOT / "scripts/release/package_charts.py")
    return [sys.executable, script, "--registry", prefix.rpartition("/")[0], "--out", str(out)]


def image_archive(release: Path, target: str) -> Path:
    """Return the archive of a release's image.

    Raises:
        SystemExit: the release lacks it.
    """
    archive = release / f"images/{target}.tar"
    if not archive.is_file():
        sys.exit(f"E2E_RELEASE: there is no {archive}: make it with make release-dry-run")
    return archive


def make_checkout(package: Path, folder: Path) -> Path:
    """Make a folder in which the quick start's commands find the packaged chart as `charts/mizzen`.

    Args:
        package: package of the operator's chart.
        folder: an empty folder.

    Returns:
        The folder, with the repository's examples and the content of the package.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    with tarfile.open(package) as archive:
        archive.extractall(folder / "charts", filter="data")
    return folder
