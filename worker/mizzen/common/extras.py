# SPDX-License-Identifier: Apache-2.0
"""Explains missing packages: which extra of the distribution `mizzen` installs them."""

from __future__ import annotations

import importlib.util
import sys

OWN_PACKAGES = ("mizzen", "mizzen_operator", "mizzen_local")
SERVE_MODULES = ("fastapi", "torch", "uvicorn", "zmq")
"""Modules of engine and gateway, which are checked before their processes start."""


def require_modules(*names: str) -> None:
    """Check that modules can be imported, without importing them.

    Args:
        names: names of top-level modules.

    Raises:
        ModuleNotFoundError: a module is not installed.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def describe_missing_module(error: ModuleNotFoundError, program: str, extras: str) -> str:
    """Return a sentence that says how to install a missing package.

    Args:
        error: the failed import.
        program: what needs the package, such as `mizzen serve`.
        extras: extras that the program needs, separated by commas; empty if it needs none.

    Raises:
        ModuleNotFoundError: `error` itself, if the module belongs to Mizzen or to Python, because no extra
            installs it.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in OWN_PACKAGES or package in sys.stdlib_module_names:
        raise error
    requirement = f"mizzen[{extras}]" if extras else "mizzen"
    return (
        f"{program} needs the Python module {package!r}, which is not installed: pip install '{requirement}'"
    )
