# SPDX-License-Identifier: Apache-2.0
"""The result of offline inference for one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mizzen.core.request import FinishReason
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.offline.batch import BatchEntry
from mizzen.wire.client.stream import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Output for one prompt."""

    text: str
    """Output text without the stop token or stop string; empty if the tokenizer is skipped."""
    token_ids: list[int]
    """All output tokens, including the one that ended the output."""
    finish_reason: Literal["stop", "length"]
    """Reason why the output ended: "stop" (an end token, stop token or stop string) or "length"."""
    cached_tokens: int
    """Number of prompt tokens whose KV came from the prefix cache."""
    logprobs: list[TokenLogprobs] | None = None
    """Log probabilities for each of `token_ids`; None unless `SamplingParams.logprobs` is set."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities for each prompt token from the second on; None unless
    `SamplingParams.prompt_logprobs` is set."""


def build_completion(entry: BatchEntry, tokenizer: Tokenizer | None) -> Completion:
    """Return the completion of a request that has finished.

    Args:
        entry: Finished entry of a batch.
        tokenizer: Tokenizer for the text; without one, the text stays empty.
    """
    end = entry.finished
    assert end is not None
    reason = "stop" if entry.stopped or end.reason is FinishReason.STOP else "length"
    text = entry.text
    if entry.stream is not None:
        text += entry.stream.flush()
    elif tokenizer is not None:
        text = tokenizer.decode(entry.tokens[:-1] if end.stop_token is not None else entry.tokens)
    sampling, count = entry.request.sampling, len(entry.tokens)
    return Completion(
        text=text,
        token_ids=entry.tokens,
        finish_reason=reason,
        cached_tokens=end.cached_tokens,
        # Tokens after a stop string are dropped, and so are their log probabilities.
        logprobs=None if sampling.logprobs is None else entry.logprobs[:count],
        prompt_logprobs=None if sampling.prompt_logprobs is None else entry.prompt_logprobs,
    )
