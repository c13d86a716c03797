"""The commands that run Mizzen's images as programs of this Python environment."""

from __future__ import annotations

import sys
from pathlib import Path

ENTRY_POINTS = {"mizzen/engine": "mizzen", "mizzen/gateway": "mizzen", "mizzen/operator": "mizzen-operator"}
MODULES = {"mizzen/engine-simulated": "mizzen.server.simulate"}
"""Images that nobody builds: programs of the tests."""
REPOSITORY = Path(__file__).resolve().parents[3]
IMAGE_FILES = {"/opt/mizzen/models": REPOSITORY / "models"}
"""Folders of the images, and where they are here."""


class UnknownImageError(Exception):
    """No program is known for an image."""


def programs() -> Path:
    """The folder of this environment's programs."""
    return Path(sys.prefix) / "bin"


def entry_point(image: str) -> list[str]:
    """The command of an image.

    Args:
        image: a reference, with or without registry, tag and digest.

    Raises:
        UnknownImageError: it is none of Mizzen's.
    """
    name = image.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    if colon and "/" not in tag:
        name = head
    for known, program in ENTRY_POINTS.items():
        if name == known or name.endswith("/" + known):
            return [str(programs() / program)]
    for known, module in MODULES.items():
        if name == known or name.endswith("/" + known):
            return [sys.executable, "-m", module]
    raise UnknownImageError(
        f"no program is known for image {image!r}: mizzen-local runs {', '.join(ENTRY_POINTS)}, "
        "and any image in a container that gives its command"
    )
