# SPDX-License-Identifier: Apache-2.0
"""Collects objects, events and logs of a cluster in files after a test has failed."""

from __future__ import annotations

import json
from pathlib import Path

from cluster import CommandError, kubectl

TAIL_LINES = 40


def _saved(folder: Path, name: str, *arguments: str) -> str:
    try:
        text = kubectl(*arguments)
    except CommandError as error:
        text = f"{error}\n"
    (folder / name).write_text(text)
    return text


def collect(folder: Path) -> str:
    """Write objects, events and logs of all pods into `folder`, and return a summary for the test report.

    The summary contains pods, services, and the last log lines of containers that are not ready or have
    restarted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = [
        _saved(folder, "pods.txt", "get", "pods", "-A", "-o", "wide"),
        _saved(folder, "services.txt", "get", "infsvc", "-A", "-o", "yaml"),
    ]
    _saved(folder, "events.txt", "get", "events", "-A", "--sort-by=.lastTimestamp")
    _saved(folder, "describe.txt", "describe", "pods", "-A")
    try:
        pods = json.loads(kubectl("get", "pods", "-A", "-o", "json"))["items"]
    except CommandError as error:
        return f"{error}"
    for pod in pods:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        for status in pod["status"].get("containerStatuses", []):
            log = _saved(folder, f"{name}.log", "logs", name, "-n", namespace, "-c", status["name"])
            if status["restartCount"]:
                log += _saved(folder, f"{name}.previous.log", "logs", name, "-n", namespace, "--previous")
            if not status["ready"] or status["restartCount"]:
                summary.append(f"--- {namespace}/{name}\n" + "\n".join(log.splitlines()[-TAIL_LINES:]))
    return "\n".join([*summary, f"all files: {folder}"])
