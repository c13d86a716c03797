# SPDX-License-Identifier: Apache-2.0
"""The calls from a watch event to `POST pods` are few, and docs/operator.md lists exactly these calls."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
import yaml
from kubernetes.aio.client import Configuration

import mizzen_operator
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.main import _Replica
from mizzen_operator.manager.controller import Controller
from mizzen_operator.manager.workqueue import WorkQueue

ROOT = Path(__file__).parents[3]
CODE = Path(mizzen_operator.__file__).parent
PAGE = (ROOT / "docs/operator.md").read_text()
MAX_CALLS = 15
DEADLINE_SECONDS = 20.0
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
"""Matches a step in docs/operator.md's list of calls; the match's groups are the file and the function."""
KIND = "InferenceService"
SCHEMA = yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())["spec"]["versions"][0]["schema"]


def defaulted(schema: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Fill in a schema's defaults as the API server does."""
    fields = schema.get("properties", {})
    missing = {name: part["default"] for name, part in fields.items() if "default" in part}
    return {
        name: defaulted(fields[name], part) if isinstance(part, dict) and name in fields else part
        for name, part in {**missing, **value}.items()
    }


def new_service() -> dict[str, Any]:
    """Return a service without a status, as the API server stores it."""
    meta = {"name": "demo", "namespace": "llm", "uid": "u", "generation": 1, "resourceVersion": "2"}
    spec = {"model": {"source": "file:///models/demo"}, "replicas": 1}
    return {
        "apiVersion": "mizzen.dev/v1alpha1",
        "kind": KIND,
        "metadata": {**meta, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": defaulted(SCHEMA["openAPIV3Schema"]["properties"]["spec"], spec),
    }


def own_calls() -> list[tuple[str, str]]:
    """Return the operator's functions on the stack, from the outermost one to the caller's caller."""
    calls: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(CODE):
            calls.append((str(path.relative_to(CODE)), frame.f_code.co_qualname))
        frame = frame.f_back
    return calls[::-1]


class Recorder:
    """Stands in for the API server, and records the calls that lead to the queue and to `POST pods`."""

    def __init__(self) -> None:
        self.to_queue: list[tuple[str, str]] = []
        self.to_post: list[tuple[str, str]] = []
        self.posted = asyncio.Event()

    def request(self, verb: str, ref: ObjectRef, body: Any) -> bytes:
        """Answer a request: no object exists, and every write succeeds."""
        if verb == "GET":
            if ref.name:
                raise KubeError(404, "NotFound", f"{ref.kind} {ref.name} not found")
            return msgspec.json.encode({"items": [], "metadata": {"resourceVersion": "1"}})
        if (verb, ref.kind) == ("POST", "Pod"):
            self.to_post = own_calls()
            self.posted.set()
        meta = {"uid": "u", "resourceVersion": "3", "generation": 1, **body.get("metadata", {})}
        return msgspec.json.encode({**body, "kind": ref.kind, "metadata": meta})


async def recorded_path(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Send the event of a new service to a leading replica; return the calls up to a pod's creation."""
    recorder = Recorder()

    async def request(
        self: KubeClient, verb: str, ref: ObjectRef, query: Any = None, body: Any = None, *_: Any, **__: Any
    ) -> bytes:
        return recorder.request(verb, ref, body)

    add = WorkQueue.add

    def recorded_add(self: WorkQueue, *arguments: Any, **options: Any) -> None:
        recorder.to_queue = recorder.to_queue or [*own_calls(), ("manager/workqueue.py", "WorkQueue.add")]
        add(self, *arguments, **options)

    monkeypatch.setattr(KubeClient, "_request", request)
    replica = _Replica(OperatorConfig(), Configuration())
    for kind in ("InferenceService", "Pod", "Deployment", "Service"):
        store = replica._informers.get(kind)
        assert store is not None
        no_objects: Mapping[ObjectName, Any] = {}
        store.apply_list(no_objects, 1)
    stop = asyncio.Event()
    leading = asyncio.create_task(replica._controller.run(stop))
    await asyncio.sleep(0)
    monkeypatch.setattr(WorkQueue, "add", recorded_add)
    try:
        event: Any = {"type": "ADDED", "object": new_service()}
        await replica._informers._on_event(event, KIND)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await recorder.posted.wait()
    finally:
        stop.set()
        await leading
        await replica.close()
    dispatch = ("manager/controller.py", Controller._dispatch.__qualname__)
    # The calls below KubeClient.create send the request; they are the same for every write.
    create = recorder.to_post.index(("kube/client.py", "KubeClient.create"))
    return [*recorder.to_queue, dispatch, *recorder.to_post[: create + 1]]


async def test_the_path_of_an_event_is_short_and_drawn_in_the_documentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = await recorded_path(monkeypatch)
    assert len(path) <= MAX_CALLS, "\n".join(f"{file} {function}" for file, function in path)
    assert STEP.findall(PAGE) == path


def test_the_documentation_lists_every_module_of_the_operator() -> None:
    rows = re.findall(r"^\| (?:`(\w+)`)? ?\| `(\w+\.py)` \|", PAGE, re.MULTILINE)
    listed, package = list[str](), ""
    for name, module in rows:
        package = name or package
        listed.append(
            module if (CODE / module).exists() and package == "informers" else f"{package}/{module}"
        )
    modules = {str(path.relative_to(CODE)) for path in CODE.rglob("*.py") if path.name != "__init__.py"}
    assert len(listed) == len(set(listed))
    assert set(listed) == modules
