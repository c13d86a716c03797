"""kubectl of the cluster's own programs, as a function."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mizzen_local.errors import LocalError


class KubectlError(LocalError):
    """kubectl ended in an error; the message is what it said.

    Attributes:
        message: its standard error.
    """

    def __init__(self, arguments: Sequence[str], message: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {message.strip()}")
        self.message = message.strip()


class Kubectl:
    """kubectl with one kubeconfig."""

    def __init__(self, assets: Path, kubeconfig: Path) -> None:
        self.program = assets / "kubectl"
        self.kubeconfig = kubeconfig

    def command(self, *arguments: str) -> list[str]:
        """The whole command of a call."""
        return [
            str(self.program),
            f"--kubeconfig={self.kubeconfig}",
            f"--cache-dir={self.kubeconfig.parent / 'kubectl-cache'}",
            *arguments,
        ]

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Run it and return its standard output.

        Raises:
            KubectlError: it ended in an error.
            subprocess.TimeoutExpired: it did not end.
        """
        run = subprocess.run(
            self.command(*arguments),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if run.returncode:
            raise KubectlError(arguments, run.stderr)
        return run.stdout

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run it with `-o json` and return the object.

        Raises:
            KubectlError: it ended in an error.
        """
        return json.loads(self(*arguments, "-o", "json"))

    def replace_this_program(self, *arguments: str) -> None:
        """Become kubectl; does not return."""
        os.execv(self.program, self.command(*arguments))
