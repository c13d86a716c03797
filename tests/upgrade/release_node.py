# SPDX-License-Identifier: Apache-2.0
"""`mizzen_local.node` with images of two releases: those with the tag `previous`, and all others.

The environment variables PREVIOUS_PATH and CURRENT_PATH are the values of PYTHONPATH for the programs.
"""

from __future__ import annotations

import os

from mizzen_local.node import __main__ as node
from mizzen_local.node import images, pod

PATHS = {"previous": os.environ["PREVIOUS_PATH"], "current": os.environ["CURRENT_PATH"]}


def image_command(image: str) -> list[str]:
    """Return the command that runs an image's program, of the release in the image's tag."""
    release = "previous" if image.endswith(":previous") else "current"
    return ["/usr/bin/env", f"PYTHONPATH={PATHS[release]}", *images.image_command(image)]


if __name__ == "__main__":
    pod.image_command = image_command
    node.main()
