# SPDX-License-Identifier: Apache-2.0
"""Maps Mizzen's images to programs of this Python environment."""

from __future__ import annotations

import sys
from pathlib import Path

from mizzen.common.packaged_files import find_packaged

LOCAL_REGISTRY = "localhost"
"""Registry in the image references of a local cluster; nothing is pulled from it."""
ENTRY_POINTS = {"mizzen/engine": "mizzen", "mizzen/gateway": "mizzen", "mizzen/operator": "mizzen-operator"}
MODULES = {"mizzen/engine-simulated": "mizzen.server.simulate"}
"""Images that only tests use and that are never built, mapped to the Python modules to run instead."""
IMAGE_FOLDERS = {"/opt/mizzen/models": "models"}
"""Folders in the images, mapped to the names of their counterparts among the packaged files."""


class UnknownImageError(Exception):
    """An image does not correspond to a program of this environment."""


def programs_folder() -> Path:
    """Return the folder of the programs of this Python environment."""
    return Path(sys.prefix) / "bin"


def image_files() -> dict[str, Path]:
    """Return the folders in the images, mapped to their counterparts on this machine.

    Raises:
        FileNotFoundError: this installation of Mizzen lacks its packaged files.
    """
    return {place: find_packaged(name) for place, name in IMAGE_FOLDERS.items()}


def image_command(image: str) -> list[str]:
    """Return the command that runs an image's program.

    Args:
        image: image reference, with or without registry, tag and digest.

    Raises:
        UnknownImageError: the image is not one of Mizzen's.
    """
    name = image.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    if colon and "/" not in tag:
        name = head
    for repository, program in ENTRY_POINTS.items():
        if name == repository or name.endswith("/" + repository):
            return [str(programs_folder() / program)]
    for repository, module in MODULES.items():
        if name == repository or name.endswith("/" + repository):
            return [sys.executable, "-P", "-m", module]
    raise UnknownImageError(
        f"no program is known for image {image!r}: mizzen-local runs {', '.join(ENTRY_POINTS)}, "
        "and any image in a container with a `command`"
    )
