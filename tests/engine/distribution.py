# SPDX-License-Identifier: Apache-2.0
"""Reference distribution of sampling, computed token by token, and a chi-square test against it."""

from __future__ import annotations

import math

import numpy as np
import torch

from mizzen.core.sampling_params import SamplingParams

MIN_CLASS_COUNT = 5.0
"""Minimum expected count of a chi-square class."""
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.3, top_k=7, top_p=0.8, min_p=0.1),
]


def filtered(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Return the probabilities [vocab] after temperature, top-k, top-p and min-p, token by token."""
    scaled = (logits.double() / params.temperature).tolist()
    top = max(scaled)
    weights = {i: math.exp(value - top) for i, value in enumerate(scaled)}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, kept_tokens, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        if mass < params.top_p * total:
            kept_tokens.append(i)
        mass += weights[i]
    kept_tokens = [i for i in kept_tokens if weights[i] >= params.min_p * weights[ranked[0]]]
    out = np.zeros(len(scaled))
    for i in kept_tokens:
        out[i] = weights[i] / sum(weights[j] for j in kept_tokens)
    return out


def check_counts(counts: np.ndarray, expected: np.ndarray) -> None:
    """Check by chi-square that token counts follow the expected probabilities; rare tokens form one class."""
    count = counts.sum()
    assert counts[expected == 0].sum() == 0
    actual, expected_counts = [0.0], [0.0]
    for token in np.argsort(expected):
        if expected_counts[-1] >= MIN_CLASS_COUNT:
            actual.append(0.0)
            expected_counts.append(0.0)
        actual[-1] += counts[token]
        expected_counts[-1] += count * expected[token]
    statistic = sum((a - b) ** 2 / b for a, b in zip(actual, expected_counts, strict=True))
    freedom = len(expected_counts) - 1
    assert freedom > 0
    # The 99.99th percentile of chi-square, by Wilson and Hilferty.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
