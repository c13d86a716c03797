# SPDX-License-Identifier: Apache-2.0
"""Parts of the build that pyproject.toml cannot declare: files outside the packages, and links of the README.

pyproject.toml has all metadata. Build with `pip wheel .` or any other PEP 517 frontend.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHARED = ("crds", "charts", "examples", "models/demo")
"""Folders that a wheel carries in `mizzen/share`, where `mizzen.common.packaged_files` finds them."""


def shared_files() -> list[Path]:
    """Return all files of the shared folders, relative to the root folder.

    Raises:
        FileNotFoundError: a folder is missing or empty, so that the wheel would be incomplete.
    """
    files = []
    for folder in SHARED:
        found = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.name != ".DS_Store"]
        if not found:
            raise FileNotFoundError(f"{ROOT / folder} has no files; a wheel of Mizzen contains this folder")
        files += found
    return sorted(path.relative_to(ROOT) for path in files)


class BuildWithSharedFiles(build_py):
    """Copies the shared folders into the package, except in an editable installation, which needs no copy."""

    def run(self) -> None:
        """Build the packages, then copy the shared files."""
        super().run()
        if self.editable_mode:
            return
        for source, target in self._copies().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target, preserve_mode=False)

    def _copies(self) -> dict[str, str]:
        share = Path(self.build_lib, "mizzen", "share")
        return {str(path): str(share / path) for path in shared_files()}

    def get_source_files(self) -> list[str]:
        """Return the files that a source distribution needs."""
        return [*super().get_source_files(), *map(str, shared_files())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files that the build writes."""
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *self._copies().values()]


def readme() -> str:
    """Return the README for a package index: with absolute links, and without the marks of its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = (ROOT / "worker/mizzen/__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if version is None:
        raise ValueError("worker/mizzen/__init__.py does not define __version__")
    base = f"{project['urls']['Source']}/blob/v{version[1]}/"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^<!-- (?:run|skip): .*? -->\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<=\]\()(?!https?:|#)(?:\./)?", base, text)


setup(
    cmdclass={"build_py": BuildWithSharedFiles},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
