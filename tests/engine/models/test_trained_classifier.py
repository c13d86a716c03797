# SPDX-License-Identifier: Apache-2.0
"""A classifier that was trained with Transformers names the right labels of new texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from encoders.training import HELD_OUT, LABELS, label_of, train_classifier
from encoders.twins import save_wordpiece
from family_twins import save_twin
from mizzen import LLM


@pytest.mark.timeout(180)
def test_a_trained_classifier_names_the_right_labels(tmp_path: Path) -> None:
    tokenizer = save_wordpiece(tmp_path)
    labels = dict(enumerate(LABELS))
    head = "ForSequenceClassification"
    model = save_twin(tmp_path, "qwen3", head=head, vocab_size=100, id2label=labels)
    train_classifier(model, tokenizer)
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", kv_cache_tokens=1024, threads=1) as llm:
        assert llm.engine.info.labels == LABELS
        scores = llm.classify(list(HELD_OUT))
    right = [label_of(text) for text in HELD_OUT]
    assert set(right) == {0, 1, 2}
    assert scores.argmax(axis=1).tolist() == right
    assert scores.max(axis=1).min() > 0.9
