# SPDX-License-Identifier: Apache-2.0
"""A reference implementation of logits processing in NumPy, one row and one token at a time."""

from __future__ import annotations

import numpy as np

from mizzen.core.sampling_params import SamplingParams

BANNED = np.float32(-1e30)


def process(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    ends: tuple[int, ...] = (),
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Return the float32 logits [vocab] from which a row is sampled, as the parameters' docs define them."""
    row = logits.astype(np.float32).copy()
    for token, bias in dict(params.logit_bias).items():
        row[token] = BANNED if bias <= -100 else row[token] + np.float32(bias)
    repetition = np.float32(params.repetition_penalty)
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        row[token] -= np.float32(params.presence_penalty)
    if len(output) < params.min_tokens:
        row[list(ends)] = BANNED
    if allowed is not None:
        row[~allowed] = -np.inf
    return row


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Return natural log probabilities [vocab]; -9999 for tokens that cannot be sampled."""
    exact = row.astype(np.float64)
    shifted = exact - exact.max()
    return np.maximum(shifted - np.log(np.exp(shifted).sum()), -9999.0)
