# SPDX-License-Identifier: Apache-2.0
"""The demo: starts a cluster, applies an InferenceService, and prints its answer to one question."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from mizzen.common.packaged_files import find_packaged
from mizzen_local.cluster import Cluster
from mizzen_local.errors import LocalError
from mizzen_local.urls import service_url
from mizzen_local.waits import find_condition, watch_service

EXAMPLE = "examples/inferenceservice.yaml"
NAME, NAMESPACE = "demo", "default"
QUESTION = "What is Mizzen?"
READY_SECONDS = 180.0
Report = Callable[[str], None]


class DemoError(LocalError):
    """The demo failed; the message says where to look."""


def run_demo(cluster: Cluster, *, gpus: int, values: Mapping[str, Any], report: Report) -> None:
    """Start the cluster unless it is up, apply the example, send one question and print the answer.

    Args:
        cluster: the cluster to use.
        gpus: number of GPUs that the node offers; ignored if the cluster is up already.
        values: values of the operator's chart; must be empty if the cluster is up already.
        report: called with each line of progress.

    Raises:
        DemoError: the service did not become ready, or did not answer; or there are values for a cluster that
            is up.
        mizzen_local.cluster.ClusterError, mizzen_local.controlplane.StartError: the cluster did not start.
    """
    if cluster.state.status() == "up":
        if values:
            raise DemoError("--values has no effect on a cluster that is up: run mizzen-local down first")
    else:
        cluster.up(gpus=gpus, operator=True, values=values, report=report)
    kubectl = cluster.kubectl()
    start = time.monotonic()
    example = find_packaged(EXAMPLE)
    report(f"kubectl apply -f {_relative_path(example)}")
    kubectl("apply", "-f", str(example))
    asyncio.run(_wait_ready(cluster, report))
    report(f"{NAME} is Ready, {time.monotonic() - start:.1f} s after it was applied")
    url = service_url(kubectl, NAME, NAMESPACE)
    report(f"POST {url}/chat/completions")
    print(f"\n> {QUESTION}")
    for piece in stream_answer(url, QUESTION):
        print(piece, end="", flush=True)
    print("\n\n" + next_commands(url))


async def _wait_ready(cluster: Cluster, report: Report) -> None:
    """Wait until the service is Ready, and report each change of its Ready condition."""
    reported, message = "", "the operator has not reconciled it"
    try:
        async for item in watch_service(cluster.state.kubeconfig, NAMESPACE, NAME, READY_SECONDS):
            ready, failed = find_condition(item, "Ready"), find_condition(item, "Failed")
            current = item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]
            if not ready or not current:
                continue
            if ready["status"] == "True":
                return
            if failed.get("status") == "True":
                raise DemoError(_with_hint(cluster, f"{NAME} has failed: {failed.get('message', '')}"))
            message = f"{ready.get('reason', '')}: {ready.get('message', '')}".strip(": ")
            if message != reported:
                report(f"  {message}")
                reported = message
    except TimeoutError:
        raise DemoError(
            _with_hint(cluster, f"{NAME} was not Ready within {READY_SECONDS:g} s: {message}")
        ) from None


def _with_hint(cluster: Cluster, what: str) -> str:
    program = command_name()
    return (
        f"{what}\n  {program} kubectl describe infsvc {NAME}\n"
        f"  {program} logs {NAME}\n  {program} logs operator\n  logs are in {cluster.state.logs}"
    )


def stream_answer(url: str, question: str) -> Iterator[str]:
    """Send a question to an OpenAI-compatible service, and yield the pieces of its answer.

    Args:
        url: base URL, ending in /v1.
        question: the user's message.

    Raises:
        DemoError: the service did not answer, or its answer is incomplete.
    """
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 256,
    }
    reason = None
    try:
        # trust_env=False: a proxy from the environment cannot reach this machine's loopback addresses.
        with (
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", f"{url}/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise DemoError(f"{url} answered {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                choice = _parse_choice(line)
                reason = choice.get("finish_reason") or reason
                if piece := choice.get("delta", {}).get("content"):
                    yield piece
    except httpx.HTTPError as error:
        raise DemoError(
            f"request to {url} failed: {error}; {command_name()} logs {NAME} shows why"
        ) from error
    if reason is None:
        raise DemoError(f"the answer is incomplete; {command_name()} logs {NAME} shows why")


def _parse_choice(line: str) -> dict[str, Any]:
    """Return the first choice in one line of server-sent events; empty if it contains no choice."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return {}
    event = json.loads(data)
    if "error" in event:
        raise DemoError(f"the service ended the answer: {event['error'].get('message', event['error'])}")
    choices = event.get("choices") or [{}]
    return choices[0]


def command_name() -> str:
    """Return the shortest command that runs this program."""
    program = Path(sys.argv[0])
    return _relative_path(program) if program.name == "mizzen-local" else "mizzen-local"


def _relative_path(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def next_commands(url: str) -> str:
    """Return a text that suggests commands to try next, for the service at `url`."""
    program = command_name()
    chat = str(Path(program).with_name("mizzen"))
    kubectl = "kubectl" if shutil.which("kubectl") else f"{program} kubectl"
    return "\n".join(
        [
            "The cluster stays up. Try next:",
            f"  export KUBECONFIG=$({program} kubeconfig)",
            f"  {kubectl} get infsvc,pods",
            f"  {kubectl} scale infsvc {NAME} --replicas=3",
            f"  {chat} chat {url}",
            f"  {program} logs {NAME}",
            f"  {program} down",
        ]
    )
