# SPDX-License-Identifier: Apache-2.0
"""Categories of /v1/moderations: OpenAI's names, and the labels of models that map to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

OPENAI_CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
HARMLESS = frozenset(
    {"safe", "ok", "neutral", "normal", "none", "benign", "clean", "harmless", "non-toxic", "not_toxic"}
)
"""Labels of classifiers, in lower case, that are not reported as a category."""
DEFAULT_MAPPING = {
    "S1": "violence",
    "S2": "illicit",
    "S3": "sexual",
    "S4": "sexual/minors",
    "S9": "illicit/violent",
    "S10": "hate",
    "S11": "self-harm",
    "S12": "sexual",
    "Violent": "violence",
    "Non-violent Illegal Acts": "illicit",
    "Sexual Content or Sexual Acts": "sexual",
    "Suicide & Self-Harm": "self-harm",
}
"""Categories of the labels of Llama Guard 3 and Qwen3Guard; their other labels keep their names."""
THRESHOLD = 0.5
"""Score from which on a category is true."""


def parse_mapping(options: Sequence[str]) -> dict[str, str]:
    """Return the mapping of labels to categories in values of --moderation-category; labels may contain `=`.

    Raises:
        ValueError: a value is not of the form LABEL=CATEGORY.
    """
    mapping: dict[str, str] = {}
    for option in options:
        label, equals, category = option.rpartition("=")
        if not (label and equals and category):
            raise ValueError(f"--moderation-category must have the form LABEL=CATEGORY, not {option!r}")
        mapping[label] = category
    return mapping


def map_scores(scores: Mapping[str, float], mapping: Mapping[str, str]) -> dict[str, float]:
    """Return the score of each category: the highest one of its labels.

    If `mapping` is not empty, labels that are not in it are left out. Otherwise the default mapping applies,
    labels outside of it keep their names, and harmless labels are left out.

    Args:
        scores: score of each label.
        mapping: category of each label, as the operator configured it.
    """
    categories: dict[str, float] = {}
    for label, score in scores.items():
        if mapping:
            category = mapping.get(label)
        else:
            category = None if label.lower() in HARMLESS else DEFAULT_MAPPING.get(label, label)
        if category is not None:
            categories[category] = max(score, categories.get(category, 0.0))
    return categories
