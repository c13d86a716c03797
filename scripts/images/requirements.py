# SPDX-License-Identifier: Apache-2.0
"""Print the requirements of the given extras of pyproject.toml, without the distribution itself.

An image installs the requirements in a separate layer, which is reused while only the sources change.

    python requirements.py pyproject.toml base gateway --without torch
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path


def name_of(requirement: str) -> str:
    """Return the normalized name (PEP 503) of a requirement's distribution."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} does not begin with a distribution name")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def requirements(pyproject: Path, extras: list[str], without: list[str]) -> list[str]:
    """Return the requirements of `extras` in a fixed order, without duplicates.

    Args:
        pyproject: path of pyproject.toml.
        extras: names of extras; `base` means the distribution's own requirements.
        without: names of distributions to leave out.

    Raises:
        ValueError: an extra does not exist; the message lists the existing ones.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    groups = {"base": project["dependencies"], **project["optional-dependencies"]}
    unknown = sorted(set(extras) - set(groups))
    if unknown:
        raise ValueError(f"unknown extra {', '.join(unknown)}; choose from {', '.join(sorted(groups))}")
    left_out = {name_of(name) for name in without}
    wanted = [line for extra in extras for line in groups[extra] if name_of(line) not in left_out]
    return list(dict.fromkeys(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("extras", nargs="+")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME")
    options = parser.parse_args()
    print("\n".join(requirements(options.pyproject, options.extras, options.without)))


if __name__ == "__main__":
    main()
