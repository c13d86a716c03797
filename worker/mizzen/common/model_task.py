# SPDX-License-Identifier: Apache-2.0
"""The task of a model, and the activation of a classifier's logits.

Engines tell gateways their model's task; the gateway and `LLM` apply the activation.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray


class Task(enum.StrEnum):
    """Task of a model. The values are part of the wire protocol."""

    GENERATE = "generate"
    """Text; such a model can also embed texts."""
    EMBED = "embed"
    """One vector for each text; the model has no language-model head."""
    CLASSIFY = "classify"
    """One logit for each label. A reranker with a classification head (a cross-encoder) has one label."""


class ScoreActivation(enum.StrEnum):
    """Function that maps a classifier's logits to scores. The values are part of the wire protocol."""

    SOFTMAX = "softmax"
    """Probabilities of exclusive labels, whose sum is 1."""
    SIGMOID = "sigmoid"
    """An independent probability for each label."""
    NONE = "none"
    """The logits themselves."""


def default_activation(labels: int, problem_type: str | None = None) -> ScoreActivation:
    """Return the activation of a classifier, as the text classification pipeline of Transformers chooses it.

    Softmax over a single label would always be 1, so one label gets the sigmoid.

    Args:
        labels: Number of labels.
        problem_type: Value of `problem_type` in config.json; None if the file does not name it.
    """
    if problem_type == "regression":
        return ScoreActivation.NONE
    if problem_type == "multi_label_classification" or labels == 1:
        return ScoreActivation.SIGMOID
    return ScoreActivation.SOFTMAX


def apply_activation(logits: NDArray[np.float32], activation: ScoreActivation) -> NDArray[np.float32]:
    """Return the scores of logits (float32 [..., labels]) in the same shape."""
    if activation is ScoreActivation.NONE:
        return logits
    if activation is ScoreActivation.SOFTMAX:
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)
    # exp of a non-positive number cannot overflow.
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
