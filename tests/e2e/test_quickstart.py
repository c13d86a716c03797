# SPDX-License-Identifier: Apache-2.0
"""The quick start of the documentation, word for word: the first installation, and its removal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts import make_checkout
from product import ROOT, Product, everything

from cluster import CommandError, Timeline, apply, kubectl, wait_until
from demo_model import trained_answers
from snippets import Snippet, list_snippets, shell_script

PAGE = ROOT / "docs/quickstart.md"
NAMESPACE = "default"
SITE = "quickstart-site-packages"
QUESTION = "What is Mizzen?"
STEPS = [
    snippet for snippet in list_snippets(PAGE) if snippet.verb == "run" and snippet.kind.startswith("e2e")
]


def mutating_policy(folder: str) -> list[dict[str, object]]:
    """Return an admission policy that mounts a folder with torch into engine pods.

    Images of engines may lack torch (`E2E_ENGINE_SITE`). The manifests on the page do not name that folder,
    so the API server adds it.
    """
    kind = "MutatingAdmissionPolicy"
    meta = {"name": SITE}
    mutation = (
        'Object{spec: Object.spec{volumes: [Object.spec.volumes{name: "site", '
        f'hostPath: Object.spec.volumes.hostPath{{path: "{folder}"}}}}], '
        'containers: [Object.spec.containers{name: "engine", '
        'env: [Object.spec.containers.env{name: "PYTHONPATH", value: "/mnt/site"}], '
        'volumeMounts: [Object.spec.containers.volumeMounts{name: "site", mountPath: "/mnt/site", '
        "readOnly: true}]}]}}"
    )
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}]
    selector = {"matchLabels": {"mizzen.dev/component": "engine"}}
    spec = {
        "matchConstraints": {"resourceRules": rules, "objectSelector": selector},
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [
            {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": mutation}},
        ],
    }
    api = "admissionregistration.k8s.io/v1"
    return [
        {"apiVersion": api, "kind": kind, "metadata": meta, "spec": spec},
        {"apiVersion": api, "kind": f"{kind}Binding", "metadata": meta, "spec": {"policyName": SITE}},
    ]


@pytest.fixture(scope="module")
def engine_packages(product: Product) -> Iterator[None]:
    """Let engine pods find torch if their image lacks it."""
    objects = mutating_policy(product.engine_site) if product.engine_site else []
    if objects:
        apply(*objects)
    yield
    for item in objects:
        kubectl("delete", str(item["kind"]), SITE)


@pytest.fixture(scope="module")
def forwards() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the commands that run in a second terminal; they are stopped at the end."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def environment(product: Product, before: set[str]) -> dict[str, str]:
    """Return the variables of the reader's shell."""
    assert before
    registry, _, organisation = product.prefix.rpartition("/")
    assert organisation == "mizzen", f"E2E_PREFIX must end with /mizzen: {product.prefix}"
    return {**os.environ, "REGISTRY": registry}


@pytest.fixture(scope="module")
def checkout(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the reader's shell, whose chart is the packaged one."""
    return make_checkout(product.chart, tmp_path_factory.mktemp("checkout"))


@pytest.mark.usefixtures("engine_packages")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"line-{step.line}")
def test_a_step_succeeds(
    step: Snippet,
    environment: dict[str, str],
    checkout: Path,
    forwards: list[subprocess.Popen[str]],
    timeline: Timeline,
) -> None:
    if step.kind == "e2e-background":
        forwards.append(forward(step, environment, checkout))
        return
    with timeline.measure(f"quick start, block at line {step.line}"):
        text = execute(step, environment, checkout)
    print(text)
    if QUESTION in step.text:
        assert trained_answers()[QUESTION] in text


def execute(step: Snippet, environment: dict[str, str], folder: Path) -> str:
    """Run a block in a folder and return its output."""
    shell = ["bash", "-euo", "pipefail", "-c", shell_script(step.text)]
    command = [sys.executable, "-c", step.text] if step.language == "python" else shell
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise CommandError(f"{step.page}:{step.line}: {done.stdout}{done.stderr}")
    return done.stdout


def forward(step: Snippet, environment: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """Start a block that does not end, and return when it has printed its first line."""
    command = ["bash", "-euc", f"exec {shell_script(step.text)}"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert "Forwarding" in process.stdout.readline()
    return process


def test_the_cluster_is_as_it_was(before: set[str]) -> None:
    selector = ["-n", NAMESPACE, "-l", "mizzen.dev/service"]
    wait_until(lambda: not kubectl("get", "pods", *selector, "-o", "name"), "no pod of the service left")
    left = {name for name in everything() - before if not name.endswith(f"/{SITE}")}
    assert not left
