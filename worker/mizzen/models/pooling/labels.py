# SPDX-License-Identifier: Apache-2.0
"""Labels and activation of a classifier, from its config.json.

Importing this module does not import torch.
"""

from __future__ import annotations

from mizzen.common.model_task import ScoreActivation, default_activation
from mizzen.models.hf_fields import Fields

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
DEFAULT_LABELS = 2
"""Number of labels if config.json names none, as in Transformers."""
MAX_LABELS = 100_000
NAMED_ACTIVATIONS = {
    "Identity": ScoreActivation.NONE,
    "Sigmoid": ScoreActivation.SIGMOID,
    "Softmax": ScoreActivation.SOFTMAX,
}
"""Activations by the class of torch.nn that the configuration of a cross-encoder of sentence-transformers
names."""


def read_labels(fields: Fields) -> tuple[str, ...]:
    """Read the names of a classifier's labels, by index.

    Without `id2label` the names are LABEL_0, LABEL_1 and so on, for `num_labels` labels.

    Raises:
        ConfigError: `id2label` does not map the numbers from 0 on to texts, or there are too many labels.
    """
    names = fields.values.get("id2label")
    if names is None:
        count = fields.integer("num_labels", DEFAULT_LABELS)
        if count > MAX_LABELS:
            raise fields.error("num_labels", f"must be at most {MAX_LABELS}")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(names, dict) or not 0 < len(names) <= MAX_LABELS:
        raise fields.error("id2label", f"must map 1 to {MAX_LABELS} numbers to labels")
    labels = [names.get(str(index)) for index in range(len(names))]
    if not all(isinstance(label, str) for label in labels):
        raise fields.error("id2label", "must map the numbers from 0 on to texts")
    return tuple(str(label) for label in labels)


def read_score_activation(fields: Fields, labels: int) -> ScoreActivation:
    """Read the activation of a classifier with `labels` labels.

    It is the one that sentence-transformers has saved for a cross-encoder, else that of the `problem_type`.

    Raises:
        ConfigError: the saved activation or `problem_type` is not supported; the message lists the supported
            values.
    """
    if (named := _read_named_activation(fields)) is not None:
        return named
    problem = fields.values.get("problem_type")
    if problem is not None and problem not in PROBLEM_TYPES:
        raise fields.error("problem_type", f"must be one of {', '.join(PROBLEM_TYPES)}")
    return default_activation(labels, problem)


def _read_named_activation(fields: Fields) -> ScoreActivation | None:
    """Read the activation that sentence-transformers has saved; None if config.json names none."""
    name = "sbert_ce_default_activation_function"
    value = fields.values.get(name)
    saved = fields.values.get("sentence_transformers")
    if isinstance(saved, dict) and saved.get("activation_fn") is not None:
        name, value = "sentence_transformers", saved["activation_fn"]
    if value is None:
        return None
    module, _, kind = str(value).rpartition(".")
    if not module.startswith("torch.nn") or kind not in NAMED_ACTIVATIONS:
        supported = ", ".join(f"torch.nn.{kind}" for kind in NAMED_ACTIVATIONS)
        raise fields.error(name, f"must name one of {supported}")
    return NAMED_ACTIVATIONS[kind]
