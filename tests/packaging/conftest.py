# SPDX-License-Identifier: Apache-2.0
"""Builds the distribution from a copy of the tree, once for all tests of this folder."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from demo_model import trained_answers

sys.path.insert(0, str(Path(__file__).parent))

from built_distribution import ROOT, SOURCES, Built, Installed, build


@pytest.fixture(scope="session")
def answers() -> dict[str, str]:
    return trained_answers()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    tree = folder / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".cache")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree / path.name)
    sdist = build(tree, "sdist", folder / "sdist")
    wheel = build(tree, "wheel", folder / "wheel")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(sdist, wheel, build(unpacked, "wheel", folder / "again"))


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(site)
    return Installed(site, tmp_path_factory.mktemp("empty"))
