# SPDX-License-Identifier: Apache-2.0
"""Tokens with their texts and log probabilities, in a form that all APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.client.stream import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most probable tokens at a position."""

    id: int
    data: bytes
    """The token's text in UTF-8; may begin or end within a character."""
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Token of an answer or a prompt, with its log probability."""

    id: int
    data: bytes
    logprob: float | None
    """Log probability; None for a prompt's first token, because no token precedes it, and for tokens before
    `prompt_logprobs_from`."""
    offset: int
    """Position of the token's text in the choice's text, in characters."""
    top: tuple[TopToken, ...] = ()
    """Most probable tokens at this position, as many as requested, most probable first."""


def decode_logprobs(tokenizer: Tokenizer, entry: TokenLogprobs, offset: int) -> ScoredToken:
    """Return a token and its top tokens with their texts; the token's text begins at character `offset`."""
    data = tokenizer.token_bytes
    top = tuple(TopToken(token, data(token), logprob) for token, logprob in entry.top)
    return ScoredToken(entry.token, data(entry.token), entry.logprob, offset, top)


def decode_prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], entries: Sequence[TokenLogprobs], skip_special_tokens: bool
) -> list[ScoredToken]:
    """Return a prompt's tokens with their log probabilities; `entries` belong to its last tokens.

    Tokens before them have no log probability, as the first token never has.
    """
    first = max(1, len(prompt) - len(entries))
    offsets = tokenizer.detokenizer(skip_special_tokens)
    tokens: list[ScoredToken] = []
    offset = 0
    for index, token in enumerate(prompt):
        if index < first:
            tokens.append(ScoredToken(token, tokenizer.token_bytes(token), None, offset))
        else:
            tokens.append(decode_logprobs(tokenizer, entries[index - first], offset))
        offset += len(offsets.add((token,)))
    return tokens
