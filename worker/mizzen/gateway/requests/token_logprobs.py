"""MODULE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.client.stream import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TopToken:
    """A token that came, or could have."""

    id: int
    data: bytes
    """Its text in UTF-8, or a part of a character."""
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer or a prompt."""

    id: int
    data: bytes
    logprob: float | None
    """None for a prompt's first token, which nothing predicts."""
    offset: int
    """Where its text begins, in characters of the choice's text."""
    top: tuple[TopToken, ...] = ()
    """The most probable tokens in its place, as many as were asked for, the most probable first."""


def decode_logprobs(tokenizer: Tokenizer, entry: TokenLogprobs, offset: int) -> ScoredToken:
    """Return a token with its text."""
    data = tokenizer.token_bytes
    top = tuple(TopToken(token, data(token), logprob) for token, logprob in entry.top)
    return ScoredToken(entry.token, data(entry.token), entry.logprob, offset, top)


def decode_prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], entries: Sequence[TokenLogprobs], skip_special_tokens: bool
) -> list[ScoredToken]:
    """Return a prompt's tokens, which `entries` has from the second on."""
    offsets = tokenizer.detokenizer(skip_special_tokens)
    found: list[ScoredToken] = []
    offset = 0
    for index, token in enumerate(prompt):
        if index == 0:
            found.append(ScoredToken(token, tokenizer.token_bytes(token), None, 0))
        elif index <= len(entries):
            found.append(decode_logprobs(tokenizer, entries[index - 1], offset))
        offset += len(offsets.add((token,)))
    return found
