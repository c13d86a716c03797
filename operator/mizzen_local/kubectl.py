# SPDX-License-Identifier: Apache-2.0
"""Runs the cluster's own kubectl."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mizzen_local.errors import LocalError


class KubectlError(LocalError):
    """kubectl failed.

    Attributes:
        message: text that kubectl wrote to standard error.
    """

    def __init__(self, arguments: Sequence[str], message: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {message.strip()}")
        self.message = message.strip()


class Kubectl:
    """kubectl with the kubeconfig of one cluster; call it with kubectl's arguments."""

    def __init__(self, assets: Path, kubeconfig: Path) -> None:
        self.program = assets / "kubectl"
        self.kubeconfig = kubeconfig

    def command(self, *arguments: str) -> list[str]:
        """Return the complete command line, including the path of kubectl."""
        return [
            str(self.program),
            f"--kubeconfig={self.kubeconfig}",
            f"--cache-dir={self.kubeconfig.parent / 'kubectl-cache'}",
            *arguments,
        ]

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Run kubectl and return its standard output.

        Args:
            arguments: arguments of kubectl.
            stdin: text for the standard input of kubectl; None for no input.
            timeout: maximum duration in seconds.

        Raises:
            KubectlError: kubectl failed.
            subprocess.TimeoutExpired: kubectl was still running after `timeout` seconds.
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
        """Run kubectl with `-o json` and return the object that it prints.

        Raises:
            KubectlError: kubectl failed.
        """
        return json.loads(self(*arguments, "-o", "json"))

    def replace_process(self, *arguments: str) -> None:
        """Replace this process with kubectl; this does not return."""
        os.execv(self.program, self.command(*arguments))
