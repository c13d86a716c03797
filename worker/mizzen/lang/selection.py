# SPDX-License-Identifier: Apache-2.0
"""Choice between texts by their probabilities, or by a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from mizzen.core.sampling_params import SamplingParams, choice_grammar
from mizzen.lang.backends import Backend, RoleText
from mizzen.lang.expressions import Selection, SelectMethod


async def choose(backend: Backend, turns: Sequence[RoleText], selection: Selection, session: str) -> str:
    """Return the choice that the model prefers after the turns.

    Each choice is tokenized together with the text before it. All choices are compared starting at the first
    token at which any of them differs from the tokens of the text alone, so that a token across the boundary
    counts for all.
    """
    if selection.method is SelectMethod.GRAMMAR:
        params = SamplingParams(temperature=0.0, grammar=choice_grammar(selection.choices))
        return await backend.generate(await backend.encode(turns), params, session)
    base, *prompts = await backend.encode_endings(turns, ("", *selection.choices))
    start = max(1, min(count_common(base, prompt) for prompt in prompts))
    scores = await asyncio.gather(*(backend.score(prompt, start, session) for prompt in prompts))
    if selection.method is SelectMethod.UNCONDITIONAL:
        alone = [[prompt[0], *prompt[start:]] for prompt in prompts]
        priors = await asyncio.gather(*(backend.score(prompt, 1, session) for prompt in alone))
        scores = [score - prior for score, prior in zip(scores, priors, strict=True)]
    means = [score / max(1, len(prompt) - start) for score, prompt in zip(scores, prompts, strict=True)]
    return selection.choices[means.index(max(means))]


def count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differing[0]) if len(differing) else length
