# SPDX-License-Identifier: Apache-2.0
"""Finds the programs prometheus and promtool for the tests.

They come from the folder PROMETHEUS_DIR, from PATH, from the user's cache, or else from Debian's package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")
SECONDS = 240


def find() -> Path:
    """Return the folder of both programs; Debian's package is unpacked into the user's cache, not installed.

    Raises:
        RuntimeError: PROMETHEUS_DIR lacks a program, or none is found and the package cannot be downloaded.
    """
    configured = os.environ.get("PROMETHEUS_DIR")
    if configured:
        return complete(Path(configured))
    in_path = shutil.which("prometheus")
    if in_path and shutil.which("promtool"):
        return Path(in_path).parent
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(base) / "mizzen-local" / "prometheus"
    if not all((cache / name).exists() for name in PROGRAMS):
        unpack(cache)
    return complete(cache)


def complete(folder: Path) -> Path:
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if missing:
        raise RuntimeError(f"{folder} lacks {', '.join(missing)}: PROMETHEUS_DIR must hold both programs")
    return folder


def unpack(target: Path) -> None:
    """Download Debian's package, and unpack its programs into `target`.

    APT uses package lists and a cache in a temporary folder, so the system's own remain unchanged.
    """
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        options = []
        for setting, folder in (("State::lists", "lists"), ("Cache", "cache")):
            (work / folder / ("archives" if folder == "cache" else "") / "partial").mkdir(parents=True)
            options.append(f"-oDir::{setting}={work / folder}")
        options += ["-oAPT::Sandbox::User=root", "-oDebug::NoLocking=1"]
        for command in ("update", "download prometheus"):
            run(["apt-get", "-qq", *options, *command.split()], work)
        (package,) = work.glob("prometheus_*.deb")
        run(["dpkg-deb", "-x", str(package), str(work / "root")], work)
        target.parent.mkdir(parents=True, exist_ok=True)
        ready = Path(tempfile.mkdtemp(dir=target.parent))
        for program in PROGRAMS:
            shutil.copy2(work / "root/usr/bin" / program, ready / program)
        ready.chmod(0o755)
        try:
            ready.rename(target)
        except OSError:  # another run has created the folder meanwhile
            shutil.rmtree(ready)


def run(command: list[str], folder: Path) -> None:
    """Run a command in a folder.

    Raises:
        RuntimeError: the command failed, does not exist, or took longer than SECONDS.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        problem = done.stderr if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise RuntimeError(
            f"Prometheus was not found, and {' '.join(command[:1])} cannot get it: {problem.strip()}\n"
            "Install prometheus and promtool, or let PROMETHEUS_DIR name the folder that has them."
        )
