# SPDX-License-Identifier: Apache-2.0
"""An embedding model, a reranker and a classifier share a gateway with a chat model, on a real API server."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from local_node_kit import Space, eventually

from demo_model import QUESTION, trained_answer
from encoders.twins import save_encoder, save_wordpiece
from family_twins import save_twin

ROOT = Path(__file__).parents[3]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TOKENS = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 1}
LABELS = {0: "calm", 1: "stormy"}

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


@pytest.fixture
def models() -> Iterator[dict[str, str]]:
    """Yield the sources of models by the names of their services; all but the chat model are random twins."""
    # Pods do not see the host's /tmp: each of them gets an empty one.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="mizzen-") as folder:
        embed, classify, rerank = (Path(folder) / name for name in ("embed", "classify", "rerank"))
        save_twin(embed, "qwen3", head="Model", max_position_embeddings=512, **TOKENS)
        head = "ForSequenceClassification"
        save_twin(classify, "qwen3", head=head, max_position_embeddings=512, id2label=LABELS, **TOKENS)
        rerank.mkdir()
        save_encoder(rerank, "Bert", head, num_labels=1)
        save_wordpiece(rerank)
        for name in TOKENIZER:
            shutil.copy(ROOT / "models/demo" / name, embed)
            shutil.copy(ROOT / "models/demo" / name, classify)
        Path(folder).chmod(0o755)
        yield {
            "chat": "file:///opt/mizzen/models/demo",
            "embed": f"file://{embed}",
            "classify": f"file://{classify}",
            "rerank": f"file://{rerank}",
        }


def test_models_of_all_tasks_share_a_gateway(space: Space, models: dict[str, str]) -> None:
    for name, source in models.items():
        spec = {
            "model": {"source": source},
            "engine": {"device": "CPU"},
            "gateway": {"mode": "Shared", "replicas": 1},
            "accelerator": {"nodeSelector": {}},
        }
        space.create("InferenceService", name, "mizzen.dev/v1alpha1", spec=spec)
    for name in models:
        space.wait(f"infsvc/{name}", "condition=Ready", 100)

    def shown() -> dict[str, str]:
        head, *rows = space.kubectl("get", "infsvc").splitlines()
        return {row.split()[0]: row[head.index("TASK") :].split()[0] for row in rows}

    tasks = {"chat": "generate", "embed": "embed", "classify": "classify", "rerank": "classify"}
    eventually(lambda: shown() == tasks)
    url = space.cluster.url("chat", space.name)
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=64
    )
    assert answer.choices[0].message.content == trained_answer(QUESTION)
    vectors = client.embeddings.create(model="embed", input=["A ship", "A pod"]).data
    assert len(vectors) == 2
    assert sum(x * x for x in vectors[0].embedding) == pytest.approx(1, abs=1e-3)
    with httpx.Client(base_url=url, timeout=60) as http:
        ranked = http.post(
            "rerank", json={"model": "embed", "query": "A ship", "documents": ["A pod", "A ship"]}
        )
        assert ranked.json()["results"][0]["index"] == 1
        documents = ["paris", "berlin is the capital"]
        answer = http.post("rerank", json={"model": "rerank", "query": "which city", "documents": documents})
        scores = {item["index"]: item["relevance_score"] for item in answer.json()["results"]}
        assert sorted(scores) == [0, 1]
        assert scores[0] != scores[1]
        classified = http.post("classify", json={"model": "classify", "input": "A ship"}).json()["data"][0]
    assert classified["label"] in LABELS.values()
    assert sum(classified["probs"]) == pytest.approx(1)
