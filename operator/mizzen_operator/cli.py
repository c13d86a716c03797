# SPDX-License-Identifier: Apache-2.0
"""The command `mizzen-operator`: starts the operator, or says which extra is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; exit with code 1 and one sentence if a required package is not installed."""
    try:
        from mizzen_operator.main import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "mizzen_operator" or package in sys.stdlib_module_names:
            raise
        sys.exit(
            f"mizzen-operator needs the Python module {package!r}, which is not installed: "
            "pip install 'mizzen[operator]'"
        )
    run()


if __name__ == "__main__":
    main()
