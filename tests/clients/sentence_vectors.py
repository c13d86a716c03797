# SPDX-License-Identifier: Apache-2.0
"""Compare vectors and scores with those of sentence-transformers, on tiny random models of each architecture.

sentence-transformers saves each model, with its modules, prompts and limit of tokens, and Mizzen serves it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import transformers
from tokenizers import Tokenizer

from encoders.twins import publish_nomic, save_encoder, save_unigram, save_wordpiece
from family_twins import save_twin
from mizzen import LLM

LIMIT = 40
TEXTS = [
    "Paris",
    "Which city is the capital of France and Berlin?",
    "the " * 30,
    "berlin is the city of the capital which paris is and france",
]
LONG = "zebra " * 30
PROMPTS = {"query": "which ", "document": "the city "}
QUERY = "which city is the capital of france"
TOLERANCE = 1e-4
"""Maximum difference of an element of a vector, or of a score."""
INPUTS = ("input_ids", "attention_mask")
WORDPIECE = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
UNIGRAM = {"unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}

Serve = Callable[..., AbstractContextManager[str]]


class Twin(NamedTuple):
    """An architecture, its usual pooling, and whether a Dense module follows."""

    family: str
    pooling: str
    dense: bool = False


TWINS = (
    Twin("Bert", "cls"),
    Twin("Bert", "mean", dense=True),
    Twin("XLMRoberta", "mean"),
    Twin("ModernBert", "cls"),
    Twin("NomicBert", "mean"),
    Twin("Gte", "cls"),
    Twin("qwen3", "lasttoken", dense=True),
)
CROSS_ENCODERS = ("Bert", "XLMRoberta", "ModernBert", "Gte")


def save_base(folder: Path, family: str, head: str = "Model", **changes: Any) -> None:
    """Save a tiny model with its tokenizer, as Transformers saves them."""
    if family == "qwen3":
        save_twin(folder, family, head=head, vocab_size=100, **changes)
    else:
        save_encoder(folder, family, head, **changes).save_pretrained(folder)
    unigram, typed = family == "XLMRoberta", family in ("Bert", "Gte")
    tokenizer: Tokenizer = (save_unigram if unigram else save_wordpiece)(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=[*INPUTS, *["token_type_ids"] * typed],
        **(UNIGRAM if unigram else WORDPIECE),
    ).save_pretrained(folder)


@contextmanager
def saved(twin: Twin) -> Iterator[tuple[Any, Path]]:
    """Yield a model of sentence-transformers, and the folder in which it saved the model."""
    from sentence_transformers import SentenceTransformer, models

    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder:
        save_base(Path(base), twin.family)
        modules = [
            models.Transformer(base, max_seq_length=LIMIT),
            models.Pooling(32, pooling_mode=twin.pooling),
        ]
        modules += [models.Dense(32, 12)] if twin.dense else []
        model = SentenceTransformer(modules=[*modules, models.Normalize()], device="cpu", prompts=PROMPTS)
        model.save(folder)
        if twin.family == "NomicBert":
            publish_nomic(Path(folder))
        yield model, Path(folder)


def check_vectors() -> float:
    """Return the largest difference of an element of a vector, over all architectures.

    Raises:
        AssertionError: a difference is above `TOLERANCE`.
    """
    worst = 0.0
    for twin in TWINS:
        with saved(twin) as (model, folder):
            options: dict[str, Any] = {"kv_cache_tokens": 1024} if twin.family == "qwen3" else {}
            with LLM(folder, device="cpu", threads=1, **options) as llm:
                difference = float(np.abs(llm.embed(TEXTS) - model.encode(TEXTS)).max())
        assert difference <= TOLERANCE, (twin, difference)
        worst = max(worst, difference)
    return worst


def check_served_vectors(serve: Serve) -> float:
    """Return the largest difference over HTTP, for texts that are cut or have a prompt."""
    texts = [*TEXTS, LONG]
    with saved(Twin("XLMRoberta", "mean")) as (model, folder), serve(str(folder), "--served-name=m") as url:
        body = {"model": "m", "input": texts, "truncate_prompt_tokens": -1}
        answer = httpx.post(f"{url}/embeddings", json=body, timeout=60).raise_for_status().json()
        differences = [np.abs([item["embedding"] for item in answer["data"]] - model.encode(texts)).max()]
        refused = httpx.post(f"{url}/embeddings", json={"model": "m", "input": LONG}, timeout=60)
        assert refused.status_code == 400
        for name, kind in (("query", "search_query"), ("document", "search_document")):
            body = {"model": "m", "texts": texts, "input_type": kind}
            answer = httpx.post(
                f"{url.removesuffix('/v1')}/v2/embed", json=body, timeout=60
            ).raise_for_status()
            vectors = answer.json()["embeddings"]["float"]
            differences.append(np.abs(vectors - model.encode(texts, prompt_name=name)).max())
    worst = float(max(differences))
    assert worst <= TOLERANCE, differences
    return worst


def check_cross_encoders(serve: Serve) -> float:
    """Return the largest difference of a score of a cross-encoder, also where the document is cut."""
    from sentence_transformers import CrossEncoder

    worst = 0.0
    documents = [*TEXTS, LONG]
    for family in CROSS_ENCODERS:
        with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as folder:
            save_base(Path(base), family, "ForSequenceClassification", num_labels=1)
            model = CrossEncoder(base, max_length=LIMIT, device="cpu")
            model.save_pretrained(folder)
            with serve(folder, "--served-name=m") as url:
                body = {"model": "m", "query": QUERY, "documents": documents, "truncate_prompt_tokens": -1}
                answer = httpx.post(f"{url}/rerank", json=body, timeout=60).raise_for_status().json()
            expected = model.predict([(QUERY, document) for document in documents])
            for item in answer["results"]:
                difference = abs(item["relevance_score"] - float(expected[item["index"]]))
                assert difference <= TOLERANCE, (family, item, expected)
                worst = max(worst, difference)
    return worst


def check_sentence_transformers(serve: Serve) -> None:
    """Compare all models; `serve` runs a model with options and yields its URL, which ends with /v1."""
    results = {
        "vectors of all architectures": check_vectors(),
        "vectors over HTTP, with prompts and cut texts": check_served_vectors(serve),
        "scores of cross-encoders over HTTP": check_cross_encoders(serve),
    }
    for name, difference in results.items():
        print(f"sentence-transformers, {name}: differ by {difference:.1e} at most")
