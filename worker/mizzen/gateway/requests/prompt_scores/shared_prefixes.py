# SPDX-License-Identifier: Apache-2.0
"""Prompts of one request that begin alike, so that their common prefix is computed once.

Tools such as lm-evaluation-harness send the prompts of several continuations, and request the log
probabilities of all prompt tokens. Up to the token at which two prompts differ, they have the same log
probabilities.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MIN_SHARED_TOKENS = 32
"""Number of common tokens from which computing a prefix only once is worthwhile."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prefix that a prompt has in common with another prompt of the same request."""

    source: int
    """Index of the other prompt."""
    tokens: int
    """Number of common tokens."""


def find_shared_prefixes(prompts: Sequence[str | array[int]]) -> dict[int, SharedPrefix]:
    """Return the prefixes that prompts share with another prompt, by index of the prompt.

    The sources have no cycle: following them ends at a prompt that is not in the result. Prompts that are
    texts share nothing, because their tokens are not known.
    """
    tokens = {index: prompt.tobytes() for index, prompt in enumerate(prompts) if not isinstance(prompt, str)}
    # In lexicographic order, no other prompt has a longer prefix in common than a neighbour. Any order of the
    # tokens will do, so bytes are compared.
    order = sorted(tokens, key=tokens.__getitem__)
    shared: dict[int, SharedPrefix] = {}
    for source, index in pairwise(order):
        count = count_common_tokens(tokens[source], tokens[index])
        if count >= MIN_SHARED_TOKENS:
            shared[index] = SharedPrefix(source, count)
    return shared


def count_common_tokens(first: bytes, second: bytes) -> int:
    """Return the number of leading tokens that two prompts, as int32 token ids, have in common."""
    length = min(len(first), len(second)) // 4
    a, b = (np.frombuffer(prompt, np.int32, length) for prompt in (first, second))
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else length


def order_sources_first(sources: Sequence[int | None]) -> list[tuple[int, int]]:
    """Return pairs of an index and its source; a source's own pair comes before pairs with this source.

    Args:
        sources: Source of each index; None for none. They have no cycle.
    """
    ordered: dict[int, int] = {}
    for index in range(len(sources)):
        path: list[int] = []
        at: int | None = index
        while at is not None and at not in ordered and sources[at] is not None:
            path.append(at)
            at = sources[at]
        ordered |= {step: source for step in reversed(path) if (source := sources[step]) is not None}
    return list(ordered.items())
