# SPDX-License-Identifier: Apache-2.0
"""Finds files that Mizzen is distributed with: the CRD, the charts, the examples and the demo model.

In a checkout of the repository, they lie in its root folder. A wheel carries them in the package `mizzen`, in
the folder `share`; `setup.py` copies them.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SHARE = "share"
DEMO_MODEL = "demo"
"""Name by which commands and `LLM` accept the packaged demo model."""


def find_packaged(name: str) -> Path:
    """Return the path of a packaged file or folder.

    Args:
        name: path relative to the repository's root folder, such as `crds` or `models/demo`.

    Raises:
        FileNotFoundError: this installation lacks the file.
    """
    places = (PACKAGE / SHARE / name, PACKAGE.parents[1] / name)
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(
        f"this installation of Mizzen has no {name} (looked for {' and '.join(map(str, places))}); "
        "install Mizzen again from a wheel or from a complete checkout"
    )


def find_demo_model(name: str) -> Path | None:
    """Return the folder of the demo model if `name` names it.

    A file or folder with this name in the working directory takes precedence; the result is then None.
    """
    if name != DEMO_MODEL or Path(name).exists():
        return None
    return find_packaged(f"models/{DEMO_MODEL}")
