# SPDX-License-Identifier: Apache-2.0
"""The services that are changed under load, and the lanes of the load plan; see `load.py`."""

from __future__ import annotations

from typing import Any

from demo_model import STORY, trained_answer

MODEL = "file:///opt/mizzen/models/demo"
SIMULATED = "mizzen/engine-simulated"
QUESTIONS = ("What is Mizzen?", "Say yes.", "What is a fence?", "What is a group?")


def service(
    name: str, groups: int, gateways: int, *, drain_seconds: int, engine: dict[str, Any]
) -> dict[str, Any]:
    """Return an InferenceService; its served model has the same name."""
    return {
        "apiVersion": "mizzen.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": MODEL, "servedName": name},
            "replicas": groups,
            "engine": {"device": "CPU", "maxRunningRequests": 64, "prefillChunkTokens": 512, **engine},
            "podTemplate": {
                "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
                "sharedMemorySizeLimit": "64Mi",
            },
            "gateway": {"replicas": gateways, "accessLog": "Disabled"},
            "lifecycle": {
                "startupTimeoutSeconds": 300,
                "drainTimeoutSeconds": drain_seconds,
                "maxGroupRestarts": 1000,
            },
        },
    }


def real_service(name: str, groups: int, gateways: int, *, drain_seconds: int = 60) -> dict[str, Any]:
    """Return a service whose engines run the demo model."""
    arguments = ["--threads=1", "--kv-cache-tokens=32768"]
    engine = {"extraArgs": arguments}
    return service(name, groups, gateways, drain_seconds=drain_seconds, engine=engine)


def simulated_service(
    name: str, groups: int, gateways: int, *, step_ms: float = 40, drain_seconds: int = 60
) -> dict[str, Any]:
    """Return a service of simulated engines; each of their tokens is a hash of all earlier tokens."""
    engine = {"image": SIMULATED, "extraArgs": [f"--step-milliseconds={step_ms}"]}
    return service(name, groups, gateways, drain_seconds=drain_seconds, engine=engine)


def trained_questions(
    name: str, *, stream: bool, questions: tuple[str, ...] = QUESTIONS
) -> list[dict[str, Any]]:
    """Return questions for the demo model, with the answers that it was trained to give."""
    entries = []
    for question in questions:
        body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": question}]}
        body |= {"temperature": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        entries.append({"body": body, "text": trained_answer(question), "finish": "stop"})
    return entries


def hashed_questions(name: str, lengths: tuple[int, ...], *, stream: bool) -> list[dict[str, Any]]:
    """Return a question for simulated engines for each answer length in tokens.

    Every second question is sampled with a seed; the others have temperature 0.
    """
    entries = []
    for number, length in enumerate(lengths):
        body: dict[str, Any] = {"model": name, "prompt": f"{number}: {STORY}", "max_tokens": length}
        body |= {"temperature": 1, "seed": number} if number % 2 else {"temperature": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        entries.append({"body": body, "finish": "length", "tokens": length})
    return entries


def lane(workers: int, questions: list[dict[str, Any]], pause: float = 0.0) -> dict[str, Any]:
    """Return a lane of the plan: workers that send random questions, on average `pause` seconds apart."""
    return {"workers": workers, "pause": pause, "questions": questions}
