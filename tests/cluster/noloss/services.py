"""The services that are changed under load, and the load."""

from __future__ import annotations

from typing import Any

from demo_model import STORY, trained_answer

MODEL = "file:///opt/mizzen/models/demo"
SIMULATED = "mizzen/engine-simulated"
QUESTIONS = ("What is Mizzen?", "Say yes.", "What is a fence?", "What is a group?")


def service(
    name: str, groups: int, gateways: int, *, drain_seconds: int, engine: dict[str, Any]
) -> dict[str, Any]:
    """An InferenceService; the name is also its model's."""
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


def real(name: str, groups: int, gateways: int, *, drain_seconds: int = 60) -> dict[str, Any]:
    """A service of real engines with the demo model."""
    arguments = ["--threads=1", "--kv-cache-tokens=32768"]
    engine = {"extraArgs": arguments}
    return service(name, groups, gateways, drain_seconds=drain_seconds, engine=engine)


def slow(
    name: str, groups: int, gateways: int, *, step_ms: float = 40, drain_seconds: int = 60
) -> dict[str, Any]:
    """A service of simulated engines, whose tokens are hashes of all that came before."""
    engine = {"image": SIMULATED, "extraArgs": [f"--step-milliseconds={step_ms}"]}
    return service(name, groups, gateways, drain_seconds=drain_seconds, engine=engine)


def trained(name: str, *, stream: bool, questions: tuple[str, ...] = QUESTIONS) -> list[dict[str, Any]]:
    """Questions to real engines; the model has been trained to give these very answers."""
    asks = []
    for question in questions:
        body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": question}]}
        body |= {"temperature": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        asks.append({"body": body, "text": trained_answer(question), "finish": "stop"})
    return asks


def hashed(name: str, lengths: tuple[int, ...], *, stream: bool) -> list[dict[str, Any]]:
    """Prompts to simulated engines, greedy and seeded; each answer has so many tokens."""
    asks = []
    for number, length in enumerate(lengths):
        body: dict[str, Any] = {"model": name, "prompt": f"{number}: {STORY}", "max_tokens": length}
        body |= {"temperature": 1, "seed": number} if number % 2 else {"temperature": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        asks.append({"body": body, "finish": "length", "tokens": length})
    return asks


def lane(workers: int, asks: list[dict[str, Any]], pause: float = 0.0) -> dict[str, Any]:
    """Workers that send such requests one after another, and rest so long between on average."""
    return {"workers": workers, "pause": pause, "asks": asks}
