# SPDX-License-Identifier: Apache-2.0
"""Services with quantized weights and with a mixture of experts, on a real API server with real engines."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from local_node_kit import Space, eventually, pod_url
from prometheus_client.parser import text_string_to_metric_families

from demo_model import QUESTION, trained_answer
from mixture_chat_model import TOKENS, save_mixture_chat_model

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def serve(
    space: Space, name: str, source: str, parallelism: dict[str, int] | None = None, **engine: Any
) -> None:
    """Create a service with one group on the CPU, and wait until it is ready."""
    spec = {
        "model": {"source": source},
        "parallelism": parallelism or {},
        "engine": {"device": "CPU", **engine},
        "gateway": {"replicas": 1},
        "accelerator": {"nodeSelector": {}},
    }
    space.create("InferenceService", name, "mizzen.dev/v1alpha1", spec=spec)
    space.wait(f"infsvc/{name}", "condition=Ready", 100)


def set_quantization(space: Space, name: str, value: str) -> None:
    patch = json.dumps({"spec": {"engine": {"quantization": value}}})
    space.kubectl("patch", "infsvc", name, "--type=merge", "-p", patch)


def ask(space: Space, name: str, tokens: int = 64) -> str | None:
    url = space.cluster.url(name, space.name)
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=tokens
    )
    return answer.choices[0].message.content


def weight_bytes(space: Space, name: str) -> dict[str, float]:
    """Return the bytes of weights by format that the service's engine exports."""
    selector = f"mizzen.dev/service={name},mizzen.dev/component=engine"
    [pod] = space.get("pods", "-l", selector)["items"]
    with urllib.request.urlopen(f"{pod_url(pod)}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    metric = "mizzen_engine_weights_format_bytes"
    return {sample.labels["format"]: sample.value for sample in samples if sample.name == metric}


def test_a_service_whose_weights_are_quantized_while_they_are_loaded_answers_and_shows_the_format(
    space: Space,
) -> None:
    serve(space, "int8", "file:///opt/mizzen/models/demo", quantization="INT8")
    assert ask(space, "int8") == trained_answer(QUESTION)
    shown = "Online: INT8, a scale for each channel"
    eventually(
        lambda: (
            space.get("infsvc", "int8")["status"].get("model") == {"quantization": shown, "task": "generate"}
        )
    )
    head, row = space.kubectl("get", "infsvc", "int8", "-o", "wide").splitlines()
    assert row[head.index("QUANTIZATION") :].startswith(shown)
    found = weight_bytes(space, "int8")
    assert {name for name, size in found.items() if size} == {"int8", "float32"}
    set_quantization(space, "int8", "Auto")
    eventually(lambda: space.get("infsvc", "int8")["status"].get("model") == {"task": "generate"}, 120)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield an empty folder that pods can read."""
    # Pods do not see the host's /tmp: each of them gets an empty one.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="mizzen-") as path:
        yield Path(path)


def test_a_mixture_of_experts_answers_as_in_transformers_and_is_quantized_while_it_is_loaded(
    space: Space, folder: Path
) -> None:
    expected = save_mixture_chat_model(folder)
    serve(space, "experts", f"file://{folder}", {"tensor": 2, "expert": 2})
    assert ask(space, "experts", TOKENS) == expected
    shown = {"expert": 2, "task": "generate"}
    eventually(lambda: space.get("infsvc", "experts")["status"].get("model") == shown)
    assert {name for name, size in weight_bytes(space, "experts").items() if size} == {"float32"}
    set_quantization(space, "experts", "FP8")
    quantized = {"expert": 2, "task": "generate", "quantization": "Online: FP8, a scale for each channel"}
    eventually(lambda: space.get("infsvc", "experts")["status"].get("model") == quantized, 120)
    assert ask(space, "experts")
